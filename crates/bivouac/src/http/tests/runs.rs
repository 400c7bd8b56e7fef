//! Commands: streams, waits, signals, standard input, files.

use std::time::Duration;

use super::*;
use axum::http::request::Parts;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn joined(records: &[Value]) -> String {
    records.iter().filter_map(|r| r["data"].as_str()).collect()
}

async fn detached(bed: &Bed, session: &str, body: Value) -> String {
    let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
    let started = bed.ok(Method::POST, &path, Some(body)).await;
    assert_eq!(started["command"]["exitCode"], Value::Null);
    assert_eq!(started["command"]["sessionId"], session);
    started["command"]["id"].as_str().unwrap().to_owned()
}

/// The next piece of a body, as text.
async fn piece(body: &mut Body) -> String {
    let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await;
    let frame = frame.expect("in time").expect("a frame").expect("no error");
    String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
}

async fn open(bed: &Bed, method: Method, path: &str, body: Value) -> (Parts, Body) {
    let request = with_token(method, path).body(Body::from(body.to_string())).unwrap();
    let response = bed.send(request).await;
    let (head, body) = response.into_parts();
    assert_eq!(head.status, 200);
    let (parts, _) = Request::new(()).into_parts();
    (parts, body)
}

#[tokio::test]
async fn a_blocking_run() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let records = bed.run(&session, &["echo", "x", "y z"]).await;
    assert_eq!(records[0]["command"]["exitCode"], Value::Null);
    assert_eq!(joined(&records), "x y z\n");
    let last = &records.last().unwrap()["command"];
    assert_eq!((&last["exitCode"], &last["id"]), (&json!(0), &records[0]["command"]["id"]));
    assert!(last["durationMs"].is_i64());
    let records = bed.run(&session, &["exit", "3"]).await;
    assert_eq!(records.last().unwrap()["command"]["exitCode"], 3);

    // Wait without logs: two records, the output is asked for afterwards. The Python client says
    // what it wants in the query.
    let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t&wait=true");
    let request =
        with_token(Method::POST, &path).body(Body::from(r#"{"command":"echo"}"#)).unwrap();
    let records = lines(bed.send(request).await).await;
    assert_eq!(records.len(), 2, "{records:?}");
    let id = records[0]["command"]["id"].as_str().unwrap();
    let logs = format!("/api/v2/sandboxes/sessions/{session}/cmd/{id}/logs?teamId=t");
    for _ in 0..2 {
        let response = bed.send(with_token(Method::GET, &logs).body(Body::empty()).unwrap()).await;
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        assert_eq!(joined(&lines(response).await), "\n");
    }
    let response = bed
        .send(
            with_token(Method::GET, &format!("{logs}&encoding=base64"))
                .body(Body::empty())
                .unwrap(),
        )
        .await;
    assert_eq!(
        lines(response).await,
        [json!({"stream": "stdout", "data": "Cg==", "encoding": "base64"})]
    );
}

#[tokio::test]
async fn what_cannot_start_is_refused() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
    for body in [
        json!({"command": ""}),
        json!({"args": ["x"]}),
        json!({"command": "true", "timeout": 1}),
        json!({"command": "true", "env": {"A=": "x"}}),
    ] {
        let answer = bed.post(&path, body).await;
        assert_eq!(code(&answer), (400, "bad_request"), "{answer:?}");
    }
    let line = json!({"command": "echo hi", "wait": true, "logs": true});
    assert_eq!(code(&bed.post(&path, line).await), (400, "executable_not_found"));
    let bad = bed.post(&format!("{path}&encoding=rot13"), json!({"command": "true"})).await;
    assert_eq!(bad.0, 400);
    let list = bed.ok(Method::GET, &path, None).await;
    assert_eq!(list["commands"], json!([]), "nothing was started");
}

#[tokio::test]
async fn a_wait_sends_its_headers_at_once() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let id = detached(&bed, &session, json!({"command": "sleep"})).await;
    let path = format!("/api/v2/sandboxes/sessions/{session}/cmd/{id}?teamId=t");
    let shown = bed.ok(Method::GET, &path, None).await;
    assert_eq!(shown["command"]["exitCode"], Value::Null);
    let (_, mut body) = open(&bed, Method::GET, &format!("{path}&wait=true"), json!({})).await;
    assert_eq!(piece(&mut body).await, " ");
    let kill = format!("/api/v2/sandboxes/sessions/{session}/cmd/{id}/kill?teamId=t");
    bed.ok(Method::POST, &kill, Some(json!({"signal": 15}))).await;
    let answer: Value = serde_json::from_str(&piece(&mut body).await).unwrap();
    assert_eq!(answer["command"]["exitCode"], 143);
    let after = bed.ok(Method::GET, &format!("{path}&wait=true"), None).await;
    assert_eq!(after["command"]["exitCode"], 143);
    for bad in [json!({"signal": 0}), json!({"signal": 65}), json!({"signal": "SIGTERM"})] {
        assert_eq!(bed.post(&kill, bad).await.0, 400);
    }
    let unknown = "cmd_00000000000000000000000000";
    for end in ["", "?wait=true", "/logs", "/kill"] {
        let path = format!("/api/v2/sandboxes/sessions/{session}/cmd/{unknown}{end}");
        let path = format!("{path}{}teamId=t", if end.contains('?') { "&" } else { "?" });
        let method = if end == "/kill" { Method::POST } else { Method::GET };
        assert_eq!(code(&bed.call(method, &path, None).await), (404, "not_found"), "{path}");
    }
}

