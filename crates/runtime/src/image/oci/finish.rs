//! The last hand on a tree of an OCI image: what a sandbox expects of every image.
//!
//! The user `vercel-sandbox` (1000), its home, the folder `/vercel/sandbox`, mount points, `/etc` files that a
//! session covers with its own, a rule for `sudo` where the image has that, and the image's working folder. All
//! else stays as the layers have it. Invariant: the tree is a stranger's: names are resolved below its root
//! (`RESOLVE_IN_ROOT`), the last part of a name is never followed, and what is written is a new file.
//! Called by `flatten`.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};

use bivouac_types::oci::ImageConfig;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};

const USER: &str = "vercel-sandbox";
const ID: u32 = 1000;
const HOME: &str = "home/vercel-sandbox";
/// A table of users that is longer is none.
const MAX_TABLE: u64 = 4 << 20;
/// Files of /etc that a session covers with its own: plain files, so that they can be covered.
const OF_THE_SESSION: &[&str] = &["hostname", "hosts", "machine-id", "resolv.conf"];
/// Folders that are mounted over, or that every program may expect.
const FOLDERS: &[(&str, u32)] = &[
    ("dev", 0o755),
    ("proc", 0o555),
    ("run", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("var/tmp", 0o1777),
];
const SUDO_RULE: &[u8] =
    b"Defaults:vercel-sandbox env_keep += \"*\"\nvercel-sandbox ALL=(ALL:ALL) NOPASSWD: ALL\n";
const SUDO_INCLUDE: &[u8] = b"@includedir /etc/sudoers.d\n";

/// Does it all.
///
/// # Errors
/// The path, and what is in the way there.
pub(crate) fn finish(root: OwnedFd, config: &ImageConfig) -> io::Result<()> {
    let tree = Tree { root };
    for (path, mode) in FOLDERS {
        tree.folder(path, *mode, 0)?;
    }
    tree.folder("etc", 0o755, 0)?;
    for name in OF_THE_SESSION {
        tree.write(&format!("etc/{name}"), b"", 0o644)?;
    }
    users(&tree)?;
    tree.folder(HOME, 0o755, ID)?;
    tree.folder("vercel", 0o755, ID)?;
    tree.folder("vercel/sandbox", 0o755, ID)?;
    sudo(&tree)?;
    if let Some(folder) = config.folder() {
        let folder = tree.folder(folder.trim_start_matches('/'), 0o755, ID)?;
        // Whoever works there is not root: files of root in it stay root's.
        let stat = rustix::fs::fstat(&folder)?;
        if stat.st_uid == 0 {
            rustix::fs::fchown(&folder, Some(Uid::from_raw(ID)), Some(Gid::from_raw(ID)))?;
        }
    }
    Ok(())
}

/// The tables of users: ours comes before whoever else has the same number.
fn users(tree: &Tree) -> io::Result<()> {
    let shells = ["bin/bash", "usr/bin/bash", "bin/sh", "usr/bin/sh"];
    let shell = shells.into_iter().find(|path| tree.is_file(path)).unwrap_or("bin/sh");
    let user = format!("{USER}:x:{ID}:{ID}:Sandbox:/{HOME}:/{shell}");
    let root = format!("root:x:0:0:root:/root:/{shell}\n");
    table(tree, "etc/passwd", Some(&root), &user, Some(2))?;
    table(tree, "etc/group", Some("root:x:0:\n"), &format!("{USER}:x:{ID}:"), Some(2))?;
    table(tree, "etc/shadow", None, &format!("{USER}:*:19700:0:99999:7:::"), None)?;
    table(tree, "etc/gshadow", None, &format!("{USER}:*::"), None)?;
    for name in ["etc/subuid", "etc/subgid"] {
        table(tree, name, Some(""), &format!("{USER}:10000:50000"), None)?;
    }
    Ok(())
}

/// Puts our line into a table, in front of the first one with our number in field `number`. `fresh` is the
/// table where there is none; absent: there need not be one.
fn table(
    tree: &Tree,
    path: &str,
    fresh: Option<&str>,
    line: &str,
    number: Option<usize>,
) -> io::Result<()> {
    let (text, mode) = match (tree.read(path)?, fresh) {
        (Some(there), _) => there,
        (None, Some(fresh)) => (fresh.as_bytes().to_vec(), 0o644),
        (None, None) => return Ok(()),
    };
    tree.write(path, &with_line(&text, line, number), mode)
}

fn with_line(text: &[u8], line: &str, number: Option<usize>) -> Vec<u8> {
    let id = ID.to_string();
    let mut out: Vec<u8> = Vec::with_capacity(text.len() + line.len() + 2);
    let mut put = false;
    for old in text.split_inclusive(|b| *b == b'\n') {
        let mut fields = old.trim_ascii_end().split(|b| *b == b':');
        if fields.clone().next() == Some(USER.as_bytes()) {
            continue;
        }
        if !put && number.and_then(|n| fields.nth(n)) == Some(id.as_bytes()) {
            out.extend_from_slice(line.as_bytes());
            out.push(b'\n');
            put = true;
        }
        out.extend_from_slice(old);
        if !old.ends_with(b"\n") {
            out.push(b'\n');
        }
    }
    if !put {
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out
}

/// Without a password, where there is sudo at all.
fn sudo(tree: &Tree) -> io::Result<()> {
    if !["usr/bin/sudo", "bin/sudo", "usr/local/bin/sudo"].into_iter().any(|p| tree.is_file(p)) {
        return Ok(());
    }
    tree.folder("etc/sudoers.d", 0o750, 0)?;
    tree.write("etc/sudoers.d/90-vercel-sandbox", SUDO_RULE, 0o440)?;
    let (mut text, mode) =
        tree.read("etc/sudoers")?.unwrap_or((b"root ALL=(ALL:ALL) ALL\n".to_vec(), 0o440));
    let includes = text.split(|b| *b == b'\n').any(|line| {
        line.starts_with(b"@includedir /etc/sudoers.d")
            || line.starts_with(b"#includedir /etc/sudoers.d")
    });
    if !includes {
        if !text.ends_with(b"\n") {
            text.push(b'\n');
        }
        text.extend_from_slice(SUDO_INCLUDE);
        tree.write("etc/sudoers", &text, mode)?;
    }
    Ok(())
}

/// A stranger's tree.
struct Tree {
    root: OwnedFd,
}

fn at(path: &str, e: impl Into<io::Error>) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("/{path} of the image: {e}"))
}

