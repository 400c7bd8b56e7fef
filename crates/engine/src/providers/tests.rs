//! Providers: how references are read, and what is asked of whom.

use super::outcalls::Outcalls;
use super::*;
use crate::jwt;

fn source(from: &str) -> Result<Source, String> {
    Source::new(NewSecret { from: Some(from.to_owned()), value: None })
}

#[test]
fn references_are_checked() {
    for (from, kind) in [
        ("env:GITHUB_TOKEN", "env"),
        ("file:/run/secrets/x", "file"),
        ("exec:[\"pass\", \"show\", \"a b\"]", "exec"),
        ("exec:pass show x", "exec"),
        ("vault:secret/ci/github#token", "vault"),
    ] {
        assert_eq!(source(from).unwrap().kind(), kind, "{from}");
    }
    for bad in [
        "",
        "env:",
        "env:1A",
        "env:A=B",
        "file:relative",
        "exec:",
        "exec:[]",
        "exec:[\"\"]",
        "exec:[1]",
        "vault:secret#x",
        "vault:secret/a",
        "vault:secret/../a#x",
        "vault:/a#x",
        "vault:a/b?c#x",
        "x:y",
        "github-app:1/2",
        "env:A\n",
    ] {
        assert!(source(bad).is_err(), "{bad}");
    }
    let both = NewSecret {
        from: Some("env:A".to_owned()),
        value: Some(Secret::new("hunter2".to_owned())),
    };
    let why = Source::new(both).unwrap_err();
    assert!(!why.contains("hunter2"), "{why}");
}

#[test]
fn times_are_read() {
    for (text, ms) in [
        ("1970-01-01T00:00:00Z", Some(0)),
        ("2026-11-30T11:38:58Z", Some(1_796_038_738_000)),
        ("2024-02-29T23:59:59.123Z", Some(1_709_251_199_000)),
        ("2026-11-30T13:38:58+02:00", Some(1_796_038_738_000)),
        ("1969-12-31T23:59:59Z", Some(-1000)),
        ("soon", None),
        ("2026-13-30T11:38:58Z", None),
        ("", None),
    ] {
        assert_eq!(rfc3339(text), ms, "{text}");
    }
}

async fn exec(argv: &[&str]) -> Result<String, String> {
    let argv: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
    local::exec(&argv).await.map(|secret| secret.expose().to_owned())
}

#[tokio::test]
async fn programs_run_without_a_shell_and_without_our_environment() {
    assert_eq!(exec(&["printf", "%s\\n", "$HOME; hunter2"]).await.unwrap(), "$HOME; hunter2");
    let environment = exec(&["env"]).await.unwrap();
    let names: Vec<&str> = environment.lines().filter_map(|l| l.split('=').next()).collect();
    assert!(names.contains(&"PATH"), "{names:?}");
    assert!(names.iter().all(|n| ["PATH", "LANG", "HOME"].contains(n)), "{names:?}");
    let why = exec(&["sh", "-c", "echo hunter2; echo hunter2 >&2; exit 3"]).await.unwrap_err();
    assert!(why.contains('3') && !why.contains("hunter2"), "{why}");
    let why = exec(&["/nonexistent/program"]).await.unwrap_err();
    assert!(why.contains("/nonexistent/program"), "{why}");
    let why = exec(&["sh", "-c", "yes | head -c 70000"]).await.unwrap_err();
    assert!(why.contains("larger"), "{why}");
}

#[tokio::test]
async fn a_program_that_takes_too_long_ends_with_all_that_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pid");
    let script = format!("sleep 1000 & echo $! > {}; wait", path.display());
    let why = exec(&["sh", "-c", &script]).await.unwrap_err();
    assert!(why.contains("longer than"), "{why}");
    let pid = std::fs::read_to_string(path).unwrap();
    let stat = format!("/proc/{}/stat", pid.trim());
    bivouac_testkit::eventually("the end of its child", bivouac_testkit::LONG, async || {
        match std::fs::read_to_string(&stat) {
            // Dead and not yet waited for by whoever has inherited it.
            Ok(text) if !text.contains(") Z ") => Err(text),
            _ => Ok(()),
        }
    })
    .await;
}

