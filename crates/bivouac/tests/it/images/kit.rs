//! What tests of images need: images made on the spot, Debian's registry, and a registry that lies.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bivouac_runtime::image::blobs::sha256;
use bivouac_testkit::eventually;
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const PLAIN_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// `cap_net_bind_service=ep`, as the kernel keeps it.
pub(crate) const CAPABILITY: [u8; 20] =
    [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A layer in the making.
pub(crate) struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    pub(crate) fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn head(kind: tar::EntryType, mode: u32, owner: (u64, u64)) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner.0);
        header.set_gid(owner.1);
        header.set_mtime(1_600_000_000);
        header.set_size(0);
        header
    }

    pub(crate) fn file(mut self, name: &str, text: &[u8], mode: u32, owner: (u64, u64)) -> Self {
        let mut header = Self::head(tar::EntryType::Regular, mode, owner);
        header.set_size(text.len() as u64);
        self.0.append_data(&mut header, name, text).unwrap();
        self
    }

    pub(crate) fn with(mut self, xattr: &str, value: &[u8]) -> Self {
        let key = format!("SCHILY.xattr.{xattr}");
        self.0.append_pax_extensions([(key.as_str(), value)]).unwrap();
        self
    }

    pub(crate) fn folder(mut self, name: &str, mode: u32, owner: (u64, u64)) -> Self {
        let mut header = Self::head(tar::EntryType::Directory, mode, owner);
        self.0.append_data(&mut header, name, &[][..]).unwrap();
        self
    }

    pub(crate) fn link(mut self, name: &str, target: &str, hard: bool) -> Self {
        let kind = if hard { tar::EntryType::Link } else { tar::EntryType::Symlink };
        let mut header = Self::head(kind, 0o777, (0, 0));
        self.0.append_link(&mut header, name, target).unwrap();
        self
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// A shell and a few programs of the host, with what they are linked to: a tree that runs.
pub(crate) fn base() -> Vec<u8> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (name, path) in [
        ("bin/sh", "/bin/dash"),
        ("bin/cat", "/bin/cat"),
        ("bin/stat", "/usr/bin/stat"),
        ("bin/id", "/usr/bin/id"),
        ("bin/env", "/usr/bin/env"),
    ] {
        files.insert(name.to_owned(), path.into());
        let said = Command::new("ldd").arg(path).output().unwrap();
        for word in String::from_utf8_lossy(&said.stdout).split_whitespace() {
            if let Some(name) = word.strip_prefix('/') {
                files.insert(name.to_owned(), word.into());
            }
        }
    }
    let mut layer = Layer::new();
    for (name, path) in files {
        layer = layer.file(&name, &std::fs::read(&path).unwrap(), 0o755, (0, 0));
    }
    layer.end()
}

/// An image: its pieces by digest, and the manifest.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) pieces: Vec<Vec<u8>>,
    pub(crate) manifest: Vec<u8>,
}

impl Image {
    pub(crate) fn new(layers: &[&[u8]], config: &Value) -> Self {
        Self::of(layers, config, &architecture())
    }

    pub(crate) fn of(layers: &[&[u8]], config: &Value, architecture: &str) -> Self {
        let diff_ids: Vec<String> = layers.iter().map(|layer| sha256(layer)).collect();
        let config = json!({ "os": "linux", "architecture": architecture, "config": config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids } });
        let mut pieces = vec![config.to_string().into_bytes()];
        let mut described = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            // Both ways of keeping a layer.
            let (bytes, kind) = if number % 2 == 0 {
                let mut out = GzEncoder::new(Vec::new(), Compression::fast());
                out.write_all(layer).unwrap();
                (out.finish().unwrap(), LAYER)
            } else {
                (layer.to_vec(), PLAIN_LAYER)
            };
            described
                .push(json!({ "mediaType": kind, "digest": sha256(&bytes), "size": bytes.len() }));
            pieces.push(bytes);
        }
        let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST,
            "config": { "mediaType": CONFIG, "digest": sha256(&pieces[0]), "size": pieces[0].len() },
            "layers": described });
        Self { pieces, manifest: manifest.to_string().into_bytes() }
    }

    pub(crate) fn digest(&self) -> String {
        sha256(&self.manifest)
    }

    /// As an OCI layout in a folder.
    pub(crate) fn layout(&self, folder: &Path, tag: &str) {
        let blobs = folder.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        for piece in self.pieces.iter().chain([&self.manifest]) {
            std::fs::write(blobs.join(&sha256(piece)["sha256:".len()..]), piece).unwrap();
        }
        let index = json!({ "schemaVersion": 2, "manifests": [{ "mediaType": MANIFEST,
            "digest": self.digest(), "size": self.manifest.len(),
            "annotations": { "org.opencontainers.image.ref.name": tag } }] });
        std::fs::write(folder.join("index.json"), index.to_string()).unwrap();
        std::fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }
}

pub(crate) fn architecture() -> String {
    bivouac_types::oci::Platform::ours().architecture
}

/// Debian's docker-registry on a port of its own.
pub(crate) struct Registry {
    child: Child,
    pub(crate) at: String,
    _folder: Option<tempfile::TempDir>,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        let _ = kill_process(pid, Signal::KILL);
        let _ = self.child.wait();
    }
}

