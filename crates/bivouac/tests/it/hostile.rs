//! Hostile archives and paths: nothing that a sandbox or a client sends reaches a file outside.
//!
//! Every test has a folder on the host that a successful attack would change or show, and a positive
//! control that the folder is where the attack looks for it.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bivouac_testkit::{Answer, Entry, Tar, TestSandbox};
use serde_json::json;
use tempfile::TempDir;

use crate::sandbox;

const MARK: &str = "host-secret-7f31";

/// A folder on the host with a secret in it.
struct Bait {
    dir: TempDir,
}

impl Bait {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("bait").tempdir_in("/tmp").unwrap();
        fs::write(dir.path().join("secret"), MARK).unwrap();
        Self { dir }
    }

    /// The folder as an absolute path.
    fn path(&self) -> String {
        self.dir.path().to_str().unwrap().to_owned()
    }

    #[track_caller]
    fn assert_untouched(&self, after: &str) {
        let names: Vec<PathBuf> =
            fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(names, [self.dir.path().join("secret")], "{after} changed the host's folder");
        let text = fs::read_to_string(self.dir.path().join("secret")).unwrap();
        assert_eq!(text, MARK, "{after} changed the host's file");
    }
}

#[track_caller]
fn assert_sane(answer: &Answer, what: &str) {
    let text = String::from_utf8_lossy(&answer.bytes);
    assert!(answer.status < 500, "{what}: {answer}");
    assert!(!text.contains(MARK), "{what} showed the host's file: {answer}");
}

/// The engine and the sandbox are as usable as before.
async fn assert_alive(sandbox: &TestSandbox) {
    let _ = sandbox.write("/vercel/sandbox", Tar::new().file("probe", b"alive").gzip()).await.ok();
    assert_eq!(sandbox.run(&["cat", "probe"]).await.good(), "alive");
    assert_eq!(sandbox.read("probe").await.bytes, b"alive");
}

