//! Drives: volumes that outlive sandboxes, and where sandboxes have them.
//!
//! Owns: the rules of names, sizes and places (reference/vercel-api.md §2.2, §3.5). Invariant: places that pass
//! [`check_mounts`] neither overlap nor hide what a sandbox needs of its own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::id::{DriveId, SessionId};
use crate::name::{Invalid, Namespace};

/// Most drives that a sandbox may have mounted.
pub const MAX_MOUNTS: usize = 4;
/// Longest place, characters.
pub const MAX_MOUNT_PATH: usize = 256;
/// Longest name of a drive.
pub const MAX_DRIVE_NAME: usize = 64;
/// Size of a drive that is given none, bytes (1 TiB).
pub const DEFAULT_DRIVE_BYTES: i64 = 1 << 40;
/// Smallest size, bytes.
pub const MIN_DRIVE_BYTES: i64 = 1 << 20;
/// Largest size, bytes (16 TiB).
pub const MAX_DRIVE_BYTES: i64 = 16 << 40;

/// Places of the engine and of the kernel inside: nothing is mounted on, above or below them.
const OWN_PLACES: [&str; 6] =
    ["/proc", "/sys", "/dev", "/run/cell", "/run/vercel/share", "/run/bivouac"];

/// How a drive is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriveMode {
    /// The drive itself. One session at a time.
    #[default]
    ReadWrite,
    /// A private copy of what it holds at that moment; writable, and gone with the session.
    Snapshot,
}

impl DriveMode {
    /// The word of the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ReadWrite => "read-write",
            Self::Snapshot => "snapshot",
        }
    }

    /// Reads the word, and the one of older clients.
    ///
    /// # Errors
    /// [`Invalid`] that lists the words.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        match text {
            "read-write" => Ok(Self::ReadWrite),
            "snapshot" | "read-only" => Ok(Self::Snapshot),
            _ => Err(Invalid::new("mounts", "a mode is 'read-write' or 'snapshot'")),
        }
    }
}

/// What is to be mounted at a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Name (or id) of a drive of the same project.
    pub drive: String,
    /// How.
    #[serde(default)]
    pub mode: DriveMode,
}

/// Drives of a sandbox by their places inside.
pub type Mounts = BTreeMap<String, Mount>;

/// A volume with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// Its id; also the name of its data.
    pub id: DriveId,
    /// Whose it is.
    pub namespace: Namespace,
    /// Unique in the namespace.
    pub name: String,
    /// The node that holds its data.
    pub node: String,
    /// Opaque; a sandbox has to be in the same.
    pub region: String,
    /// Most bytes that it may hold.
    pub max_bytes: i64,
    /// It was mounted for writing, or written, at least once.
    pub initialized: bool,
    /// The drive that it was forked from.
    pub parent_id: Option<DriveId>,
    /// The first one of its ancestry.
    pub root_id: Option<DriveId>,
    /// The session that has it mounted for writing.
    pub writer: Option<SessionId>,
    /// Grows with each writer.
    pub fence: i64,
    /// When it was made.
    pub created_at: Millis,
    /// Last change.
    pub updated_at: Millis,
}

/// Checks a drive's name: `^[a-zA-Z0-9_-]+$`, 64 characters at most.
///
/// # Errors
/// [`Invalid`] naming `field`.
pub fn check_drive_name(field: &str, name: &str) -> Result<(), Invalid> {
    if name.is_empty() || name.len() > MAX_DRIVE_NAME {
        let reason = format!("must have 1 to {MAX_DRIVE_NAME} characters");
        return Err(Invalid::new(field, reason));
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Err(Invalid::new(field, "only letters, digits, '_' and '-' are allowed"));
    }
    Ok(())
}

/// Checks a drive's size.
///
/// # Errors
/// [`Invalid`] with the bounds.
pub fn check_drive_size(bytes: i64) -> Result<i64, Invalid> {
    if (MIN_DRIVE_BYTES..=MAX_DRIVE_BYTES).contains(&bytes) {
        return Ok(bytes);
    }
    let reason = format!("must be {MIN_DRIVE_BYTES} to {MAX_DRIVE_BYTES} bytes, got {bytes}");
    Err(Invalid::new("maxSizeBytes", reason))
}

/// Whether `inner` is `outer` or below it.
fn is_within(inner: &str, outer: &str) -> bool {
    inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn overlap(one: &str, other: &str) -> bool {
    is_within(one, other) || is_within(other, one)
}

fn check_place(path: &str) -> Result<(), Invalid> {
    let shown: String = path.chars().take(80).collect();
    let refuse =
        |reason: &str| Err(Invalid::new("mounts", format!("'{}' {reason}", shown.escape_debug())));
    if path.chars().count() > MAX_MOUNT_PATH {
        return refuse(&format!("has more than {MAX_MOUNT_PATH} characters"));
    }
    let Some(below) = path.strip_prefix('/') else { return refuse("is not an absolute path") };
    if below.is_empty() {
        return refuse("is the root: mount a drive at a folder below it");
    }
    if path.chars().any(char::is_control) {
        return refuse("holds a control character");
    }
    if below.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return refuse("must be written without '.', '..', '//' and a '/' at the end");
    }
    if let Some(own) = OWN_PLACES.iter().find(|own| overlap(path, own)) {
        return refuse(&format!("is kept for the sandbox itself ({own})"));
    }
    Ok(())
}