/// The program; script/test unpacks it beside the build, so that no service is started for it.
fn program() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/registry");
    let places = [
        std::env::var_os("BIVOUAC_TEST_REGISTRY").map(PathBuf::from),
        Some(root.join("usr/bin/docker-registry")),
        Some("/usr/bin/docker-registry".into()),
    ];
    places.into_iter().flatten().find(|path| path.is_file()).expect(
        "Debian's docker-registry is missing: script/test fetches it, or set BIVOUAC_TEST_REGISTRY",
    )
}

impl Registry {
    pub(crate) async fn start(storage: &Path, more: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let at = format!("127.0.0.1:{port}");
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: {at}\n  secret: test\n{more}",
            storage.display()
        );
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(program())
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let registry = Self { child, at: at.clone(), _folder: Some(folder) };
        eventually("the registry", Duration::from_secs(20), async || {
            TcpStream::connect(&at).map(drop)
        })
        .await;
        registry
    }

    /// Pushes an image by the registry's own calls.
    pub(crate) async fn push(&self, repository: &str, tag: &str, image: &Image) {
        let http = reqwest::Client::new();
        let base = format!("http://{}/v2/{repository}", self.at);
        for piece in &image.pieces {
            let begun = http.post(format!("{base}/blobs/uploads/")).send().await.unwrap();
            let place = begun.headers()["location"].to_str().unwrap().to_owned();
            let sign = if place.contains('?') { '&' } else { '?' };
            let put = http.put(format!("{place}{sign}digest={}", sha256(piece)));
            assert_eq!(put.body(piece.clone()).send().await.unwrap().status(), 201);
        }
        let put = http.put(format!("{base}/manifests/{tag}")).header("content-type", MANIFEST);
        let done = put.body(image.manifest.clone()).send().await.unwrap();
        assert_eq!(done.status(), 201, "{}", done.text().await.unwrap());
    }
}

/// A request to the lying registry.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    headers: BTreeMap<String, String>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What it answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// So many bytes of the body, and then the end of the connection.
    pub(crate) cut: Option<usize>,
    /// So many bytes of the body, and then silence.
    pub(crate) stall: Option<usize>,
}

impl Reply {
    pub(crate) fn ok(body: &[u8]) -> Self {
        Self { status: 200, body: body.to_vec(), ..Self::default() }
    }

    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }
}

/// A registry whose answers a test writes.
pub(crate) struct Liar {
    pub(crate) at: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

type Answers = dyn Fn(&Asked) -> Reply + Send + Sync;

impl Liar {
    pub(crate) fn start(answers: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (seen, answers): (_, Arc<Answers>) = (Arc::clone(&asked), Arc::new(answers));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, answers) = (Arc::clone(&seen), Arc::clone(&answers));
                std::thread::spawn(move || answer(stream, &seen, &*answers));
            }
        });
        Self { at, asked }
    }

    /// One that tells the truth about an image, but for what `lie` answers.
    pub(crate) fn about(
        image: &Image,
        lie: impl Fn(&Asked) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let image = image.clone();
        Self::start(move |asked| lie(asked).unwrap_or_else(|| truth(&image, asked)))
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

/// What an honest registry says.
pub(crate) fn truth(image: &Image, asked: &Asked) -> Reply {
    if asked.path == "/v2/" {
        return Reply::ok(b"{}");
    }
    let last = asked.path.rsplit('/').next().unwrap();
    if asked.path.contains("/manifests/") {
        return Reply::ok(&image.manifest);
    }
    let Some(piece) = image.pieces.iter().find(|piece| sha256(piece) == last) else {
        return Reply::status(404);
    };
    let from = asked
        .header("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    match from {
        None => Reply::ok(piece),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", piece.len() - 1, piece.len());
            let headers = vec![("content-range", range)];
            Reply { status: 206, headers, body: piece[from..].to_vec(), ..Reply::default() }
        }
    }
}

fn answer(mut stream: TcpStream, seen: &Mutex<Vec<Asked>>, answers: &Answers) {
    let mut head = Vec::new();
    let mut byte = [0u8; 1];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            // A TLS hello: this registry speaks none, and says so as servers do.
            Ok(1) if head.is_empty() && byte[0] == 0x16 => {
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let _ = std::io::copy(&mut stream, &mut std::io::sink());
                return;
            }
            Ok(1) => head.push(byte[0]),
            _ => return,
        }
    }
    let head = String::from_utf8_lossy(&head);
    let mut lines = head.lines();
    let path = lines.next().unwrap_or_default().split(' ').nth(1).unwrap_or_default().to_owned();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    let asked = Asked { path, headers };
    seen.lock().unwrap().push(asked.clone());
    let reply = answers(&asked);
    let told = reply.headers.iter().any(|(name, _)| *name == "content-length");
    let mut text = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    if !told {
        text.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    let part = reply.cut.or(reply.stall).unwrap_or(reply.body.len()).min(reply.body.len());
    let _ = stream.write_all(text.as_bytes());
    let _ = stream.write_all(&reply.body[..part]);
    let _ = stream.flush();
    if reply.stall.is_some() {
        // Until the other side goes.
        let _ = stream.read(&mut byte);
    }
}