#[tokio::test]
async fn files_are_read_anew_and_only_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "one\n").unwrap();
    let read = || async { local::file(path.to_str().unwrap()).await };
    assert_eq!(read().await.unwrap().expose(), "one");
    std::fs::write(&path, "two\r\n").unwrap();
    assert_eq!(read().await.unwrap().expose(), "two");
    for bad in [folder.path().to_str().unwrap(), "/dev/zero", "/nonexistent"] {
        assert!(local::file(bad).await.is_err(), "{bad}");
    }
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(read().await.unwrap_err().contains("no text"));
}

/// Answers each connection with the next of `answers` and hands out what was asked.
async fn server(answers: Vec<String>) -> (String, tokio::task::JoinHandle<Vec<String>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut text = Vec::new();
            let mut chunk = [0; 4096];
            loop {
                let n = stream.read(&mut chunk).await.unwrap();
                text.extend_from_slice(&chunk[..n]);
                let whole = String::from_utf8_lossy(&text);
                let Some((head, body)) = whole.split_once("\r\n\r\n") else { continue };
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    name.eq_ignore_ascii_case("content-length")
                        .then(|| value.trim().parse().ok())?
                });
                if body.len() >= length.unwrap_or(0usize) {
                    break;
                }
            }
            asked.push(String::from_utf8(text).unwrap());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        asked
    });
    (url, serving)
}

