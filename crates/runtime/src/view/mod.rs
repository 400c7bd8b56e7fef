//! The view: one small FUSE file system per engine, whose files tell each sandbox of its own memory,
//! CPU time and age where proc would tell of the host's.
//!
//! ```text
//! <root>/<session>.<first>.<count>/{meminfo,stat,uptime,loadavg,swaps,cpuinfo,online}
//! ```
//!
//! A session's folder comes into being when its shim looks it up at the launch; the name says which
//! CPUs are its. Init binds the files over those of its proc. So the file that is read says whose
//! numbers are meant: who reads does not matter, and two sandboxes share no inode. Served by a process
//! of its own, executed like a zygote: one thread, an unprivileged id, a filter that leaves it reading
//! and writing. It ends when the file system is mounted nowhere any more, so it outlives serve as long
//! as a sandbox needs it; when it dies, reads fail at once. Invariant: it keeps a bounded number of
//! bytes for each session, and each request is answered at once. Why not one per session:
//! docs/decisions/0002-honest-proc.md.

mod fuse;
mod groups;
mod text;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;

use bivouac_types::id::SessionId;
use serde::{Deserialize, Serialize};

use self::fuse::{Answer, Ask, Node, Request};
use self::groups::Meter;
use self::text::{Load, Ticks};
use crate::linux::cgroup::Hierarchies;
use crate::linux::confine;
use crate::proto::{self, Assembler, Frame, TRUSTED_CAP};
use crate::sys;

/// `argv[0]` of the process that serves it.
pub(crate) const ROLE: &str = "bivouac-view";

/// Id that the process gives itself: below the owner ids of sessions, and nobody's.
const OWN_ID: u32 = (1 << 30) - 65_536 - 1;
/// How long a text is good for, µs: a busy reader costs no more than that.
const FRESH_US: u64 = 10_000;

/// serve → view, with the FUSE descriptor: the only frame.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ViewStart {
    /// Where the sessions' groups are.
    pub hierarchies: Hierarchies,
    /// Name of the engine's group.
    pub cgroup: String,
}

/// The CPUs of a session: so many of those that the engine may use, from a place on, round the end.
#[must_use]
pub(crate) fn cpus_of(allowed: &[u32], first: usize, count: usize) -> Vec<u32> {
    let from = first.checked_rem(allowed.len()).unwrap_or(0);
    let round = allowed.iter().cycle().skip(from);
    let mut cpus: Vec<u32> = round.take(count.min(allowed.len())).copied().collect();
    cpus.sort_unstable();
    cpus
}

/// CPUs that this process may use.
pub(crate) fn allowed_cpus() -> Vec<u32> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| {
        // Only a kernel with more CPUs than the set has room for: then sandboxes are not pinned.
        rustix::thread::CpuSet::new()
    });
    (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .filter_map(|cpu| u32::try_from(cpu).ok())
        .collect()
}

/// Name of a session's folder.
#[must_use]
pub(crate) fn folder_name(session: &SessionId, first: usize, count: usize) -> String {
    format!("{session}.{first}.{count}")
}

/// A file of the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum File {
    Meminfo,
    Stat,
    Uptime,
    Loadavg,
    Swaps,
    Cpuinfo,
    Online,
}

const FILES: [(&str, File); 7] = [
    ("meminfo", File::Meminfo),
    ("stat", File::Stat),
    ("uptime", File::Uptime),
    ("loadavg", File::Loadavg),
    ("swaps", File::Swaps),
    ("cpuinfo", File::Cpuinfo),
    ("online", File::Online),
];

/// Files of every session, with the places that they go to.
pub(crate) const ALWAYS: [(&str, &str); 5] = [
    ("meminfo", "/proc/meminfo"),
    ("stat", "/proc/stat"),
    ("uptime", "/proc/uptime"),
    ("loadavg", "/proc/loadavg"),
    ("swaps", "/proc/swaps"),
];
/// Files of a session that has not all of the host's CPUs.
pub(crate) const PINNED: [(&str, &str); 2] =
    [("cpuinfo", "/proc/cpuinfo"), ("online", "/sys/devices/system/cpu/online")];

