//! The variables, the installed file, and the shim itself under a real Node.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse as _, Redirect, Response};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::sync::Notify;

use super::*;

fn settings() -> Settings {
    Settings {
        url: "http://127.0.0.1:7070/".to_owned(),
        token: "it's $secret".to_owned(),
        team: "local".to_owned(),
        project: "my-project".to_owned(),
    }
}

fn claims(jwt: &str) -> Value {
    let parts: Vec<&str> = jwt.split('.').collect();
    assert_eq!(parts.len(), 3, "{jwt}");
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(parts[1]).unwrap()).unwrap()
}

#[test]
fn a_shell_reads_back_what_was_meant() {
    let text = render(
        &settings(),
        Format::Sh,
        Some("--trace-warnings"),
        Way::Shim(Path::new("/a b/s.mjs")),
    );
    #[expect(clippy::disallowed_methods, reason = "a real shell is the judge of quoting")]
    let output = std::process::Command::new("sh")
        .env_clear()
        .args(["-c", "eval \"$1\"; unset PWD OLDPWD SHLVL _; export -p", "sh", &text])
        .output()
        .unwrap();
    let seen = String::from_utf8(output.stdout).unwrap();
    let json: BTreeMap<String, String> = serde_json::from_str(&render(
        &settings(),
        Format::Json,
        Some("--trace-warnings"),
        Way::Shim(Path::new("/a b/s.mjs")),
    ))
    .unwrap();
    assert_eq!(json.len(), 9);
    assert_eq!(json["BIVOUAC_URL"], "http://127.0.0.1:7070");
    assert_eq!(json["BIVOUAC_TOKEN"], "it's $secret");
    assert_eq!(json["NODE_OPTIONS"], "--trace-warnings --import=file:///a%20b/s.mjs");
    assert_eq!(json["VERCEL_OIDC_TOKEN"], json["VERCEL_AUTH_TOKEN"]);
    assert_eq!(
        claims(&json["VERCEL_OIDC_TOKEN"]),
        json!({"owner_id": "local", "project_id": "my-project", "token": "it's $secret"})
    );
    #[expect(clippy::disallowed_methods, reason = "a real shell is the judge of quoting")]
    let token = std::process::Command::new("sh")
        .args(["-c", "eval \"$1\"; printf %s \"$BIVOUAC_TOKEN\"", "sh", &text])
        .output()
        .unwrap();
    assert_eq!(token.stdout, b"it's $secret");
    assert_eq!(seen.lines().filter(|l| l.starts_with("export ")).count(), 9, "{seen}");
}

#[test]
fn with_certificates_there_is_no_shim() {
    let trust = trust::Trust { extra: "/c/extra.pem".into(), bundle: "/c/bundle.pem".into() };
    let variables = |node_options: Option<&str>| -> BTreeMap<String, String> {
        let text = render(&settings(), Format::Json, node_options, Way::Trust(&trust));
        serde_json::from_str(&text).unwrap()
    };
    let plain = variables(Some("--trace-warnings"));
    assert_eq!(plain["NODE_EXTRA_CA_CERTS"], "/c/extra.pem");
    assert_eq!(plain["SSL_CERT_FILE"], "/c/bundle.pem");
    assert!(!plain.contains_key("NODE_OPTIONS"), "the caller's own are left alone");
    let shimmed = variables(Some("--trace-warnings --import=file:///x/bivouac/shim-0.mjs"));
    assert_eq!(shimmed["NODE_OPTIONS"], "--trace-warnings");
}

#[test]
fn the_import_is_there_once() {
    let shim = Path::new("/home/u/.cache/bivouac/shim-0123456789abcdef.mjs");
    let once = with_import("", shim);
    assert_eq!(once, "--import=file:///home/u/.cache/bivouac/shim-0123456789abcdef.mjs");
    assert_eq!(with_import(&once, shim), once);
    let older = "--max-old-space-size=1 --import=file:///x/bivouac/shim-0.mjs --import=./own.mjs";
    assert_eq!(
        with_import(older, shim),
        format!("--max-old-space-size=1 --import=./own.mjs {once}")
    );
    let quoted = r#"--require "a  b.cjs""#;
    assert_eq!(with_import(quoted, shim), format!("{quoted} {once}"));
}

