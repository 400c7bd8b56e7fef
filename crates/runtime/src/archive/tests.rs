//! The attack table, what a layer may hold, and properties. Needs root, as all of this crate's tests of files.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use tar::{EntryType, Header};

use super::*;

mod properties;
mod trees;

const LIMITS: Limits = Limits { bytes: 64 << 20, entries: 10_000, path: 4096, depth: 64 };

/// A tar that says what no tool would write.
#[derive(Default, Clone)]
struct Tar(Vec<u8>);

/// Header fields that a test changes.
#[derive(Clone, Copy)]
struct Head<'a> {
    name: &'a [u8],
    kind: EntryType,
    link: &'a [u8],
    mode: u32,
    ids: (u64, u64),
    device: (u32, u32),
}

const FILE: Head<'static> = Head {
    name: b"",
    kind: EntryType::Regular,
    link: b"",
    mode: 0o644,
    ids: (0, 0),
    device: (0, 0),
};

impl Tar {
    fn block(mut self, head: &Head<'_>, size: u64, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..head.name.len()].copy_from_slice(head.name);
        header.as_old_mut().linkname[..head.link.len()].copy_from_slice(head.link);
        header.set_entry_type(head.kind);
        header.set_mode(head.mode);
        header.set_uid(head.ids.0);
        header.set_gid(head.ids.1);
        header.set_mtime(1_000);
        header.set_size(size);
        header.set_device_major(head.device.0).unwrap();
        header.set_device_minor(head.device.1).unwrap();
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn head(self, head: Head<'_>) -> Self {
        self.block(&head, 0, b"")
    }

    fn file(self, name: &str, content: &[u8]) -> Self {
        let head = Head { name: name.as_bytes(), ..FILE };
        self.block(&head, content.len() as u64, content)
    }

    fn kind(self, name: &str, kind: EntryType, link: &str) -> Self {
        self.head(Head { name: name.as_bytes(), kind, link: link.as_bytes(), ..FILE })
    }

    fn folder(self, name: &str) -> Self {
        self.head(Head { name: name.as_bytes(), kind: EntryType::Directory, mode: 0o755, ..FILE })
    }

    fn link(self, name: &str, to: &str) -> Self {
        self.kind(name, EntryType::Symlink, to)
    }

    fn hard(self, name: &str, to: &str) -> Self {
        self.kind(name, EntryType::Link, to)
    }

    fn long(self, kind: u8, text: &[u8]) -> Self {
        let head = Head { name: b"././@LongLink", kind: EntryType::new(kind), ..FILE };
        self.block(&head, text.len() as u64 + 1, &[text, b"\0"].concat())
    }

    fn pax_as(self, kind: EntryType, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            write!(data, "{length} {key}=").unwrap();
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.block(&Head { name: b"pax", kind, ..FILE }, data.len() as u64, &data)
    }

    fn pax(self, records: &[(&str, &[u8])]) -> Self {
        self.pax_as(EntryType::XHeader, records)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

fn tar() -> Tar {
    Tar::default()
}

/// A folder to unpack into, with a witness beside it that nothing may touch.
struct Bed {
    dir: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        std::fs::write(dir.path().join("witness"), "untouched").unwrap();
        Self { dir }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    fn fd(&self) -> OwnedFd {
        std::fs::File::open(self.root()).unwrap().into()
    }

    fn unpack_with(
        &self,
        layers: &[Vec<u8>],
        limits: Limits,
        whiteouts: Whiteouts,
    ) -> Result<LayerStat, ArchiveError> {
        let mut unpacker = Unpacker::new(self.fd(), limits, whiteouts);
        let mut last = LayerStat::default();
        for layer in layers {
            last = unpacker.layer(layer.as_slice())?;
        }
        unpacker.finish()?;
        Ok(last)
    }

    fn unpack(&self, layers: &[Vec<u8>]) -> Result<LayerStat, ArchiveError> {
        self.unpack_with(layers, LIMITS, Whiteouts::Apply)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap()
    }

    /// Names of everything below the root.
    fn names(&self) -> Vec<String> {
        fn walk(at: &Path, prefix: &str, out: &mut Vec<String>) {
            for entry in std::fs::read_dir(at).unwrap() {
                let entry = entry.unwrap();
                let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
                if entry.file_type().unwrap().is_dir() {
                    walk(&entry.path(), &format!("{name}/"), out);
                }
                out.push(name);
            }
        }
        let mut out = Vec::new();
        walk(&self.root(), "", &mut out);
        out.sort();
        out
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let beside: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().collect();
        if !std::thread::panicking() {
            assert_eq!(beside.len(), 2, "something was written beside the root");
            let witness = std::fs::metadata(self.dir.path().join("witness")).unwrap();
            assert_eq!((witness.len(), witness.nlink()), (9, 1));
        }
    }
}

/// Archives that must be refused, and words of the refusal.
fn attacks() -> Vec<(&'static str, Tar, &'static str)> {
    let sparse = |map: &[u8], real: &[u8]| {
        tar()
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.realsize", real),
            ])
            .file("s", map)
    };
    let huge = Head { name: b"big", ..FILE };
    vec![
        ("parent", tar().file("../witness", b"x"), "'..'"),
        ("parent inside", tar().file("a/../../witness", b"x"), "'..'"),
        ("parent at the end", tar().folder("a/.."), "'..'"),
        ("parent behind a slash", tar().file("/../witness", b"x"), "'..'"),
        ("long name with parent", tar().long(b'L', b"../witness").file("ok", b"x"), "'..'"),
        ("record with parent", tar().pax(&[("path", b"../witness")]).file("ok", b"x"), "'..'"),
        (
            "sparse name with parent",
            {
                let records: &[(&str, &[u8])] = &[
                    ("GNU.sparse.map", b"0,1"),
                    ("GNU.sparse.size", b"1"),
                    ("GNU.sparse.name", b"../witness"),
                ];
                tar().pax(records).file("ok", b"x")
            },
            "'..'",
        ),
        ("through an absolute link", tar().link("a", "/").file("a/witness", b"x"), "no folder"),
        ("through a relative link", tar().link("a", "..").file("a/witness", b"x"), "no folder"),
        (
            "through a link to a folder",
            tar().folder("d").link("a", "d").file("a/x", b""),
            "no folder",
        ),
        (
            "through two links",
            tar().link("a", ".").link("a/b", "..").file("a/b/witness", b"x"),
            "no folder",
        ),
        ("through a file", tar().file("a", b"").file("a/b", b"x"), "no folder"),
        ("folder through a link", tar().link("a", "..").folder("a/new"), "no folder"),
        ("hard link out", tar().hard("a", "../witness"), "'..'"),
        ("hard link to a root's path", tar().hard("a", "/etc/passwd"), "not there"),
        ("hard link through a link", tar().link("l", "..").hard("a", "l/witness"), "not there"),
        ("hard link to a folder", tar().folder("d").hard("a", "d"), "not there"),
        ("hard link to the root", tar().hard("a", "."), "not there"),
        ("hard link to a later entry", tar().hard("a", "b").file("b", b""), "not there"),
        ("hard link to nothing", tar().hard("a", ""), "without a target"),
        (
            "hard link with content",
            {
                tar().file("b", b"").block(
                    &Head { name: b"a", kind: EntryType::Link, link: b"b", ..FILE },
                    1,
                    b"x",
                )
            },
            "has content",
        ),
        (
            "folder with content",
            { tar().block(&Head { name: b"a", kind: EntryType::Directory, ..FILE }, 1, b"x") },
            "has content",
        ),
        ("file with a folder's name", tar().file("a/", b"x"), "name of a folder"),
        ("link without a target", tar().link("a", ""), "without a target"),
        ("root as a file", tar().file("./", b""), ""),
        ("root as a link", tar().link(".", "/etc"), "no folder"),
        ("mark of the parent", tar().file("a/.wh...", b""), "marks no name"),
        ("mark of itself", tar().file("a/.wh..", b""), "marks no name"),
        ("mark of nothing", tar().file("a/.wh.", b""), "marks no name"),
        ("mark that is a folder", tar().folder(".wh.a"), "no file itself"),
        ("mark that is a link", tar().link(".wh.a", "/"), "no file itself"),
        ("below a mark", tar().file(".wh.a/b", b""), "below a mark"),
        ("zero in a record", tar().pax(&[("path", b"a\0b")]).file("ok", b""), "'path' record"),
        (
            "zero in a link's record",
            tar().pax(&[("linkpath", b"a\0")]).link("ok", "x"),
            "'linkpath' record",
        ),
        ("two paths", tar().pax(&[("path", b"a"), ("path", b"b")]).file("ok", b""), "two 'path'"),
        (
            "long name in two ways",
            tar().pax(&[("path", b"a")]).long(b'L', b"b").file("c", b""),
            "two ways",
        ),
        ("two long names", tar().long(b'L', b"a").long(b'L', b"b").file("c", b""), "two extended"),
        (
            "two extended headers",
            tar().pax(&[("path", b"a")]).pax(&[("path", b"b")]).file("c", b""),
            "two extended",
        ),
        ("larger size in a record", tar().pax(&[("size", b"1024")]).file("a", b"x"), "two sizes"),
        (
            "smaller size in a record",
            tar().pax(&[("size", b"0")]).file("a", &[b'x'; 512]),
            "two sizes",
        ),
        ("no size in a record", tar().pax(&[("size", b"-1")]).file("a", b"x"), "'size' record"),
        (
            "global path",
            tar().pax_as(EntryType::XGlobalHeader, &[("path", b"a")]).file("b", b""),
            "all entries",
        ),
        (
            "global size",
            tar().pax_as(EntryType::XGlobalHeader, &[("size", b"0")]).file("b", b"x"),
            "all entries",
        ),
        (
            "damaged record",
            tar().block(&Head { name: b"p", kind: EntryType::XHeader, ..FILE }, 5, b"9 a=b"),
            "damaged",
        ),
        (
            "huge extended header",
            tar().block(&Head { name: b"p", kind: EntryType::XHeader, ..FILE }, 1 << 30, b""),
            "extended header of",
        ),
        (
            "huge long name",
            tar().block(&Head { name: b"p", kind: EntryType::GNULongName, ..FILE }, 1 << 30, b""),
            "extended header of",
        ),
        ("ends behind an extended header", tar().pax(&[("path", b"a")]), "behind an extended"),
        ("unknown kind", tar().kind("a", EntryType::new(b'M'), ""), "unknown kind 'M'"),
        (
            "name part too long",
            tar().pax(&[("path", &[b'a'; 256])]).file("ok", b""),
            "more than 255",
        ),
        (
            "name too long",
            tar().pax(&[("path", b"a/".repeat(2049).as_slice())]).file("ok", b""),
            "more than 4096",
        ),
        (
            "too deep",
            tar().pax(&[("path", b"a/".repeat(65).as_slice())]).file("ok", b""),
            "more than 64 folders",
        ),
        ("more than allowed", tar().block(&huge, 1 << 40, b""), "more than 67108864 bytes"),
        ("size beyond numbers", tar().block(&huge, u64::MAX, b""), "more than"),
        ("sparse: behind the end", sparse(b"1\n0\n4096\n", b"10"), "damaged map"),
        ("sparse: backwards", sparse(b"2\n10\n1\n0\n1\n", b"20"), "damaged map"),
        ("sparse: too many", sparse(b"99999999\n", b"20"), "too many pieces"),
        ("sparse: no number", sparse(b"x\n", b"20"), "damaged map"),
        ("sparse: map without an end", sparse(b"1", b"20"), "damaged map"),
        ("sparse: endless", sparse(b"0\n", b"99999999999999999"), "more than 16 TiB"),
        (
            "sparse: old format",
            tar().pax(&[("GNU.sparse.offset", b"0")]).file("a", b""),
            "before 2006",
        ),
        (
            "bad capability",
            tar().pax(&[("SCHILY.xattr.security.capability", b"root")]).file("a", b""),
            "capabilities",
        ),
        (
            "attribute twice",
            tar()
                .pax(&[("SCHILY.xattr.user.a", b"1"), ("SCHILY.xattr.user.a", b"2")])
                .file("a", b""),
            "two",
        ),
    ]
}

#[test]
fn attacks_are_refused() {
    for (what, tar, words) in attacks() {
        for whiteouts in [Whiteouts::Apply, Whiteouts::Overlay] {
            let marks = what.starts_with("mark") || what == "below a mark";
            if marks && whiteouts == Whiteouts::Overlay {
                continue;
            }
            let bed = Bed::new();
            let done = bed.unpack_with(&[tar.clone().end()], LIMITS, whiteouts);
            if what == "root as a file" {
                // A file whose name ends with a slash and that is empty is a folder to every tar.
                assert!(done.is_ok(), "{what}");
                continue;
            }
            let error = done.expect_err(what);
            assert!(
                matches!(error, ArchiveError::Refused(_) | ArchiveError::TooLarge(_)),
                "{what}: {error:?}"
            );
            let text = error.to_string();
            let wanted = if what == "attribute twice" { "twice" } else { words };
            assert!(text.contains(wanted), "{what}: {text}");
        }
    }
}

#[test]
fn what_is_no_archive_is_told_so() {
    let bed = Bed::new();
    let text = |bytes: &[u8]| bed.unpack(&[bytes.to_vec()]).unwrap_err().to_string();
    assert!(text(&[b'x'; 600]).contains("no tar archive"));
    assert!(text(&[b'x'; 100]).contains("ends too early"));
    let whole = tar().file("a", &[b'x'; 2000]).end();
    assert!(text(&whole[..1000]).contains("ends too early"));
    let mut second = tar().file("a", b"x").file("b", b"x").end();
    second[1024 + 10] ^= 1;
    assert!(text(&second).contains("wrong sum"));
    let mut behind = tar().file("a", b"x").end();
    behind.extend_from_slice(&tar().file("b", b"x").end());
    assert!(text(&behind).contains("behind its end"));
    // Without the zeros at its end it is whole all the same.
    bed.unpack(&[tar().file("c", b"x").0]).unwrap();
    assert_eq!(bed.read("c"), "x");
}

#[test]
fn limits_count_all_layers_together() {
    let bed = Bed::new();
    let limits = Limits { bytes: 5_000, entries: 3, ..LIMITS };
    let layer = tar().file("a", &[b'x'; 1000]).end();
    let unpack =
        |limits, count| bed.unpack_with(&vec![layer.clone(); count], limits, Whiteouts::Apply);
    assert!(unpack(limits, 2).is_ok());
    let error = unpack(limits, 3).unwrap_err();
    assert!(matches!(&error, ArchiveError::TooLarge(text) if text.contains("bytes")), "{error}");
    let limits = Limits { bytes: 50_000, ..limits };
    assert!(unpack(limits, 3).is_ok());
    let error = unpack(limits, 4).unwrap_err();
    assert!(matches!(&error, ArchiveError::TooLarge(text) if text.contains("entries")), "{error}");
}

#[test]
fn all_that_is_kept() {
    let bed = Bed::new();
    // Two bits of which one byte is a line feed.
    let mut capability = [0u8; 20];
    capability[..5].copy_from_slice(&[1, 0, 0, 2, b'\n']);
    let long = "d/".repeat(60) + "file";
    let layer = tar()
        .head(Head { name: b"./", kind: EntryType::Directory, mode: 0o750, ids: (7, 8), ..FILE })
        .head(Head { name: b"bin/", kind: EntryType::Directory, mode: 0o2775, ids: (1, 2), ..FILE })
        .pax(&[
            ("SCHILY.xattr.security.capability", &capability),
            ("SCHILY.xattr.user.note", b"a\nb"),
            ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
            ("SCHILY.xattr.security.selinux", b"x"),
            ("mtime", b"-5.25"),
        ])
        .block(&Head { name: b"/bin/tool", mode: 0o4755, ids: (0, 33), ..FILE }, 4, b"tool")
        .hard("bin/same", "./bin/tool")
        .link("bin/out", "../../../etc/passwd")
        .kind("pipe", EntryType::Fifo, "")
        .head(Head { name: b"null", kind: EntryType::Char, device: (1, 3), ..FILE })
        .head(Head { name: b"sda", kind: EntryType::Block, device: (8, 0), ..FILE })
        .block(&Head { name: b"foreign", mode: 0o6755, ids: (70_000, 5), ..FILE }, 1, b"x")
        .head(Head { name: b"bytes-\xff\xfe", ..FILE })
        .long(b'L', long.as_bytes())
        .file("short", b"deep")
        .pax(&[("path", b"record"), ("uid", b"5"), ("gid", b"6")])
        .file("short", b"recorded");
    let stat = bed.unpack(&[layer.end()]).unwrap();
    assert_eq!((stat.devices, stat.xattrs, stat.ids), (2, 2, 1));
    let meta = |name: &str| std::fs::symlink_metadata(bed.at(name)).unwrap();
    let all = |name: &str| (meta(name).mode() & 0o7777, meta(name).uid(), meta(name).gid());
    assert_eq!(all(""), (0o750, 7, 8));
    assert_eq!(all("bin"), (0o2775, 1, 2));
    assert_eq!((meta("bin").mtime(), meta("").mtime()), (1000, 1000));
    assert_eq!(all("bin/tool"), (0o4755, 0, 33));
    assert_eq!((meta("bin/tool").mtime(), meta("bin/tool").mtime_nsec()), (-6, 750_000_000));
    assert_eq!(meta("bin/same").ino(), meta("bin/tool").ino());
    let file = std::fs::File::open(bed.at("bin/tool")).unwrap();
    let mut value = [0u8; 64];
    let mut get = |name: &str| {
        rustix::fs::fgetxattr(&file, name, &mut value[..]).map(|n| value[..n].to_vec())
    };
    assert_eq!(get("user.note").unwrap(), b"a\nb");
    assert_eq!(get("security.capability").unwrap(), capability);
    assert!(get("trusted.overlay.redirect").is_err());
    assert_eq!(std::fs::read_link(bed.at("bin/out")).unwrap(), Path::new("../../../etc/passwd"));
    assert!(meta("pipe").file_type().is_fifo());
    assert!(!bed.at("null").exists() && !bed.at("sda").exists());
    assert_eq!(all("foreign"), (0o755, 65_534, 5));
    assert!(bed.root().join(OsStr::from_bytes(b"bytes-\xff\xfe")).exists());
    assert_eq!(bed.read(&long), "deep");
    assert_eq!(all("record"), (0o644, 5, 6));
    assert_eq!(bed.read("record"), "recorded");
}

#[test]
fn sparse_files_keep_their_holes() {
    let map = b"2\n1048576\n3\n4194304\n4\n".to_vec();
    let mut data = map;
    data.resize(512, 0);
    data.extend_from_slice(b"abcdefg");
    let new = tar()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"new"),
            ("GNU.sparse.realsize", b"8388608"),
        ])
        .file("GNUSparseFile.1/new", &data)
        .pax(&[
            ("GNU.sparse.map", b"1048576,3,4194304,4"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.size", b"8388608"),
        ])
        .file("old", b"abcdefg")
        .end();
    let bed = Bed::new();
    bed.unpack(&[new]).unwrap();
    // And as GNU tar writes them, if it is there.
    let made = std::process::Command::new("tar")
        .args(["--sparse", "--format=gnu", "-cf", "../gnu.tar", "new"])
        .current_dir(bed.root())
        .status();
    let mut names = vec!["new", "old"];
    if made.is_ok_and(|status| status.success()) {
        let archive = std::fs::read(bed.dir.path().join("gnu.tar")).unwrap();
        std::fs::remove_file(bed.dir.path().join("gnu.tar")).unwrap();
        assert!(archive.len() < 1 << 20);
        std::fs::remove_file(bed.at("new")).unwrap();
        bed.unpack(&[archive]).unwrap();
        names = vec!["new", "old", "new"];
    }
    for name in names {
        let content = std::fs::read(bed.at(name)).unwrap();
        assert_eq!(content.len(), 8 << 20);
        assert_eq!(&content[1 << 20..(1 << 20) + 4], b"abc\0");
        assert_eq!(&content[4 << 20..(4 << 20) + 5], b"defg\0");
        assert_eq!(content.iter().filter(|b| **b != 0).count(), 7);
        let blocks = std::fs::metadata(bed.at(name)).unwrap().blocks();
        assert!(blocks * 512 < 1 << 20, "{name}: {blocks} blocks");
    }
}

