//! Id ranges and user namespaces.
//!
//! Each session has 65,536 ids of its own, from 2^30 up, and an owner id below 2^30 that no sandbox
//! maps: it owns the session's user namespace and runs its shim, so that per-user kernel limits are
//! not shared between sandboxes. Invariant: two live sessions never share an index.

use std::io;
use std::os::fd::OwnedFd;

use crate::sys::Parked;

/// Ids of a sandbox.
pub const RANGE: u32 = 65_536;
/// First id of the first range.
const FIRST: u32 = 1 << 30;
/// Number of ranges: the ids end at 2^32 and the last one is kept out.
pub const RANGES: u32 = u32::MAX / RANGE - FIRST / RANGE;

/// The ids of one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IdRange {
    /// Host id of the sandbox's root.
    pub first: u32,
    /// Host id of the shim and owner of the user namespace.
    pub owner: u32,
}

impl IdRange {
    /// The ids of an index.
    ///
    /// # Errors
    /// When the index is not below [`RANGES`].
    pub(crate) fn of(index: u32) -> io::Result<Self> {
        if index >= RANGES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "id range out of bounds"));
        }
        Ok(Self { first: FIRST + index * RANGE, owner: FIRST - RANGE + index })
    }
}

/// A user namespace for id-mapped mounts of a session: ids on disk are natural, and id 65536 maps
/// to the host's root so that the overlay's own work stays possible (substrate.md §4.3 C). Nothing
/// ever runs in it.
///
/// # Errors
/// As clone(2) and the writes of the maps.
pub(crate) fn mount_namespace(ids: IdRange) -> io::Result<OwnedFd> {
    let map = format!("0 {} {RANGE}\n{RANGE} 0 1\n", ids.first);
    // It exists to hold the namespace until there is a descriptor of it.
    let holder = Parked::start(libc::CLONE_NEWUSER)?;
    write_maps(holder.pid, &map)?;
    let path = format!("/proc/{}/ns/user", holder.pid);
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
}

/// Writes both maps of a process's new user namespace.
///
/// # Errors
/// As the writes.
pub(crate) fn write_maps(pid: i32, map: &str) -> io::Result<()> {
    for file in ["uid_map", "gid_map"] {
        std::fs::write(format!("/proc/{pid}/{file}"), map)
            .map_err(|e| io::Error::new(e.kind(), format!("{file} of a new namespace: {e}")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_meet() {
        let last = IdRange::of(RANGES - 1).unwrap();
        assert!(last.first.checked_add(RANGE).is_some());
        assert!(last.owner < FIRST, "owner ids stay below the first range");
        assert_eq!(IdRange::of(1).unwrap().first, IdRange::of(0).unwrap().first + RANGE);
        assert!(IdRange::of(RANGES).is_err());
    }
}
