//! Positive controls: one leftover of each kind is planted, and the search must find it.
//!
//! Without these a search that looks in the wrong place would call every leaking engine clean.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use bivouac_testkit::{
    Cache, Kind, LONG, PowerDisk, SHORT, TestServer, Traces, eventually, exclusive,
};

/// Ends with the test.
struct Planted(Child);

impl Drop for Planted {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {err}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Takes a picture, plants, and asserts that exactly this kind is new and names `what`.
async fn finds<T>(data: &Path, kind: Kind, what: &str, plant: impl FnOnce() -> T) -> T {
    let before = Traces::before(data);
    let planted = plant();
    eventually("the planted thing to be found", SHORT, async || {
        let added = before.added();
        let found = added.iter().any(|t| t.kind == kind && t.what.contains(what));
        if found { Ok(()) } else { Err(added) }
    })
    .await;
    planted
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("planted-").tempdir().unwrap()
}

#[tokio::test]
async fn a_process_is_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let program = dir.path().join("bivouac-planted");
    fs::copy("/bin/sleep", &program).unwrap();
    let before = Traces::before(dir.path());
    let child = finds(dir.path(), Kind::Process, "bivouac-planted", || {
        Planted(Command::new(&program).arg("86070").spawn().unwrap())
    })
    .await;
    drop(child);
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_process_in_other_namespaces_is_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let child = finds(dir.path(), Kind::Process, "sleep", || {
        Planted(Command::new("unshare").args(["--net", "--", "sleep", "86071"]).spawn().unwrap())
    })
    .await;
    drop(child);
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_net_namespace_is_found_however_it_is_held() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let holder = || {
        Planted(Command::new("unshare").args(["--net", "--", "sleep", "86072"]).spawn().unwrap())
    };
    let by_process = finds(dir.path(), Kind::NetNamespace, "net:[", holder).await;
    // By a mount alone: the process ends, the namespace stays.
    let point = dir.path().join("held");
    fs::write(&point, "").unwrap();
    let pid = by_process.0.id();
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    eventually("unshare to have run", SHORT, async || {
        let its = fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
        if its == own { Err(its) } else { Ok(()) }
    })
    .await;
    let text = point.to_str().unwrap().to_owned();
    run("mount", &["--bind", &format!("/proc/{pid}/ns/net"), &text]);
    drop(by_process);
    let namespaces = |traces: Vec<bivouac_testkit::Trace>| {
        traces.iter().filter(|t| t.kind == Kind::NetNamespace).count()
    };
    let by_mount = namespaces(before.added());
    // By an open file alone.
    let file = fs::File::open(&point).unwrap();
    run("umount", &["--lazy", &text]);
    let by_file = namespaces(before.added());
    drop(file);
    assert_eq!((by_mount, by_file), (1, 1), "held by a mount, held by a descriptor");
    fs::remove_file(&point).unwrap();
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_mount_is_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let point = dir.path().join("mnt");
    fs::create_dir(&point).unwrap();
    let text = point.to_str().unwrap();
    finds(dir.path(), Kind::Mount, text, || run("mount", &["-t", "tmpfs", "planted", text])).await;
    run("umount", &[text]);
    fs::remove_dir(&point).unwrap();
    before.assert_same_after(SHORT).await;
    // One that names the product but lies elsewhere.
    let other = folder();
    let text = other.path().to_str().unwrap();
    finds(dir.path(), Kind::Mount, "bivouac-planted", || {
        run("mount", &["-t", "tmpfs", "bivouac-planted", text])
    })
    .await;
    run("umount", &[text]);
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_loop_device_is_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let file = dir.path().join("disk");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let before = Traces::before(dir.path());
    let text = file.to_str().unwrap();
    let device =
        finds(dir.path(), Kind::Loop, text, || run("losetup", &["--find", "--show", text])).await;
    assert!(device.starts_with("/dev/loop"), "{device}");
    run("losetup", &["-d", &device]);
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_control_group_is_found_in_every_hierarchy() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let roots: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let options: Vec<&str> = fields[3].split(',').collect();
            let wanted = fields[2] == "cgroup2"
                || ["memory", "pids", "cpu"].iter().any(|c| options.contains(c));
            (fields[2].starts_with("cgroup") && wanted).then(|| PathBuf::from(fields[1]))
        })
        .collect();
    assert!(!roots.is_empty());
    for root in roots {
        let group = root.join("bivouac-planted");
        let text = group.to_str().unwrap();
        finds(dir.path(), Kind::Cgroup, text, || fs::create_dir(&group).unwrap()).await;
        fs::remove_dir(&group).unwrap();
    }
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn files_and_sockets_are_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let deep = dir.path().join("a/b");
    fs::create_dir_all(&deep).unwrap();
    finds(dir.path(), Kind::File, "a/b/planted", || fs::write(deep.join("planted"), "").unwrap())
        .await;
    fs::remove_dir_all(dir.path().join("a")).unwrap();
    let run = Path::new("/run/bivouac");
    let had = run.exists();
    let socket = run.join("planted/socket");
    finds(dir.path(), Kind::Run, "planted/socket", || {
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        fs::write(&socket, "").unwrap();
    })
    .await;
    fs::remove_dir_all(socket.parent().unwrap()).unwrap();
    if !had {
        fs::remove_dir(run).unwrap();
    }
    before.assert_same_after(SHORT).await;
}

#[tokio::test]
async fn a_test_that_fails_over_a_power_cut_leaves_nothing() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    let (place, seen) = (dir.path().to_owned(), before.clone());
    let failed = tokio::spawn(async move {
        let mut disk = PowerDisk::make_in(&place, Cache::Lost).unwrap();
        let data = disk.folder().join("data");
        let server = TestServer::builder().embedded_database().data_folder(data);
        let server = server.start().await.unwrap();
        let picture = disk.picture().unwrap();
        let restored = disk.open(picture).unwrap();
        let added = seen.added();
        let count = |kind| added.iter().filter(|t| t.kind == kind).count();
        // The pool's, and two for each of the machine before and after the cut; one below all of them.
        assert_eq!(count(Kind::Loop), 6, "{added:?}");
        assert!(count(Kind::Mount) >= 6, "{added:?}");
        panic!("as a test fails with {restored:?} and {server:?}");
    });
    let failure = failed.await.unwrap_err().into_panic();
    let said = failure.downcast_ref::<String>().map_or("", String::as_str);
    assert!(said.starts_with("as a test fails"), "{said}");
    before.assert_same_after(LONG).await;
}

#[test]
fn nothing_planted_is_nothing_found() {
    let (_lock, dir) = (exclusive().unwrap(), folder());
    let before = Traces::before(dir.path());
    // Children that are ours and in our namespaces do not count.
    let child = Planted(Command::new("sleep").arg("86073").stdin(Stdio::null()).spawn().unwrap());
    let added = before.added();
    drop(child);
    let odd: Vec<_> = added.iter().filter(|t| !t.what.contains(" (sd-")).collect();
    assert!(odd.is_empty(), "{odd:?}");
}