#[test]
fn entries_replace_each_other() {
    let bed = Bed::new();
    let one = tar()
        .file("twice", b"first")
        .file("twice", b"second")
        .folder("kind")
        .file("kind/inside", b"")
        .file("kind", b"now a file")
        .link("was", "/etc")
        .folder("was")
        .file("was/inside", b"")
        .file("other", b"shared")
        .hard("name", "other")
        .file("other", b"alone")
        .end();
    bed.unpack(&[one]).unwrap();
    assert_eq!(bed.read("twice"), "second");
    assert_eq!(bed.read("kind"), "now a file");
    assert!(bed.at("was/inside").exists());
    assert_eq!((bed.read("name"), bed.read("other")), ("shared".into(), "alone".into()));
    // A lower layer's link, where this one has a folder, is replaced and not followed.
    let lower = tar().link("lib", "usr/lib").file("usr/lib/a", b"").end();
    let upper = tar().file("lib/b", b"").hard("lib/c", "lib/b").end();
    let bed = Bed::new();
    bed.unpack(&[lower, upper]).unwrap();
    assert_eq!(bed.names(), ["lib", "lib/b", "lib/c", "usr", "usr/lib", "usr/lib/a"]);
}

#[test]
fn marks_delete_what_lower_layers_made() {
    let bed = Bed::new();
    let lower = tar()
        .file("gone", b"")
        .file("dir/a", b"")
        .file("dir/deep/b", b"")
        .file("dir/deep/c", b"")
        .file("tree/x/y", b"")
        .file("kept", b".wh. in content is content")
        .end();
    let upper = tar()
        .file("dir/deep/new", b"")
        .file("dir/.wh..wh..opq", b"")
        .file("dir/later", b"")
        .file(".wh.gone", b"")
        .file(".wh.never-there", b"")
        .file("no/such/.wh.folder", b"")
        .file(".wh.tree", b"")
        .file(".wh..wh.plnk", b"")
        .file("kept", b"mine")
        .file(".wh.kept", b"")
        .end();
    let stat = bed.unpack(&[lower.clone(), upper]).unwrap();
    assert_eq!(stat.whiteouts, 6);
    assert_eq!(bed.names(), ["dir", "dir/deep", "dir/deep/new", "dir/later", "kept"]);
    assert_eq!(bed.read("kept"), "mine");
    // A mark of a folder through a link of a lower layer deletes nothing elsewhere.
    let bed = Bed::new();
    let links = tar().link("l", "dir").end();
    let mark = tar().file("l/.wh.a", b"").file("l/.wh..wh..opq", b"").end();
    bed.unpack(&[lower, links, mark]).unwrap();
    assert!(bed.at("dir/a").exists());
}

