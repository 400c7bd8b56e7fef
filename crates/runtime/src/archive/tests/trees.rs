//! Snapshots there and back, out of real overlays. Needs root.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use super::*;
use crate::archive::snapshot::{Changed, Outgoing};
use crate::archive::walk::{LeftOut, Marks, Walk};
use crate::archive::write::Writer;
use crate::linux::overlay::{self, Way};
use crate::linux::rootfs::clone_tree;

/// An image, a snapshot over it, and a place for what comes back.
struct World {
    dir: tempfile::TempDir,
}

fn put(path: &std::path::Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn set_xattr(path: &std::path::Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn set_mode(path: &std::path::Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Capabilities of which a byte is a line feed.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

impl World {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        for (name, text) in [
            ("dir/a", "a of the image"),
            ("dir/b", "b of the image"),
            ("dir/deep/c", "c of the image"),
            ("mode", "only its mode is changed"),
            ("owner", "only its owner is changed"),
            ("moved-file", "moved and its mode changed"),
            ("gone", ""),
            ("gone-dir/x", ""),
            ("again/old", ""),
            ("again/both", "old"),
            ("untouched/file", "stays below"),
            ("written", "of the image"),
        ] {
            put(&world.at("lower").join(name), text);
        }
        set_xattr(&world.at("lower/dir/deep"), "user.of", b"the image");
        std::fs::hard_link(world.at("lower/dir/a"), world.at("lower/dir/a2")).unwrap();
        for name in ["volume/u0", "volume/w0", "back/u0"] {
            std::fs::create_dir_all(world.at(name)).unwrap();
        }
        world
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tree(&self, name: &str) -> OwnedFd {
        clone_tree(&self.at(name).to_string_lossy()).unwrap()
    }

    fn write_over_the_image(&self) {
        let volume = self.tree("volume");
        let stacks = [vec![self.tree("lower")]];
        let made = overlay::make(Way::Detached, volume.as_fd(), &stacks).unwrap();
        let root = PathBuf::from(format!("/proc/self/fd/{}", made[0].as_raw_fd()));
        let at = |name: &str| root.join(name);
        // A folder of the image under another name, with changes in it.
        std::fs::rename(at("dir"), at("renamed")).unwrap();
        std::fs::write(at("renamed/b"), "b written").unwrap();
        std::fs::remove_file(at("renamed/deep/c")).unwrap();
        put(&at("renamed/deep/new"), "new in a renamed folder");
        std::fs::rename(at("renamed/deep"), at("out")).unwrap();
        set_mode(&at("mode"), 0o4711);
        std::os::unix::fs::chown(at("owner"), Some(1000), Some(33)).unwrap();
        std::fs::hard_link(at("owner"), at("owner-too")).unwrap();
        set_mode(&at("moved-file"), 0o600);
        std::fs::create_dir(at("new-dir")).unwrap();
        std::fs::rename(at("moved-file"), at("new-dir/file")).unwrap();
        std::fs::remove_file(at("gone")).unwrap();
        std::fs::remove_dir_all(at("gone-dir")).unwrap();
        std::fs::remove_dir_all(at("again")).unwrap();
        put(&at("again/both"), "new");
        std::fs::write(at("written"), "over the image").unwrap();
        odd_files(&root);
    }

    fn changed(&self, volume: &str) -> Changed {
        let upper = self.tree(&format!("{volume}/u0"));
        let image = self.tree("lower");
        let shown = overlay::shown(Way::Detached, &[upper.as_fd(), image.as_fd()]).unwrap();
        Changed { upper, shown }
    }

    fn manifest() -> Manifest {
        Manifest {
            bivouac_snapshot: FORMAT,
            image: ManifestImage {
                name: "i".to_owned(),
                reference: "i@1".to_owned(),
                digest: "1".to_owned(),
            },
            runtime: "node24".to_owned(),
            cwd: "/w".to_owned(),
            name: "box".to_owned(),
            labels: [("k".to_owned(), "v".to_owned())].into(),
            created_at: 1_796_040_001_000,
        }
    }

    fn export(&self, volume: &str) -> (Vec<u8>, LeftOut) {
        let mut out = Vec::new();
        let mut archive = Outgoing::begin(&mut out, &Self::manifest()).unwrap();
        let left_out = archive.layer(0, &self.changed(volume)).unwrap();
        archive.end().unwrap();
        (out, left_out)
    }

    fn import(&self, archive: &[u8]) -> Result<LayerStat, ArchiveError> {
        let archive = std::io::Cursor::new(archive.to_vec());
        Incoming::open(archive, LIMITS, || Ok(()))?.unpack(self.tree("back"), 1)
    }
}

/// Files of every kind that a sandbox can make.
fn odd_files(root: &std::path::Path) {
    let at = |name: &str| root.join(name);
    put(&at("odd/one"), "two names");
    std::fs::hard_link(at("odd/one"), at("odd/two")).unwrap();
    std::fs::hard_link(at("odd/one"), at("three")).unwrap();
    put(&at("odd/attributes"), "x");
    set_xattr(&at("odd/attributes"), "user.note", b"line\nfeed");
    set_xattr(&at("odd/attributes"), "user.empty", b"");
    set_xattr(&at("odd"), "user.folder", b"\0\xff");
    put(&at("odd/tool"), "capable");
    set_xattr(&at("odd/tool"), "security.capability", &CAPABILITY);
    put(&at("odd/set-id"), "");
    set_mode(&at("odd/set-id"), 0o6755);
    let sparse = std::fs::File::create(at("odd/sparse")).unwrap();
    sparse.set_len(40 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"in the middle", 20 << 20).unwrap();
    let hole = std::fs::File::create(at("odd/hole")).unwrap();
    hole.set_len(30 << 20).unwrap();
    let bytes = root.join("odd").join(OsStr::from_bytes(b"bytes-\xff\xfe\n"));
    std::fs::write(bytes, "not UTF-8").unwrap();
    rustix::fs::mknodat(CWD, at("odd/pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    drop(std::os::unix::net::UnixListener::bind(at("socket")).unwrap());
    symlink("/etc/../../outside", at("odd/link")).unwrap();
    symlink("x".repeat(300), at("odd/long-link")).unwrap();
    put(&at(&format!("{}/file", "deep/".repeat(40))), "far down");
    put(&at("odd/.wh.name"), "a name like others");
    put(&at("odd/.wh..wh..opq"), "this one too");
    put(&at("odd/empty"), "");
    let old = std::time::UNIX_EPOCH - std::time::Duration::from_nanos(1_500_000_001);
    let file = std::fs::File::options().write(true).open(at("odd/empty")).unwrap();
    file.set_modified(old).unwrap();
    set_mode(&at("odd"), 0o1777);
}

/// A tree as one archive: equal archives are equal trees.
fn picture(tree: &OwnedFd, marks: Marks) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    Walk::new(&mut writer, marks, b"").whole(tree).unwrap();
    writer.finish().unwrap()
}

#[test]
fn a_snapshot_comes_back_as_it_was() {
    let world = World::new();
    world.write_over_the_image();
    // It is what this test is about: a file without content, a folder that points into the image.
    let has = |name: &str, attribute: &str| {
        rustix::fs::getxattr(world.at("volume/u0").join(name), attribute, &mut [0u8; 64][..])
            .is_ok()
    };
    assert!(has("mode", "trusted.overlay.metacopy") && has("renamed", "trusted.overlay.redirect"));
    let (archive, left_out) = world.export("volume");
    assert_eq!(left_out, LeftOut { special: 1, ..LeftOut::default() });
    assert!(archive.len() < 200_000, "holes are left out: {}", archive.len());
    assert!(world.export("volume").0 == archive, "the same bytes again");
    let stat = world.import(&archive).unwrap();
    assert_eq!((stat.devices, stat.xattrs, stat.ids), (0, 0, 0));
    let before = picture(&world.changed("volume").shown, Marks::Overlay);
    let after = picture(&world.changed("back").shown, Marks::Overlay);
    assert!(before == after, "another tree");
    assert!(before.len() > 100_000);
    // No trace of the kernel's pointers into the image, and it can be exported like any other.
    let back = |name: &str| world.at("back/u0").join(name);
    assert_eq!(std::fs::read(back("mode")).unwrap(), b"only its mode is changed");
    assert_eq!(std::fs::read(back("renamed/a")).unwrap(), b"a of the image");
    assert!(!back("untouched").exists(), "what was not changed is not carried");
    let blocks =
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(back("odd/sparse")).unwrap());
    assert!(blocks < 1000, "{blocks} blocks");
    assert!(world.export("back").0 == archive, "there and back once more");
}

#[test]
fn an_oci_image_is_the_same_tree() {
    use crate::archive::oci;
    let world = World::new();
    world.write_over_the_image();
    for name in ["odd/.wh.name", "odd/.wh..wh..opq"] {
        // OCI has no words for them.
        let changed = world.changed("volume");
        let mut writer = Writer::new(std::io::sink());
        let error = Walk::new(&mut writer, Marks::Oci, b"").upper(&changed.upper, &changed.shown);
        assert!(error.unwrap_err().to_string().contains("export it as tar.zst"));
        std::fs::remove_file(world.at("volume/u0").join(name)).unwrap();
    }
    let about = oci::About {
        name: oci::image_name("box", "snap_1"),
        cwd: "/w".to_owned(),
        labels: std::collections::BTreeMap::new(),
        created_at: 0,
        image: "i@1".to_owned(),
    };
    let image: oci::Layer<'_> = Box::new(|out| {
        let mut writer = Writer::new(out);
        let left_out = Walk::new(&mut writer, Marks::Oci, b"").whole(&world.tree("lower"))?;
        writer.finish()?;
        Ok(left_out)
    });
    let changes: oci::Layer<'_> = Box::new(|out| {
        let changed = world.changed("volume");
        let mut writer = Writer::new(out);
        let walk = Walk::new(&mut writer, Marks::Oci, b"");
        let left_out = walk.upper(&changed.upper, &changed.shown)?;
        writer.finish()?;
        Ok(left_out)
    });
    let mut layout = Vec::new();
    oci::write(&mut layout, &about, &[("image", image), ("changes", changes)], &|| false).unwrap();
    // As another tool takes it apart: by the names that the manifest tells.
    let mut files = std::collections::BTreeMap::new();
    let mut archive = tar::Archive::new(layout.as_slice());
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        files.insert(name, content);
    }
    let json = |name: &str| serde_json::from_slice::<serde_json::Value>(&files[name]).unwrap();
    let place = |digest: &serde_json::Value| {
        format!("blobs/{}", digest.as_str().unwrap().replace(':', "/"))
    };
    let manifest = json(&place(&json("index.json")["manifests"][0]["digest"]));
    let config = json(&place(&manifest["config"]["digest"]));
    assert_eq!(config["config"]["WorkingDir"], "/w");
    let layers = manifest["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 2);
    let bed = Bed::new();
    let unpacked: Vec<Vec<u8>> =
        layers.iter().map(|layer| files[&place(&layer["digest"])].clone()).collect();
    for (layer, content) in layers.iter().zip(&unpacked) {
        assert_eq!(layer["size"], content.len());
        assert_eq!(layer["digest"], crate::image::blobs::sha256(content));
    }
    bed.unpack(&unpacked).unwrap();
    let wanted = picture(&world.changed("volume").shown, Marks::Oci);
    assert!(picture(&bed.fd(), Marks::Oci) == wanted, "another tree");
}

