//! The `host` image, which needs no download: the host's `/usr` below a fresh tree with an `/etc` of its
//! own.
//!
//! Invariant: of the host's `/etc` only what [`COPIED`] lists gets in, and nothing of `/home`,
//! `/root`, `/var` and `/opt`. The fresh tree is named by the hash of its inputs, made beside and
//! renamed, so a half-made one is never used. Not replayable: it is another tree on another host.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::proto::Layer;

use super::HOST;

/// What programs of `/usr` need of `/etc`, files and folders; none of it is secret on Debian.
const COPIED: &[&str] = &[
    "adduser.conf",
    "alternatives",
    "bash.bashrc",
    "bash_completion.d",
    "bindresvport.blacklist",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "default/locale",
    "default/useradd",
    "deluser.conf",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "java-25-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libaudit.conf",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "magic",
    "magic.mime",
    "mailcap",
    "mime.types",
    "mke2fs.conf",
    "networks",
    "os-release",
    "pam.conf",
    "pam.d",
    "perl",
    "profile.d",
    "protocols",
    "python3",
    "python3.11",
    "python3.13",
    "rmt",
    "rpc",
    "security/access.conf",
    "security/faillock.conf",
    "security/group.conf",
    "security/limits.conf",
    "security/namespace.conf",
    "security/pam_env.conf",
    "security/sepermit.conf",
    "security/time.conf",
    "services",
    "shells",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "ucf.conf",
    "vim",
    "wgetrc",
    "xattr.conf",
];

/// Files that are written, not copied: path, mode, content.
fn written() -> Vec<(&'static str, u32, String)> {
    let passwd = "root:x:0:0:root:/root:/bin/bash\n\
        daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
        bin:x:2:2:bin:/bin:/usr/sbin/nologin\n\
        sys:x:3:3:sys:/dev:/usr/sbin/nologin\n\
        mail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n\
        www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n\
        _apt:x:42:65534::/nonexistent:/usr/sbin/nologin\n\
        nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n\
        vercel-sandbox:x:1000:1000:Sandbox:/home/vercel-sandbox:/bin/bash\n";
    let groups = [
        ("root", 0),
        ("daemon", 1),
        ("bin", 2),
        ("sys", 3),
        ("adm", 4),
        ("tty", 5),
        ("disk", 6),
        ("mail", 8),
        ("kmem", 15),
        ("dialout", 20),
        ("sudo", 27),
        ("audio", 29),
        ("www-data", 33),
        ("shadow", 42),
        ("utmp", 43),
        ("video", 44),
        ("staff", 50),
        ("games", 60),
        ("users", 100),
        ("nogroup", 65534),
        ("vercel-sandbox", 1000),
    ];
    let group: String = groups.iter().map(|(n, id)| format!("{n}:x:{id}:\n")).collect();
    let gshadow: String = groups.iter().map(|(n, _)| format!("{n}:*::\n")).collect();
    let shadow: String = passwd
        .lines()
        .filter_map(|line| line.split(':').next())
        .map(|name| format!("{name}:*:19700:0:99999:7:::\n"))
        .collect();
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let sudoers = format!(
        "Defaults env_keep += \"*\"\nDefaults !requiretty\nDefaults secure_path=\"{path}\"\n\
         root ALL=(ALL:ALL) ALL\nvercel-sandbox ALL=(ALL:ALL) NOPASSWD: ALL\n\
         @includedir /etc/sudoers.d\n"
    );
    let profile = format!(
        "export PATH=\"${{PATH:-{path}}}\"\n\
         if [ -d /etc/profile.d ]; then\n  for i in /etc/profile.d/*.sh; do\n    \
         [ -r \"$i\" ] && . \"$i\"\n  done\n  unset i\nfi\n"
    );
    let nsswitch = "passwd: files\ngroup: files\nshadow: files\ngshadow: files\n\
        hosts: files dns\nnetworks: files\nprotocols: files\nservices: files\nrpc: files\n";
    vec![
        ("passwd", 0o644, passwd.to_owned()),
        ("group", 0o644, group),
        ("shadow", 0o640, shadow),
        ("gshadow", 0o640, gshadow),
        ("sudoers", 0o440, sudoers),
        ("profile", 0o644, profile),
        ("nsswitch.conf", 0o644, nsswitch.to_owned()),
        ("environment", 0o644, format!("PATH=\"{path}\"\n")),
        ("fstab", 0o644, String::new()),
        ("hostname", 0o644, String::new()),
        ("hosts", 0o644, String::new()),
        ("machine-id", 0o644, String::new()),
        ("resolv.conf", 0o644, String::new()),
        ("subuid", 0o644, "vercel-sandbox:10000:50000\n".to_owned()),
        ("subgid", 0o644, "vercel-sandbox:10000:50000\n".to_owned()),
    ]
}

