//! Real clients through an intercepted name, from a sandbox that holds nothing: git, curl, Python, Node,
//! npm, pip and cargo. Each asks a server that wants a token; the token is the broker's.

use std::process::{Child, Command, Stdio};

use bivouac_testkit::{LONG, TestSandbox, World, eventually};
use serde_json::json;

use crate::{Bed, fresh};

/// A server of the test's own in the world: `server.py` below, at one address. It ends with this.
struct Server {
    child: Child,
}

impl Server {
    async fn start(world: &World, names: &[&str], token: &str, root: &std::path::Path) -> Self {
        let (certificate, key) = world.certificate(names).unwrap();
        let pem = root.join("server.pem");
        std::fs::write(&pem, format!("{certificate}{key}")).unwrap();
        let prefix = world.far_prefix();
        let address = fresh_address();
        let child = Command::new(&prefix[0])
            .args(&prefix[1..])
            .args(["python3", "-c", include_str!("server.py")])
            .arg(&pem)
            .arg(root)
            .arg(&address)
            .env("WANTED_TOKEN", token)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child };
        for name in names {
            world.name(name, &[&address]);
        }
        let ready = root.join("ready");
        eventually("the server", LONG, async || if ready.exists() { Ok(()) } else { Err("no") })
            .await;
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Port 443 of this address is free in the world: nothing listens there by address.
pub(crate) fn fresh_address() -> String {
    use std::sync::atomic::{AtomicU8, Ordering};
    static NEXT: AtomicU8 = AtomicU8::new(90);
    format!("198.51.100.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn run(folder: &std::path::Path, line: &str) {
    let output = Command::new("sh").args(["-ec", line]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

async fn brokered(bed: &Bed, name: &str, header: &str) -> TestSandbox {
    let rule = json!([{"transform": [{"headers": {"authorization": header}}]}]);
    bed.sandbox(json!({"allow": {name: rule}})).await
}

#[tokio::test]
async fn a_private_repository_is_cloned_with_a_token_that_the_sandbox_never_has() {
    let bed = Bed::new().await;
    let root = tempfile::tempdir_in(bed.folder()).unwrap();
    run(
        root.path(),
        "git init -q --bare -b main repo.git; git init -q -b main w; cd w; echo private > file; \
        git add file; git -c user.name=t -c user.email=t@t commit -qm one; git push -q ../repo.git main; \
        git -C ../repo.git config http.receivepack true",
    );
    let name = fresh("git.test");
    let token = format!("Basic t0ken{}", name.replace('.', ""));
    let server = Server::start(&bed, &[&name], &token, root.path()).await;
    let sandbox = brokered(&bed, &name, &token).await;
    let url = format!("https://{name}/repo.git");
    let ran = sandbox.sh(&format!("git clone -q {url} /tmp/c && cat /tmp/c/file")).await;
    assert_eq!(ran.good(), "private");
    let push = "cd /tmp/c && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m two && git push -q origin main && echo pushed";
    assert_eq!(sandbox.sh(push).await.good(), "pushed");
    // The control: without the rule the server refuses, and nobody is asked for a password.
    bed.set(&sandbox, &json!({"allow": [name]})).await;
    let ran = sandbox
        .sh(&format!("GIT_TERMINAL_PROMPT=0 git -c http.sslVerify=false clone -q {url} /tmp/d"))
        .await;
    assert_ne!(ran.exit, Some(0));
    let found = sandbox
        .sudo(&format!(
            "grep -rlaFs {} / --exclude-dir=usr --exclude-dir=proc --exclude-dir=sys",
            &token[6..]
        ))
        .await;
    assert_eq!(found.out(), "");
    drop(server);
}

#[tokio::test]
async fn case_118_a_credential_for_reading_does_not_push() {
    let bed = Bed::new().await;
    let root = tempfile::tempdir_in(bed.folder()).unwrap();
    run(
        root.path(),
        "git init -q --bare -b main repo.git; git init -q -b main w; cd w; echo private > file; \
        git add file; git -c user.name=t -c user.email=t@t commit -qm one; git push -q ../repo.git main; \
        git -C ../repo.git config http.receivepack true",
    );
    let name = fresh("git.test");
    let token = format!("Basic t0ken{}", name.replace('.', ""));
    let server = Server::start(&bed, &[&name], &token, root.path()).await;
    // Reading is: what is announced for fetching, and the fetch itself.
    let set = json!([{"headers": {"authorization": token}}]);
    let service = json!([{"key": {"exact": "service"}, "value": {"exact": "git-upload-pack"}}]);
    let rules = json!([
        {"match": {"path": {"exact": "/repo.git/info/refs"}, "queryString": service}, "transform": set},
        {"match": {"path": {"exact": "/repo.git/git-upload-pack"}}, "transform": set},
    ]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rules}})).await;
    let line = format!("git clone -q https://{name}/repo.git /tmp/c && cat /tmp/c/file");
    assert_eq!(sandbox.sh(&line).await.good(), "private");
    let push = "cd /tmp/c && git -c user.name=t -c user.email=t@t commit -q --allow-empty -m two && \
        GIT_TERMINAL_PROMPT=0 git push -q origin main";
    assert_ne!(sandbox.sh(push).await.exit, Some(0), "it was pushed");
    // The control: with a rule for pushing the same push works.
    let all = json!({"allow": {name.as_str(): [{"transform": set}]}});
    bed.set(&sandbox, &all).await;
    let ran = sandbox.sh("cd /tmp/c && git push -q origin main").await;
    assert_eq!(ran.exit, Some(0), "{}", ran.err());
    drop(server);
}

#[tokio::test]
async fn ordinary_clients_trust_the_broker_without_being_told() {
    let bed = Bed::new().await;
    let name = fresh("trust.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = brokered(&bed, &name, "Bearer trusted").await;
    let url = format!("https://{name}/trust");
    let clients = [
        format!("curl -sSf {url}"),
        format!(
            "python3 -c 'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'"
        ),
        format!(
            "if command -v node >/dev/null; then node -e 'fetch(\"{url}\").then(r=>r.text()).then(console.log)'; else curl -sSf {url}; fi"
        ),
        format!("git -c http.sslVerify=true ls-remote {url} >/dev/null 2>&1; curl -sSf {url}"),
        // Java verifies by a store of its own. What comes is no list of revoked certificates: it came.
        format!(
            "if command -v keytool >/dev/null; then \
            keytool -list -cacerts -storepass changeit -alias bivouac-session-1 >&2 && \
            {{ keytool -printcrl -file {url} >&2 || echo /trust; }}; else curl -sSf {url}; fi"
        ),
    ];
    for line in clients {
        let before = bed.seen_with("/trust").len();
        let ran = sandbox.sh(&line).await;
        assert!(ran.good().contains("/trust"), "{line}: {}", ran.err());
        let seen = bed.seen_with("/trust");
        assert!(seen.len() > before, "{line}");
        assert_eq!(seen.last().unwrap().header("authorization"), ["Bearer trusted"], "{line}");
    }
}

#[tokio::test]
async fn packages_come_from_a_registry_that_wants_a_token() {
    let bed = Bed::new().await;
    let root = tempfile::tempdir_in(bed.folder()).unwrap();
    // One package for each tool, made here: the server serves files below this folder.
    run(
        root.path(),
        r#"
        mkdir -p npm/package pip/simple/inside crates src/demo-0.1.0/src index/de/mo
        echo '{"name":"inside","version":"1.0.0","main":"i.js"}' > npm/package/package.json
        echo 'module.exports = "npm-inside"' > npm/package/i.js
        tar -czf npm/inside-1.0.0.tgz -C npm package
        mkdir -p wheel/inside wheel/inside-1.0.0.dist-info
        echo 'NAME = "pip-inside"' > wheel/inside/__init__.py
        printf 'Metadata-Version: 2.1\nName: inside\nVersion: 1.0.0\n' > wheel/inside-1.0.0.dist-info/METADATA
        printf 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n' > wheel/inside-1.0.0.dist-info/WHEEL
        printf 'inside/__init__.py,,\ninside-1.0.0.dist-info/METADATA,,\ninside-1.0.0.dist-info/WHEEL,,\ninside-1.0.0.dist-info/RECORD,,\n' > wheel/inside-1.0.0.dist-info/RECORD
        cd wheel && python3 -m zipfile -c ../pip/simple/inside/inside-1.0.0-py3-none-any.whl inside inside-1.0.0.dist-info && cd ..
        printf '[package]\nname = "demo"\nversion = "0.1.0"\nedition = "2021"\n' > src/demo-0.1.0/Cargo.toml
        echo 'pub fn demo() {}' > src/demo-0.1.0/src/lib.rs
        tar -czf crates/demo-0.1.0.crate -C src demo-0.1.0
    "#,
    );
    let name = fresh("registry.test");
    let token = format!("Bearer t0ken{}", name.replace('.', ""));
    let server = Server::start(&bed, &[&name], &token, root.path()).await;
    let sandbox = brokered(&bed, &name, &token).await;
    let has = async |tool: &str| sandbox.sh(&format!("command -v {tool}")).await.exit == Some(0);
    let mut tried = 0;
    if has("npm").await {
        let line = format!(
            "mkdir -p /tmp/n && cd /tmp/n && echo '{{\"dependencies\":{{\"inside\":\"1.0.0\"}}}}' > package.json && \
            npm config set registry https://{name}/npm/ --location project && npm install --no-audit --no-fund --silent && \
            npm ci --no-audit --no-fund --silent && node -p 'require(\"inside\")'"
        );
        let ran = sandbox.sh(&line).await;
        assert_eq!(ran.good(), "npm-inside", "{}", ran.err());
        tried += 1;
    }
    if sandbox.sh("python3 -m pip --version").await.exit == Some(0) {
        let line = format!(
            "python3 -m pip install -q --disable-pip-version-check --break-system-packages --no-deps --target /tmp/p \
            --index-url https://{name}/pip/simple/ inside && PYTHONPATH=/tmp/p python3 -c 'import inside; print(inside.NAME)'"
        );
        let ran = sandbox.sh(&line).await;
        assert_eq!(ran.good(), "pip-inside", "{}", ran.err());
        tried += 1;
    }
    if has("cargo").await && sandbox.sh("cargo --version").await.exit == Some(0) {
        let line = format!(
            "mkdir -p /tmp/c/src /tmp/c/.cargo && cd /tmp/c && touch src/lib.rs && \
            printf '[package]\\nname = \"c\"\\nversion = \"0.1.0\"\\nedition = \"2021\"\\n[dependencies]\\ndemo = {{ version = \"0.1.0\", registry = \"inside\" }}\\n' > Cargo.toml && \
            printf '[registries.inside]\\nindex = \"sparse+https://{name}/index/\"\\n' > .cargo/config.toml && \
            CARGO_HOME=/tmp/ch cargo fetch -q && ls /tmp/ch/registry/cache/*/demo-0.1.0.crate"
        );
        let ran = sandbox.sh(&line).await;
        assert!(ran.good().ends_with("demo-0.1.0.crate"), "{}", ran.err());
        tried += 1;
    }
    assert!(tried > 0, "the image has none of the tools");
    let found = sandbox
        .sudo(&format!(
            "grep -rlaFs {} / --exclude-dir=usr --exclude-dir=proc --exclude-dir=sys",
            &token[7..]
        ))
        .await;
    assert_eq!(found.out(), "");
    drop(server);
}
