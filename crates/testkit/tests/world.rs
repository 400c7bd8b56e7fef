//! The world as a program: what the tests in other languages rely on.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

#[test]
fn the_program_tells_what_reached_its_world() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_bivouac-world"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    let socket = UnixStream::connect(told["socket"].as_str().unwrap()).unwrap();
    let mut answers = BufReader::new(socket.try_clone().unwrap());
    let mut ask = |what: Value| {
        writeln!(&socket, "{what}").unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    assert_eq!(ask(json!({"name": "a.test", "addresses": ["198.51.100.10"]})), json!({}));
    let prefix: Vec<_> =
        told["prefix"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    let done = Command::new(prefix[0])
        .args(&prefix[1..])
        .args(["curl", "-s", "-m", "10", "http://203.0.113.66/marker"])
        .output()
        .unwrap();
    assert!(done.status.success());
    assert_eq!(ask(json!({"seen": "/marker"}))["seen"][0]["target"], "/marker");
    assert!(ask(json!({"packets": "203.0.113.66"}))["packets"].as_u64().unwrap() > 3);
    assert_eq!(ask(json!({"packets": "203.0.113.67"}))["packets"], 0);
    assert_eq!(ask(json!({"queries": "a.test"}))["queries"], 0);
    let server = ask(json!({"server": ["own.test"]}));
    assert!(server["certificate"].as_str().unwrap().contains("BEGIN CERTIFICATE"));
    assert!(server["key"].as_str().unwrap().contains("PRIVATE KEY"));
    assert_ne!(server["prefix"], told["prefix"]);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(!std::path::Path::new(told["socket"].as_str().unwrap()).exists());
}
