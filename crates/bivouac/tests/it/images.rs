//! Images of registries and of files, from outside: pulled, imported, run; and registries that lie.

mod kit;

use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_runtime::image::blobs::sha256;
use bivouac_testkit::{Cli, Client, LONG, TestSandbox, TestServer, eventually, shared};
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use kit::{CAPABILITY, INDEX, Image, Layer, Liar, Registry, Reply, truth};

/// What a lying registry answers to some paths.
type Lie = Box<dyn Fn(&str) -> Option<Reply> + Send + Sync>;

/// A folder for everything of a test, on the machine's disk.
struct Bed(TempDir);

impl Bed {
    fn new() -> Self {
        Self(tempfile::Builder::new().prefix("oci-test-").tempdir_in("/var/tmp").unwrap())
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    async fn server(&self) -> TestServer {
        self.builder().start().await.unwrap()
    }

    fn builder(&self) -> bivouac_testkit::Builder {
        TestServer::builder().env("BIVOUAC_IMAGES", self.path("images").to_str().unwrap())
    }

    fn cli(&self, args: &[&str]) -> Cli {
        Cli::new(args).env("BIVOUAC_IMAGES", self.path("images"))
    }

    /// What is in the folder of images, but for locks and leases.
    fn left(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("images")) else { return Vec::new() };
        let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|n| !n.ends_with(".lock") && n != "leases" && n != "blobs").collect()
    }
}

/// Pulls; the image, or code and message of the refusal.
async fn pull(client: &Client, body: Value) -> Result<Value, (String, String)> {
    let request = client.request(Method::POST, "/api/bivouac/v1/images/pull").json(&body);
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut lines = match client.stream(request).await {
        Ok(lines) => lines,
        Err(answer) => {
            let error = &answer.json["error"];
            return Err((word(&error["code"]), word(&error["message"])));
        }
    };
    while let Some(line) = lines.next(LONG).await.unwrap() {
        match line["type"].as_str() {
            Some("image") => return Ok(line["image"].clone()),
            Some("error") => return Err((word(&line["code"]), word(&line["message"]))),
            _ => {}
        }
    }
    panic!("the stream ended without an end");
}

fn top() -> Vec<u8> {
    Layer::new()
        .file("data/.wh.gone", b"", 0o644, (0, 0))
        .folder("opaque", 0o755, (0, 0))
        .file("opaque/.wh..wh..opq", b"", 0o644, (0, 0))
        .file("opaque/new", b"new", 0o640, (5, 6))
        .link("data/hard", "data/kept", true)
        .link("etc/link", "/etc/passwd", false)
        .with("security.capability", &CAPABILITY)
        .file("data/capable", b"x", 0o755, (0, 0))
        .with("user.note", b"mine")
        .file("data/noted", b"x", 0o644, (0, 0))
        .file("bin/set", b"x", 0o4755, (0, 0))
        .folder("app", 0o755, (0, 0))
        .end()
}

fn bottom() -> Vec<u8> {
    Layer::new()
        .folder("data", 0o755, (33, 44))
        .file("data/gone", b"gone", 0o644, (0, 0))
        .file("data/kept", b"kept", 0o644, (33, 44))
        .file("opaque/old", b"old", 0o644, (0, 0))
        .file(
            "etc/passwd",
            b"root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n",
            0o644,
            (0, 0),
        )
        .end()
}

/// The image that most tests use.
fn image() -> Image {
    let config = json!({ "Env": ["PATH=/bin", "GREETING=hello", "HOME=/root"], "WorkingDir": "/app", "User": "node" });
    Image::new(&[&kit::base(), &bottom(), &top()], &config)
}