#[test]
fn the_cache_folder() {
    let with = |pairs: &[(&str, &str)]| {
        let map: BTreeMap<String, String> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        default_cache_dir(|name| map.get(name).cloned())
    };
    assert_eq!(with(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")]), Some("/c".into()));
    assert_eq!(with(&[("XDG_CACHE_HOME", "c"), ("HOME", "/h")]), Some("/h/.cache".into()));
    assert_eq!(with(&[("XDG_CACHE_HOME", "")]), None);
    assert!(install_shim(None).is_err());
}

#[test]
fn the_shim_is_installed_whole_and_mended() {
    let cache = tempfile::tempdir().unwrap();
    let path = install_shim(Some(cache.path())).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), SHIM);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    fs::write(&path, "half").unwrap();
    assert_eq!(install_shim(Some(cache.path())).unwrap(), path);
    assert_eq!(fs::read_to_string(&path).unwrap(), SHIM);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
}

/// Tells what arrived: `method host path body`, plus a few odd paths.
async fn echo(request: Request) -> Response {
    let host = request.headers()[header::HOST].to_str().unwrap().to_owned();
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let length = request.headers().get(header::CONTENT_LENGTH).cloned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.to_vec()).unwrap();
    match uri.path() {
        "/moved" => Redirect::to("/there").into_response(),
        "/gzip" => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            io::Write::write_all(&mut gzip, b"unpacked").unwrap();
            ([(header::CONTENT_ENCODING, "gzip")], gzip.finish().unwrap()).into_response()
        }
        "/api/slow" => {
            // Silent for longer than the limit that the test gives to undici's global dispatcher.
            let later = futures_util::stream::once(async {
                tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
                Ok::<_, io::Error>(Bytes::from_static(b"late"))
            });
            Body::from_stream(later).into_response()
        }
        _ => format!("{method} {host} {uri} [{body}] {length:?}").into_response(),
    }
}

/// Runs a script under Node with the shim, against a server that tells what arrived.
async fn under_node(script: &str) -> (u16, String) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (stop, stopped) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let server = {
        let (stop, stopped) = (Arc::clone(&stop), Arc::clone(&stopped));
        tokio::spawn(async move {
            let app = Router::new().fallback(echo);
            crate::http::serve(listener, None, app, async move { stop.notified().await }).await;
            stopped.notify_one();
        })
    };
    let cache = tempfile::tempdir().unwrap();
    let shim = install_shim(Some(cache.path())).unwrap();
    let file = cache.path().join("script.mjs");
    fs::write(&file, script).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a real Node is the judge of the shim")]
    let output = tokio::process::Command::new("node")
        .arg(&file)
        .env("NODE_OPTIONS", with_import("", &shim))
        .env("BIVOUAC_URL", format!("http://127.0.0.1:{port}"))
        .env_remove("NODE_USE_ENV_PROXY")
        .output()
        .await
        .expect("node is needed to test the shim");
    stop.notify_one();
    server.await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(errors, "", "the shim is silent");
    (port, text)
}

