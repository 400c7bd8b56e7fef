//! The honest `df`: answers `statfs` and `fstatfs` of everything inside by the sandbox's own limit.
//!
//! The kernel tells of the whole storage pool there. So the filter hands these two calls over
//! (seccomp user notification), and a helper, forked from init when one is waiting, answers them: for a
//! file on the sandbox's disk the kernel's own answer with other numbers, for every other file the
//! kernel goes on by itself. Whoever fools the helper gets numbers that it could have made up itself.
//!
//! Invariant: init never waits for anything of the guest's. What can block (a path on a file system
//! that the guest serves, memory that is mapped from one) blocks the helper alone; init looks at it from
//! time to time, lets the call through that it hangs in, and forgets it. An idle helper ends, so that a
//! sandbox that asks nothing has none. Called by init's loop and by the build of the root.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::Groups;
use crate::linux::confine;
use crate::sys::notify::{self, Call, FileSystem, Slot};
use crate::sys::{self, Fork};

/// How long a helper stays without work.
const IDLE_S: i64 = 10;
/// How long a helper may take for one call.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often init looks at its helper.
const LOOK: Duration = Duration::from_millis(250);
/// When a helper is tried again that could not be started.
const RETRY: Duration = Duration::from_millis(50);
/// So many helpers may hang at once; after that one lets everything through without looking.
const MOST_STUCK: usize = 4;
/// Longest path, with its end.
const PATH_MAX: usize = 4096;
/// What statfs says of an overlay.
const OVERLAY: i64 = 0x794c_7630;

/// Files of the quota group, in the order of [`Counters`].
const FILES: [&str; 5] =
    ["max_referenced", "referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"];

/// Where the numbers are: open files that the kernel and serve write.
#[derive(Debug)]
pub(super) struct Counters {
    /// Of the quota group: the most, what is charged, and what is about to be.
    group: Vec<std::fs::File>,
    /// Room that the whole storage has, bytes.
    space: std::fs::File,
    /// Bytes that the sandbox may write.
    limit: u64,
}

/// What `df` shows, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shown {
    size: u64,
    free: u64,
    available: u64,
}

/// The rule: what the quota leaves is free, and of that so much is available as the storage has.
fn shown(limit: u64, most: u64, charged: u64, space: u64) -> Shown {
    let free = most.saturating_sub(charged).min(limit);
    Shown { size: limit, free, available: free.min(space) }
}

fn number_in(file: &std::fs::File) -> Option<u64> {
    let mut text = [0u8; 32];
    let length = file.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..length]).ok()?.trim().parse().ok()
}

impl Counters {
    /// Opens the files in the quota group's folder. The folder is the host's: it is not kept.
    ///
    /// # Errors
    /// As openat(2).
    pub(super) fn open(folder: &OwnedFd, space: OwnedFd, limit: u64) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let one = |name: &&str| rustix::fs::openat(folder, *name, flags, Mode::empty());
        let group = FILES.iter().map(|name| one(name).map(Into::into));
        Ok(Self { group: group.collect::<Result<_, _>>()?, space: space.into(), limit })
    }

    /// `None`: there is no quota, or it cannot be read; the kernel's numbers are the best there are.
    fn read(&self) -> Option<Shown> {
        let [most, charged @ ..] = &self.group[..] else { return None };
        let charged = charged.iter().map(number_in).try_fold(0u64, |all, one| {
            // What is about to be charged is told apart by its kind; older kernels tell less.
            Some(all.saturating_add(one?))
        })?;
        let most = number_in(most).filter(|most| *most > 0)?;
        Some(shown(self.limit, most, charged, number_in(&self.space).unwrap_or(u64::MAX)))
    }
}

/// Type and id of a file system, as statfs tells them.
type Identity = (i64, [u8; 8]);

/// What the answers are made of.
#[derive(Debug)]
pub(super) struct Disk {
    proc: OwnedFd,
    counters: Counters,
    own: Vec<Identity>,
}

impl Disk {
    /// With a proc of this namespace that is attached nowhere.
    pub(super) fn new(proc: OwnedFd, counters: Counters) -> Self {
        Self { proc, counters, own: Vec::new() }
    }

