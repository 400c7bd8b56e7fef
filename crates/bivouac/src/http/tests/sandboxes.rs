//! Sandboxes and sessions: the life of one, in the official SDK's words.

use super::*;

fn names(list: &Value) -> Vec<&str> {
    list["sandboxes"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_life() {
    let bed = Bed::new().await;
    let body = json!({"projectId": "p", "ports": [3000], "name": "box", "tags": {"env": "dev"},
        "timeout": 600_000, "resources": {"vcpus": 4}, "__interactive": true});
    let made = bed.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body.clone())).await;
    let session = made["session"]["id"].as_str().unwrap().to_owned();
    assert_eq!(made["session"]["status"], "running");
    assert!(made["session"]["interactivePort"].is_u64());
    assert_eq!(made["sandbox"]["currentSessionId"], session.as_str());
    assert_eq!(made["sandbox"]["memory"], 8192);
    assert_eq!(made["resumed"], false);
    assert!(made["sandbox"]["expiresAt"].is_i64());
    assert_eq!(made["routes"][0]["port"], 3000);
    assert!(!made["session"]["runtime"].as_str().unwrap().is_empty());

    let again = bed.post("/api/v3/sandboxes?teamId=t", body).await;
    assert_eq!(again.0, 400);
    let message = again.1["error"]["message"].as_str().unwrap();
    assert_eq!(message, "A sandbox with the name 'box' already exists for this project.");

    let shown = bed.ok(Method::GET, "/api/v2/sandboxes/box?teamId=t&projectId=p", None).await;
    assert!(shown["session"].get("interactivePort").is_none());
    for list in ["/api/v2/sandboxes", "/api/bivouac/v1/sandboxes"] {
        let path = format!("{list}?teamId=t&project=p");
        let listed = bed.ok(Method::GET, &path, None).await;
        assert_eq!(listed["sandboxes"][0]["expiresAt"], shown["sandbox"]["expiresAt"]);
    }
    let path = format!("/api/v2/sandboxes/sessions/{session}?teamId=t");
    assert_eq!(bed.ok(Method::GET, &path, None).await["routes"][0]["port"], 3000);

    // The SDK sends a JSON type with an empty body.
    let stop = format!("/api/v2/sandboxes/sessions/{session}/stop?teamId=t");
    let stopped = bed.ok(Method::POST, &stop, None).await;
    assert_eq!(stopped["session"]["status"], "stopped");
    assert_eq!(stopped["session"]["id"], session.as_str());
    assert_eq!(stopped["sandbox"]["currentSnapshotId"], stopped["snapshot"]["id"]);
    assert_eq!(stopped["snapshot"]["creationMethod"], "automatic");
    assert!(stopped["sandbox"].get("expiresAt").is_none());
    let twice = bed.ok(Method::POST, &stop, Some(json!({}))).await;
    assert!(twice.get("snapshot").is_none());

    let command = format!("/api/v2/sandboxes/sessions/{session}/cmd?teamId=t");
    let refused = bed.post(&command, json!({"command": "true"})).await;
    assert_eq!(code(&refused), (410, "sandbox_stopped"));

    let path = "/api/v2/sandboxes/box?teamId=t&projectId=p&resume=true&__includeSystemRoutes=true";
    let resumed = bed.ok(Method::GET, path, None).await;
    assert_eq!(resumed["resumed"], true);
    assert_ne!(resumed["session"]["id"], session.as_str());
    assert_eq!(resumed["session"]["sourceSnapshotId"], stopped["snapshot"]["id"]);
    assert_eq!(bed.ok(Method::GET, path, None).await["resumed"], false);

    let sessions = "/api/v2/sandboxes/sessions?teamId=t&project=p&name=box&limit=1";
    let page = bed.ok(Method::GET, sessions, None).await;
    assert_eq!(page["pagination"]["count"], 1);
    let cursor = page["pagination"]["next"].as_str().unwrap();
    let last = bed.ok(Method::GET, &format!("{sessions}&cursor={cursor}"), None).await;
    assert_eq!(last["sessions"][0]["id"], session.as_str());
    assert_eq!(last["pagination"]["next"], Value::Null);

    let path = "/api/v2/sandboxes/box?teamId=t&projectId=p&deleteOrphanSnapshots=true";
    let deleted = bed.ok(Method::DELETE, path, None).await;
    assert_eq!(deleted["sandbox"]["name"], "box");
    assert_eq!(code(&bed.call(Method::DELETE, path, None).await), (404, "not_found"));
    assert!(bed.sim.running().is_empty());
}

#[tokio::test]
async fn versions_of_create_are_the_same() {
    let bed = Bed::new().await;
    for version in ["v2", "v3", "v4"] {
        let body = json!({"projectId": "p", "ports": []});
        let path = format!("/api/{version}/sandboxes?teamId=t");
        let made = bed.ok(Method::POST, &path, Some(body)).await;
        assert!(made["session"].get("interactivePort").is_none());
        assert!(made["sandbox"]["name"].is_string());
    }
    assert_eq!(bed.sim.running().len(), 3);
}

