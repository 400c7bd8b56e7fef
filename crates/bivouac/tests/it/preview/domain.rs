//! `--preview-domain`: names below it, TLS of our own with HTTP/2, and plain behind somebody else's.

use std::sync::Arc;

use bivouac_testkit::{Client, LONG, TestSandbox, TestServer, eventually, shared};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const DOMAIN: &str = "boxes.example";

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.renew();
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// A new certificate.
    fn renew(&self) {
        let pair = rcgen::generate_simple_self_signed([format!("*.{DOMAIN}")]).unwrap();
        std::fs::write(self.path("key.pem"), pair.signing_key.serialize_pem()).unwrap();
        std::fs::write(self.path("cert.pem"), pair.cert.pem()).unwrap();
    }

    async fn connect(
        &self,
        port: u16,
        name: &str,
        protocol: &str,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = rustls::RootCertStore::empty();
        let pem = std::fs::read(self.path("cert.pem")).unwrap();
        roots.add(CertificateDer::from_pem_slice(&pem).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn site(client: &Client, server: &TestServer) -> (TestSandbox, String) {
    let body = json!({ "name": "site", "persistent": false, "ports": [3000] });
    let sandbox = TestSandbox::create(client, body).await;
    super::start_app(&sandbox, 3000, "127.0.0.1").await;
    let label = sandbox.view["routes"][0]["subdomain"].as_str().unwrap();
    let name = format!("{label}.{DOMAIN}");
    // Behind somebody else's TLS: plain, on the ordinary address.
    let told = eventually("it answers", LONG, async || {
        let got = reqwest::Client::new()
            .get(format!("{}/echo", server.url))
            .header("host", &name)
            .header("x-bivouac-token", &server.token)
            .send()
            .await
            .unwrap();
        if got.status() == 200 { Ok(got.json::<Value>().await.unwrap()) } else { Err(got.status()) }
    })
    .await;
    let head = told["head"].to_string();
    assert!(head.contains("x-forwarded-proto: https"), "{head}");
    (sandbox, name)
}

#[tokio::test]
async fn names_below_a_domain_over_tls() {
    let _lock = shared().unwrap();
    let (folder, port) = (Folder::new(), free_port());
    let server = TestServer::builder()
        .arg("--preview-domain")
        .arg(DOMAIN)
        .arg("--preview-listen")
        .arg(format!("127.0.0.1:{port}"))
        .arg("--preview-cert")
        .arg(folder.path("cert.pem"))
        .arg("--preview-key")
        .arg(folder.path("key.pem"))
        .start()
        .await
        .unwrap();
    let client = server.client("local").unwrap();
    let (sandbox, name) = site(&client, &server).await;
    let url = sandbox.view["routes"][0]["url"].as_str().unwrap();
    assert_eq!(url, format!("https://{name}:{port}"));
    let token = server.token.as_str();
    let get = |target: &str, token: Option<&str>| {
        let mut request = hyper::Request::builder().uri(target);
        if let Some(token) = token {
            request = request.header("x-bivouac-token", token);
        }
        request.body(Empty::<Bytes>::new()).unwrap()
    };

    // HTTP/2: 200 streams on one connection.
    let stream = folder.connect(port, &name, "h2").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut two, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    let driver = tokio::spawn(connection);
    let base = format!("https://{name}:{port}");
    let asks: Vec<_> = (0..200)
        .map(|number| two.send_request(get(&format!("{base}/echo?{number}"), Some(token))))
        .collect();
    for (number, answer) in futures_util::future::join_all(asks).await.into_iter().enumerate() {
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 200);
        let told: Value =
            serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes())
                .unwrap();
        assert_eq!(told["head"][0], format!("GET /echo?{number} HTTP/1.1"));
        let head = told["head"].to_string();
        assert!(head.contains(&format!("host: {name}:{port}")), "{head}");
        assert!(
            head.contains("x-forwarded-proto: https") && !head.contains("bivouac-token"),
            "{head}"
        );
    }
    let closed = two.send_request(get(&format!("{base}/echo"), None)).await.unwrap();
    assert_eq!(closed.status(), 401);
    // Neither the API nor anything else has a name there.
    for other in
        [format!("https://{DOMAIN}/health"), format!("https://127.0.0.1:{port}/api/openapi.json")]
    {
        let answer = two.send_request(get(&other, Some(token))).await.unwrap();
        assert_eq!(answer.status(), 421, "{other}");
    }
    drop(two);
    driver.abort();

    // HTTP/1.1, a link, its cookie.
    let stream = folder.connect(port, &name, "http/1.1").await.unwrap();
    let (mut one, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let path = "/api/bivouac/v1/sandboxes/site/ports/3000/link";
    let link = client.post(path, &json!({})).await.ok();
    let query =
        link["url"].as_str().unwrap().strip_prefix(&format!("{base}/?")).unwrap().to_owned();
    let request = |target: &str, cookie: &str| {
        hyper::Request::builder()
            .uri(target)
            .header("host", &name)
            .header("cookie", cookie)
            .body(Full::<Bytes>::default())
            .unwrap()
    };
    let answer = one.send_request(request(&format!("/x?{query}"), "a=1")).await.unwrap();
    assert_eq!(answer.status(), 302);
    assert_eq!(answer.headers()["location"], format!("https://{name}/x"));
    let cookie = answer.headers()["set-cookie"].to_str().unwrap().to_owned();
    assert!(cookie.ends_with("; Secure"), "{cookie}");
    one.ready().await.unwrap();
    let pair = cookie.split(';').next().unwrap();
    assert_eq!(one.send_request(request("/echo", pair)).await.unwrap().status(), 200);
    driver.abort();

    // The operator's new certificate is taken without a restart; the client knows only that one.
    folder.renew();
    let _ = eventually("the new certificate is in use", LONG, async || {
        folder.connect(port, &name, "h2").await.map_err(|error| error.to_string())
    })
    .await;
    let _ = sandbox.delete().await.ok();
}