    /// Takes a mount of the sandbox's for its disk, if it is an overlay.
    pub(super) fn own(&mut self, mount: BorrowedFd<'_>) {
        let identity = FileSystem::of(mount).map(|kernel| kernel.identity());
        self.own.extend(identity.ok().filter(|(kind, _)| *kind == OVERLAY));
    }
}

/// The filter's listener and who answers it.
#[derive(Debug)]
pub(super) struct Desk {
    listener: OwnedFd,
    /// A proc of this namespace that is attached nowhere: nothing can be mounted over its files.
    proc: OwnedFd,
    counters: Counters,
    /// The overlays of the root, as statfs tells them.
    own: Vec<Identity>,
    helper: Option<Helper>,
    /// Helpers that hang. They end when the guest's file system does.
    stuck: Vec<i32>,
    retry_at: Option<Instant>,
}

#[derive(Debug)]
struct Helper {
    pid: i32,
    slot: Slot,
    /// The call that it had at the last look, and since when.
    seen: (u64, Instant),
    /// It lets everything through.
    blind: bool,
}

impl Desk {
    /// Bounds this process with a filter that hands the two calls over.
    ///
    /// # Errors
    /// As seccomp(2). Without a listener the caller installs the plain filter.
    pub(super) fn open(shown: Disk) -> io::Result<Self> {
        let Disk { proc, counters, own } = shown;
        let listener = notify::install(&confine::filter(confine::Statfs::Handed))?;
        let (helper, stuck, retry_at) = (None, Vec::new(), None);
        Ok(Self { listener, proc, counters, own, helper, stuck, retry_at })
    }

    /// What init's poll is to wait for besides its own, and for how long at most.
    pub(super) fn waits_for(&self) -> (Option<BorrowedFd<'_>>, Option<Duration>) {
        match (&self.helper, self.retry_at) {
            (Some(_), _) => (None, Some(LOOK)),
            (None, Some(at)) => (None, Some(at.saturating_duration_since(Instant::now()))),
            (None, None) => (Some(self.listener.as_fd()), None),
        }
    }

    /// Looks at the helper; starts one when a call waits.
    pub(super) fn tend(&mut self, called: bool, groups: &Groups) {
        let now = Instant::now();
        if let Some(helper) = &mut self.helper {
            let id = helper.slot.pending();
            if id == 0 || id != helper.seen.0 {
                helper.seen = (id, now);
            } else if now.duration_since(helper.seen.1) >= PATIENCE {
                let pid = helper.pid;
                let _ = sys::kill(pid, libc::SIGKILL);
                self.stuck.push(pid);
                self.forget_helper();
            }
            return;
        }
        let due = self.retry_at.is_some_and(|at| at <= now);
        if called || due {
            self.retry_at = self.start(groups).err().map(|_| now + RETRY);
        }
    }

    /// A child of init's has ended.
    pub(super) fn ended(&mut self, pid: i32) {
        self.stuck.retain(|stuck| *stuck != pid);
        if self.stuck.len() < MOST_STUCK
            && let Some(blind) = self.helper.as_ref().filter(|helper| helper.blind)
        {
            // One that looks takes its place, when its end has been noticed.
            let _ = sys::kill(blind.pid, libc::SIGKILL);
        }
        if self.helper.as_ref().is_some_and(|helper| helper.pid == pid) {
            self.forget_helper();
        }
    }

    /// What it was at is done by the kernel: nobody waits for an answer that will not come.
    fn forget_helper(&mut self) {
        let Some(helper) = self.helper.take() else { return };
        let id = helper.slot.pending();
        if id != 0 {
            // Answered already, or its caller is gone: as good.
            let _ = notify::let_through(self.listener.as_fd(), id);
        }
    }

    fn start(&mut self, groups: &Groups) -> io::Result<()> {
        let slot = Slot::new()?;
        let blind = self.stuck.len() >= MOST_STUCK;
        match fork_past_limit(groups)? {
            Fork::Parent(pid) => {
                self.helper = Some(Helper { pid, slot, seen: (0, Instant::now()), blind });
                Ok(())
            }
            Fork::Child => {
                sys::reset_signals_of_role();
                let code = i32::from(self.help(slot, blind).is_err());
                sys::exit_now(code)
            }
        }
    }