#[tokio::test]
async fn a_repeated_create_with_one_key_makes_one() {
    let bed = Bed::new().await;
    let mut seen = Vec::new();
    for key in ["a", "a", "b"] {
        let request = with_token(Method::POST, "/api/v3/sandboxes").header("idempotency-key", key);
        let response = bed.send(request.body(Body::from("{}")).unwrap()).await;
        assert_eq!(response.status(), 200);
        seen.push(lines(response).await.remove(0)["sandbox"]["name"].clone());
    }
    assert_eq!(seen[0], seen[1]);
    assert_ne!(seen[0], seen[2]);
    let request = with_token(Method::POST, "/api/v3/sandboxes").header("idempotency-key", "a b");
    assert_eq!(bed.send(request.body(Body::from("{}")).unwrap()).await.status(), 400);
}

#[tokio::test]
async fn lists_filter_and_page() {
    let bed = Bed::new().await;
    for (name, tag) in [("a1", "x"), ("a2", "y"), ("b1", "x")] {
        let body = json!({"projectId": "p", "name": name, "tags": {"env": tag}});
        bed.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body)).await;
    }
    bed.ok(Method::POST, "/api/v3/sandboxes", Some(json!({"name": "elsewhere"}))).await;
    let list = async |query: &str| {
        let path = format!("/api/v2/sandboxes?teamId=t&project=p{query}");
        bed.ok(Method::GET, &path, None).await
    };
    assert_eq!(names(&list("").await), ["b1", "a2", "a1"]);
    assert_eq!(names(&list("&sortBy=name&sortOrder=asc&namePrefix=a").await), ["a1", "a2"]);
    assert_eq!(names(&list("&tags=env:x").await), ["b1", "a1"]);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = list(&format!("&limit=2{cursor}")).await;
        seen.extend(names(&page).into_iter().map(ToOwned::to_owned));
        match page["pagination"]["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ["b1", "a2", "a1"]);
    for bad in [
        "limit=0",
        "limit=51",
        "limit=x",
        "sortBy=size",
        "sortOrder=up",
        "namePrefix=a",
        "tags=env",
        "cursor=!",
    ] {
        let answer = bed.get(&format!("/api/v2/sandboxes?{bad}")).await;
        assert_eq!(code(&answer), (400, "bad_request"), "{bad}");
    }
    let own = bed.ok(Method::GET, "/api/bivouac/v1/sandboxes?all=true", None).await;
    assert_eq!(own["pagination"]["count"], 4);
    let elsewhere = &own["sandboxes"][0];
    assert_eq!((&elsewhere["team"], &elsewhere["project"]), (&json!("local"), &json!("local")));
    let own = bed.ok(Method::GET, "/api/bivouac/v1/sandboxes?teamId=t&project=p", None).await;
    assert_eq!(own["pagination"]["count"], 3);
}

#[tokio::test]
async fn a_namespace_does_not_see_another() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = "/api/v2/sandboxes/box?teamId=t&projectId=other";
    assert_eq!(code(&bed.get(path).await), (404, "not_found"));
    for end in ["", "/cmd"] {
        let path = format!("/api/v2/sandboxes/sessions/{session}{end}?teamId=other");
        assert_eq!(code(&bed.get(&path).await), (404, "not_found"));
    }
    let slug = format!("/api/v2/sandboxes/sessions/{session}?slug=t");
    assert_eq!(bed.get(&slug).await.0, 200);
    for bad in ["teamId=a%2Fb", "projectId=%00", "project=a%20b"] {
        let path = format!("/api/v2/sandboxes/box?{bad}");
        assert_eq!(code(&bed.get(&path).await), (400, "bad_request"), "{bad}");
    }
}

#[tokio::test]
async fn an_update_changes_and_clears() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = "/api/v2/sandboxes/box?teamId=t&projectId=p";
    let set = json!({"ports": [4000], "networkId": "n", "keepLastSnapshots": {"count": 2},
        "tags": {"a": "b"}, "timeout": 900_000});
    let set = bed.ok(Method::PATCH, path, Some(set)).await;
    assert_eq!(set["routes"][0]["port"], 4000);
    assert_eq!(set["sandbox"]["keepLastSnapshots"], json!({"count": 2, "deleteEvicted": true}));
    assert_eq!(set["sandbox"]["networkId"], "n");
    let cleared = json!({"networkId": null, "keepLastSnapshots": null, "tags": {}, "mounts": {}});
    let cleared = bed.ok(Method::PATCH, path, Some(cleared)).await;
    assert!(cleared["sandbox"].get("networkId").is_none());
    assert!(cleared["sandbox"].get("keepLastSnapshots").is_none());
    assert_eq!(cleared["sandbox"]["tags"], json!({}));
    assert_eq!(cleared["sandbox"]["timeout"], 900_000);

    let extend = format!("/api/v2/sandboxes/sessions/{session}/extend-timeout?teamId=t");
    let longer = bed.ok(Method::POST, &extend, Some(json!({"duration": 60_000}))).await;
    assert_eq!(longer["session"]["timeout"], 360_000);
    for bad in [json!({"duration": 999}), json!({"duration": "x"}), json!({})] {
        assert_eq!(bed.post(&extend, bad).await.0, 400);
    }
    assert_eq!(bed.post(&extend, json!({"duration": 90_000_000})).await.0, 400);
}

