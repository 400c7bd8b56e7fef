//! Which role this process was executed for. Called first in `main`, before any thread exists.

use std::ffi::OsStr;

use std::os::fd::OwnedFd;

use crate::keeper::GateKeeper;
use crate::{image, pool, sys, view, zygote};

/// Runs the role that `argv[0]` names and never returns; returns at once in a process that has none.
/// Shims are forked from a process of one of these roles: `keeper` is theirs.
pub fn maybe_run(keeper: &dyn GateKeeper) {
    let Some(name) = std::env::args_os().next() else { return };
    let shims = |control: &OwnedFd| zygote::run_shim_zygote(control, keeper);
    let role: &dyn Fn(&OwnedFd) -> std::io::Result<()> = if name == OsStr::new(zygote::SHIM_ZYGOTE)
    {
        &shims
    } else if name == OsStr::new(zygote::INIT_ZYGOTE) {
        &zygote::run_init_zygote
    } else if name == OsStr::new(view::ROLE) {
        &view::run
    } else if name == OsStr::new(pool::scrub::ROLE) {
        &pool::scrub::run
    } else if name == OsStr::new(image::build::WORKER) {
        &image::build::worker::run
    } else {
        return;
    };
    // Executed through /proc/self/exe, it would be called "exe" in every list of processes.
    if let Ok(name) = std::ffi::CString::new(name.as_encoded_bytes()) {
        let _ = rustix::thread::set_name(&name);
    }
    // serve puts the control socket where standard input was.
    let done = sys::take_fd(0).and_then(|control| {
        let null = std::fs::File::open("/dev/null")?;
        let kept = rustix::io::fcntl_dupfd_cloexec(&control, 3)?;
        sys::dup_to(std::os::fd::AsFd::as_fd(&null), 0)?;
        std::mem::forget(control);
        role(&kept)
    });
    sys::exit_now(i32::from(done.is_err()))
}

/// Keeps what this process inherited from whoever started it to itself: all descriptors but the three
/// standard ones are closed in every process that is started from now on.
///
/// # Errors
/// As close_range(2).
pub fn keep_descriptors() -> std::io::Result<()> {
    sys::close_on_exec_from(3)
}
