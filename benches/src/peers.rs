//! What the product is compared with: posix_spawn, `bwrap`, `crun`, `podman`, and plain programs on
//! the host's btrfs, all on the rootfs that the sandboxes have.
//!
//! A process of its own (`bivouac-bench peers`), in private mount and process namespaces: mounts and
//! processes of peers end with it, and `crun` and `podman` refuse a host with both control group versions until the
//! second one is out of their sight. It is asked over its standard input, runs one command, and
//! answers how long that took from posix_spawn to the reaped exit.
//!
//! Invariant: a peer that is absent, fails or hangs ends the bench with a sentence; it never leaves a
//! row out.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Debian's package and the program in it. `runc` is compared where it is installed.
const PROGRAMS: [(&str, &str); 3] =
    [("bwrap", "bubblewrap"), ("crun", "crun"), ("podman", "podman")];
/// No command of a peer takes longer, on any machine.
const DEADLINE: Duration = Duration::from_secs(300);

/// A folder of every Debian, over which podman's storage is mounted.
const PODMAN: &str = "/mnt";
/// Another one, for the storage of a container that works on the disk.
const PODMAN_DISK: &str = "/media";
/// Apparent size of the file with the ext4.
const EXT4: u64 = 12 << 30;
/// The folder of the container in which it works.
const WORK: &str = "/work";

/// Where a program is, as a shell would find it.
fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// What the peers' root is made of.
#[derive(Debug, Clone)]
pub(crate) enum Rootfs {
    /// An image file.
    File(PathBuf),
    /// The engine's tree of the `host` image, with the host's /usr in it.
    Host(PathBuf),
}

/// Where a line of shell runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Place {
    /// On the engine's btrfs, chrooted into the rootfs.
    Btrfs,
    /// On an ext4 in a loop file of its own, as the engine's btrfs is, chrooted into the rootfs.
    Ext4,
    /// In one container of podman that stays: in its own overlay, or, where the root is a folder (image
    /// `host`), in a folder of the engine's btrfs. Its time is taken inside.
    Podman,
}

/// The running helper.
#[derive(Debug)]
pub(crate) struct Peers {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// Those to measure, in order.
    pub(crate) names: Vec<&'static str>,
}

impl Peers {
    /// Checks that every peer is there, and starts the helper on a folder of its own. `scratch` lies
    /// on the engine's btrfs and is `/mnt` for programs that run on the host.
    pub(crate) fn start(folder: &Path, rootfs: &Rootfs, scratch: &Path) -> Result<Self> {
        for (program, package) in PROGRAMS {
            ensure!(
                on_path(program).is_some(),
                "the peer `{program}` is not installed, and a comparison without it would mislead: apt-get install {package}"
            );
        }
        let mut names = vec!["posix_spawn", "bwrap", "crun", "podman"];
        if on_path("runc").is_some() {
            names.push("runc");
        }
        fs::create_dir_all(folder)?;
        let own = std::env::current_exe()?;
        let (kind, from) = match rootfs {
            Rootfs::File(file) => ("--image-file", file),
            Rootfs::Host(tree) => ("--host-tree", tree),
        };
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc", "--"])
            .arg(own)
            .args(["peers", "--folder"])
            .arg(folder)
            .arg("--scratch")
            .arg(scratch)
            .arg(kind)
            .arg(from)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("start unshare (Debian's package util-linux)")?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("a pipe")?);
        let mut peers = Self { child, stdin, stdout, names };
        let _ = peers.answer().context("the helper that runs the peers did not start")?;
        Ok(peers)
    }

    /// Runs a peer once with `/bin/true`; milliseconds.
    pub(crate) fn run(&mut self, name: &str) -> Result<f64> {
        self.ask(&json!({ "peer": name })).with_context(|| format!("the peer {name} failed"))
    }

    /// Runs a line of shell at a place. `/mnt` is the scratch folder everywhere, and the working folder
    /// of [`Place::Btrfs`]; milliseconds.
    pub(crate) fn shell(&mut self, place: Place, line: &str) -> Result<f64> {
        let request = json!({ "shell": line, "place": place });
        self.ask(&request).with_context(|| format!("at {place:?}: {line}"))
    }

    fn ask(&mut self, request: &Value) -> Result<f64> {
        let stdin = self.stdin.as_mut().context("the helper has ended")?;
        writeln!(stdin, "{request}")?;
        stdin.flush()?;
        let answer = self.answer()?;
        answer["micros"].as_f64().map(|micros| micros / 1e3).context("no time in the answer")
    }

    fn answer(&mut self) -> Result<Value> {
        let late = Timespec { tv_sec: DEADLINE.as_secs().try_into()?, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(self.stdout.get_ref(), PollFlags::IN)], Some(&late))?;
        ensure!(ready > 0, "no answer within {DEADLINE:?}");
        let mut line = String::new();
        ensure!(self.stdout.read_line(&mut line)? > 0, "the helper ended");
        let answer: Value = serde_json::from_str(&line)?;
        if let Some(error) = answer["error"].as_str() {
            bail!("{error}");
        }
        Ok(answer)
    }
}

