//! A sandbox as a test uses it: short calls for create, run, read, write, stop, delete.

use std::time::Duration;

use anyhow::Result;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use reqwest::Method;
use serde_json::{Value, json};

use crate::client::{Answer, Client, Lines};

/// A finished command, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// The last command record's `exitCode`.
    pub exit: Option<i64>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Whether a record said that output is missing.
    pub cut: bool,
    /// The last command record.
    pub command: Value,
    /// The first record of kind `error`, if the stream failed.
    pub failure: Option<Value>,
}

impl Ran {
    /// Standard output as text, without the white space at its end.
    #[must_use]
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    /// Standard error as text.
    #[must_use]
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Standard output of a command that must have succeeded.
    ///
    /// # Panics
    /// When it did not exit with 0.
    #[track_caller]
    #[must_use]
    pub fn good(&self) -> String {
        assert_eq!(
            self.exit,
            Some(0),
            "{} | stderr: {} | {:?}",
            self.out(),
            self.err(),
            self.command
        );
        self.out()
    }
}

/// A sandbox and its newest session.
#[derive(Debug, Clone)]
pub struct TestSandbox {
    /// How to reach it.
    pub client: Client,
    /// Its name.
    pub name: String,
    /// Id of the session that calls go to.
    pub session: String,
    /// The whole answer of the call that made or resumed it.
    pub view: Value,
}

impl TestSandbox {
    /// Creates one; `body` is merged over the smallest body that a client sends.
    pub async fn create(client: &Client, body: Value) -> Self {
        Self::try_create(client, body).await.unwrap_or_else(|answer| panic!("{answer}"))
    }

    /// As [`TestSandbox::create`], with the refusal as an error.
    ///
    /// # Errors
    /// The answer when it is not a success.
    pub async fn try_create(client: &Client, body: Value) -> Result<Self, Answer> {
        let mut whole = json!({ "projectId": client.project(), "ports": [] });
        if let (Some(whole), Value::Object(body)) = (whole.as_object_mut(), body) {
            whole.extend(body);
        }
        let answer = client.post("/v3/sandboxes", &whole).await;
        if (200..300).contains(&answer.status) {
            Ok(Self::of(client, answer.json))
        } else {
            Err(answer)
        }
    }

    /// From the answer of a create, get or fork.
    ///
    /// # Panics
    /// When the answer has no name or session.
    #[must_use]
    pub fn of(client: &Client, view: Value) -> Self {
        let text = |v: &Value| v.as_str().unwrap_or_else(|| panic!("no id in {view}")).to_owned();
        Self {
            client: client.clone(),
            name: text(&view["sandbox"]["name"]),
            session: text(&view["session"]["id"]),
            view,
        }
    }

    /// `GET` by name.
    pub async fn get(&self, resume: bool) -> Answer {
        self.client.get(&format!("/v2/sandboxes/{}?resume={resume}", self.name)).await
    }

    /// Resumes it if it is not running; calls then go to the newest session.
    pub async fn resume(&mut self) -> bool {
        let view = self.get(true).await.ok();
        let resumed = view["resumed"] == true;
        *self = Self::of(&self.client, view);
        resumed
    }

    /// Path of a session end point.
    #[must_use]
    pub fn path(&self, tail: &str) -> String {
        format!("/v2/sandboxes/sessions/{}{tail}", self.session)
    }

    /// POST to a session end point.
    pub async fn post(&self, tail: &str, body: &Value) -> Answer {
        self.client.post(&self.path(tail), body).await
    }

    /// Runs a program to its end.
    pub async fn run(&self, argv: &[&str]) -> Ran {
        self.run_with(argv, json!({})).await
    }

    /// Runs a line of shell to its end.
    pub async fn sh(&self, line: &str) -> Ran {
        self.run(&["sh", "-c", line]).await
    }

    /// Runs a line of shell as root to its end.
    pub async fn sudo(&self, line: &str) -> Ran {
        self.run_with(&["sh", "-c", line], json!({ "sudo": true })).await
    }

    /// Runs a program to its end with more fields in the body.
    pub async fn run_with(&self, argv: &[&str], extra: Value) -> Ran {
        match self.open(argv, extra).await {
            Ok(lines) => collect(lines).await,
            Err(answer) => panic!("{argv:?}: {answer}"),
        }
    }

    /// Opens the stream of a blocking command.
    ///
    /// # Errors
    /// The answer when the command did not start.
    pub async fn open(&self, argv: &[&str], extra: Value) -> Result<Lines, Answer> {
        let mut body = body(argv, extra);
        body["wait"] = json!(true);
        body["logs"] = json!(true);
        let path = self.path("/cmd?encoding=base64");
        self.client.stream(self.client.request(Method::POST, &path).json(&body)).await
    }