#[test]
fn an_upper_is_what_overlayfs_knows() {
    let bed = Bed::new();
    let device = |name| Head { name, kind: EntryType::Char, device: (0, 0), ..FILE };
    let layer = tar()
        .head(device(b"u0/removed"))
        .pax(&[("BIVOUAC.opaque", b"1")])
        .folder("u0/opaque")
        .file("u0/.wh.name", b"a name like others")
        .head(device(b"u0/again"))
        .folder("u0/again")
        .head(device(b"u0/parent"))
        .file("u0/parent/child", b"")
        .folder("u0/plain")
        .end();
    let stat = bed.unpack_with(&[layer], LIMITS, Whiteouts::Overlay).unwrap();
    assert_eq!((stat.whiteouts, stat.devices), (3, 0));
    let removed = std::fs::symlink_metadata(bed.at("u0/removed")).unwrap();
    assert!(removed.file_type().is_char_device() && removed.rdev() == 0);
    assert_eq!(bed.read("u0/.wh.name"), "a name like others");
    let opaque = |name: &str| {
        let folder = std::fs::File::open(bed.at(name)).unwrap();
        let mut value = [0u8; 8];
        rustix::fs::fgetxattr(&folder, tree::OPAQUE, &mut value[..])
            .is_ok_and(|n| value[..n] == *b"y")
    };
    assert!(
        opaque("u0/opaque") && opaque("u0/again") && opaque("u0/parent") && !opaque("u0/plain")
    );
    // The uppers of one snapshot share nothing.
    let across = tar().file("u0/a", b"").hard("u1/b", "u0/a").end();
    let error = Bed::new().unpack_with(&[across], LIMITS, Whiteouts::Overlay).unwrap_err();
    assert!(error.to_string().contains("not there"), "{error}");
    // In a layer of an image it is a device like others.
    let bed = Bed::new();
    let stat = bed.unpack(&[tar().head(device(b"removed")).end()]).unwrap();
    assert_eq!((stat.devices, bed.names().len()), (1, 0));
}

