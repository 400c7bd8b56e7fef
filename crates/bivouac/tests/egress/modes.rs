//! The three modes, and how they are switched.

use serde_json::json;

use crate::{Bed, fresh};

#[tokio::test]
async fn deny_all_lets_nothing_out_not_even_a_query() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"mode": "deny-all"})).await;
    let ran = sandbox
        .sh(&format!("curl -sS -m 5 https://{name}/; curl -sS -m 5 http://203.0.113.67/"))
        .await;
    assert_ne!(ran.exit, Some(0), "{}", ran.out());
    assert!(bed.queries().iter().all(|q| q.name != name));
    assert!(bed.wire().to("203.0.113.67").is_empty());
}

#[tokio::test]
async fn allow_all_reaches_names_and_addresses() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let ran = sandbox
        .sh(&format!("curl -sS -m 10 http://{name}/a && curl -sS -m 10 http://203.0.113.68/b"))
        .await;
    assert!(ran.good().contains(r#""target":"/b""#), "{}", ran.out());
    assert!(!bed.wire().to("203.0.113.68").is_empty());
}
