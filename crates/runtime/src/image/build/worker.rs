//! The process that builds: PID 1 of pid and mount namespaces of its own.
//!
//! Invariant: it lives no longer than the process that started it (their socket closes), and with it ends
//! everything that it started; its mounts are seen by nobody else and go with it. It leaves one file,
//! [`RESULT`], in its working folder. Started by `build::Worker`, through `roles`.

use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;
use std::time::SystemTime;

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::WaitOptions;

use super::starter::Job;
use super::{Contents, Progress, Report, debian, finish, node, scratch, tool};
use crate::image::oci::flatten;
use crate::sys::{self, Cloned};

/// The image, in the worker's folder.
pub(in crate::image) const RESULT: &str = "image.erofs";

/// Speaks to the starter.
pub(in crate::image) struct Teller(Mutex<UnixStream>);

impl Teller {
    fn send(&self, report: &Report) {
        let Ok(mut line) = serde_json::to_vec(report) else { return };
        line.push(b'\n');
        // A starter that is gone ends us by the other thread.
        if let Ok(mut socket) = self.0.lock() {
            let _ = socket.write_all(&line);
        }
    }

    pub(in crate::image) fn step(&self, name: impl Into<String>) {
        let name = name.into();
        // The log too shows where one step ends and the next begins.
        let _ = writeln!(io::stderr(), "==> {name}");
        self.send(&Report::Progress(Progress::Step(name)));
    }

    pub(in crate::image) fn done(&self, thousandths: u32) {
        self.send(&Report::Progress(Progress::Done(thousandths)));
    }
}

/// The role: takes namespaces, and builds in them.
///
/// # Errors
/// When there are no namespaces to be had.
pub(crate) fn run(control: &OwnedFd) -> io::Result<()> {
    let namespaces = libc::CLONE_NEWNS | libc::CLONE_NEWPID;
    match sys::clone_into(namespaces as u64, None)? {
        Cloned::Child => {
            sys::reset_signals_of_role();
            let done = inside(control);
            sys::exit_now(i32::from(done.is_err()))
        }
        Cloned::Parent { .. } => {
            // Its end is ours; the starter sees it by the socket.
            while let Ok(Some(_)) = rustix::process::wait(WaitOptions::empty()) {}
            Ok(())
        }
    }
}

fn inside(control: &OwnedFd) -> io::Result<()> {
    let mut socket = UnixStream::from(control.try_clone()?);
    let job = Job::receive(&mut socket)?;
    let mut watched = socket.try_clone()?;
    std::thread::Builder::new().name("starter".to_owned()).spawn(move || {
        let _ = watched.read(&mut [0u8; 1]);
        // PID 1 takes everything in its namespace along.
        sys::exit_now(1)
    })?;
    let teller = Teller(Mutex::new(socket));
    let end = build(&teller, &job).map_err(|e| tool::without_passwords(&e.to_string()));
    teller.send(&Report::End(end));
    Ok(())
}

fn build(teller: &Teller, job: &Job) -> io::Result<Contents> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("proc", "/proc", "proc", flags, None)?;
    let work = std::env::current_dir()?;
    match job {
        Job::Universal => universal(teller, &work),
        Job::Oci(task) => flatten::build(teller, &work, task).map(|()| Contents::default()),
    }
}

fn universal(teller: &Teller, work: &Path) -> io::Result<Contents> {
    let begin = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    teller.step("making room");
    let scratch = scratch::mount(work)?;
    let tree = scratch.join("tree");
    // Both wait for the network most of the time, each for another server.
    let runtimes = scratch.join("runtimes");
    std::thread::scope(|scope| {
        let node = scope.spawn(|| node::install(&scratch, &runtimes, teller));
        let debian = debian::bootstrap(&scratch, &tree, teller);
        let node = node.join().unwrap_or_else(|_| Err(io::Error::other("fetching Node panicked")));
        debian.and(node)
    })?;
    node::place(&runtimes, &tree)?;
    teller.done(850);
    teller.step("settling users, folders and times");
    let contents = finish::finish(&tree)?;
    teller.done(900);
    teller.step("writing the image");
    let begin = i64::try_from(begin.as_secs()).unwrap_or(i64::MAX);
    let epoch = finish::settle_times(&tree, begin)?;
    write_image(&tree, &work.join(RESULT), Times::All(epoch))?;
    teller.done(980);
    Ok(contents)
}

/// The identity of every image's file system: what is in it names it, not when it was made.
const UUID: &str = "b1f0ac00-0000-4000-8000-000000000001";

/// What the times of files become, seconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(in crate::image) enum Times {
    /// All of them this one.
    All(i64),
    /// Those that are later, this one; the others stay.
    Latest(i64),
}

/// Writes a tree as a file system of its own.
///
/// # Errors
/// What mkfs.erofs said.
pub(in crate::image) fn write_image(tree: &Path, result: &Path, times: Times) -> io::Result<()> {
    let mut command = tool::command("mkfs.erofs");
    command.arg("-d0").arg(format!("-U{UUID}"));
    match times {
        Times::All(epoch) => command.arg(format!("-T{epoch}")),
        // The only way to say so that all versions know.
        Times::Latest(epoch) => command.env("SOURCE_DATE_EPOCH", epoch.to_string()),
    };
    command.arg(result).arg(tree);
    // It draws its progress; what it has to complain about it writes to standard error.
    let done = command.stdout(Stdio::null()).output()?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(io::Error::other(format!("mkfs.erofs failed ({}): {}", done.status, said.trim())))
}