impl Tree {
    fn open(&self, path: &str, flags: OFlags) -> Result<OwnedFd, rustix::io::Errno> {
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), inside)
    }

    /// Whether a name leads to a regular file.
    fn is_file(&self, path: &str) -> bool {
        self.open(path, OFlags::PATH)
            .and_then(|file| rustix::fs::fstat(&file))
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
    }

    /// A small file and its mode, if a name leads to one.
    fn read(&self, path: &str) -> io::Result<Option<(Vec<u8>, u32)>> {
        let Ok(file) = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK) else { return Ok(None) };
        let stat = rustix::fs::fstat(&file).map_err(|e| at(path, e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let mut text = Vec::new();
        File::from(file).take(MAX_TABLE + 1).read_to_end(&mut text).map_err(|e| at(path, e))?;
        if text.len() as u64 > MAX_TABLE {
            return Err(at(path, io::Error::new(io::ErrorKind::InvalidData, "it is too long")));
        }
        Ok(Some((text, stat.st_mode & 0o777)))
    }

    /// Opens a folder; what is missing of its path is made, with this owner and mode.
    fn folder(&self, path: &str, mode: u32, owner: u32) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut parent = self.root.try_clone()?;
        let mut above = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !above.is_empty() {
                above.push('/');
            }
            above.push_str(part);
            parent = match self.open(&above, flags) {
                Ok(there) => there,
                Err(rustix::io::Errno::NOENT) => {
                    rustix::fs::mkdirat(&parent, part, Mode::from_raw_mode(0o700))
                        .map_err(|e| at(&above, e))?;
                    let made = rustix::fs::openat(
                        &parent,
                        part,
                        flags | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                        Mode::empty(),
                    )
                    .map_err(|e| at(&above, e))?;
                    // Only the last part is what was asked for; folders on the way are root's.
                    let (mode, owner) = if above == path { (mode, owner) } else { (0o755, 0) };
                    rustix::fs::fchown(
                        &made,
                        Some(Uid::from_raw(owner)),
                        Some(Gid::from_raw(owner)),
                    )?;
                    rustix::fs::fchmod(&made, Mode::from_raw_mode(mode))?;
                    made
                }
                Err(e) => return Err(at(&above, e)),
            };
        }
        Ok(parent)
    }

    /// Puts a new file of root's at a name, in the place of a file or link that is there.
    fn write(&self, path: &str, text: &[u8], mode: u32) -> io::Result<()> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folder = self.folder(folder, 0o755, 0)?;
        match rustix::fs::unlinkat(&folder, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(rustix::io::Errno::ISDIR) => {
                rustix::fs::unlinkat(&folder, name, AtFlags::REMOVEDIR).map_err(|e| at(path, e))?;
            }
            Err(e) => return Err(at(path, e)),
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| at(path, e))?;
        rustix::fs::fchmod(file.as_fd(), Mode::from_raw_mode(mode)).map_err(|e| at(path, e))?;
        File::from(file).write_all(text).map_err(|e| at(path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::Path;

    fn bed() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        (dir, tree)
    }

    fn run(tree: &Path, working_dir: &str) {
        let root = File::open(tree).unwrap().into();
        finish(
            root,
            &ImageConfig { working_dir: working_dir.to_owned(), ..ImageConfig::default() },
        )
        .unwrap();
    }

    #[test]
    fn our_line_comes_before_its_rival() {
        let text = b"root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\nvercel-sandbox:x:5:5:::";
        let out = String::from_utf8(with_line(text, "vercel-sandbox:x:1000:", Some(2))).unwrap();
        let names: Vec<&str> = out.lines().map(|l| l.split(':').next().unwrap()).collect();
        assert_eq!(names, ["root", "vercel-sandbox", "node"]);
        assert_eq!(with_line(b"a:b", "x", None), b"a:b\nx\n");
        assert_eq!(with_line(b"", "x", Some(2)), b"x\n");
    }

    #[test]
    fn a_tree_of_nothing_becomes_one_of_a_sandbox() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (_dir, tree) = bed();
        run(&tree, "/srv/app");
        let passwd = std::fs::read_to_string(tree.join("etc/passwd")).unwrap();
        assert!(passwd.starts_with("root:x:0:0:"), "{passwd}");
        assert!(passwd.contains("\nvercel-sandbox:x:1000:1000:"), "{passwd}");
        for folder in ["vercel/sandbox", "home/vercel-sandbox", "srv/app"] {
            use std::os::unix::fs::MetadataExt as _;
            assert_eq!(std::fs::metadata(tree.join(folder)).unwrap().uid(), ID, "{folder}");
        }
        assert_eq!(
            std::fs::metadata(tree.join("tmp")).unwrap().permissions().mode() & 0o7777,
            0o1777
        );
        assert!(!tree.join("etc/shadow").exists() && !tree.join("etc/sudoers.d").exists());
    }

    #[test]
    fn nothing_is_written_through_a_link_out_of_the_tree() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (dir, tree) = bed();
        let outside = dir.path().join("outside");
        std::fs::create_dir_all(outside.join("sub")).unwrap();
        std::fs::write(outside.join("passwd"), "mine\n").unwrap();
        std::fs::create_dir_all(tree.join("etc")).unwrap();
        std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
        std::fs::write(tree.join("usr/bin/sudo"), "").unwrap();
        symlink(outside.join("passwd"), tree.join("etc/passwd")).unwrap();
        symlink("../../outside/sub", tree.join("etc/sudoers.d")).unwrap();
        symlink(&outside, tree.join("vercel")).unwrap();
        let root: OwnedFd = File::open(&tree).unwrap().into();
        // Links that lead nowhere inside of the tree are in the way of folders.
        assert!(finish(root, &ImageConfig::default()).is_err());
        std::fs::remove_file(tree.join("vercel")).unwrap();
        std::fs::remove_file(tree.join("etc/sudoers.d")).unwrap();
        run(&tree, "/");
        assert_eq!(std::fs::read_to_string(outside.join("passwd")).unwrap(), "mine\n");
        assert_eq!(std::fs::read_dir(outside.join("sub")).unwrap().count(), 0);
        assert!(tree.join("etc/sudoers.d/90-vercel-sandbox").is_file());
        assert!(!std::fs::symlink_metadata(tree.join("etc/passwd")).unwrap().is_symlink());
        let sudoers = std::fs::read_to_string(tree.join("etc/sudoers")).unwrap();
        assert!(sudoers.ends_with("@includedir /etc/sudoers.d\n"), "{sudoers}");
    }

    #[test]
    fn links_inside_of_the_tree_lead_where_they_lead_inside() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (_dir, tree) = bed();
        std::fs::create_dir_all(tree.join("var/home")).unwrap();
        std::fs::create_dir_all(tree.join("store")).unwrap();
        std::fs::create_dir_all(tree.join("etc")).unwrap();
        symlink("/var/home", tree.join("home")).unwrap();
        std::fs::write(tree.join("store/passwd"), "root:x:0:0:::\nnix:x:30000:1:::\n").unwrap();
        symlink("/store/passwd", tree.join("etc/passwd")).unwrap();
        run(&tree, "");
        assert!(tree.join("var/home/vercel-sandbox").is_dir());
        let passwd = std::fs::read_to_string(tree.join("etc/passwd")).unwrap();
        assert!(passwd.contains("nix:") && passwd.contains("vercel-sandbox:"), "{passwd}");
    }
}