#[tokio::test]
async fn reads_stay_inside() {
    let (_server, sandbox) = sandbox("read-inside").await;
    let bait = Bait::new();
    let host = bait.path();
    let script = format!(
        "ln -s {host}/secret abs; ln -s ../../../../../..{host}/secret rel; \
         ln -s /proc/self/root proc-root; ln -s /proc/1/root init-root; ln -s /proc/self/cwd cwd; ln -s {host} dir"
    );
    let _ = sandbox.sh(&script).await.good();
    let up = "../".repeat(40);
    let paths = [
        format!("{host}/secret"),
        format!("{up}{host}/secret"),
        "abs".into(),
        "rel".into(),
        "dir/secret".into(),
        format!("proc-root{host}/secret"),
        format!("init-root{host}/secret"),
        format!("cwd/{up}{host}/secret"),
        format!("/proc/self/root{host}/secret"),
        format!("/proc/1/root{host}/secret"),
        format!("/proc/thread-self/root{host}/secret"),
        format!("/proc/self/fd/../root{host}/secret"),
    ];
    for path in &paths {
        assert_sane(&sandbox.read(path).await, path);
        let with = json!({ "path": path.trim_start_matches('/'), "cwd": "/" });
        assert_sane(&sandbox.post("/fs/read", &with).await, path);
    }
    for n in 0..64 {
        let path = format!("/proc/self/fd/{n}{host}/secret");
        assert_sane(&sandbox.read(&path).await, &path);
        let path = format!("/proc/1/fd/{n}/{up}{host}/secret");
        assert_sane(&sandbox.read(&path).await, &path);
    }
    // The same names inside do exist when the sandbox makes them: the paths were not just wrong.
    let _ = sandbox.sudo(&format!("mkdir -p {host}; echo inner > {host}/secret")).await.good();
    for path in ["abs", "rel", "dir/secret"] {
        assert_eq!(sandbox.read(path).await.bytes, b"inner\n", "{path}");
    }
    let passwd = sandbox.read("/etc/passwd").await;
    assert!(String::from_utf8_lossy(&passwd.bytes).contains("vercel-sandbox"), "{passwd}");
    bait.assert_untouched("reading");
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn archives_cannot_leave() {
    let (_server, sandbox) = sandbox("archives").await;
    let bait = Bait::new();
    let host = bait.path();
    let bare = host.trim_start_matches('/').to_owned();
    let up = "../".repeat(20);
    let cases: Vec<(&str, Tar)> = vec![
        ("dots", Tar::new().file(format!("{up}{bare}/planted"), b"x")),
        ("dots in the middle", Tar::new().file(format!("a/b/{up}{bare}/planted"), b"x")),
        (
            "dots by PAX",
            Tar::new().pax(&[("path", format!("{up}{bare}/planted").as_bytes())]).file("ok", b"x"),
        ),
        ("a link, then through it", Tar::new().symlink("out", &host).file("out/planted", b"x")),
        (
            "a link onto the secret",
            Tar::new().symlink("f", format!("{host}/secret")).file("f", b"x"),
        ),
        ("a relative link", Tar::new().symlink("r", format!("{up}{bare}")).file("r/planted", b"x")),
        (
            "links in a row",
            Tar::new().symlink("l1", "l2").symlink("l2", &host).file("l1/planted", b"x"),
        ),
        (
            "the root of proc",
            Tar::new().symlink("p", "/proc/self/root").file(format!("p{host}/planted"), b"x"),
        ),
        (
            "init's root",
            Tar::new().symlink("i", "/proc/1/root").file(format!("i{host}/planted"), b"x"),
        ),
        (
            "a hard link to outside",
            Tar::new().hardlink("h", format!("{host}/secret")).file("h", b"x"),
        ),
        ("a hard link up", Tar::new().hardlink("h", format!("{up}{bare}/secret"))),
        (
            "a hard link by PAX",
            Tar::new().pax(&[("linkpath", format!("{host}/secret").as_bytes())]).hardlink("h", "x"),
        ),
        ("an absolute name", Tar::new().file(format!("{host}/planted"), b"x")),
        ("a folder outside", Tar::new().folder(format!("{up}{bare}/planted"))),
        (
            "a link as the folder",
            Tar::new().symlink("d", &host).folder("d").file("d/planted", b"x"),
        ),
    ];
    for (name, tar) in cases {
        for cwd in ["/vercel/sandbox", "/", "/tmp"] {
            assert_sane(&sandbox.write(cwd, tar.clone().gzip()).await, name);
            bait.assert_untouched(name);
        }
        let read = sandbox.run(&["sh", "-c", "cat h f 2>/dev/null; true"]).await;
        assert!(!read.out().contains(MARK), "{name} brought the host's file in");
        let _ = sandbox.sh("rm -rf ./* /tmp/*").await;
    }
    for cwd in [
        format!("{up}{bare}"),
        "/proc/self/root".into(),
        "/proc/1/root/tmp".into(),
        String::new(),
        "rel".into(),
    ] {
        assert_sane(&sandbox.write(&cwd, Tar::new().file("planted", b"x").gzip()).await, &cwd);
        bait.assert_untouched(&cwd);
    }
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn links_of_the_sandbox_do_not_lead_out() {
    let (_server, sandbox) = sandbox("own-links").await;
    let bait = Bait::new();
    let host = bait.path();
    let script = format!(
        "ln -s {host}/secret f; ln -s {host} d; ln -s /proc/self/root r; ln -s ../../../..{host} u"
    );
    let _ = sandbox.sh(&script).await.good();
    for name in ["f".to_owned(), "d/planted".into(), format!("r{host}/planted"), "u/planted".into()]
    {
        assert_sane(
            &sandbox.write("/vercel/sandbox", Tar::new().file(&name, b"x").gzip()).await,
            &name,
        );
        bait.assert_untouched(&name);
        let made = sandbox.post("/fs/mkdir", &json!({ "path": name, "recursive": true })).await;
        assert_sane(&made, &name);
        bait.assert_untouched(&name);
    }
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn special_entries_are_refused() {
    let (_server, sandbox) = sandbox("special").await;
    let mut device = Entry::new("dev", b'3');
    device.mode = 0o666;
    let cases = [
        ("a character device", Tar::new().raw(&device, b"")),
        ("a block device", Tar::new().raw(&Entry::new("dev", b'4'), b"")),
        ("a FIFO", Tar::new().raw(&Entry::new("dev", b'6'), b"")),
        ("an unknown kind", Tar::new().raw(&Entry::new("dev", b'V'), b"")),
        ("an empty name", Tar::new().file("", b"x")),
        ("a NUL by PAX", Tar::new().pax(&[("path", b"dev\0x")]).file("ok", b"x")),
    ];
    for (name, tar) in cases {
        let answer = sandbox.write("/vercel/sandbox", tar.gzip()).await;
        assert!(answer.status == 400, "{name}: {answer}");
        let listed = sandbox.sh("find . -mindepth 1 ! -type f ! -type d").await.good();
        assert_eq!(listed, "", "{name} made a special file");
    }
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn broken_archives_are_refused() {
    let (_server, sandbox) = sandbox("broken").await;
    let good = Tar::new().file("f", &[b'x'; 50_000]).gzip();
    let mut wrong_sum = Tar::new().file("f", b"x").bytes();
    wrong_sum[3] ^= 1;
    let mut claims = Entry::new("huge", b'0');
    claims.size = 1 << 42;
    let mut more = Entry::new("more", b'0');
    more.size = 100_000;
    let gzip = |bytes: &[u8]| {
        use std::io::Write as _;
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    };
    let huge_pax = "1".repeat(400);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("not gzip", b"hello, this is not an archive".to_vec()),
        ("not tar", gzip(&[b'z'; 2000])),
        ("cut in the gzip", good[..good.len() / 2].to_vec()),
        ("cut in the trailer", good[..good.len() - 4].to_vec()),
        ("a wrong check sum", gzip(&wrong_sum)),
        ("a size of four tebibytes", Tar::new().raw(&claims, b"x").gzip()),
        ("a size past the end", Tar::new().raw(&more, b"only this").gzip()),
        (
            "a PAX size past the end",
            Tar::new().pax(&[("size", b"999999999")]).file("f", b"x").gzip(),
        ),
        ("a PAX size that is none", Tar::new().pax(&[("size", b"-1")]).file("f", b"x").gzip()),
        (
            "a PAX size beyond 64 bits",
            Tar::new().pax(&[("size", huge_pax.as_bytes())]).file("f", b"x").gzip(),
        ),
        (
            "a PAX record without end",
            Tar::new()
                .raw(
                    &{
                        let mut e = Entry::new("p", b'x');
                        e.size = 20;
                        e
                    },
                    b"99999999 path=aaaaaa",
                )
                .file("f", b"x")
                .gzip(),
        ),
        (
            "a PAX header of a gigabyte",
            Tar::new()
                .raw(
                    &{
                        let mut e = Entry::new("p", b'x');
                        e.size = 1 << 30;
                        e
                    },
                    b"",
                )
                .gzip(),
        ),
        (
            "a long name of a gigabyte",
            Tar::new()
                .raw(
                    &{
                        let mut e = Entry::new("p", b'L');
                        e.size = 1 << 30;
                        e
                    },
                    b"",
                )
                .gzip(),
        ),
        ("a name that is too long", Tar::new().file("n".repeat(300), b"x").gzip()),
    ];
    let mut accepted = Vec::new();
    for (name, body) in cases {
        let answer = sandbox.write("/vercel/sandbox", body).await;
        if answer.status != 400 || answer.message().len() < 10 {
            accepted.push(format!("{name}: {answer}"));
        }
    }
    assert!(accepted.is_empty(), "{accepted:#?}");
    // An empty archive and an empty body are not the same thing.
    let _ = sandbox.write("/vercel/sandbox", Tar::new().gzip()).await.ok();
    sandbox.write("/vercel/sandbox", Vec::new()).await.refused(400, "");
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn a_swapped_folder_is_never_followed_out() {
    let (_server, sandbox) = sandbox("swap").await;
    let bait = Bait::new();
    let host = bait.path();
    let script = format!(
        "mkdir real; while :; do rm -rf d; mkdir d; rmdir d; ln -s {host} d; rm d; ln -s /proc/self/root{host} d; rm d; done"
    );
    let id = sandbox.start(&["sh", "-c", &script], json!({})).await;
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < Duration::from_secs(5) || rounds < 50 {
        let tar = Tar::new().file("d/planted", b"x").file("d/e/planted", b"x");
        assert_sane(&sandbox.write("/vercel/sandbox", tar.gzip()).await, "a write");
        assert_sane(&sandbox.read("d/secret").await, "a read");
        let made = sandbox.post("/fs/mkdir", &json!({ "path": "d/m", "recursive": true })).await;
        assert_sane(&made, "a mkdir");
        bait.assert_untouched("the race");
        rounds += 1;
    }
    let _ = sandbox.kill(&id, 9).await.ok();
    let _ = sandbox.wait(&id).await;
    let _ = sandbox.sh("rm -rf d").await;
    assert_alive(&sandbox).await;
}

#[tokio::test]
async fn a_path_through_parents_is_read_amid_renames() {
    let (_server, sandbox) = sandbox("renames").await;
    let _ =
        sandbox.sh("mkdir -p a/b x && echo inner > a/f && ln -s b/../b/../f a/rel").await.good();
    // The kernel gives such a path up whenever anything is renamed meanwhile.
    let script = "import os\nwhile True:\n os.rename('x', 'y')\n os.rename('y', 'x')";
    let storm = sandbox.start(&["python3", "-c", script], json!({})).await;
    for _ in 0..200 {
        let read = sandbox.read("a/rel").await;
        assert_eq!(read.bytes, b"inner\n", "{read}");
    }
    let _ = sandbox.kill(&storm, 9).await.ok();
}