    /// The helper's life.
    fn help(&self, mut slot: Slot, blind: bool) -> io::Result<()> {
        let _ = rustix::thread::set_name(c"bivouac-df");
        let desk = Answering {
            listener: self.listener.as_fd(),
            proc: self.proc.as_fd(),
            counters: &self.counters,
            own: &self.own,
        };
        give_up_rights()?;
        let patience = rustix::time::Timespec { tv_sec: IDLE_S, tv_nsec: 0 };
        loop {
            let mut polled = [PollFd::new(&self.listener, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&patience)) {
                Ok(0) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let call = match slot.receive(self.listener.as_fd()) {
                Ok(call) => call,
                // Who asked was killed before its call was received.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            let answered = !blind && desk.answer(&call).unwrap_or(false);
            if !answered {
                let _ = notify::let_through(self.listener.as_fd(), call.id);
            }
            slot.clear();
        }
    }
}

/// Forks, past a full process limit as a command does: a program that waits for an answer must get one.
fn fork_past_limit(groups: &Groups) -> io::Result<Fork> {
    let first = sys::fork_single_threaded();
    let full = matches!(&first, Err(e) if e.raw_os_error() == Some(libc::EAGAIN));
    let (true, Some([outside, run])) = (full, &groups.pids) else { return first };
    rustix::io::write(outside, b"0")?;
    let second = sys::fork_single_threaded();
    if !matches!(second, Ok(Fork::Child)) {
        rustix::io::write(run, b"0")?;
    }
    second
}

/// From here on: what reading of others' paths takes, and hardly a system call.
fn give_up_rights() -> io::Result<()> {
    let kept = CapabilitySet::SYS_PTRACE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::set_capabilities(None, sets)?;
    sys::install_seccomp(&confine::only(CALLS), sys::Refusals::Silent)
}

/// What answering takes; every other call answers EPERM.
const CALLS: &[libc::c_long] = &[
    libc::SYS_ioctl,
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_fstatfs,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_getpid,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// What a helper works with.
struct Answering<'a> {
    listener: BorrowedFd<'a>,
    proc: BorrowedFd<'a>,
    counters: &'a Counters,
    own: &'a [Identity],
}

impl Answering<'_> {
    /// Answers a call about the sandbox's disk. `false`: it is about something else, or there is no
    /// answer that is better than the kernel's.
    fn answer(&self, call: &Call) -> io::Result<bool> {
        let file = match call.call {
            libc::SYS_fstatfs => self.descriptor(call.pid, call.args[0] as i32)?,
            libc::SYS_statfs => self.path(call)?,
            _ => return Ok(false),
        };
        let kernel = FileSystem::of(file.as_fd())?;
        if !self.own.contains(&kernel.identity()) {
            return Ok(false);
        }
        let Some(Shown { size, free, available }) = self.counters.read() else {
            return Ok(false);
        };
        // Another process may have its number by now.
        if !notify::waits(self.listener, call.id) {
            return Ok(true);
        }
        let answer = kernel.with(size, free, available);
        notify::write_memory(call.pid, call.args[1], answer.bytes())?;
        notify::succeed(self.listener, call.id)?;
        Ok(true)
    }

    fn process(&self, pid: u32) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(self.proc, pid.to_string(), flags, Mode::empty())?)
    }

    fn descriptor(&self, pid: u32, number: i32) -> io::Result<OwnedFd> {
        let number =
            u32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
        let link = format!("{pid}/fd/{number}");
        Ok(rustix::fs::openat(self.proc, link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The file that the path of a `statfs` names, found as its caller would find it, with its rights.
    /// What it finds elsewhere (under a root that changes, a path that changes) is its own loss.
    fn path(&self, call: &Call) -> io::Result<OwnedFd> {
        let path = text_of(call.pid, call.args[0])?;
        let process = self.process(call.pid)?;
        // What was read is of the caller and of nobody who has its number by now.
        if !notify::waits(self.listener, call.id) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let (from, resolve) = if path.starts_with(b"/") {
            ("root", ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
        } else {
            ("cwd", ResolveFlags::NO_MAGICLINKS)
        };
        let place = OFlags::PATH | OFlags::CLOEXEC;
        let start = rustix::fs::openat(&process, from, place, Mode::empty())?;
        let (user, group) = rights_of(&process)?;
        notify::look_as(user, group);
        let found = rustix::fs::openat2(&start, &path[..], place, Mode::empty(), resolve);
        notify::look_as(0, 0);
        Ok(found?)
    }
}

/// A text in another process's memory, up to its end.
fn text_of(pid: u32, at: u64) -> io::Result<Vec<u8>> {
    const PAGE: usize = 4096;
    let mut text = Vec::with_capacity(256);
    let mut buffer = [0u8; PAGE];
    while text.len() < PATH_MAX {
        let from = at.wrapping_add(text.len() as u64);
        // Never across the end of a page: what lies behind may not be there.
        let length = (PAGE - from as usize % PAGE).min(if text.is_empty() { 256 } else { PAGE });
        let got = notify::read_memory(pid, from, &mut buffer[..length])?;
        if got == 0 {
            break;
        }
        if let Some(end) = buffer[..got].iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&buffer[..end]);
            // Its end counts too; where pages lie, more than the longest may have been read.
            return if text.len() < PATH_MAX { Ok(text) } else { Err(too_long()) };
        }
        text.extend_from_slice(&buffer[..got]);
    }
    Err(too_long())
}

fn too_long() -> io::Error {
    io::Error::from_raw_os_error(libc::ENAMETOOLONG)
}

/// User and group by whose rights a process looks at files. Its other groups count for nothing here: who
/// sees a file only by one of them gets the kernel's answer.
fn rights_of(process: &OwnedFd) -> io::Result<(u32, u32)> {
    let stat = rustix::fs::statat(process, "", AtFlags::EMPTY_PATH)?;
    if stat.st_uid != 0 {
        return Ok((stat.st_uid, stat.st_gid));
    }
    // Root, or one that hides from its own user: the folder does not tell.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(process, "status", flags, Mode::empty())?;
    let mut text = [0u8; 2048];
    let length = rustix::io::read(&file, &mut text)?;
    let text = String::from_utf8_lossy(&text[..length]);
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok())
    };
    field("Uid:").zip(field("Gid:")).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        /// `df` adds up, whatever the counters say: never more than the limit, never more than there is.
        #[test]
        fn numbers_add_up(limit in 0u64..1 << 50, most in 0u64.., charged in 0u64.., space in 0u64..) {
            let shown = shown(limit, most, charged, space);
            proptest::prop_assert_eq!(shown.size, limit);
            proptest::prop_assert!(shown.free <= limit);
            proptest::prop_assert!(shown.available <= shown.free && shown.available <= space);
            if charged >= most {
                proptest::prop_assert_eq!(shown.free, 0);
            }
        }
    }

    #[test]
    fn what_the_quota_leaves_is_free() {
        let all = Shown { size: 100, free: 60, available: 60 };
        // 40 of 100 are in use, some of which another subvolume is charged for.
        assert_eq!(shown(100, 70, 10, 1000), all);
        assert_eq!(shown(100, 70, 10, 5), Shown { available: 5, ..all });
    }

    #[test]
    fn texts_end() {
        let own = std::process::id();
        let text = format!("/{}\0rest", "a".repeat(5000));
        assert!(text_of(own, text.as_ptr() as u64).is_err(), "too long");
        // Wherever it begins in a page.
        let pages = format!("{}\0", "a".repeat(3 * 4096));
        for length in [4095, 4096, 5000, 8191, 8192] {
            let at = pages.as_ptr() as u64 + (pages.len() - 1 - length) as u64;
            assert_eq!(text_of(own, at).is_ok(), length < PATH_MAX, "{length}");
        }
        let text = format!("/{}\0rest", "a".repeat(4000));
        assert_eq!(text_of(own, text.as_ptr() as u64).unwrap().len(), 4001);
        assert_eq!(text_of(own, c"/x".as_ptr() as u64).unwrap(), b"/x");
        assert!(text_of(own, 4090).is_err());
    }

    #[test]
    fn rights_are_found() {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let own = rustix::fs::open("/proc/self", flags, Mode::empty()).unwrap();
        let id = rustix::process::geteuid().as_raw();
        assert_eq!(rights_of(&own).unwrap(), (id, rustix::process::getegid().as_raw()));
    }
}