/// Serves until the file system is gone.
///
/// # Errors
/// When the frame is missing, or the kernel's requests cannot be read.
pub(crate) fn run(control: &OwnedFd) -> io::Result<()> {
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let received = proto::receive::<ViewStart>(control, &mut assembler)?;
    let Some(Frame { message, mut fds, .. }) = received else { return Ok(()) };
    let device = fds.pop().ok_or_else(|| io::Error::other("no FUSE descriptor"))?;
    let mut server = Server::new(message)?;
    give_up_rights()?;
    let mut buffer = vec![0u8; fuse::BUFFER];
    loop {
        let got = match rustix::io::read(&device, &mut buffer[..]).map_err(io::Error::from) {
            Ok(got) => got,
            Err(e) if fuse::over(&e) => return Ok(()),
            Err(e) if fuse::passing(&e) => continue,
            Err(e) => return Err(e),
        };
        let Some(request) = Request::parse(&buffer[..got]) else { continue };
        let Some(answer) = server.answer(&request) else { continue };
        let frame = Answer::frame(request.unique, answer);
        match rustix::io::write(&device, &frame).map_err(io::Error::from) {
            Ok(_) => {}
            Err(e) if fuse::over(&e) => return Ok(()),
            // Who asked has gone, or the answer was refused: the next request is another's.
            Err(_) => {}
        }
    }
}

/// From here on: no user that owns anything, no capability, and hardly a system call.
fn give_up_rights() -> io::Result<()> {
    let (uid, gid) = (rustix::fs::Uid::from_raw(OWN_ID), rustix::fs::Gid::from_raw(OWN_ID));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    rustix::thread::set_no_new_privs(true)?;
    // Readers that never rest shall not take the CPU from those who work.
    let _ = rustix::process::nice(5);
    sys::install_seccomp(&confine::only(CALLS), sys::Refusals::Silent)
}

/// What reading a few files and answering takes; every other call answers EPERM.
const CALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_clock_gettime,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// A session that has been looked up and not forgotten.
struct Session {
    name: String,
    meter: Meter,
    cpus: Vec<u32>,
    /// Start, since the host's: µs. And by the clock: s.
    start_us: u64,
    start: u64,
    ticks: Ticks,
    load: Load,
    /// When each file was read last, and what it said.
    texts: [Option<(u64, Vec<u8>)>; FILES.len()],
    /// How often the kernel knows its nodes.
    known: u64,
}

/// Places of a node: `number << 8` is a session's folder, the low byte its file.
const SHIFT: u32 = 8;

/// After so many new sessions those are dropped that are gone. The kernel keeps the nodes of a
/// short-lived one for as long as it has room, and says so late that they are forgotten.
const SWEEP: u64 = 64;

struct Server {
    start: ViewStart,
    allowed: Vec<u32>,
    /// The host's /proc/cpuinfo, once, and its memory and swap.
    cpuinfo: String,
    host: groups::Host,
    sessions: HashMap<u64, Session>,
    by_name: HashMap<String, u64>,
    next: u64,
}

fn boot_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

fn wall() -> u64 {
    rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec.unsigned_abs()
}

impl Server {
    fn new(start: ViewStart) -> io::Result<Self> {
        Ok(Self {
            start,
            allowed: allowed_cpus(),
            cpuinfo: std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(),
            host: groups::Host::read()?,
            sessions: HashMap::new(),
            by_name: HashMap::new(),
            next: 1,
        })
    }

    /// `None`: wants no answer.
    fn answer(&mut self, request: &Request) -> Option<Result<Answer, i32>> {
        Some(match &request.ask {
            Ask::Init { major: 7, flags } => Ok(Answer::init(*flags)),
            Ask::Init { .. } => Err(libc::EPROTO),
            Ask::Lookup { name } => self.look_up(request.node, name).ok_or(libc::ENOENT),
            Ask::Forget { count } => {
                self.forget(request.node, *count);
                return None;
            }
            Ask::BatchForget { nodes } => {
                for &(node, count) in nodes {
                    self.forget(node, count);
                }
                return None;
            }
            Ask::Attributes => self.node(request.node).map(Answer::attributes).ok_or(libc::ENOENT),
            Ask::Open => Ok(Answer::opened()),
            Ask::Read { offset, size } => self.read(request.node, *offset, *size),
            Ask::List { offset, size } => Ok(self.list(request.node, *offset, *size)),
            Ask::FileSystem => Ok(Answer::file_system()),
            Ask::Release => Ok(Answer::empty()),
            Ask::Silent => return None,
            // Also to open a folder: the kernel does not ask again.
            Ask::Unknown => Err(libc::ENOSYS),
        })
    }

    fn node(&self, id: u64) -> Option<Node> {
        if id == fuse::ROOT {
            return Some(Node { id, folder: true, time: 0 });
        }
        let session = self.sessions.get(&(id >> SHIFT))?;
        Some(Node { id, folder: id & 0xff == 0, time: session.start })
    }