#[tokio::test]
async fn the_clients_addresses_go_to_the_engine() {
    let (port, text) = under_node(
        r#"
const say = async (r) => console.log(r.status, new URL(r.url).pathname, await r.text());
const api = "https://vercel.com/api/v2/sandboxes/sessions/sbx_1";
await say(await fetch(api + "?teamId=t"));
await say(await fetch(new URL(api), { method: "POST", body: "{}" }));
await say(await fetch(new Request(api, { method: "POST", body: "req", headers: { a: "b" } })));
await say(await fetch(new Request(api), { method: "DELETE" }));
await say(await fetch("https://oidc.vercel.com/team/.well-known/jwks"));
"#,
    )
    .await;
    let path = "/api/v2/sandboxes/sessions/sbx_1";
    let host = format!("127.0.0.1:{port}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("200 {path} GET {host} {path}?teamId=t [] None"));
    assert_eq!(lines[1], format!("200 {path} POST {host} {path} [{{}}] Some(\"2\")"));
    assert!(lines[2].starts_with(&format!("200 {path} POST {host} {path} [req]")), "{}", lines[2]);
    assert!(lines[3].starts_with(&format!("200 {path} DELETE {host} {path} []")), "{}", lines[3]);
    assert!(lines[4].contains(&format!("GET {host} /team/.well-known/jwks")), "{}", lines[4]);
}

#[tokio::test]
async fn routes_into_a_sandbox_go_by_the_host_header() {
    let (port, text) = under_node(
        r#"
const port = new URL(process.env.BIVOUAC_URL).port;
const say = async (r) => console.log(r.status, r.url, r.redirected, await r.text());
await say(await fetch("https://abc.vercel.run/p?q=1"));
await say(await fetch(`http://abc.localhost:${port}/p`, { method: "POST", body: "text" }));
const stream = new ReadableStream({ start(c) { c.enqueue(new TextEncoder().encode("streamed")); c.close(); } });
await say(await fetch("https://abc.vercel.run/p", { method: "PUT", body: stream, duplex: "half" }));
await say(await fetch("https://abc.vercel.run/moved", { method: "POST", body: "x" }));
const manual = await fetch("https://abc.vercel.run/moved", { redirect: "manual" });
console.log(manual.status, manual.headers.get("location"));
await say(await fetch("https://abc.vercel.run/gzip"));
const gone = AbortSignal.abort(new Error("mine"));
await fetch("https://abc.vercel.run/p", { signal: gone }).catch((e) => console.log(e.message));
await fetch("https://abc.vercel.run/moved", { redirect: "error" }).catch((e) => console.log(e.message));
"#,
    )
    .await;
    let host = format!("abc.localhost:{port}");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        format!("200 https://abc.vercel.run/p?q=1 false GET {host} /p?q=1 [] None")
    );
    assert_eq!(lines[1], format!("200 http://{host}/p false POST {host} /p [text] Some(\"4\")"));
    assert_eq!(
        lines[2],
        format!("200 https://abc.vercel.run/p false PUT {host} /p [streamed] None")
    );
    assert_eq!(
        lines[3],
        format!("200 https://abc.vercel.run/there true GET {host} /there [] None")
    );
    assert_eq!(lines[4], "303 /there");
    assert_eq!(lines[5], "200 https://abc.vercel.run/gzip false unpacked");
    assert_eq!(lines[6], "mine");
    assert_eq!(lines[7], "fetch failed");
}

#[tokio::test]
async fn everything_else_is_left_alone() {
    // 127.0.0.1:9 takes nothing, so what is not redirected fails to connect or to resolve.
    let (_, text) = under_node(
        r#"
const tries = [
  "http://127.0.0.1:9/api/v2", "https://vercel.com.invalid/api/v2", "http://app.localhost:9/",
  "https://sub.vercel.run.invalid/", "not a url",
];
for (const url of tries) await fetch(url).then(() => console.log("went through", url), (e) => console.log(e.name));
console.log((await fetch("data:text/plain,hello").then((r) => r.text())));
console.log(fetch.name, globalThis.fetch === fetch);
"#,
    )
    .await;
    assert_eq!(text, "TypeError\n".repeat(5) + "hello\nfetch true\n");
}

#[tokio::test]
async fn a_dispatcher_of_the_caller_is_kept() {
    // Node has no public way to make one, so a small one that counts stands for the SDK's: it hands
    // on to the default, and a limit on the silence of a body would end the slow answer.
    let (_, text) = under_node(
        r#"
const key = Symbol.for("undici.globalDispatcher.1");
await fetch("data:,");
const base = globalThis[key];
let calls = 0;
const dispatcher = { dispatch(options, handler) { calls++; return base.dispatch({ ...options, bodyTimeout: 0 }, handler); } };
const limited = { dispatch(options, handler) { return base.dispatch({ ...options, bodyTimeout: 1000 }, handler); } };
const url = "https://vercel.com/api/slow";
console.log(await (await fetch(url, { dispatcher })).text(), calls);
console.log(await fetch(url, { dispatcher: limited }).then((r) => r.text()).catch((e) => e.message));
"#,
    )
    .await;
    assert_eq!(text, "late 1\nterminated\n");
}

#[tokio::test]
async fn without_an_engine_it_does_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let shim = install_shim(Some(cache.path())).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a real Node is the judge of the shim")]
    let output = tokio::process::Command::new("node")
        .args(["-p", "Object.getOwnPropertySymbols(fetch).length"])
        .env("NODE_OPTIONS", with_import("", &shim))
        .env_remove("BIVOUAC_URL")
        .output()
        .await
        .expect("node is needed to test the shim");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n");
}