/// One that cannot run, and is quick to make.
fn small(fill: u8) -> Image {
    // Does not compress: tests break off in the middle of it.
    let mut state = u64::from(fill) + 1;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    })
    .take(300_000)
    .collect();
    Image::new(&[&Layer::new().file("noise", &noise, 0o644, (0, 0)).end()], &json!({}))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_a_registry_is_pulled_and_runs() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let registry = Registry::start(&bed.path("storage"), "").await;
    let image = image();
    registry.push("team/app", "1", &image).await;
    let name = format!("docker://{}/team/app:1", registry.at);
    let server = bed.server().await;
    let client = server.client("oci").unwrap();

    // A create pulls what is not here.
    let sandbox = TestSandbox::create(&client, json!({ "image": name })).await;
    assert_eq!(sandbox.view["session"]["image"], name.as_str());
    let checks = [
        (
            "id -un; id -u; pwd; echo $GREETING $HOME; echo $PATH",
            "vercel-sandbox\n1000\n/app\nhello /home/vercel-sandbox\n/bin\n",
        ),
        ("stat -c '%u:%g %a %Y' /data/kept", "33:44 644 1600000000\n"),
        ("stat -c '%u:%g %a' /data /opaque/new /bin/set", "33:44 755\n5:6 640\n0:0 4755\n"),
        ("cat /etc/link | { read line; echo $line; }", "root:x:0:0::/root:/bin/sh\n"),
        ("echo yes > here; stat -c %u /app /app/here /vercel/sandbox", "1000\n1000\n1000\n"),
    ];
    for (line, said) in checks {
        assert_eq!(sandbox.sh(line).await.good().trim_end(), said.trim_end(), "{line}");
    }
    let root =
        "test ! -e /data/gone && test ! -e /opaque/old && stat -c '%h %i' /data/kept /data/hard";
    let said = sandbox.sudo(root).await.good();
    let links: Vec<&str> = said.lines().collect();
    assert_eq!(links[0], links[1]);
    assert!(links[0].starts_with("2 "), "{said}");

    // What only the mounted file shows.
    let mounts = server.data.clone().join("mounts");
    let tree = std::fs::read_dir(&mounts).unwrap().next().unwrap().unwrap().path();
    let mut value = [0u8; 64];
    let length =
        rustix::fs::getxattr(tree.join("data/capable"), "security.capability", &mut value[..]);
    assert_eq!(value[..length.unwrap()], CAPABILITY);
    let length = rustix::fs::getxattr(tree.join("data/noted"), "user.note", &mut value[..]);
    assert_eq!(&value[..length.unwrap()], b"mine");

    // By digest it is the same tree under another name; nothing is fetched.
    let pinned = format!("docker://{}/team/app@{}", registry.at, image.digest());
    let pulled = pull(&client, json!({ "image": pinned })).await.unwrap();
    assert_eq!((&pulled["new"], &pulled["fetched"]), (&json!(false), &json!(0)));
    assert_eq!(pulled["manifest"], image.digest());

    // In use: it stays. The other name is not.
    let refused = bed.cli(&["image", "rm", &name]).run();
    assert!(!refused.status.success());
    let _ = bed.cli(&["image", "rm", &pinned]).good();
    let shown = bed.cli(&["--json", "image", "inspect", &name]).json();
    assert_eq!(shown["oci"]["manifest"], image.digest());
    assert_eq!(shown["oci"]["config"]["workingDir"], "/app");
    assert_eq!(shown["usedBy"].as_array().unwrap().len(), 1);

    // Another image on the same base: only what is new comes.
    let more = Layer::new().file("more", b"more", 0o644, (0, 0)).end();
    let next = Image::new(&[&kit::base(), &more], &json!({ "Env": ["PATH=/bin"] }));
    registry.push("team/app", "2", &next).await;
    let second = format!("docker://{}/team/app:2", registry.at);
    let pulled = pull(&client, json!({ "image": second })).await.unwrap();
    assert_eq!(pulled["new"], true);
    assert_eq!(pulled["fetched"], next.pieces[2].len() as u64);

    // A tag means what it meant, until it is pulled again.
    registry.push("team/app", "1", &next).await;
    let again = TestSandbox::create(&client, json!({ "image": name })).await;
    assert_eq!(again.sh("test ! -e /more; echo $GREETING").await.good().trim_end(), "hello");
    let pulled = pull(&client, json!({ "image": name })).await.unwrap();
    assert_eq!(pulled["manifest"], next.digest());
    let newer = TestSandbox::create(&client, json!({ "image": name })).await;
    assert_eq!(newer.sh("cat /more; echo; pwd").await.good().trim_end(), "more\n/vercel/sandbox");
    // The sandbox that was there goes on with what it had.
    assert_eq!(sandbox.sh("echo $GREETING").await.good().trim_end(), "hello");
    for sandbox in [sandbox, again, newer] {
        sandbox.delete().await;
    }
    eventually("the engine to let go of its images", LONG, async || {
        let all =
            Cli::new(&["--json", "image", "ls"]).env("BIVOUAC_IMAGES", bed.path("images")).json();
        if all.as_array().unwrap().iter().all(|one| one["usedBy"] == json!([])) {
            Ok(())
        } else {
            Err(all)
        }
    })
    .await;
    let pruned = bed.cli(&["--json", "image", "prune", "--all"]).json();
    assert_eq!(pruned["images"].as_array().unwrap().len(), 3);
    assert!(bed.left().is_empty(), "{:?}", bed.left());
}