    fn look_up(&mut self, parent: u64, name: &str) -> Option<Answer> {
        let id = if parent == fuse::ROOT {
            let number = match self.by_name.get(name) {
                Some(&number) => number,
                None => self.adopt(name)?,
            };
            number << SHIFT
        } else {
            let place = FILES.iter().position(|(file, _)| *file == name)?;
            (parent & 0xff == 0).then_some(parent | (place as u64 + 1))?
        };
        let node = self.node(id)?;
        self.sessions.get_mut(&(id >> SHIFT))?.known += 1;
        Some(Answer::entry(node))
    }

    /// A session that is being launched. Only its shim can ask: sandboxes have no way to the root.
    fn adopt(&mut self, name: &str) -> Option<u64> {
        let mut parts = name.split('.');
        let session = SessionId::parse(parts.next()?).ok()?;
        let first = parts.next()?.parse().ok()?;
        let count = parts.next()?.parse().ok()?;
        let groups = self.start.hierarchies.session(&self.start.cgroup, session.as_str());
        let number = self.next;
        self.next += 1;
        if number.is_multiple_of(SWEEP) {
            self.sweep();
        }
        let session = Session {
            name: name.to_owned(),
            meter: Meter::new(&groups),
            cpus: cpus_of(&self.allowed, first, count),
            start_us: boot_us(),
            start: wall(),
            ticks: Ticks::default(),
            load: Load::default(),
            texts: Default::default(),
            known: 0,
        };
        self.by_name.insert(name.to_owned(), number);
        self.sessions.insert(number, session);
        Some(number)
    }

    fn sweep(&mut self) {
        self.sessions.retain(|_, session| {
            // A launch makes the groups before it looks its folder up.
            let gone = session.meter.gone();
            if gone {
                self.by_name.remove(&session.name);
            }
            !gone
        });
    }

    fn forget(&mut self, node: u64, count: u64) {
        let number = node >> SHIFT;
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.known = session.known.saturating_sub(count);
        if session.known == 0 {
            self.by_name.remove(&session.name);
            self.sessions.remove(&number);
        }
    }

    fn list(&mut self, node: u64, offset: u64, size: u32) -> Answer {
        let nodes: Vec<(&str, Node)> = match self.sessions.get(&(node >> SHIFT)) {
            Some(session) if node & 0xff == 0 => (1..)
                .zip(FILES)
                // Those that every session needs, but for one with all of the host's CPUs.
                .take(if session.cpus == self.allowed { ALWAYS.len() } else { FILES.len() })
                .map(|(place, (name, _))| {
                    (name, Node { id: node | place, folder: false, time: session.start })
                })
                .collect(),
            // The root shows nothing: its folders are found by name.
            _ => Vec::new(),
        };
        let (answer, told) = Answer::list(&nodes, offset, size);
        if let Some(session) = self.sessions.get_mut(&(node >> SHIFT)) {
            session.known += told;
        }
        answer
    }

    fn read(&mut self, node: u64, offset: u64, size: u32) -> Result<Answer, i32> {
        let place = usize::try_from(node & 0xff).unwrap_or(0).checked_sub(1).ok_or(libc::EISDIR)?;
        let (_, file) = *FILES.get(place).ok_or(libc::EIO)?;
        let Self { sessions, host, cpuinfo, .. } = self;
        let session = sessions.get_mut(&(node >> SHIFT)).ok_or(libc::ESTALE)?;
        if file == File::Cpuinfo {
            // Made each time, out of what does not change: it is too long to be kept.
            let text = text::cpuinfo(cpuinfo, &session.cpus);
            return Ok(Answer::data(text.as_bytes(), offset, size));
        }
        let now = boot_us();
        let fresh = |at: u64| now.saturating_sub(at) < FRESH_US;
        // Whoever reads in pieces gets the pieces of one text, as long as nobody else starts over.
        let keep = session.texts[place].as_ref().is_some_and(|(at, _)| offset > 0 || fresh(*at));
        if !keep {
            let text = session.text(file, now, host).map_err(|_| libc::EIO)?;
            session.texts[place] = Some((now, text.into_bytes()));
        }
        let text = session.texts[place].as_ref().map(|(_, text)| text.as_slice());
        Ok(Answer::data(text.unwrap_or_default(), offset, size))
    }
}

impl Session {
    fn text(&mut self, file: File, now: u64, host: &groups::Host) -> io::Result<String> {
        Ok(match file {
            File::Meminfo => text::meminfo(&self.meter.memory(host)?),
            File::Swaps => text::swaps(&self.meter.memory(host)?),
            File::Stat => {
                let up = self.measure(now)?;
                self.load.advance(up, self.meter.used_us());
                let running = self.load.running(self.meter.tasks()?);
                text::stat(&self.cpus, self.ticks, self.start, running)
            }
            File::Uptime => {
                let up = self.measure(now)?;
                text::uptime(up, self.ticks)
            }
            File::Loadavg => {
                let up = self.measure(now)?;
                self.load.advance(up, self.meter.used_us());
                self.load.text(self.meter.tasks()?)
            }
            File::Online => text::online(&self.cpus),
            File::Cpuinfo => String::new(),
        })
    }

