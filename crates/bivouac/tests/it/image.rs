//! Built images: what is in the universal one, who keeps it, what an interrupted build leaves.
//!
//! The image has to be there: `script/test` builds it, or `bivouac image build`.

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Child;

use bivouac_testkit::{Cli, LONG, TestSandbox, TestServer, eventually, shared};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The folder with the image that this machine has.
fn built() -> PathBuf {
    std::env::var_os("BIVOUAC_TEST_IMAGES")
        .map_or_else(|| PathBuf::from("/var/cache/bivouac/images"), PathBuf::from)
}

/// A folder of images of the test's own.
struct Folder(TempDir);

impl Folder {
    /// On the file system of the built one, so that files can be links.
    fn empty() -> Self {
        let beside = built().parent().unwrap().to_owned();
        fs::create_dir_all(&beside).unwrap();
        Self(tempfile::Builder::new().prefix("images-test-").tempdir_in(beside).unwrap())
    }

    /// With the machine's universal image in it.
    fn with_universal() -> Self {
        let folder = Self::empty();
        let images = Cli::new(&["--json", "image", "ls"]).env("BIVOUAC_IMAGES", built()).json();
        let image = images[0].clone();
        assert_eq!(image["name"], "universal", "build it: bivouac image build");
        let stem = image["reference"].as_str().unwrap().replace("@blake3:", "-");
        fs::hard_link(built().join(format!("{stem}.erofs")), folder.file(&stem)).unwrap();
        let manifest = format!("{stem}.json");
        fs::copy(built().join(&manifest), folder.path().join(&manifest)).unwrap();
        folder
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, stem: &str) -> PathBuf {
        self.path().join(format!("{stem}.erofs"))
    }

    fn image_file(&self) -> PathBuf {
        let files = fs::read_dir(self.path()).unwrap().map(|e| e.unwrap().path());
        files.into_iter().find(|path| path.extension().is_some_and(|e| e == "erofs")).unwrap()
    }

    fn cli(&self, args: &[&str]) -> Cli {
        Cli::new(args).env("BIVOUAC_IMAGES", self.path())
    }

    async fn server(&self) -> TestServer {
        let path = self.path().to_str().unwrap();
        TestServer::builder().env("BIVOUAC_IMAGES", path).start().await.unwrap()
    }

    /// What belongs to it: processes, loop devices, mounts.
    fn traces(&self) -> Vec<String> {
        let wanted = self.path().to_str().unwrap();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.bytes().all(|b| b.is_ascii_digit()) || name == std::process::id().to_string() {
                continue;
            }
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let cwd = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
            if line.contains(wanted) || cwd.starts_with(wanted) {
                found.push(format!("process {name} {line}"));
            }
        }
        for entry in fs::read_dir("/sys/block").unwrap().flatten() {
            let file = fs::read_to_string(entry.path().join("loop/backing_file"));
            found.extend(file.ok().filter(|file| file.contains(wanted)));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        found.extend(mounts.lines().filter(|line| line.contains(wanted)).map(str::to_owned));
        found
    }

    /// Names in it that are not locks.
    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.path()).unwrap();
        let names = names.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.ends_with(".lock") && name != "leases").collect()
    }
}