/// Folders of the tree: path, mode, owner.
const FOLDERS: &[(&str, u32, u32)] = &[
    ("dev", 0o755, 0),
    ("etc", 0o755, 0),
    ("etc/sudoers.d", 0o750, 0),
    ("etc/default", 0o755, 0),
    ("etc/security", 0o755, 0),
    ("etc/security/limits.d", 0o755, 0),
    ("etc/security/namespace.d", 0o755, 0),
    ("etc/ssl", 0o755, 0),
    ("etc/opt", 0o755, 0),
    ("home", 0o755, 0),
    ("home/vercel-sandbox", 0o755, 1000),
    ("media", 0o755, 0),
    ("mnt", 0o755, 0),
    ("opt", 0o755, 0),
    ("proc", 0o755, 0),
    ("root", 0o700, 0),
    ("run", 0o755, 0),
    ("srv", 0o755, 0),
    ("sys", 0o755, 0),
    ("tmp", 0o1777, 0),
    ("usr", 0o755, 0),
    ("var", 0o755, 0),
    ("var/cache", 0o755, 0),
    ("var/lib", 0o755, 0),
    ("var/local", 0o755, 0),
    ("var/log", 0o755, 0),
    ("var/mail", 0o755, 0),
    ("var/spool", 0o755, 0),
    ("var/tmp", 0o1777, 0),
    ("vercel", 0o755, 1000),
    ("vercel/sandbox", 0o755, 1000),
];

const LINKS: &[(&str, &str)] = &[
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib32", "usr/lib32"),
    ("lib64", "usr/lib64"),
    ("libx32", "usr/libx32"),
    ("var/run", "/run"),
    ("var/lock", "/run/lock"),
    ("etc/mtab", "/proc/self/mounts"),
];

/// The built `host` image.
#[derive(Debug, Clone)]
pub(crate) struct HostImage {
    /// Hash of the inputs.
    pub digest: String,
    /// Its layers.
    pub layers: Vec<Layer>,
}

/// Something to be copied, as it was read.
enum Item {
    File(Vec<u8>, u32),
    Link(PathBuf),
    Folder,
}

impl HostImage {
    /// Finds or makes the tree below `images`.
    ///
    /// # Errors
    /// With the file's name; nothing half-made stays under the final name.
    pub(crate) fn ensure(images: &Path) -> io::Result<Self> {
        let host_lib = std::fs::symlink_metadata("/lib")?;
        if !host_lib.is_symlink() {
            return Err(io::Error::other(
                "the host image needs a merged /usr (/lib is a folder here): install usrmerge",
            ));
        }
        let mut items = BTreeMap::new();
        for name in COPIED {
            collect(&Path::new("/etc").join(name), Path::new(name), &mut items)?;
        }
        let digest = digest(&items);
        let tree = images.join(format!("{HOST}-{digest}"));
        if !tree.exists() {
            let beside = images.join(format!("{HOST}-{digest}.new"));
            match std::fs::remove_dir_all(&beside) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
            build(&beside, &items)
                .map_err(|e| io::Error::new(e.kind(), format!("build the host image: {e}")))?;
            // A name may last where the content of its files was not written yet: a power cut would
            // leave a tree of empty files, which every start after it took for the whole one.
            rustix::fs::syncfs(std::fs::File::open(&beside)?)?;
            std::fs::rename(&beside, &tree)?;
        }
        let text = tree.to_string_lossy().into_owned();
        let layers = vec![
            Layer { lower: text, at: "/".to_owned() },
            Layer { lower: "/usr".to_owned(), at: "/usr".to_owned() },
        ];
        Ok(Self { digest, layers })
    }
}