/// A certificate authority, and a certificate of it for loopback, in PEM.
fn authority() -> (String, String, String) {
    let mut params = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let ca = params.self_signed(&key).unwrap();
    let pem = ca.pem();
    let issuer = rcgen::Issuer::new(params, key);
    let leaf_key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&leaf_key, &issuer).unwrap();
    (pem, leaf.pem(), leaf_key.serialize_pem())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_registry_wants_the_right_login() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let image = small(1);
    let open = Registry::start(&bed.path("storage"), "").await;
    open.push("team/app", "1", &image).await;
    drop(open);
    let (ca, certificate, key) = authority();
    for (name, text) in [("ca.pem", &ca), ("cert.pem", &certificate), ("key.pem", &key)] {
        std::fs::write(bed.path(name), text).unwrap();
    }
    // bcrypt of "pw".
    let users = "me:$2y$05$abcdefghijklmnopqrstuuHIrMEWpUCQe2YqFR3sXwQ75u4od..9q\n";
    std::fs::write(bed.path("users"), users).unwrap();
    let more = format!(
        "  tls: {{certificate: {}, key: {}}}\nauth: {{htpasswd: {{realm: test, path: {}}}}}\n",
        bed.path("cert.pem").display(),
        bed.path("key.pem").display(),
        bed.path("users").display()
    );
    let registry = Registry::start(&bed.path("storage"), &more).await;
    let name = format!("docker://{}/team/app:1", registry.at);
    {
        let server = bed.server().await;
        let client = server.client("oci").unwrap();
        let (code, message) = pull(&client, json!({ "image": name })).await.unwrap_err();
        assert_eq!(code, "image_unavailable");
        assert!(message.contains("certificate") && message.contains("--extra-ca"), "{message}");
    }
    let ca = bed.path("ca.pem");
    let server = bed.builder().arg("--extra-ca").arg(ca.to_str().unwrap()).start().await.unwrap();
    let client = server.client("oci").unwrap();
    let login = |user: &str, password: &str| json!({ "image": name, "username": user, "password": password });
    for body in [json!({ "image": name }), login("me", "wrong"), login("other", "pw")] {
        let (code, message) = pull(&client, body.clone()).await.unwrap_err();
        assert_eq!(code, "image_denied", "{body}: {message}");
        assert!(!message.contains("wrong"), "{message}");
    }
    assert!(TestSandbox::try_create(&client, json!({ "image": name })).await.is_err());
    assert!(bed.left().is_empty(), "{:?}", bed.left());
    let pulled = pull(&client, login("me", "pw")).await.unwrap();
    assert_eq!(pulled["new"], true);

    // By a secret of the project, and by the caller's file.
    let _ = bed.cli(&["image", "rm", &name]).good();
    let _ = client.put("/v2/secrets/REGISTRY", &json!({ "value": "me:pw" })).await.ok();
    let by_secret = json!({ "image": name, "secret": "REGISTRY" });
    assert_eq!(pull(&client, by_secret).await.unwrap()["new"], true);
    let (code, _) = pull(&client, json!({ "image": name, "secret": "NONE" })).await.unwrap_err();
    assert_eq!(code, "bad_request");
    let _ = bed.cli(&["image", "rm", &name]).good();
    let mut auths = serde_json::Map::new();
    auths.insert(registry.at.clone(), json!({ "auth": STANDARD.encode("me:pw") }));
    let file = bed.path("auth.json");
    std::fs::write(&file, json!({ "auths": auths }).to_string()).unwrap();
    let file = file.to_str().unwrap();
    let pulled = server.cli(&["--json", "image", "pull", &name, "--auth-file", file]).json();
    assert_eq!(pulled["new"], true);
    // Nothing of it is kept.
    for place in [server.data.clone(), bed.path("images")] {
        for text in ["me:pw".to_owned(), STANDARD.encode("me:pw")] {
            let found = std::process::Command::new("grep")
                .args([
                    "-rlF",
                    "--exclude=pool.btrfs",
                    "--exclude-dir=mounts",
                    "--exclude-dir=pool",
                    &text,
                ])
                .arg(&place)
                .output()
                .unwrap();
            assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_lies_makes_no_image() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let server = bed.server().await;
    let client = server.client("oci").unwrap();
    let image = small(2);
    let layer = sha256(&image.pieces[1]);
    let is_layer = move |path: &str| path.ends_with(&layer);
    let bytes = image.pieces[1].clone();
    let lies: Vec<(&str, &str, Lie)> = vec![
        ("other bytes", "those bytes are", {
            let (is_layer, mut bytes) = (is_layer.clone(), bytes.clone());
            bytes[1000] ^= 1;
            Box::new(move |path| is_layer(path).then(|| Reply::ok(&bytes)))
        }),
        ("too few", "another size", {
            let (is_layer, bytes) = (is_layer.clone(), bytes.clone());
            Box::new(move |path| is_layer(path).then(|| Reply::ok(&bytes[..1000])))
        }),
        ("too many", "another size", {
            let (is_layer, bytes) = (is_layer.clone(), bytes.clone());
            Box::new(move |path| is_layer(path).then(|| Reply::ok(&[&bytes[..], b"x"].concat())))
        }),
        ("none", "has not", {
            let is_layer = is_layer.clone();
            Box::new(move |path| is_layer(path).then(|| Reply::status(404)))
        }),
        ("another manifest", "sent something else", {
            let manifest = small(9).manifest;
            Box::new(move |path| path.contains("/manifests/").then(|| Reply::ok(&manifest)))
        }),
        ("another machine", "linux/s390x", {
            let other = Image::of(&[b""], &json!({}), "s390x");
            Box::new(move |path| {
                let config = path.ends_with(&sha256(&other.pieces[0]));
                let reply =
                    if path.contains("/manifests/latest") { Some(&other.manifest) } else { None };
                reply.or(config.then_some(&other.pieces[0])).map(|body| Reply::ok(body))
            })
        }),
        ("an index of other machines", "linux/s390x", {
            let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [{ "digest": image.digest(),
                "size": 1, "platform": { "os": "linux", "architecture": "s390x" } }] });
            Box::new(move |path| {
                path.contains("/manifests/latest").then(|| Reply::ok(index.to_string().as_bytes()))
            })
        }),
        ("a layer that is none of the configuration's", "configuration names", {
            let other = small(3);
            let mut manifest: Value = serde_json::from_slice(&image.manifest).unwrap();
            manifest["layers"][0]["digest"] = sha256(&other.pieces[1]).into();
            manifest["layers"][0]["size"] = other.pieces[1].len().into();
            Box::new(move |path| {
                if path.contains("/manifests/latest") {
                    return Some(Reply::ok(manifest.to_string().as_bytes()));
                }
                path.ends_with(&sha256(&other.pieces[1])).then(|| Reply::ok(&other.pieces[1]))
            })
        }),
    ];
    for (what, said, lie) in lies {
        let liar = Liar::about(&image, move |asked| lie(&asked.path));
        let version =
            if what == "another manifest" { format!("@{}", image.digest()) } else { String::new() };
        let name = format!("docker://{}/a{version}", liar.at);
        let (code, message) = pull(&client, json!({ "image": name })).await.unwrap_err();
        assert!(code == "image_unavailable" || code == "image_unfit", "{what}: {code} {message}");
        assert!(message.contains(said), "{what}: {message}");
        assert!(bed.left().is_empty(), "{what}: {:?}", bed.left());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_off_goes_on() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let image = small(4);
    let layer = sha256(&image.pieces[1]);
    let (length, piece) = (image.pieces[1].len(), layer.clone());
    let server = bed.server().await;
    let client = server.client("oci").unwrap();
    let copy = image.clone();
    let liar = Liar::about(&image, move |asked| {
        let first = asked.header("range").is_none();
        (asked.path.ends_with(&piece) && first)
            .then(|| Reply { cut: Some(100_000), ..truth(&copy, asked) })
    });
    let name = format!("docker://{}/a", liar.at);
    let pulled = pull(&client, json!({ "image": name })).await.unwrap();
    assert_eq!(pulled["new"], true);
    assert_eq!(pulled["fetched"], length as u64, "no byte twice");
    let ranges: Vec<_> =
        liar.asked().iter().filter_map(|a| a.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges.len(), 1, "{ranges:?}");
    assert!(liar.asked().iter().any(|asked| asked.path.ends_with(&layer)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_killed_leaves_nothing_and_goes_on() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let image = small(5);
    let piece = sha256(&image.pieces[1]);
    let copy = image.clone();
    let liar = Liar::about(&image, move |asked| {
        let first = asked.header("range").is_none();
        (asked.path.ends_with(&piece) && first)
            .then(|| Reply { stall: Some(120_000), ..truth(&copy, asked) })
    });
    let name = format!("docker://{}/a", liar.at);
    let mut server = bed.server().await;
    let client = server.client("oci").unwrap();
    let waiting = tokio::spawn({
        let (client, name) = (client.clone(), name.clone());
        async move {
            let request = client.request(Method::POST, "/api/bivouac/v1/images/pull");
            let _ = client.try_send(request.json(&json!({ "image": name }))).await;
        }
    });
    let part = bed.path("images/blobs").join(sha256(&image.pieces[1]).replace(':', "-") + ".part");
    eventually("the half of a layer", Duration::from_secs(60), async || {
        if std::fs::metadata(&part).is_ok_and(|meta| meta.len() >= 120_000) {
            Ok(())
        } else {
            Err("not yet")
        }
    })
    .await;
    server.kill9().unwrap();
    let _ = waiting.await;
    assert!(bed.left().is_empty(), "{:?}", bed.left());
    server.restart().await.unwrap();
    let client = server.client("oci").unwrap();
    let pulled = pull(&client, json!({ "image": name })).await.unwrap();
    assert_eq!(pulled["fetched"], image.pieces[1].len() as u64 - 120_000);
    assert!(bed.left().iter().all(|name| !name.ends_with(".tmp")), "{:?}", bed.left());
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_go_to_whom_they_are_for() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let server = bed.server().await;
    let client = server.client("oci").unwrap();
    let image = small(6);
    let copy = image.clone();
    let elsewhere = Liar::start(move |asked| truth(&copy, asked));
    let copy = image.clone();
    let store = elsewhere.at.clone();
    let liar = Liar::start(move |asked| {
        let me = asked.header("host").unwrap_or_default().to_owned();
        if asked.path.starts_with("/token") {
            let right = asked.header("authorization") == Some("Basic bWU6cHc=");
            return if right { Reply::ok(br#"{"token":"t0ken"}"#) } else { Reply::status(401) };
        }
        if asked.header("authorization") != Some("Bearer t0ken") {
            let scope = "repository:a:pull,push,delete registry:catalog:*";
            let challenge =
                format!("Bearer realm=\"http://{me}/token\",service=\"here\",scope=\"{scope}\"");
            return Reply { headers: vec![("www-authenticate", challenge)], ..Reply::status(401) };
        }
        if asked.path.contains("/blobs/") {
            let to = format!("http://{store}{}", asked.path);
            return Reply { headers: vec![("location", to)], ..Reply::status(307) };
        }
        truth(&copy, asked)
    });
    let name = format!("docker://{}/a", liar.at);
    let (code, _) = pull(&client, json!({ "image": name })).await.unwrap_err();
    assert_eq!(code, "image_denied");
    let login = json!({ "image": name, "username": "me", "password": "pw" });
    pull(&client, login).await.unwrap();
    assert!(elsewhere.asked().iter().all(|asked| asked.header("authorization").is_none()));
    assert!(elsewhere.asked().len() >= 2);
    let tokens: Vec<_> =
        liar.asked().into_iter().filter(|a| a.path.starts_with("/token")).collect();
    assert!(tokens.iter().all(|a| a.path.contains("scope=repository:a:pull&")), "{tokens:?}");
    // A token, once it is there, takes the place of the password.
    for asked in liar.asked().iter().filter(|a| !a.path.starts_with("/token")) {
        assert!(
            !asked.header("authorization").unwrap_or_default().starts_with("Basic"),
            "{asked:?}"
        );
    }

    // What a registry names is not asked when it is a metadata service, or needs the login over plain HTTP.
    for (to, said) in
        [("https://169.254.169.254/x", "never asked"), ("http://example.invalid/x", "https only")]
    {
        let copy = image.clone();
        let liar = Liar::about(&copy, move |asked| {
            asked
                .path
                .contains("/blobs/")
                .then(|| Reply { headers: vec![("location", to.to_owned())], ..Reply::status(307) })
        });
        // Its pieces are here already.
        let _ = server
            .cli(&["image", "prune", "--all"])
            .env("BIVOUAC_IMAGES", bed.path("images"))
            .good();
        let name = format!("docker://{}/b", liar.at);
        let (code, message) = pull(&client, json!({ "image": name })).await.unwrap_err();
        assert_eq!(code, "image_unavailable");
        assert!(message.contains(said), "{message}");
    }
    let realm = Liar::start(|_| Reply {
        headers: vec![("www-authenticate", "Bearer realm=\"http://example.invalid/t\"".to_owned())],
        ..Reply::status(401)
    });
    let login =
        json!({ "image": format!("docker://{}/a", realm.at), "username": "me", "password": "pw" });
    let (_, message) = pull(&client, login).await.unwrap_err();
    assert!(message.contains("over plain http"), "{message}");
    // Neither is whom a client names.
    let (code, message) =
        pull(&client, json!({ "image": "docker://169.254.169.254/a" })).await.unwrap_err();
    assert_eq!(code, "image_unavailable");
    assert!(message.contains("never asked"), "{message}");
    for bad in [
        "example.com/a",
        "docker://nohost",
        "docker://example.com/A",
        "docker://me:pw@example.com/a",
    ] {
        let (code, _) = pull(&client, json!({ "image": bad })).await.unwrap_err();
        assert_eq!(code, "bad_request", "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pull_serves_all_who_ask() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let server = bed.server().await;
    let client = server.client("oci").unwrap();
    let image = small(7);
    let copy = image.clone();
    let liar = Liar::start(move |asked| {
        std::thread::sleep(Duration::from_millis(50));
        truth(&copy, asked)
    });
    let name = format!("docker://{}/a", liar.at);
    let all = (0..8).map(|_| {
        let (client, name) = (client.clone(), name.clone());
        tokio::spawn(async move { pull(&client, json!({ "image": name })).await })
    });
    let mut references = std::collections::BTreeSet::new();
    for one in all.collect::<Vec<_>>() {
        references.insert(one.await.unwrap().unwrap()["reference"].to_string());
    }
    assert_eq!(references.len(), 1);
    let layer = sha256(&image.pieces[1]);
    let fetched = liar.asked().iter().filter(|asked| asked.path.ends_with(&layer)).count();
    assert_eq!(fetched, 1);
}

#[test]
fn the_same_file_makes_the_same_image() {
    let _lock = shared().unwrap();
    let bed = Bed::new();
    let image = small(8);
    image.layout(&bed.path("layout"), "app:1");
    let import = |folder: &str, from: &Path, more: &[&str]| {
        let mut args = vec!["--json", "image", "import", from.to_str().unwrap()];
        args.extend(more);
        Cli::new(&args).env("BIVOUAC_IMAGES", bed.path(folder)).json()
    };
    let first = import("one", &bed.path("layout"), &[]);
    assert_eq!(first["name"], "app:1");
    assert_eq!(first["oci"]["manifest"], image.digest());
    let second = import("two", &bed.path("layout"), &[]);
    assert_eq!(first["digest"], second["digest"]);
    // The same as docker's archive, compressed, under another name.
    let mut out =
        tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    let list = json!([{ "Config": "config.json", "RepoTags": ["app:1"], "Layers": ["layer.tar"] }]);
    for (name, text) in [
        ("layer.tar", &image.pieces[1]),
        ("config.json", &image.pieces[0]),
        ("manifest.json", &list.to_string().into_bytes()),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        out.append_data(&mut header, name, text.as_slice()).unwrap();
    }
    let saved = bed.path("saved.tar.gz");
    std::fs::write(&saved, out.into_inner().unwrap().finish().unwrap()).unwrap();
    let third = import("one", &saved, &["--name", "other"]);
    assert_eq!(third["digest"], first["digest"]);
    // By standard input; what is cut short makes none.
    let bytes = std::fs::read(&saved).unwrap();
    let piped = |bytes: &[u8]| {
        let cli = Cli::new(&["--json", "image", "import", "-"]).stdin(bytes.to_vec());
        cli.env("BIVOUAC_IMAGES", bed.path("three")).run()
    };
    assert!(piped(&bytes).status.success());
    assert!(!piped(&bytes[..bytes.len() / 2]).status.success());
    let left = std::fs::read_dir(bed.path("three")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> =
        left.map(|n| n.to_string_lossy().into_owned()).filter(|n| n.ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
    for bad in ["host", "universal", "node24", "A"] {
        let refused = Cli::new(&["image", "import", saved.to_str().unwrap(), "--name", bad]);
        assert!(!refused.env("BIVOUAC_IMAGES", bed.path("one")).run().status.success(), "{bad}");
    }
}