#[tokio::test]
async fn a_stop_under_a_blocking_run_is_told_in_its_stream() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
    let run = json!({"command": "sleep", "wait": true, "logs": true});
    let (_, mut body) = open(&bed, Method::POST, &path, run).await;
    assert!(piece(&mut body).await.starts_with("{\"command\":"));
    let stop = format!("/api/v2/sandboxes/sessions/{session}/stop?teamId=t");
    bed.ok(Method::POST, &stop, None).await;
    let record: Value = serde_json::from_str(&piece(&mut body).await).unwrap();
    assert_eq!(record["stream"], "error");
    assert_eq!(record["data"]["code"], "sandbox_stopped");
    assert!(body.frame().await.is_none(), "the error is the end");
}

#[tokio::test]
async fn standard_input() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let attached = json!({"command": "sleep", "attachStdin": true});
    let id = detached(&bed, &session, attached).await;
    let other = detached(&bed, &session, json!({"command": "sleep"})).await;
    let path = |id: &str| format!("/api/v2/sandboxes/sessions/{session}/cmd/{id}/stdin?teamId=t");
    let stdin = path(&id);
    let probe = bed.ok(Method::POST, &stdin, Some(json!({}))).await;
    assert_eq!(probe["bytesWritten"], 0);
    let written =
        bed.ok(Method::POST, &stdin, Some(json!({"data": "aGVsbG8=", "offset": 0}))).await;
    assert_eq!(written["bytesWritten"], 5);
    assert_eq!(written["command"]["id"], id.as_str());
    assert_eq!(bed.post(&stdin, json!({"data": "eA==", "offset": 6})).await.0, 409);
    assert_eq!(bed.post(&stdin, json!({"data": "not base64"})).await.0, 400);
    assert_eq!(bed.post(&stdin, json!({"offset": -1})).await.0, 400);
    bed.ok(Method::POST, &stdin, Some(json!({"offset": 5, "close": true}))).await;
    assert_eq!(bed.post(&stdin, json!({"data": "eA=="})).await.0, 404);
    let refused = bed.post(&path(&other), json!({})).await;
    assert_eq!(code(&refused), (400, "command_stdin_unavailable"));
}

#[tokio::test]
async fn files() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = |what: &str| format!("/api/v2/sandboxes/sessions/{session}/fs/{what}?teamId=t");
    assert_eq!(bed.post(&path("mkdir"), json!({"path": "a"})).await, (StatusCode::OK, json!({})));
    let again = bed.post(&path("mkdir"), json!({"path": "a"})).await;
    assert_eq!(code(&again), (400, "bad_request"));
    let message = again.1["error"]["message"].as_str().unwrap();
    assert!(message.contains("already exists"), "{message}");
    bed.ok(Method::POST, &path("mkdir"), Some(json!({"path": "a", "recursive": true}))).await;
    let missing = bed.post(&path("read"), json!({"path": "missing"})).await;
    assert_eq!(code(&missing), (404, "not_found"));
    for bad in [json!({}), json!({"path": ""}), json!({"path": "a\0b"})] {
        assert_eq!(bed.post(&path("read"), bad).await.0, 400);
    }
    // The simulated sandbox takes no files, which is an error of its own.
    let refused = bed.post(&path("write"), json!({})).await;
    assert_eq!(code(&refused), (400, "bad_request"));
}

#[tokio::test]
async fn a_dropped_connection_frees_the_stream_and_leaves_the_command() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve(listener, None, bed.app.clone(), async {
        let _ = stopped.await;
    }));

    let body = json!({"command": "sleep", "wait": true, "logs": true}).to_string();
    let mut peer = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /api/v2/sandboxes/sessions/{session}/cmd?teamId=t HTTP/1.1\r\nhost: {address}\r\n\
         authorization: Bearer {TOKEN}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    peer.write_all(head.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("\"exitCode\":null") {
        assert!(peer.read_buf(&mut seen).await.unwrap() > 0, "the answer begins at once");
    }
    drop(peer);
    // With nobody left to read, an end of the server does not have to wait for its grace.
    tokio::time::sleep(Duration::from_millis(50)).await;
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(2), server).await.expect("at once").unwrap();

    let list = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
    let commands = bed.ok(Method::GET, &list, None).await;
    assert_eq!(commands["commands"][0]["exitCode"], Value::Null, "it still runs");
}
