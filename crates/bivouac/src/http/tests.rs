//! Whole exchanges: through the router, on an engine with a simulated host.

mod doors;
mod older;
mod policy;
mod rights;
mod runs;
mod sandboxes;
mod secrets;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use axum::response::Response;
use bivouac_engine::{Engine, EngineConfig, SystemClock};
use bivouac_runtime::sim::Sim;
use bivouac_store::Db;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::*;

const TOKEN: &str = "test-token";

/// A router on an engine of its own.
struct Bed {
    _dir: tempfile::TempDir,
    sim: Sim,
    app: Router,
}

impl Bed {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open_file(&dir.path().join("bivouac.db")).await.unwrap();
        db.unlock(&dir.path().join("vault.key")).await.unwrap();
        let sim = Sim::new();
        let mut config = EngineConfig::new("node-a", "host", "http://127.0.0.1:7070");
        config.token = Some(bivouac_types::secret::Secret::new(TOKEN.to_owned()));
        let engine =
            Engine::open(config, db, Arc::new(sim.clone()), Arc::new(SystemClock)).await.unwrap();
        let info = EngineInfo {
            version: "0".to_owned(),
            pid: 1,
            node: "node-a".to_owned(),
            data_dir: "/data".to_owned(),
            started_at: 5,
            clients_tls: None,
        };
        let uses = UseLog::open(dir.path()).unwrap();
        let key = crate::ssh::host_key::new("test").unwrap();
        let ssh = crate::ssh::Server::new(engine.clone(), key, crate::ssh::SshOptions::default());
        let app = router(engine, HttpConfig { uses, info, ssh: Some(ssh.unwrap()) });
        Self { _dir: dir, sim, app }
    }

    async fn send(&self, request: Request<Body>) -> Response {
        self.app.clone().oneshot(request).await.unwrap()
    }

    /// Sends a request as the official SDK does: a JSON type even without a body.
    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let body = body.map_or(Body::empty(), |value| Body::from(value.to_string()));
        let request = with_token(method, path).body(body).unwrap();
        let response = self.send(request).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
        (status, value)
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.call(Method::GET, path, None).await
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        self.call(Method::POST, path, Some(body)).await
    }

    async fn ok(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let (status, value) = self.call(method.clone(), path, body).await;
        assert!(status.is_success(), "{method} {path}: {status} {value}");
        value
    }

    /// Makes a sandbox; answers its session's id.
    async fn create(&self, name: &str) -> String {
        let body = json!({"name": name, "projectId": "p", "ports": []});
        let made = self.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body)).await;
        made["session"]["id"].as_str().unwrap().to_owned()
    }

    /// Runs a command to its end; answers the records of the stream.
    async fn run(&self, session: &str, argv: &[&str]) -> Vec<Value> {
        let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
        let body = json!({"command": argv[0], "args": &argv[1..], "env": {}, "sudo": false,
            "wait": true, "logs": true});
        let request = with_token(Method::POST, &path).body(Body::from(body.to_string())).unwrap();
        let response = self.send(request).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        lines(response).await
    }
}

fn with_token(method: Method, path: &str) -> axum::http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header("authorization", format!("Bearer {TOKEN}"))
        .header("content-type", "application/json")
}

async fn lines(response: Response) -> Vec<Value> {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    text.lines().filter(|l| !l.is_empty()).map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn code(answer: &(StatusCode, Value)) -> (u16, &str) {
    (answer.0.as_u16(), answer.1["error"]["code"].as_str().unwrap_or("no code"))
}