/// Checks what is to be mounted where: the rules that need no state.
///
/// # Errors
/// [`Invalid`] that names the place.
pub fn check_mounts(mounts: &Mounts) -> Result<(), Invalid> {
    if mounts.len() > MAX_MOUNTS {
        let reason = format!("at most {MAX_MOUNTS} drives, got {}", mounts.len());
        return Err(Invalid::new("mounts", reason));
    }
    for (index, (path, mount)) in mounts.iter().enumerate() {
        check_place(path)?;
        check_drive_name("mounts.drive", &mount.drive)?;
        for (other, before) in mounts.iter().take(index) {
            if overlap(path, other) {
                let reason = format!("'{path}' and '{other}' overlap");
                return Err(Invalid::new("mounts", reason));
            }
            let write = DriveMode::ReadWrite;
            if mount.drive == before.drive && mount.mode == write && before.mode == write {
                let reason = format!("drive '{}' is mounted read-write twice", mount.drive);
                return Err(Invalid::new("mounts", reason));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(places: &[&str]) -> Mounts {
        let mount = |n: usize| Mount { drive: format!("d{n}"), mode: DriveMode::ReadWrite };
        places.iter().enumerate().map(|(n, place)| ((*place).to_owned(), mount(n))).collect()
    }

    #[test]
    fn places() {
        let long = format!("/{}", "é".repeat(255));
        for good in [
            &["/data"][..],
            &["/data", "/data2", "/vercel/sandbox/x", "/run/mine"],
            &[&long],
            &["/devices", "/process", "/...", "/a b"],
        ] {
            assert_eq!(check_mounts(&at(good)), Ok(()), "{good:?}");
        }
        let longer = format!("{long}x");
        for bad in [
            &["/"][..],
            &[""],
            &["data"],
            &["/a/../b"],
            &["/a/./b"],
            &["/a//b"],
            &["/a/"],
            &["/a\n"],
            &[&longer],
            &["/proc"],
            &["/proc/x"],
            &["/sys/fs"],
            &["/dev/shm"],
            &["/run"],
            &["/run/vercel"],
            &["/run/vercel/share/x"],
            &["/run/cell"],
            &["/run/bivouac"],
            &["/data", "/data/sub"],
            &["/1", "/2", "/3", "/4", "/5"],
        ] {
            assert!(check_mounts(&at(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn one_writer_of_a_drive() {
        let mount = |mode| Mount { drive: "d".to_owned(), mode };
        let two = |a, b| Mounts::from([("/a".to_owned(), mount(a)), ("/b".to_owned(), mount(b))]);
        let (write, view) = (DriveMode::ReadWrite, DriveMode::Snapshot);
        assert!(check_mounts(&two(write, write)).is_err());
        assert!(check_mounts(&two(write, view)).is_ok());
        assert!(check_mounts(&two(view, view)).is_ok());
    }

    #[test]
    fn names_sizes_and_modes() {
        for good in ["a", "A_b-9", &"x".repeat(64)] {
            assert!(check_drive_name("name", good).is_ok(), "{good}");
        }
        for bad in ["", "a/b", "a.b", "é", &"x".repeat(65)] {
            assert!(check_drive_name("name", bad).is_err(), "{bad}");
        }
        assert!(check_drive_size(DEFAULT_DRIVE_BYTES).is_ok());
        for bad in [0, -1, MIN_DRIVE_BYTES - 1, MAX_DRIVE_BYTES + 1] {
            assert!(check_drive_size(bad).is_err(), "{bad}");
        }
        assert_eq!(DriveMode::parse("read-only"), Ok(DriveMode::Snapshot));
        assert!(DriveMode::parse("rw").is_err());
        for mode in [DriveMode::ReadWrite, DriveMode::Snapshot] {
            assert_eq!(DriveMode::parse(mode.as_str()), Ok(mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.as_str());
        }
    }

    proptest::proptest! {
        /// What passes has a place of its own, whatever was written.
        #[test]
        fn places_that_pass_are_plain(places in proptest::collection::vec("[a-z./]{0,12}", 0..5)) {
            let places: Vec<&str> = places.iter().map(String::as_str).collect();
            let mounts = at(&places);
            if check_mounts(&mounts).is_ok() {
                for path in mounts.keys() {
                    proptest::prop_assert!(path.starts_with('/') && path.len() > 1);
                    proptest::prop_assert!(!path.split('/').any(|p| p == ".."));
                    let others = mounts.keys().filter(|other| *other != path);
                    proptest::prop_assert!(!others.into_iter().any(|o| is_within(o, path)));
                }
            }
        }
    }
}
