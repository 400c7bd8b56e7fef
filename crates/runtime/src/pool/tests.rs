//! Tests of the pool as a whole, on real file systems. They need root.

use std::ffi::CStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, Instant};

use rustix::fs::XattrFlags;
use tempfile::TempDir;

use super::*;

/// A data folder; nothing of it is left mounted.
struct Data(TempDir);

impl Data {
    fn new() -> Self {
        Self(tempfile::Builder::new().prefix("bivouac-pool-").tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn open(&self, mode: PoolMode) -> io::Result<Pool> {
        Pool::open(self.path(), &options(Some(mode)))
    }

    fn migrate(&self, to: PoolMode) -> io::Result<Migrated> {
        migrate(self.path(), "no-such-instance", to, &mut |_| {})
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        for name in ["pool", "pool.moving"] {
            let _ = rustix::mount::unmount(self.path().join(name), UnmountFlags::DETACH);
        }
    }
}

fn options(mode: Option<PoolMode>) -> PoolOptions {
    PoolOptions { mode, first_bytes: Some(512 << 20) }
}

fn xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// A tree with all that a guest and an overlay can make. One part of it points outside.
fn plant(top: &Path, outside: &Path) {
    let upper = top.join("u0");
    std::fs::create_dir_all(upper.join("dir/inner")).unwrap();
    std::fs::create_dir_all(top.join("w0/work")).unwrap();
    std::fs::write(top.join("w0/work/mark"), "the kernel's").unwrap();
    std::fs::write(upper.join("dir/text"), "hello").unwrap();
    std::fs::hard_link(upper.join("dir/text"), upper.join("dir/inner/same")).unwrap();
    std::fs::hard_link(upper.join("dir/text"), upper.join("zz")).unwrap();
    std::fs::write(upper.join(".bivouac-links"), "a name that copying might take").unwrap();
    symlink(outside, upper.join("away")).unwrap();
    symlink(outside.join("file"), upper.join("dir/out")).unwrap();
    std::os::unix::fs::lchown(upper.join("away"), Some(7), Some(8)).unwrap();
    xattr(&upper.join("away"), "trusted.overlay.opaque", b"y");
    let sparse = std::fs::File::create(upper.join("sparse")).unwrap();
    sparse.set_len(3 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"middle", 1 << 30).unwrap();
    let node = |name: &str, kind, number| {
        let mode = Mode::from_raw_mode(0o640);
        rustix::fs::mknodat(CWD, upper.join(name), kind, mode, number).unwrap();
    };
    node("gone", FileType::CharacterDevice, 0);
    node("dir/gone", FileType::CharacterDevice, 0);
    node("fifo", FileType::Fifo, 0);
    let program = upper.join("program");
    std::fs::write(&program, vec![7; 300_000]).unwrap();
    std::os::unix::fs::chown(&program, Some(1000), Some(50)).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o6755)).unwrap();
    // Version 2 of the format, for CAP_NET_RAW.
    let mut capability = [0; 20];
    capability[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
    capability[5] = 0x20;
    xattr(&program, "security.capability", &capability);
    xattr(&program, "user.note", b"kept");
    xattr(&upper.join("dir"), "trusted.overlay.redirect", b"/elsewhere");
    std::fs::set_permissions(upper.join("dir"), std::fs::Permissions::from_mode(0o1700)).unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + Duration::new(1_000_000, 123_456_789);
    for name in ["dir/inner", "dir", "program", ""] {
        std::fs::File::open(upper.join(name)).unwrap().set_modified(old).unwrap();
    }
}

fn hash(pool: &Pool, kind: Kind, name: &str) -> blake3::Hash {
    let skip = |name: &CStr| volumes::is_work(kind, name);
    digest::tree(folder(&pool.volume(kind, name)).unwrap(), &skip).unwrap()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn volumes_work(pool: &Pool, outside: &Path) {
    pool.make_volume(Kind::Session, "ses_a").unwrap();
    assert!(pool.make_volume(Kind::Session, "ses_a").is_err(), "it is there");
    plant(&pool.session("ses_a"), outside);
    let before = hash(pool, Kind::Session, "ses_a");
    pool.snapshot("ses_a", "snap_1").unwrap();
    pool.snapshot("ses_a", "snap_1").unwrap();
    assert_eq!(hash(pool, Kind::Snapshot, "snap_1"), before);
    let copy = pool.volume(Kind::Snapshot, "snap_1").join("u0");
    let stat = |name: &str| std::fs::symlink_metadata(copy.join(name)).unwrap();
    assert_eq!(stat("zz").ino(), stat("dir/inner/same").ino(), "names of one file");
    assert_eq!((stat("zz").nlink(), stat("gone").rdev()), (3, 0));
    assert_eq!((stat("program").mode() & 0o7777, stat("program").uid()), (0o6755, 1000));
    assert_eq!(stat("program").mtime_nsec(), 123_456_789);
    assert!(stat("sparse").blocks() < 1000, "holes stay holes");
    assert!(stat("away").is_symlink() && stat("away").uid() == 7);
    let mut value = [0; 64];
    let len = rustix::fs::lgetxattr(copy.join("program"), "security.capability", &mut value[..]);
    assert_eq!(len, Ok(20));
    // What comes later shows in neither.
    std::fs::write(pool.session("ses_a").join("u0/later"), "x").unwrap();
    pool.copy_volume((Kind::Snapshot, "snap_1"), (Kind::Session, "ses_b"), false).unwrap();
    assert!(!pool.session("ses_b").join("u0/later").exists());
    std::fs::write(pool.session("ses_b").join("u0/dir/text"), "changed").unwrap();
    assert_eq!(std::fs::read_to_string(copy.join("dir/text")).unwrap(), "hello");
    assert_eq!(hash(pool, Kind::Snapshot, "snap_1"), before);
    let usage = pool.usage(Kind::Snapshot, "snap_1").unwrap();
    assert!(usage.bytes >= 300_000 && usage.unique_bytes.is_none_or(|own| own <= usage.bytes));
    let twice = pool.copy_volume((Kind::Snapshot, "snap_1"), (Kind::Session, "ses_b"), false);
    assert_eq!(twice.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    let none = pool.copy_volume((Kind::Drive, "drv_1"), (Kind::Session, "ses_c"), false);
    assert_eq!(none.unwrap_err().kind(), io::ErrorKind::NotFound);
    for name in ["ses_a", "ses_b", "ses_b"] {
        pool.remove_session(name).unwrap();
    }
    pool.remove_snapshot("snap_1").unwrap();
    assert!(pool.names(Kind::Session).unwrap().is_empty() && !pool.has_snapshot("snap_1"));
    assert_eq!(std::fs::read_to_string(outside.join("file")).unwrap(), "not ours");
    for bad in ["", ".", "..", "a/b", "../x", ".hidden"] {
        assert!(pool.make_volume(Kind::Drive, bad).is_err(), "{bad}");
        assert!(pool.remove_volume(Kind::Drive, bad).is_err(), "{bad}");
    }
}

fn outside() -> TempDir {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("file"), "not ours").unwrap();
    outside
}

#[test]
fn volumes_are_the_same_in_a_folder_and_in_a_file() {
    for mode in [PoolMode::Folder, PoolMode::Loop] {
        let (data, outside) = (Data::new(), outside());
        let pool = data.open(mode).unwrap();
        assert_eq!(pool.mode(), mode);
        volumes_work(&pool, outside.path());
        pool.make_volume(Kind::Drive, "drv_1").unwrap();
        let limited = pool.limit_volume(Kind::Drive, "drv_1", 8 << 20).unwrap();
        assert_eq!(limited, mode == PoolMode::Loop);
        let written =
            std::fs::write(pool.volume(Kind::Drive, "drv_1").join("f"), vec![1; 16 << 20]);
        assert_eq!(written.is_err(), limited);
        assert_eq!(pool.level(Kind::Drive, "drv_1").unwrap().is_some(), limited);
        let storage = pool.storage().unwrap();
        assert_eq!((storage.mode, storage.limits), (mode, limited));
        pool.close().unwrap();
        assert!(!is_mounted(&data.path().join("pool")).unwrap());
        assert!(!data.path().join("pool.open").exists());
    }
}

#[test]
fn a_tree_of_any_depth_is_copied_and_removed() {
    let data = Data::new();
    let pool = data.open(PoolMode::Folder).unwrap();
    pool.make_volume(Kind::Session, "ses_a").unwrap();
    let mut at = folder(&pool.session("ses_a")).unwrap();
    // Deeper than paths are long, and than descriptors last.
    for _ in 0..5000 {
        rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, "d", walk::FOLDER, Mode::empty()).unwrap();
    }
    drop(at);
    let before = hash(&pool, Kind::Session, "ses_a");
    pool.snapshot("ses_a", "snap_1").unwrap();
    assert_eq!(hash(&pool, Kind::Snapshot, "snap_1"), before);
    pool.remove_session("ses_a").unwrap();
    pool.remove_snapshot("snap_1").unwrap();
    let trash = pool.root.join(trash::TRASH);
    wait_for("the trash is emptied", || trash.read_dir().unwrap().next().is_none());
    pool.close().unwrap();
}

#[test]
fn what_was_not_finished_is_gone_after_a_start() {
    let data = Data::new();
    let pool = data.open(PoolMode::Folder).unwrap();
    pool.make_volume(Kind::Session, "ses_a").unwrap();
    std::fs::write(pool.session("ses_a").join("file"), "kept").unwrap();
    let left = pool.root.join(trash::UNFINISHED).join("half");
    std::fs::create_dir_all(left.join("deep/er")).unwrap();
    std::fs::write(left.join("deep/file"), "half").unwrap();
    pool.close().unwrap();
    let pool = Pool::open(data.path(), &options(None)).unwrap();
    assert_eq!(pool.mode(), PoolMode::Folder, "it is remembered");
    let empty = |name: &str| pool.root.join(name).read_dir().unwrap().next().is_none();
    assert!(empty(trash::UNFINISHED));
    wait_for("the trash is emptied", || empty(trash::TRASH));
    assert_eq!(std::fs::read(pool.session("ses_a").join("file")).unwrap(), b"kept");
    pool.close().unwrap();
    let error = data.open(PoolMode::Loop).unwrap_err().to_string();
    assert!(error.contains("bivouac pool migrate --to loop"), "{error}");
}

#[test]
fn a_file_grows_under_the_writers() {
    let data = Data::new();
    let pool = Pool::open(data.path(), &PoolOptions { mode: None, first_bytes: Some(256 << 20) });
    let pool = pool.unwrap();
    let first = std::fs::metadata(data.path().join("pool.btrfs")).unwrap().len();
    assert_eq!(first, 256 << 20);
    pool.make_volume(Kind::Session, "ses_a").unwrap();
    let block = vec![0x5a; 8 << 20];
    let mut file = std::fs::File::create(pool.session("ses_a").join("big")).unwrap();
    for written in 0..80u64 {
        // A real writer is slower than memory: the pool is to keep ahead of disks.
        std::io::Write::write_all(&mut file, &block).unwrap_or_else(|e| panic!("{written}: {e}"));
        file.sync_data().unwrap();
    }
    drop(file);
    let grown = std::fs::metadata(data.path().join("pool.btrfs")).unwrap().len();
    assert!(grown > 640 << 20, "{grown}");
    assert!(pool.storage().unwrap().size > 640 << 20);
    pool.admit().unwrap();
    pool.close().unwrap();
    // A growth that was cut short behind its first step is finished by the next start.
    let file =
        std::fs::OpenOptions::new().write(true).open(data.path().join("pool.btrfs")).unwrap();
    file.set_len(grown + (512 << 20)).unwrap();
    let pool = Pool::open(data.path(), &options(None)).unwrap();
    assert!(pool.storage().unwrap().size >= grown + (500 << 20));
    pool.close().unwrap();
}

#[test]
fn volumes_move_between_modes_unchanged() {
    let (data, outside) = (Data::new(), outside());
    let pool = data.open(PoolMode::Loop).unwrap();
    pool.make_volume(Kind::Session, "ses_a").unwrap();
    plant(&pool.session("ses_a"), outside.path());
    pool.snapshot("ses_a", "snap_1").unwrap();
    pool.make_volume(Kind::Drive, "drv_1").unwrap();
    std::fs::write(pool.volume(Kind::Drive, "drv_1").join("w"), "not the kernel's").unwrap();
    std::fs::write(pool.logs("x"), "a log").unwrap();
    let all = |pool: &Pool| {
        [(Kind::Session, "ses_a"), (Kind::Snapshot, "snap_1"), (Kind::Drive, "drv_1")]
            .map(|(kind, name)| hash(pool, kind, name))
    };
    let before = all(&pool);
    pool.close().unwrap();
    for (to, gone) in [(PoolMode::Folder, "pool.btrfs"), (PoolMode::Loop, "pool.folder")] {
        let moved = data.migrate(to).unwrap();
        assert_eq!((moved.to, moved.volumes), (to, 3));
        assert!(!data.path().join(gone).exists() && !data.path().join("pool.moving").exists());
        let pool = Pool::open(data.path(), &options(None)).unwrap();
        assert_eq!(pool.mode(), to);
        assert_eq!(all(&pool), before);
        assert_eq!(std::fs::read(pool.logs("x")).unwrap(), b"a log");
        if to == PoolMode::Loop {
            let snapshot = pool.volume(Kind::Snapshot, "snap_1").join("u0/new");
            let error = std::fs::write(snapshot, "").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
        }
        pool.close().unwrap();
    }
    assert_eq!(data.migrate(PoolMode::Loop).unwrap().volumes, 0, "it has the mode");
    let error = data.migrate(PoolMode::Native).unwrap_err().to_string();
    assert!(error.contains("another file system than btrfs"), "{error}");
    let pool = data.open(PoolMode::Loop).unwrap();
    assert_eq!(all(&pool), before, "a refusal changes nothing");
    pool.close().unwrap();
}

#[test]
fn a_btrfs_of_its_own_is_a_pool() {
    // A btrfs in a file, which stands for a disk.
    let disk = Data::new();
    let big = PoolOptions { mode: None, first_bytes: Some(8 << 30) };
    let pool = Pool::open(disk.path(), &big).unwrap();
    let top = pool.root.clone();
    for name in std::fs::read_dir(&top).unwrap() {
        std::fs::remove_dir_all(name.unwrap().path()).unwrap();
    }
    let data = top.join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::create_dir(top.join("home")).unwrap();
    let open = |mode| Pool::open(&data, &options(mode));
    let error = open(Some(PoolMode::Native)).unwrap_err().to_string();
    assert!(error.contains("home lies beside it"), "{error}");
    std::fs::remove_dir(top.join("home")).unwrap();
    std::fs::create_dir(data.join("photos")).unwrap();
    let error = open(Some(PoolMode::Native)).unwrap_err().to_string();
    assert!(error.contains("photos is in it"), "{error}");
    std::fs::remove_dir(data.join("photos")).unwrap();
    let native = open(Some(PoolMode::Native)).unwrap();
    let outside = outside();
    volumes_work(&native, outside.path());
    assert!(native.storage().unwrap().limits);
    native.make_volume(Kind::Snapshot, "snap_1").unwrap();
    native.close().unwrap();
    // And away from it.
    let moved = migrate(&data, "no-such-instance", PoolMode::Folder, &mut |_| {}).unwrap();
    assert_eq!(moved.volumes, 1);
    assert!(!data.join("pool.native").exists());
    std::fs::remove_dir_all(&data).unwrap();
    pool.close().unwrap();
}
