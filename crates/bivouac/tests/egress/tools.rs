//! `attack.py` inside a sandbox, and what it answers.

use bivouac_testkit::TestSandbox;
use serde_json::Value;

const SCRIPT: &str = include_str!("attack.py");

/// Runs one command of the script; its answer.
pub(crate) async fn attack(sandbox: &TestSandbox, args: &[&str]) -> Value {
    let argv = [&["python3", "-c", SCRIPT], args].concat();
    let ran = sandbox.run(&argv).await;
    let out = ran.good();
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out} | {}", ran.err()))
}

/// Starts one command of the script that goes on; the id of the command.
pub(crate) async fn begin(sandbox: &TestSandbox, args: &[&str]) -> String {
    let argv = [&["python3", "-u", "-c", SCRIPT], args].concat();
    sandbox.start(&argv, serde_json::json!({})).await
}

/// Raw HTTP/1.1 bytes over TLS with `name` as server name, to whatever address the guest resolves.
/// Answers what [`attack`] `tls` answers.
pub(crate) async fn raw_https(sandbox: &TestSandbox, name: &str, bytes: &str) -> Value {
    attack(sandbox, &["tls", PLAYED, "443", name, bytes, "http/1.1"]).await
}

/// An address that no origin name has: what the guest dials must not matter.
pub(crate) const PLAYED: &str = "203.0.113.200";

/// The status line's number, of what a raw exchange got.
pub(crate) fn status(answer: &Value) -> Option<u16> {
    answer["got"].as_str()?.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}