fn collect(from: &Path, name: &Path, items: &mut BTreeMap<PathBuf, Item>) -> io::Result<()> {
    let meta = match std::fs::symlink_metadata(from) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if meta.is_symlink() {
        items.insert(name.to_owned(), Item::Link(std::fs::read_link(from)?));
    } else if meta.is_dir() {
        items.insert(name.to_owned(), Item::Folder);
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            collect(&entry.path(), &name.join(entry.file_name()), items)?;
        }
    } else if meta.is_file() && meta.permissions().mode() & 0o004 != 0 {
        // What others may not read on the host has no place in a sandbox.
        let mode = meta.permissions().mode() & 0o755;
        items.insert(name.to_owned(), Item::File(std::fs::read(from)?, mode));
    }
    Ok(())
}

/// A 64-bit FNV hash: it names a tree of the host's own files, it does not defend anything.
fn digest(items: &BTreeMap<PathBuf, Item>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |bytes: &[u8]| {
        for &byte in bytes.iter().chain(&[0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for (path, mode, content) in written() {
        feed(path.as_bytes());
        feed(&mode.to_le_bytes());
        feed(content.as_bytes());
    }
    for (name, mode, owner) in FOLDERS {
        feed(name.as_bytes());
        feed(&mode.to_le_bytes());
        feed(&owner.to_le_bytes());
    }
    for (path, item) in items {
        feed(path.as_os_str().as_encoded_bytes());
        match item {
            Item::File(content, mode) => {
                feed(&mode.to_le_bytes());
                feed(content);
            }
            Item::Link(target) => feed(target.as_os_str().as_encoded_bytes()),
            Item::Folder => feed(b"/"),
        }
    }
    format!("{hash:016x}")
}

fn build(tree: &Path, items: &BTreeMap<PathBuf, Item>) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o755).create(tree)?;
    let set = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
    };
    set(tree, 0o755)?;
    for &(name, mode, owner) in FOLDERS {
        let path = tree.join(name);
        std::fs::create_dir(&path)?;
        std::os::unix::fs::chown(&path, Some(owner), Some(owner))?;
        set(&path, mode)?;
    }
    for &(name, target) in LINKS {
        let host = Path::new("/").join(name);
        if name.contains('/') || std::fs::symlink_metadata(&host).is_ok() {
            symlink(target, tree.join(name))?;
        }
    }
    for (name, item) in items {
        let path = tree.join("etc").join(name);
        match item {
            Item::Folder if path.is_dir() => {}
            Item::Folder => {
                std::fs::create_dir_all(&path)?;
                set(&path, 0o755)?;
            }
            Item::Link(target) => symlink(target, &path)?,
            Item::File(content, mode) => {
                std::fs::write(&path, content)?;
                set(&path, *mode)?;
            }
        }
    }
    for (name, mode, content) in written() {
        let path = tree.join("etc").join(name);
        std::fs::write(&path, content)?;
        set(&path, mode)?;
    }
    home(tree)
}

/// The default user's home starts with the host's skeleton.
fn home(tree: &Path) -> io::Result<()> {
    let home = tree.join("home/vercel-sandbox");
    let skeleton = match std::fs::read_dir(tree.join("etc/skel")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in skeleton {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let to = home.join(entry.file_name());
            std::fs::copy(entry.path(), &to)?;
            std::os::unix::fs::chown(&to, Some(1000), Some(1000))?;
        }
    }
    Ok(())
}