async fn first_line(sandbox: &TestSandbox, line: &str) -> String {
    let ran = sandbox.sh(line).await;
    ran.good().lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_runtime_is_first_for_everyone() {
    let _lock = shared().unwrap();
    let folder = Folder::with_universal();
    let server = folder.server().await;
    let client = server.client("runtimes").unwrap();
    let node = "node -v; sudo node -v; bash -lc 'node -v'; sudo -i node -v >/dev/null; npm -v >&2";
    let python = "python3 -V; sudo python3 -V; bash -lc 'python -V'; pip --version >&2";
    let cases = [
        (json!({ "runtime": "node22" }), node, "v22."),
        (json!({ "runtime": "node24" }), node, "v24."),
        (json!({ "runtime": "node26" }), node, "v26."),
        (json!({ "runtime": "python3.13" }), python, "Python 3.13."),
        (json!({ "image": "vercel/sandbox/node:22" }), node, "v22."),
        (json!({ "image": "vercel/sandbox/python:3.13" }), python, "Python 3.13."),
        (json!({ "image": "vercel/sandbox/universal:latest" }), node, "v24."),
        (json!({}), node, "v24."),
    ];
    for (body, line, version) in cases {
        let sandbox = TestSandbox::create(&client, body.clone()).await;
        assert_eq!(sandbox.view["session"]["image"], "universal", "{body}");
        let said = sandbox.sh(line).await.good();
        assert_eq!(said.lines().count(), 3, "{body}: {said}");
        assert!(said.lines().all(|line| line.starts_with(version)), "{body}: {said}");
        let _ = sandbox.delete().await;
    }
    for image in ["vercel/sandbox/python:3.14", "vercel/sandbox/arch", "nope"] {
        let refused =
            TestSandbox::try_create(&client, json!({ "image": image })).await.unwrap_err();
        let message = refused.refused(404, "not_found").message().to_owned();
        for there in [image, "universal", "host", "vercel/sandbox/node:22", "python3.13"] {
            assert!(message.contains(there), "{message}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_programs_of_the_image_work() {
    let _lock = shared().unwrap();
    let folder = Folder::with_universal();
    let server = folder.server().await;
    let client = server.client("programs").unwrap();
    let sandbox = TestSandbox::create(&client, json!({})).await;
    let cases = [
        ("id -un; id -u", "vercel-sandbox"),
        ("sudo id -u", "0"),
        ("pwd", "/vercel/sandbox"),
        ("git init -q g && git -C g status -s && echo clean", "clean"),
        ("echo 'int puts(char*);int main(){puts(\"c\");}' > a.c && gcc -w a.c -o a && ./a", "c"),
        ("echo 'int main(){return 7;}' > b.cc && g++ b.cc -o b; ./b; echo $?", "7"),
        ("cargo init -q --vcs none x && cd x && cargo run -q --offline", "Hello, world!"),
        ("python3 -m venv v && v/bin/python -c 'import pip; print(\"venv\")'", "venv"),
        (
            "for p in npm pnpm yarn pip cargo rg jq curl wget ssh xz zip unzip make; do command -v $p >/dev/null || echo no $p; done; echo all",
            "all",
        ),
        ("touch $(npm root -g)/mine && echo writable", "writable"),
        ("printf 'import os\\nprint(os.path.expanduser(\"~\"))' | python3", "/home/vercel-sandbox"),
        ("locale 2>&1 | head -n 1", "LANG=C.UTF-8"),
        ("bwrap --unshare-all --ro-bind / / echo nested", "nested"),
        ("sudo sh -c 'echo x > /etc/own' && cat /etc/own", "x"),
        // Nothing of the build, and nothing of this machine.
        (
            "sudo find / -xdev -newermt '1 hour ago' -path '/var/*' -type f | head -n 1; echo none",
            "none",
        ),
        ("ls /var/lib/apt/lists /var/cache/apt/archives | grep -c deb; true", "0"),
        ("sudo ls -A /root | tr '\\n' ' '", ".bashrc .profile"),
        ("ls /etc/ssh | grep host_ ; echo none", "none"),
        ("cat /etc/apt/apt.conf.d/99* 2>/dev/null; echo none", "none"),
        ("grep -c @ /etc/apt/sources.list; true", "0"),
    ];
    for (line, answer) in cases {
        assert_eq!(first_line(&sandbox, line).await.trim(), answer, "{line}");
    }
    // The session's own name is no other session's.
    let id = sandbox.sh("cat /etc/machine-id").await.good();
    let other = TestSandbox::create(&client, json!({})).await;
    assert_ne!(id, other.sh("cat /etc/machine-id").await.good());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_removed_when_nothing_lies_on_it() {
    let _lock = shared().unwrap();
    let folder = Folder::with_universal();
    let mut server = folder.server().await;
    let client = server.client("keeps").unwrap();
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let refuse = |server: &TestServer| {
        let output = folder.cli(&["image", "rm", "universal"]).run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("in use") && said.contains(server.data.to_str().unwrap()), "{said}");
        assert!(folder.image_file().exists());
    };
    refuse(&server);
    let shown = folder.cli(&["--json", "image", "ls"]).json();
    assert_eq!(shown[0]["usedBy"], json!([server.data]));

    // The mount outlives the engine, and the next one goes on with it.
    let _ = sandbox.sh("echo kept > file").await.good();
    server.kill9().unwrap();
    refuse(&server);
    server.restart().await.unwrap();
    let client = server.client("keeps").unwrap();
    // On another port.
    sandbox.client = client.clone();
    assert_eq!(sandbox.sh("cat file; node -v | cut -c1-4").await.good(), "kept\nv24.");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours = server.data.join("mounts");
    assert_eq!(mounts.lines().filter(|line| line.contains(ours.to_str().unwrap())).count(), 1);

    // Stopped, it lies there as a snapshot.
    let _ = sandbox.stop().await.ok();
    refuse(&server);
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.sh("cat file").await.good(), "kept");
    let path = format!("/v2/sandboxes/{}?deleteOrphanSnapshots=true", sandbox.name);
    let _ = client.delete(&path).await.ok();
    let removed = folder.cli(&["--json", "image", "rm", "universal"]).json();
    assert_eq!(removed[0]["name"], "universal");
    assert!(folder.names().is_empty(), "{:?}", folder.names());
    assert!(fs::read_dir(&ours).unwrap().next().is_none(), "still mounted");

    // The engine goes on with what there is.
    let sandbox = TestSandbox::create(&client, json!({})).await;
    assert_eq!(sandbox.view["session"]["image"], "host");
    let body = json!({ "image": "vercel/sandbox/node:24" });
    let refused = TestSandbox::try_create(&client, body).await.unwrap_err();
    assert!(refused.refused(404, "not_found").message().contains("bivouac image build universal"));
    let engine = client.get("/api/bivouac/v1/engine").await.ok();
    assert_eq!((&engine["image"], &engine["images"]), (&json!("host"), &json!(["host"])));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_appears_without_a_restart_and_is_unmounted_at_the_end() {
    let _lock = shared().unwrap();
    let folder = Folder::empty();
    let server = folder.server().await;
    let client = server.client("appears").unwrap();
    let image = async |client: &bivouac_testkit::Client| {
        let sandbox = TestSandbox::create(client, json!({ "persistent": false })).await;
        let image = sandbox.view["session"]["image"].clone();
        let _ = sandbox.delete().await;
        image
    };
    assert_eq!(image(&client).await, "host");
    let whole = Folder::with_universal();
    for name in whole.names() {
        fs::rename(whole.path().join(&name), folder.path().join(&name)).unwrap();
    }
    assert_eq!(image(&client).await, "universal");
    // With a sandbox on it; the orderly end of this engine stops that one.
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    assert_eq!(sandbox.sh("node -v | cut -c1-3").await.good(), "v24");
    assert!(server.stop().await.unwrap().success());
    assert!(fs::read_dir(server.data.join("mounts")).unwrap().next().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_an_error_in_words_and_nothing_else() {
    let _lock = shared().unwrap();
    let folder = Folder::with_universal();
    let file = folder.image_file();
    let size = fs::metadata(&file).unwrap().len();
    let server = folder.server().await;
    let client = server.client("damaged").unwrap();
    // Another file of that size: the machine's own is a link to the same.
    fs::remove_file(&file).unwrap();
    fs::File::create(&file).unwrap().set_len(size).unwrap();
    let refused = async || {
        let answer = TestSandbox::try_create(&client, json!({ "name": "box" })).await.unwrap_err();
        let message = answer.refused(404, "not_found").message().to_owned();
        assert!(message.contains("bivouac image rm"), "{message}");
        message
    };
    assert!(refused().await.contains("damaged"));
    fs::File::create(&file).unwrap().set_len(1).unwrap();
    assert!(refused().await.contains("damaged"));
    let shown = folder.cli(&["image", "ls"]).good();
    assert!(shown.contains("damaged"), "{shown}");
    fs::remove_file(&file).unwrap();
    assert!(refused().await.contains("gone"));
    client.get("/v2/sandboxes/box").await.refused(404, "not_found");
    // The way out that it names.
    let _ = folder.cli(&["image", "rm", "universal"]).good();
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    assert_eq!(sandbox.view["session"]["image"], "host");
}

#[test]
fn a_folder_without_images_says_how_to_get_one() {
    let folder = Folder::empty();
    assert_eq!(folder.cli(&["--json", "image", "ls"]).json(), json!([]));
    let output = folder.cli(&["image", "ls"]).run();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("bivouac image build universal"), "{said}");
    for name in ["universal", "host", "../x", "universal@blake3:00"] {
        let output = folder.cli(&["image", "rm", name]).run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(name), "{said}");
    }
    assert_eq!(folder.cli(&["image", "build", "nonsense"]).run().status.code(), Some(2));
    assert!(folder.names().is_empty());
}

/// A build that has come so far that its file system is mounted.
fn at_work(folder: &Folder) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = folder.cli(&["image", "build"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let seen = until(&mut lines, "Debian mirror");
    assert!(seen, "the build has not begun: {:?}", child.wait());
    (child, lines)
}

fn none(found: Vec<String>) -> Result<(), Vec<String>> {
    if found.is_empty() { Ok(()) } else { Err(found) }
}

fn until(lines: &mut impl std::io::BufRead, wanted: &str) -> bool {
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        if line.contains(wanted) {
            return true;
        }
        line.clear();
    }
    false
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_build_leaves_nothing_and_the_next_one_may_begin() {
    let _lock = shared().unwrap();
    let folder = Folder::empty();
    let (mut first, _lines) = at_work(&folder);
    assert!(!folder.traces().is_empty());

    // One at a time: the second says for whom it waits, and can be interrupted.
    let mut second = folder.cli(&["image", "build"]).spawn().unwrap();
    let mut said = BufReader::new(second.stderr.take().unwrap());
    assert!(until(&mut said, &format!("process {}", first.id())));
    signal(&second, Signal::INT);
    assert_eq!(second.wait().unwrap().code(), Some(130));

    // In order.
    signal(&first, Signal::TERM);
    assert_eq!(first.wait().unwrap().code(), Some(143));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
    eventually("the first build is gone", LONG, async || none(folder.traces())).await;

    // By force: all that it started goes too, and the next look clears what is left.
    let (mut third, _lines) = at_work(&folder);
    signal(&third, Signal::KILL);
    let _ = third.wait();
    eventually("the third build is gone", LONG, async || none(folder.traces())).await;
    assert_eq!(folder.cli(&["--json", "image", "ls"]).json(), Value::Array(Vec::new()));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
}