impl Drop for Peers {
    /// With the helper ends its process namespace, so nothing of a peer survives it.
    fn drop(&mut self) {
        drop(self.stdin.take());
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            if self.child.try_wait().is_ok_and(|status| status.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Ok(Some(pid)) = i32::try_from(self.child.id()).map(Pid::from_raw) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// Arguments of the helper.
#[derive(Debug, clap::Args)]
pub(crate) struct HelperArgs {
    #[arg(long)]
    folder: PathBuf,
    #[arg(long)]
    scratch: PathBuf,
    #[arg(long)]
    image_file: Option<PathBuf>,
    #[arg(long)]
    host_tree: Option<PathBuf>,
}

struct Helper {
    folder: PathBuf,
    scratch: PathBuf,
    rootfs: PathBuf,
    podman_root: String,
    /// Whether podman's root is a folder in which only `WORK` may be written to.
    plain_root: bool,
    ext4: bool,
    container: Option<Container>,
    errors: File,
    next: u32,
}

/// A container that runs lines of shell.
struct Container {
    _child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

fn checked(program: &str, args: &[&Path]) -> Result<()> {
    let status = Command::new(program).args(args).stdout(Stdio::null()).status();
    let status = status.with_context(|| format!("start {program}"))?;
    ensure!(status.success(), "{program} {args:?} ended with {status}");
    Ok(())
}

fn mount(args: &[&Path]) -> Result<()> {
    checked("mount", args)
}

/// The helper's whole life.
pub(crate) fn help(args: &HelperArgs) -> Result<()> {
    // `unshare` is this process's own; the pipes are the parent's, and their end is the end.
    let mut helper = Helper::prepare(args)?;
    let mut out = std::io::stdout();
    writeln!(out, "{{}}")?;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let answer = match helper.serve(&request) {
            Ok(time) => json!({ "micros": time.as_secs_f64() * 1e6 }),
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

impl Helper {
    fn prepare(args: &HelperArgs) -> Result<Self> {
        let rootfs = args.folder.join("rootfs");
        fs::create_dir_all(&rootfs)?;
        let path = Path::new;
        match (&args.image_file, &args.host_tree) {
            (Some(file), _) => {
                mount(&[path("-t"), path("erofs"), path("-o"), path("ro"), file, &rootfs])?
            }
            (None, Some(tree)) => {
                mount(&[path("--bind"), tree, &rootfs])?;
                mount(&[path("--bind"), path("/usr"), &rootfs.join("usr")])?;
            }
            (None, None) => bail!("no root to run peers in"),
        }
        mount(&[path("--bind"), &args.scratch, &rootfs.join("mnt")])?;
        mount(&[path("--bind"), path("/dev"), &rootfs.join("dev")])?;
        mount(&[path("-t"), path("proc"), path("proc"), &rootfs.join("proc")])?;
        mount(&[path("-t"), path("tmpfs"), path("tmp"), &rootfs.join("tmp")])?;
        // A second root without these mounts, for peers, who mount their own.
        let bare = args.folder.join("bare");
        fs::create_dir_all(&bare)?;
        mount(&[path("--bind"), &rootfs, &bare])?;
        let mut podman_root = format!("{}:O", bare.display());
        if let Some(tree) = &args.host_tree {
            mount(&[path("--bind"), path("/usr"), &bare.join("usr")])?;
            // Its overlay would not see the /usr that is mounted there: it gets a copy to write to.
            let copy = args.folder.join("copy");
            checked("cp", &[path("-a"), tree, &copy])?;
            mount(&[path("--bind"), path("/usr"), &copy.join("usr")])?;
            podman_root = copy.display().to_string();
        }
        // podman refuses long paths. What it keeps here goes with this namespace.
        mount(&[path("-t"), path("tmpfs"), path("podman"), path(PODMAN)])?;
        // A version 2 hierarchy beside version 1 (never the only one).
        let unified = path("/sys/fs/cgroup/unified");
        if unified.join("cgroup.procs").exists() {
            checked("umount", &[unified])?;
        }
        let helper = Self {
            folder: args.folder.clone(),
            scratch: args.scratch.clone(),
            rootfs,
            podman_root,
            plain_root: args.host_tree.is_some(),
            ext4: false,
            container: None,
            errors: File::options()
                .create(true)
                .truncate(true)
                .read(true)
                .write(true)
                .open(args.folder.join("errors"))?,
            next: 0,
        };
        let bundle = helper.folder.join("bundle");
        fs::create_dir_all(&bundle)?;
        fs::write(bundle.join("config.json"), bundle_config(&bare).to_string())?;
        Ok(helper)
    }

    fn serve(&mut self, request: &Value) -> Result<Duration> {
        let mut command = match (request["peer"].as_str(), request["shell"].as_str()) {
            (Some(name), _) => self.peer(name)?,
            (None, Some(line)) => {
                let folder = match Place::deserialize(&request["place"])? {
                    Place::Podman => return self.in_container(line),
                    Place::Ext4 => self.ext4()?,
                    Place::Btrfs => "/mnt",
                };
                let mut command = Command::new("timeout");
                command.args(["-s", "KILL", "240", "chroot"]).arg(&self.rootfs);
                command.args(["/bin/sh", "-c", &format!("cd {folder} && {line}")]);
                command.env("HOME", "/tmp").env("LANG", "C.UTF-8");
                command
            }
            (None, None) => bail!("unknown request {request}"),
        };
        self.errors.set_len(0)?;
        self.errors.seek(SeekFrom::Start(0))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(self.errors.try_clone()?);
        let start = Instant::now();
        let status =
            command.spawn().with_context(|| format!("{:?}", command.get_program()))?.wait()?;
        let took = start.elapsed();
        ensure!(status.success(), "{status}: {}", self.said());
        Ok(took)
    }

    /// The last lines of standard error.
    fn said(&mut self) -> String {
        let mut said = String::new();
        let _ = self.errors.seek(SeekFrom::Start(0));
        let _ = self.errors.read_to_string(&mut said);
        let tail: Vec<&str> = said.lines().rev().take(5).collect();
        tail.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }

    /// Mounts the ext4 at first use; where, seen from the rootfs.
    fn ext4(&mut self) -> Result<&'static str> {
        const AT: &str = "/media";
        if !self.ext4 {
            let (file, at) = (self.folder.join("ext4.img"), self.rootfs.join("media"));
            File::options().write(true).create_new(true).open(&file)?.set_len(EXT4)?;
            checked("mkfs.ext4", &[Path::new("-q"), Path::new("-F"), &file])?;
            let mut attach = Command::new("losetup");
            let attached =
                attach.args(["--find", "--show", "--direct-io=on"]).arg(&file).output()?;
            ensure!(attached.status.success(), "losetup: {}", attached.status);
            let device = PathBuf::from(String::from_utf8_lossy(&attached.stdout).trim());
            let mounted = mount(&[Path::new("-o"), Path::new("noatime"), &device, &at]);
            // It goes with its last user, which ends with this helper's namespace.
            checked("losetup", &[Path::new("-d"), &device])?;
            mounted?;
            self.ext4 = true;
        }
        Ok(AT)
    }

    fn in_container(&mut self, line: &str) -> Result<Duration> {
        if self.container.is_none() {
            self.container = Some(self.container()?);
        }
        fs::write(self.folder.join("lines/line"), format!("cd {WORK} && {line}"))?;
        let container = self.container.as_mut().context("a container")?;
        writeln!(container.stdin, "go")?;
        container.stdin.flush()?;
        let mut answer = String::new();
        let read = container.stdout.read_line(&mut answer)?;
        ensure!(read > 0, "the container ended: {}", self.said());
        let (code, nanos) = answer.trim().split_once(' ').context("an answer of two words")?;
        let errors = fs::read_to_string(self.folder.join("lines/err")).unwrap_or_default();
        ensure!(code == "0", "exit code {code}: {errors}");
        Ok(Duration::from_nanos(nanos.parse()?))
    }

    /// Starts the container, with its storage on the engine's btrfs.
    fn container(&mut self) -> Result<Container> {
        let (disk, lines) = (self.scratch.join("podman"), self.folder.join("lines"));
        for folder in [&disk, &disk.join("work"), &lines] {
            fs::create_dir_all(folder)?;
        }
        mount(&[Path::new("--bind"), &disk, Path::new(PODMAN_DISK)])?;
        let mut podman = podman(PODMAN_DISK)?;
        podman.args(["run", "--rm", "--interactive", "--network", "none", "--cgroups", "disabled"]);
        podman.args(["--log-driver", "none", "--env", "HOME=/tmp", "--env", "LANG=C.UTF-8"]);
        podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
        podman.arg("--volume").arg(format!("{}:/mnt", self.scratch.display()));
        podman.arg("--volume").arg(format!("{}:/lines", lines.display()));
        if self.plain_root {
            podman.arg("--volume").arg(format!("{}:{WORK}", disk.join("work").display()));
        }
        podman.arg("--rootfs").arg(&self.podman_root);
        let script = format!(
            "mkdir -p {WORK}; while read -r _; do s=$(date +%s%N); \
             sh /lines/line >/dev/null 2>/lines/err; c=$?; e=$(date +%s%N); echo \"$c $((e-s))\"; done"
        );
        podman.args(["/bin/sh", "-c", &script]);
        self.errors.set_len(0)?;
        self.errors.seek(SeekFrom::Start(0))?;
        podman.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(self.errors.try_clone()?);
        let mut child = podman.spawn().context("start podman")?;
        let stdin = child.stdin.take().context("a pipe")?;
        let stdout = BufReader::new(child.stdout.take().context("a pipe")?);
        Ok(Container { _child: child, stdin, stdout })
    }

    /// Each in the form that costs it least: no user namespace, no limits, a root that is read-only
    /// (for `podman`, which insists on writing: its own overlay, or a copy).
    fn peer(&mut self, name: &str) -> Result<Command> {
        self.next += 1;
        let id = format!("bench-{}-{}", std::process::id(), self.next);
        let bare = self.folder.join("bare");
        let command = |program: &str| -> Result<Command> {
            Ok(Command::new(on_path(program).with_context(|| format!("{program} is gone"))?))
        };
        Ok(match name {
            "posix_spawn" => command("true")?,
            "bwrap" => {
                let mut bwrap = command("bwrap")?;
                bwrap.args(["--unshare-all", "--die-with-parent", "--ro-bind"]).arg(bare).arg("/");
                bwrap.args(["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "/bin/true"]);
                bwrap
            }
            "crun" | "runc" => {
                let mut runtime = command(name)?;
                runtime.arg("--root").arg(self.folder.join(name)).args(["run", "--bundle"]);
                runtime.arg(self.folder.join("bundle")).arg(id);
                runtime
            }
            "podman" => {
                let mut podman = podman(PODMAN)?;
                podman.args([
                    "run",
                    "--rm",
                    "--network",
                    "none",
                    "--cgroups",
                    "disabled",
                    "--log-driver",
                    "none",
                ]);
                // As root without CAP_SYS_RESOURCE it would otherwise ask for more than it may have.
                podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
                podman.arg("--rootfs").arg(&self.podman_root).arg("/bin/true");
                podman
            }
            other => bail!("no peer is called {other}"),
        })
    }
}

/// `podman` with its storage in a folder of ours, under a deadline that no command passes.
fn podman(storage: &str) -> Result<Command> {
    let mut podman = Command::new(on_path("timeout").context("timeout is gone")?);
    podman.args(["-s", "KILL", if storage == PODMAN { "60" } else { "1200" }, "podman"]);
    for (flag, folder) in [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
        podman.arg(flag).arg(format!("{storage}/{folder}"));
    }
    podman.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
    podman.args(["--runtime", "crun", "--events-backend", "none"]);
    Ok(podman)
}

fn bundle_config(root: &Path) -> Value {
    let tmpfs = |at: &str| json!({ "destination": at, "type": "tmpfs", "source": "tmpfs" });
    let kinds = ["pid", "network", "ipc", "uts", "mount"];
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "user": { "uid": 0, "gid": 0 }, "args": ["/bin/true"],
            "env": ["PATH=/usr/bin:/bin"], "cwd": "/", "noNewPrivileges": true,
        },
        "root": { "path": root, "readonly": true },
        "hostname": "bench",
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            tmpfs("/dev"),
            tmpfs("/tmp"),
        ],
        "linux": { "namespaces": kinds.map(|kind| json!({ "type": kind })) },
    })
}