    /// Brings the ticks up to date; answers the session's age, µs.
    fn measure(&mut self, now: u64) -> io::Result<u64> {
        let up = now.saturating_sub(self.start_us);
        let (user, system) = self.meter.cpu()?;
        self.ticks = Ticks::of(user, system, up, self.cpus.len() as u64, self.ticks);
        Ok(up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Server {
        let hierarchies = Hierarchies::detect().unwrap();
        Server::new(ViewStart { hierarchies, cgroup: "bivouac-none".into() }).unwrap()
    }

    fn ask(server: &mut Server, node: u64, ask: Ask) -> Option<Result<Answer, i32>> {
        server.answer(&Request { unique: 1, node, ask })
    }

    fn look_up(server: &mut Server, node: u64, name: &str) -> Result<Answer, i32> {
        ask(server, node, Ask::Lookup { name: name.to_owned() }).unwrap()
    }

    #[test]
    fn every_file_has_a_place() {
        let placed: Vec<_> = ALWAYS.iter().chain(&PINNED).map(|(name, _)| *name).collect();
        assert_eq!(placed, FILES.map(|(name, _)| name));
    }

    #[test]
    fn cpus_go_round() {
        assert_eq!(cpus_of(&[0, 1, 2, 3], 3, 2), [0, 3]);
        assert_eq!(cpus_of(&[4, 5], 1, 9), [4, 5]);
        assert!(cpus_of(&[], 1, 2).is_empty());
    }

    #[test]
    fn a_session_is_there_until_it_is_forgotten() {
        let mut server = server();
        let name = folder_name(&SessionId::new(1, [0; 10]), 0, 1);
        assert!(look_up(&mut server, fuse::ROOT, &name).is_ok());
        assert!(look_up(&mut server, 1 << SHIFT, "meminfo").is_ok());
        assert!(look_up(&mut server, 1 << SHIFT, "other").is_err());
        server.sessions.get_mut(&1).unwrap().cpus = vec![9999];
        let _ = ask(&mut server, 1 << SHIFT, Ask::List { offset: 0, size: 8192 }).unwrap();
        assert_eq!(server.sessions[&1].known, 2 + FILES.len() as u64);
        let _ = ask(&mut server, 1 << SHIFT, Ask::Forget { count: 1 });
        let files: Vec<_> = (1..=7).map(|file| (1 << SHIFT | file, 1)).collect();
        let _ = ask(&mut server, 0, Ask::BatchForget { nodes: files });
        assert_eq!(server.sessions.len(), 1, "a file is still known");
        let _ = ask(&mut server, 1 << SHIFT | 1, Ask::Forget { count: 1 });
        assert!(server.sessions.is_empty() && server.by_name.is_empty());
    }

    #[test]
    fn what_is_gone_is_swept() {
        let mut server = server();
        for n in 0..3 * SWEEP {
            let name = folder_name(&SessionId::new(n, [0; 10]), 0, 1);
            assert!(look_up(&mut server, fuse::ROOT, &name).is_ok());
        }
        let left = server.sessions.len() as u64;
        assert!(left <= SWEEP && server.by_name.len() as u64 == left, "{left}");
        let gone = ask(&mut server, 1 << SHIFT | 1, Ask::Read { offset: 0, size: 99 }).unwrap();
        assert_eq!(gone.err(), Some(libc::ESTALE));
    }

    #[test]
    fn names_that_are_none_are_not_found() {
        let mut server = server();
        for name in ["", "..", "x", "sbx_1.0", "../../etc.0.1", "a/b.0.1", "session.0.1.2"] {
            assert!(look_up(&mut server, fuse::ROOT, name).is_err(), "{name}");
        }
        assert!(server.sessions.is_empty());
    }

    proptest::proptest! {
        /// No request makes it panic, and what is not asked for at the root adds no session.
        #[test]
        fn any_request_is_answered(node in 2u64.., opcode in 0u32..60, body in proptest::collection::vec(0u8.., 0..120)) {
            let mut server = server();
            let mut bytes = vec![0u8; 40];
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            bytes[16..24].copy_from_slice(&node.to_ne_bytes());
            bytes.extend(body);
            if let Some(request) = Request::parse(&bytes) {
                let _ = server.answer(&request);
            }
            proptest::prop_assert!(server.sessions.is_empty());
        }
    }
}
