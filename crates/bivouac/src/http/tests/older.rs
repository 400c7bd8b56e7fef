//! `/v1`: one run each, in older words.

use super::*;

#[tokio::test]
async fn a_life() {
    let bed = Bed::new().await;
    let policy = json!({"mode": "custom", "allowedDomains": ["a.com"],
        "injectionRules": [{"domain": "a.com", "headers": {"k": "SECRET"}}]});
    let body =
        json!({"projectId": "p", "ports": [3000], "runtime": "node22", "networkPolicy": policy});
    let made = bed.ok(Method::POST, "/api/v1/sandboxes?teamId=t", Some(body)).await;
    let sandbox = &made["sandbox"];
    let id = sandbox["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("sbx_"));
    assert!(sandbox["runtime"].is_string() && sandbox["cwd"].is_string());
    assert_eq!(
        sandbox["networkPolicy"]["injectionRules"],
        json!([{"domain": "a.com", "headerNames": ["k"]}])
    );
    assert_eq!(made["routes"].as_array().map(Vec::len), Some(1));
    let at = |end: &str| format!("/api/v1/sandboxes/{id}{end}?teamId=t");
    assert_eq!(bed.ok(Method::GET, &at(""), None).await["sandbox"]["status"], "running");

    let run = json!({"command": "echo", "args": ["hi"], "env": {}, "sudo": false, "wait": true});
    let request = with_token(Method::POST, &at("/cmd")).body(Body::from(run.to_string())).unwrap();
    let response = bed.send(request).await;
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    let records = lines(response).await;
    assert_eq!(records.len(), 2, "no output in the stream");
    for record in &records {
        assert_eq!(record["command"]["sandboxId"], id.as_str());
        assert!(record["command"].get("sessionId").is_none());
    }
    assert_eq!(records[1]["command"]["exitCode"], 0);
    let command = records[0]["command"]["id"].as_str().unwrap();
    let logs = with_token(Method::GET, &at(&format!("/cmd/{command}/logs"))).body(Body::empty());
    let logs = lines(bed.send(logs.unwrap()).await).await;
    assert_eq!(logs.iter().filter_map(|r| r["data"].as_str()).collect::<String>(), "hi\n");

    let sleep = bed.ok(Method::POST, &at("/cmd"), Some(json!({"command": "sleep"}))).await;
    let sleep = sleep["command"]["id"].as_str().unwrap().to_owned();
    // No `cmd` segment in this one.
    let killed =
        bed.ok(Method::POST, &at(&format!("/{sleep}/kill")), Some(json!({"signal": 9}))).await;
    assert_eq!(killed["command"]["sandboxId"], id.as_str());
    let path = format!("/api/v1/sandboxes/{id}/cmd/{sleep}?teamId=t&wait=true");
    assert_eq!(bed.ok(Method::GET, &path, None).await["command"]["exitCode"], 137);

    let longer =
        bed.ok(Method::POST, &at("/extend-timeout"), Some(json!({"duration": 1000}))).await;
    assert!(longer["sandbox"]["timeout"].is_i64());
    let policy = json!({"mode": "custom", "allowedDomains": ["a.com"]});
    let set = bed.ok(Method::POST, &at("/network-policy"), Some(policy)).await;
    assert_eq!(set["sandbox"]["networkPolicy"]["allowedDomains"], json!(["a.com"]));
    bed.ok(Method::POST, &at("/fs/mkdir"), Some(json!({"path": "d"}))).await;
    assert_eq!(bed.post(&at("/fs/read"), json!({"path": "no"})).await.0, 404);

    let taken = bed.ok(Method::POST, &at("/snapshot"), None).await;
    assert_eq!(taken["snapshot"]["sourceSandboxId"], id.as_str());
    assert!(taken["snapshot"].get("sourceSessionId").is_none());
    assert_eq!(taken["sandbox"]["status"], "stopped");
    assert_eq!(bed.ok(Method::POST, &at("/stop"), None).await["sandbox"]["status"], "stopped");

    let list = bed.ok(Method::GET, "/api/v1/sandboxes/snapshots?teamId=t&project=p", None).await;
    assert_eq!(list["snapshots"][0]["sourceSandboxId"], id.as_str());
    assert_eq!(list["pagination"], json!({"count": 1, "next": null, "prev": null}));
    let snapshot = taken["snapshot"]["id"].as_str().unwrap();
    let body = json!({"projectId": "p", "source": {"type": "snapshot", "snapshotId": snapshot}});
    let from = bed.ok(Method::POST, "/api/v1/sandboxes?teamId=t", Some(body)).await;
    assert_eq!(from["sandbox"]["sourceSnapshotId"], snapshot);
    let one = format!("/api/v1/sandboxes/snapshots/{snapshot}?teamId=t");
    assert_eq!(bed.ok(Method::DELETE, &one, None).await["snapshot"]["status"], "deleted");
}

#[tokio::test]
async fn lists_are_walked_by_time() {
    let bed = Bed::new().await;
    for _ in 0..5 {
        bed.ok(Method::POST, "/api/v1/sandboxes?teamId=t", Some(json!({"projectId": "p"}))).await;
        // Apart in time, as real ones are.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let (mut seen, mut until) = (Vec::new(), String::new());
    loop {
        let path = format!("/api/v1/sandboxes?teamId=t&project=p&limit=2{until}");
        let page = bed.ok(Method::GET, &path, None).await;
        let created = |s: &Value| s["createdAt"].as_i64().unwrap();
        seen.extend(page["sandboxes"].as_array().unwrap().iter().map(created));
        match page["pagination"]["next"].as_i64() {
            Some(next) => until = format!("&until={next}"),
            None => break,
        }
    }
    assert_eq!(seen.len(), 5);
    assert!(seen.is_sorted_by(|a, b| a > b), "{seen:?}");
    let since = seen[1];
    let path = format!("/api/v1/sandboxes?teamId=t&project=p&limit=100&since={since}");
    assert_eq!(bed.ok(Method::GET, &path, None).await["pagination"]["count"], 2);
    assert_eq!(bed.get("/api/v1/sandboxes?since=yesterday").await.0, 400);
}