    /// The answer of a command that must not start.
    ///
    /// # Panics
    /// When it starts.
    pub async fn refuses(&self, argv: &[&str], extra: Value) -> Answer {
        match self.open(argv, extra).await {
            Ok(_) => panic!("{argv:?} started"),
            Err(answer) => answer,
        }
    }

    /// Starts a program in the background; its id.
    pub async fn start(&self, argv: &[&str], extra: Value) -> String {
        let answer = self.post("/cmd", &body(argv, extra)).await.ok();
        assert!(answer["command"]["exitCode"].is_null(), "{answer}");
        answer["command"]["id"].as_str().expect("a command id").to_owned()
    }

    /// A command's record.
    pub async fn command(&self, id: &str) -> Answer {
        self.client.get(&self.path(&format!("/cmd/{id}"))).await
    }

    /// A command's record once it has ended.
    pub async fn wait(&self, id: &str) -> Value {
        let answer = self.client.get(&self.path(&format!("/cmd/{id}?wait=true"))).await.ok();
        answer["command"].clone()
    }

    /// Opens a command's log stream.
    pub async fn logs(&self, id: &str) -> Lines {
        let path = self.path(&format!("/cmd/{id}/logs?encoding=base64"));
        let request = self.client.request(Method::GET, &path);
        self.client.stream(request).await.unwrap_or_else(|answer| panic!("{answer}"))
    }

    /// Everything that a command has written, once it has ended.
    pub async fn output(&self, id: &str) -> Ran {
        collect(self.logs(id).await).await
    }

    /// Sends a signal to a command.
    pub async fn kill(&self, id: &str, signal: i32) -> Answer {
        self.post(&format!("/cmd/{id}/kill"), &json!({ "signal": signal })).await
    }

    /// Writes standard input.
    pub async fn stdin(&self, id: &str, offset: Option<u64>, data: &[u8], close: bool) -> Answer {
        let mut body = json!({});
        if !data.is_empty() {
            body["data"] = json!(BASE64_STANDARD.encode(data));
        }
        if let Some(offset) = offset {
            body["offset"] = json!(offset);
        }
        if close {
            body["close"] = json!(true);
        }
        self.post(&format!("/cmd/{id}/stdin"), &body).await
    }

    /// Sends a gzip tar.
    pub async fn write(&self, cwd: &str, archive: impl Into<reqwest::Body>) -> Answer {
        let request = self
            .client
            .request(Method::POST, &self.path("/fs/write"))
            .header("content-type", "application/gzip")
            .header("x-cwd", cwd)
            .body(archive);
        self.client.send(request).await
    }

    /// Reads a file.
    pub async fn read(&self, path: &str) -> Answer {
        self.post("/fs/read", &json!({ "path": path })).await
    }

    /// Stops the session.
    pub async fn stop(&self) -> Answer {
        self.post("/stop", &json!({})).await
    }

    /// Deletes the sandbox with its snapshots.
    pub async fn delete(&self) -> Answer {
        let path = format!("/v2/sandboxes/{}?deleteOrphanSnapshots=true", self.name);
        self.client.delete(&path).await
    }
}

fn body(argv: &[&str], extra: Value) -> Value {
    let (program, args) = argv.split_first().expect("a program");
    let mut body = json!({ "command": program, "args": args, "env": {}, "sudo": false });
    if let (Some(body), Value::Object(extra)) = (body.as_object_mut(), extra) {
        body.extend(extra);
    }
    body
}

/// Reads a stream to its end.
async fn collect(mut lines: Lines) -> Ran {
    let mut ran = Ran {
        exit: None,
        stdout: Vec::new(),
        stderr: Vec::new(),
        cut: false,
        command: Value::Null,
        failure: None,
    };
    while let Some(line) = lines.next(Duration::from_secs(120)).await.expect("a stream") {
        if line["command"].is_object() {
            ran.command = line["command"].clone();
            ran.exit = ran.command["exitCode"].as_i64();
            continue;
        }
        match line["stream"].as_str() {
            Some("stdout") => ran.stdout.extend(bytes(&line)),
            Some("stderr") => ran.stderr.extend(bytes(&line)),
            Some("cut") => ran.cut = true,
            Some("error") => ran.failure = Some(line["data"].clone()),
            _ => panic!("unknown record in a stream: {line}"),
        }
    }
    ran
}

fn bytes(line: &Value) -> Vec<u8> {
    assert_eq!(line["encoding"], "base64", "{line}");
    BASE64_STANDARD.decode(line["data"].as_str().expect("data")).expect("base64")
}
