//! Whether a data folder lies on a btrfs that is ours alone: quotas change the whole of a file system.
//!
//! Invariant: looks only. Called by `pool` before it makes a pool in the mode `Native`, and at each start of
//! one.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, StatxFlags};

use super::{folder, named};
use crate::sys::btrfs;

/// Magic number of btrfs.
const BTRFS: u64 = 0x9123_683e;
/// Folders that are ours in a data folder.
const OURS: [&str; 6] = ["pool", "pool.native", "pool.folder", "pool.new", "mounts", "view"];

fn refuse(data: &Path, why: &str) -> io::Error {
    let text = format!(
        "the data folder {} cannot be a pool of its own (--pool native): {why}. Quotas change a whole file \
         system, so it must be a btrfs that holds nothing else; give it one, or take --pool loop",
        data.display()
    );
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Whether the folder is on a btrfs.
///
/// # Errors
/// As statfs(2).
pub(super) fn is_btrfs(path: &Path) -> io::Result<bool> {
    let stat = rustix::fs::statfs(path).map_err(|e| named(path.display(), e))?;
    Ok(stat.f_type as u64 == BTRFS)
}

/// Checks all that can be seen from outside; `fresh`: there is no pool yet, so the folder itself must not
/// hold what others made.
///
/// # Errors
/// A sentence that says what is in the way.
pub(super) fn check(data: &Path, fresh: bool) -> io::Result<()> {
    let data = std::fs::canonicalize(data).map_err(|e| named(data.display(), e))?;
    if !is_btrfs(&data)? {
        return Err(refuse(&data, "it is on another file system than btrfs"));
    }
    let (top, part) = mount_of(&data)?;
    if part != "/" {
        let why = format!("only a part of its file system ({part}) is mounted at {top}");
        return Err(refuse(&data, &why));
    }
    // From the top of the file system down to the data folder there is nothing but the way.
    let below = data.strip_prefix(&top).map_err(|_| refuse(&data, "its mount cannot be found"))?;
    let mut at = Path::new(&top).to_owned();
    for next in below.components() {
        for entry in std::fs::read_dir(&at).map_err(|e| named(at.display(), e))? {
            let name = entry?.file_name();
            if name != next.as_os_str() {
                let why = format!("{} lies beside it", at.join(name).display());
                return Err(refuse(&data, &why));
            }
        }
        at.push(next);
    }
    for entry in std::fs::read_dir(&data)?.filter(|_| fresh) {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() && !OURS.iter().any(|ours| name == *ours) {
            return Err(refuse(&data, &format!("the folder {} is in it", entry.path().display())));
        }
    }
    match quota(&data)?.as_deref() {
        Some("qgroup") => Err(refuse(
            &data,
            "quotas of the other kind are on (btrfs quota disable turns them off)",
        )),
        _ => Ok(()),
    }
}

/// Which kind of quotas is on, in the kernel's words (`squota`: ours).
///
/// # Errors
/// As the ioctl.
pub(super) fn quota(path: &Path) -> io::Result<Option<String>> {
    let name = btrfs::file_system(folder(path)?.as_fd())?;
    match std::fs::read_to_string(format!("/sys/fs/btrfs/{name}/qgroups/mode")) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Where the mount that holds the folder is, and which part of its file system it shows.
fn mount_of(path: &Path) -> io::Result<(String, String)> {
    let stat = rustix::fs::statx(folder(path)?, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let id = stat.stx_mnt_id.to_string();
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(&id));
    let mut fields = line.unwrap_or_default().split(' ').skip(3);
    match (fields.next(), fields.next()) {
        (Some(part), Some(at)) => Ok((unescape(at), unescape(part))),
        _ => Err(io::Error::other(format!("the mount of {} is not listed", path.display()))),
    }
}

/// Octal escapes of mountinfo.
fn unescape(text: &str) -> String {
    let mut out = text.to_owned();
    for (escaped, plain) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        out = out.replace(escaped, plain);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_system_is_refused() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let error = check(folder.path(), true).unwrap_err().to_string();
        assert!(error.contains("another file system than btrfs") && error.contains("--pool loop"));
    }

    #[test]
    fn names_of_mounts_are_read_back() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }
}