#[tokio::test]
async fn a_policy_is_read_back_without_its_secrets() {
    let bed = Bed::new().await;
    let rule = json!([{"transform": [{"headers": {"authorization": "Bearer SECRET"}}]}]);
    let policy = json!({"allow": {"api.example.com": rule, "*": []}});
    let body = json!({"name": "box", "projectId": "p", "networkPolicy": policy});
    let made = bed.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body)).await;
    let wanted = json!({"mode": "custom", "allowedDomains": ["*", "api.example.com"],
        "injectionRules": [{"domain": "api.example.com", "headerNames": ["authorization"]}]});
    assert_eq!(made["sandbox"]["networkPolicy"], wanted);
    assert_eq!(made["session"]["networkPolicy"], wanted);
    let shown = bed.ok(Method::GET, "/api/v2/sandboxes/box?teamId=t&projectId=p", None).await;
    assert!(!shown.to_string().contains("SECRET"));
    let session = made["session"]["id"].as_str().unwrap();
    let path = format!("/api/v2/sandboxes/sessions/{session}/network-policy?teamId=t");
    let set = bed.ok(Method::POST, &path, Some(json!({"mode": "deny-all"}))).await;
    assert_eq!(set["session"]["networkPolicy"], json!({"mode": "deny-all"}));
    let refused = bed.post(&path, json!({"allow": ["foo*.com"]})).await;
    let message = refused.1["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("Invalid networkPolicy.allow[0]:"), "{message}");
}

#[tokio::test]
async fn snapshots_and_forks() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let path = format!("/api/v2/sandboxes/sessions/{session}/snapshot?teamId=t");
    let (status, taken) = bed.call(Method::POST, &path, None).await;
    assert_eq!(status, 201);
    assert_eq!(taken["snapshot"]["sourceSessionId"], session.as_str());
    assert_eq!(taken["snapshot"]["creationMethod"], "manual");
    assert_eq!(taken["session"]["status"], "stopped");
    let id = taken["snapshot"]["id"].as_str().unwrap().to_owned();

    let list = bed.ok(Method::GET, "/api/v2/sandboxes/snapshots?teamId=t&project=p&name=box", None);
    assert_eq!(list.await["snapshots"][0]["id"], id.as_str());
    let tree =
        format!("/api/v2/sandboxes/snapshots/tree?teamId=t&project=p&snapshotId={id}&limit=10");
    let tree = bed.ok(Method::GET, &tree, None).await;
    assert!(tree["snapshots"][0]["count"].is_string());
    assert_eq!(tree["anchor"]["snapshot"]["id"], id.as_str());

    let fork = "/api/v2/sandboxes/box/fork?teamId=t&projectId=p";
    let body = json!({"name": "copy", "mounts": {}, "env": {"A": "1"}, "__interactive": true});
    let made = bed.ok(Method::POST, fork, Some(body)).await;
    assert_eq!(made["sandbox"]["name"], "copy");
    assert_eq!(made["session"]["sourceSnapshotId"], id.as_str());
    assert!(made["session"]["interactivePort"].is_u64());
    let unknown = bed.post("/api/v2/sandboxes/nobody/fork?teamId=t&projectId=p", json!({})).await;
    assert_eq!(code(&unknown), (404, "not_found"));

    let one = format!("/api/v2/sandboxes/snapshots/{id}?teamId=t");
    assert_eq!(bed.ok(Method::GET, &one, None).await["snapshot"]["status"], "created");
    assert_eq!(bed.ok(Method::DELETE, &one, None).await["snapshot"]["status"], "deleted");
    let list = bed.ok(Method::GET, "/api/v2/sandboxes/snapshots?teamId=t&project=p&name=box", None);
    assert_eq!(list.await["snapshots"][0]["status"], "deleted");
    let source = json!({"type": "snapshot", "snapshotId": id});
    let answer =
        bed.post("/api/v3/sandboxes?teamId=t", json!({"projectId": "p", "source": source}));
    assert_eq!(code(&answer.await), (410, "snapshot_not_found"));
}