fn http(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn secret(text: &str) -> Secret {
    Secret::new(text.to_owned())
}

#[tokio::test]
async fn vault_is_asked_for_one_field() {
    let (url, serving) = server(vec![
        http("200 OK", r#"{"data":{"data":{"token":"hunter2","n":7},"metadata":{}}}"#),
        http("200 OK", r#"{"data":{"data":{"token":"hunter2"}}}"#),
        http("403 Forbidden", r#"{"errors":["hunter2"]}"#),
        http("302 Found", "hunter2"),
    ])
    .await;
    let out = Outcalls::default();
    let ask = |field: &'static str| {
        let (out, url) = (&out, secret(&format!("{url}/")));
        async move { hashicorp::ask(out, &url, secret("s.tok"), "kv/ci/gh", field).await }
    };
    assert_eq!(ask("token").await.unwrap().expose(), "hunter2");
    for part in ["no field 'other'", "refuses its token", "302"] {
        let why = ask("other").await.unwrap_err();
        assert!(why.contains(part) && !why.contains("hunter2"), "{why}");
    }
    let asked = serving.await.unwrap();
    assert!(asked[0].starts_with("GET /v1/kv/data/ci/gh HTTP/1.1\r\n"), "{}", asked[0]);
    assert!(asked[0].contains("x-vault-token: s.tok\r\n"), "{}", asked[0]);
}

/// A key as a PEM file: in the form that GitHub hands out, or in that of today's tools.
fn pem(key: &jwt::Key, github: bool) -> String {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let der = STANDARD.decode(key.to_sealed().unwrap().expose()).unwrap();
    // PKCS #8 is PKCS #1 behind a heading of 26 bytes.
    let (der, label) =
        if github { (&der[26..], "RSA PRIVATE KEY") } else { (&der[..], "PRIVATE KEY") };
    let text = STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[tokio::test]
async fn an_app_asks_for_an_installation_token() {
    let key = jwt::Key::generate().unwrap();
    let answer = r#"{"token":"ghs_hunter2","expires_at":"2026-11-30T12:00:00Z"}"#;
    let (url, serving) = server(vec![http("201 Created", answer), http("401 No", "")]).await;
    let from = format!("github-app:77/42?repositories=app&permissions=contents:read&api={url}");
    let new = NewSecret { from: Some(from), value: Some(secret(&pem(&key, true))) };
    let source = Source::new(new).unwrap();
    assert!(!format!("{source:?}").contains("PRIVATE"));
    let source = Source::from_sealed(&source.to_sealed()).unwrap();
    let now = rfc3339("2026-11-30T11:00:00Z").unwrap();
    let fetched = source.fetch(&Outcalls::default(), now).await.unwrap();
    assert_eq!(fetched.text.expose(), "ghs_hunter2");
    assert_eq!(fetched.until, Some(now + 48 * 60_000), "at four fifths of an hour");
    let why = source.fetch(&Outcalls::default(), now).await.err().unwrap();
    assert!(why.contains("does not take the key"), "{why}");

    let asked = serving.await.unwrap().remove(0);
    assert!(asked.starts_with("POST /app/installations/42/access_tokens "), "{asked}");
    let body = asked.split_once("\r\n\r\n").unwrap().1;
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    let wanted = serde_json::json!({"repositories": ["app"], "permissions": {"contents": "read"}});
    assert_eq!(body, wanted);
    // The assertion is verified by another implementation than the one that signed it.
    let token = asked.split("Bearer ").nth(1).unwrap().lines().next().unwrap();
    let public = key.public("x");
    let part = |name: &str| public[name].as_str().unwrap().to_owned();
    let key = jsonwebtoken::DecodingKey::from_rsa_components(&part("n"), &part("e")).unwrap();
    let mut rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::RS256);
    rules.validate_exp = false;
    let claims = jsonwebtoken::decode::<serde_json::Value>(token, &key, &rules).unwrap().claims;
    assert_eq!(claims["iss"], "77");
    assert_eq!(claims["exp"], now / 1000 + 540);
}

#[test]
fn keys_that_are_none_are_refused() {
    for bad in ["hunter2", "-----BEGIN PRIVATE KEY-----\naHVudGVyMg==\n-----END PRIVATE KEY-----"] {
        let new = NewSecret { from: Some("github-app:1/2".to_owned()), value: Some(secret(bad)) };
        let why = Source::new(new).unwrap_err();
        assert!(!why.contains("hunter2") && why.contains("key"), "{why}");
    }
    let open = "github-app:1/2?api=http://example.com";
    let key = Some(secret(&pem(&jwt::Key::generate().unwrap(), false)));
    let why = Source::new(NewSecret { from: Some(open.to_owned()), value: key }).unwrap_err();
    assert!(why.contains("https://"), "{why}");
}

#[test]
fn an_app_calls_github_unless_told() {
    let key = pem(&jwt::Key::generate().unwrap(), false);
    let app = |options: &str| {
        let from = Some(format!("github-app:1/2{options}"));
        Source::new(NewSecret { from, value: Some(secret(&key)) })
    };
    assert!(!app("?repositories=a").unwrap().calls_elsewhere());
    assert!(!app("?api=https://api.github.com/").unwrap().calls_elsewhere());
    assert!(app("?api=https://github.corp.test/api/v3").unwrap().calls_elsewhere());
    // What is appended must not become part of a query: any path could be called then.
    for bad in ["http://127.0.0.1:2375/containers/create?x=", "https://a.test/#"] {
        let why = app(&format!("?api={bad}")).unwrap_err();
        assert!(why.contains("no query"), "{why}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_or_not_trusted_is_told() {
    let out = Outcalls::default();
    let gone = out.json(outcalls::Call::get("http://127.0.0.1:1/x")).await.unwrap_err();
    assert!(gone.contains("127.0.0.1:1 could not be reached"), "{gone}");
    let (url, serving) = server(vec![http("200 OK", "{}")]).await;
    serving.abort();
    let wrong = out.json(outcalls::Call::get(&url.replace("http:", "https:"))).await.unwrap_err();
    assert!(wrong.contains("127.0.0.1"), "{wrong}");
}