#[test]
fn what_is_not_whole_is_refused() {
    let world = World::new();
    world.write_over_the_image();
    let (archive, _) = world.export("volume");
    let plain = zstd::decode_all(archive.as_slice()).unwrap();
    let refuse = |bytes: &[u8], words: &str| {
        let _ = std::fs::remove_dir_all(world.at("back"));
        std::fs::create_dir_all(world.at("back/u0")).unwrap();
        let error = world.import(bytes).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    };
    for part in [archive.len() / 4, archive.len() / 2, archive.len() - 1] {
        refuse(&archive[..part], "cannot be read");
    }
    // Not compressed is as good; cut off at an entry's end, it is not whole.
    world.import(&plain).unwrap();
    let end = plain.windows(16).rposition(|w| w == b"bivouac.end.json").unwrap();
    refuse(&plain[..end], "its end is missing");
    refuse(&plain[..end - 512], "end");
    // One byte of a file's content.
    let mut changed = plain.clone();
    let at = plain.windows(8).position(|w| w == b"far down").unwrap();
    changed[at] ^= 1;
    refuse(&changed, "its hash is another one");
    // Something behind the end; a layer that the image does not have; another program's archive.
    refuse(&tar().file("a", b"").end(), "no snapshot of Bivouac");
    refuse(b"", "no snapshot of Bivouac");
    let manifest = |version: u32| {
        let manifest = Manifest { bivouac_snapshot: version, ..World::manifest() };
        serde_json::to_vec(&manifest).unwrap()
    };
    refuse(&tar().file("bivouac.json", &manifest(2)).end(), "version 2");
    refuse(&tar().file("bivouac.json", b"{}").end(), "no snapshot of Bivouac");
    for (name, words) in
        [("u1/a", "which has 1"), ("etc/passwd", "which has 1"), ("u0", "no folder")]
    {
        refuse(&tar().file("bivouac.json", &manifest(1)).file(name, b"").end(), words);
    }
    let end = br#"{"blake3":"00","entries":1}"#;
    refuse(&tar().file("bivouac.json", &manifest(1)).file("bivouac.end.json", end).end(), "hash");
    // Room is asked for before anything is written.
    let full = || Err(std::io::Error::other("no room"));
    let error = Incoming::open(std::io::Cursor::new(archive), LIMITS, full).unwrap_err();
    assert!(matches!(error, ArchiveError::Read(e) if e.kind() == std::io::ErrorKind::StorageFull));
}