#[test]
fn compressed_archives_have_bounds() {
    let read = |bytes: &[u8], media: Option<&str>| {
        let mut out = Vec::new();
        let mut reader = decompressor(bytes, media)?;
        std::io::copy(&mut reader.by_ref().take(1 << 30), &mut out)?;
        Ok::<_, std::io::Error>(out)
    };
    let plain = tar().file("a", b"content").end();
    let gzip = {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&plain).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = zstd::encode_all(plain.as_slice(), 1).unwrap();
    let kind = "application/vnd.oci.image.layer.v1.tar";
    for (bytes, ending) in [(&plain, ""), (&gzip, "+gzip"), (&zstd, "+zstd")] {
        assert_eq!(read(bytes, None).unwrap(), plain);
        assert_eq!(read(bytes, Some(&format!("{kind}{ending}"))).unwrap(), plain);
        for other in ["", "+gzip", "+zstd"].iter().filter(|other| **other != ending) {
            assert!(read(bytes, Some(&format!("{kind}{other}"))).is_err());
        }
        assert!(read(&bytes[..bytes.len() - 3], None).is_err() || ending.is_empty());
    }
    assert!(read(&plain, Some("application/json")).is_err());
    assert_eq!(read(b"", None).unwrap(), b"");
    assert_eq!(read(b"ab", None).unwrap(), b"ab");
    // 1 GiB of zeros: zstd makes some 30 kB of it, gzip a megabyte.
    let bomb = zstd::encode_all(std::io::repeat(0).take(1 << 30), 3).unwrap();
    let error = read(&bomb, None).unwrap_err();
    assert!(error.to_string().contains("grows without end"), "{error}");
    // A window of 2 GiB is memory that nobody gets.
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    encoder.include_contentsize(false).unwrap();
    encoder.write_all(&vec![7u8; 1000]).unwrap();
    let wide = encoder.finish().unwrap();
    assert!(read(&wide, None).is_err());
}
