//! Every operation of the API and the right that it takes: one that is not in the table fails the test.
//!
//! Two things are seen of each: a token of another namespace finds nothing (with the words for what is not there)
//! and changes nothing; and of the tokens with a single right exactly those get in that the table says.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// `METHOD path ; rights of which one is needed ; body ; query`. `free`: any token. `admin`: for the engine as a whole.
/// `upgrade`: what asks for no other protocol is refused before anything is looked at; the right that such a call takes is
/// seen in the engine's own tests.
const TABLE: &str = r#"
GET /api/openapi.json ; free
GET /api/bivouac/v1/engine ; free
GET /api/bivouac/v1/whoami ; free
GET /api/bivouac/v1/tokens ; free
POST /api/bivouac/v1/tokens ; read ; {"name":"made","namespaces":["t/b"],"verbs":["read"]}
DELETE /api/bivouac/v1/tokens/{token} ; free
GET /api/bivouac/v1/access-log ; admin
POST /api/bivouac/v1/gc ; admin ; {"dryRun":true}
POST /api/bivouac/v1/images/pull ; admin ; {"image":"docker://127.0.0.1:1/none:1"}
GET /api/v2/user ; free
GET /api/v2/teams ; free
GET /api/v2/teams/{team} ; free
GET /api/v2/projects/{project} ; free
POST /api/v11/projects ; free ; {"name":"b"}
GET /api/bivouac/v1/sandboxes ; read
GET /api/bivouac/v1/stats ; read
GET /api/bivouac/v1/usage ; read ; ; sandbox=b-box
POST /api/bivouac/v1/sandboxes/{name}/hold ; write
POST /api/bivouac/v1/sandboxes/{name}/snapshots ; write ; {"live":true}
POST /api/bivouac/v1/sandboxes/{name}/forks ; write ; {}
POST /api/bivouac/v1/sandboxes/{name}/rollback ; write ; {}
POST /api/bivouac/v1/sandboxes/{name}/pause ; write ; {}
POST /api/bivouac/v1/sandboxes/{name}/unpause ; write ; {}
POST /api/bivouac/v1/sandboxes/{name}/keep-alive ; write ; {}
PATCH /api/bivouac/v1/snapshots/{id} ; write ; {"labels":{"a":"b"}}
POST /api/bivouac/v1/snapshots/import ; write
GET /api/bivouac/v1/snapshots/{id}/export ; read
POST /api/bivouac/v1/drives/{name}/attach ; write ; {"sandbox":"b-box","path":"/data"}
POST /api/bivouac/v1/drives/{name}/detach ; write ; {"sandbox":"b-box"}
GET /api/bivouac/v1/drives/{name}/file ; read ; ; path=/f
PUT /api/bivouac/v1/drives/{name}/file ; write ; x ; path=/f
GET /api/bivouac/v1/drives/{name}/files ; read
GET /api/bivouac/v1/drives/{name}/usage ; read
GET /api/bivouac/v1/sandboxes/{name}/policy ; read,policy
PUT /api/bivouac/v1/sandboxes/{name}/policy ; policy ; {"mode":"deny-all"}
PATCH /api/bivouac/v1/sandboxes/{name}/policy ; policy ; {"allow":["a.test"]}
POST /api/bivouac/v1/sandboxes/{name}/policy/explain ; read,policy ; {"url":"https://a.test/"}
POST /api/bivouac/v1/sandboxes/{name}/policy/learn ; policy ; {}
DELETE /api/bivouac/v1/sandboxes/{name}/policy/learn ; policy ; ; since=0
GET /api/bivouac/v1/sandboxes/{name}/egress-log ; read
POST /api/v2/sandboxes ; write ; {"projectId":"b"}
POST /api/v3/sandboxes ; write ; {"projectId":"b"}
POST /api/v4/sandboxes ; write ; {"projectId":"b"}
GET /api/bivouac/v1/sandboxes/{name}/terminals ; read
POST /api/bivouac/v1/sandboxes/{name}/terminals ; exec ; {}
DELETE /api/bivouac/v1/sandboxes/{name}/terminals/{terminal} ; exec
GET /api/bivouac/v1/sandboxes/{name}/terminals/{terminal}/attach ; upgrade
GET /api/bivouac/v1/sessions/{session}/terminals/{command}/attach ; upgrade
GET /api/bivouac/v1/ssh ; free
GET /api/bivouac/v1/ssh-keys ; free
POST /api/bivouac/v1/ssh-keys ; free ; {"name":"k","publicKey":"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKCgP4FwDyOD7ndaEGCqQ+VpvPPVoVCWyZ5p6aHHiW4S"}
DELETE /api/bivouac/v1/ssh-keys/{key} ; free
GET /api/bivouac/v1/sandboxes/{name}/ssh ; upgrade
GET /api/bivouac/v1/sandboxes/{name}/tunnel ; upgrade ; ; port=80
GET /api/bivouac/v1/sandboxes/{name}/ports ; read
PUT /api/bivouac/v1/sandboxes/{name}/ports/{port} ; write ; {"public":false}
POST /api/bivouac/v1/sandboxes/{name}/ports/{port}/link ; preview ; {}
POST /api/bivouac/v1/sandboxes/{name}/ports/revoke ; write ; {}
POST /api/v2/sandboxes/sessions/{id}/interactive ; exec ; {}
GET /api/v2/sandboxes ; read
GET /api/v2/sandboxes/{name} ; read
PATCH /api/v2/sandboxes/{name} ; write ; {"tags":{"a":"b"}}
DELETE /api/v2/sandboxes/{name} ; write
POST /api/v2/sandboxes/{name}/fork ; write ; {}
GET /api/v2/secrets ; read,policy
PUT /api/v2/secrets/{name} ; policy ; {"value":"v"}
DELETE /api/v2/secrets/{name} ; policy
GET /api/v2/sandboxes/{name}/credentials ; read,policy
POST /api/v2/sandboxes/{name}/credentials ; policy ; {"type":"bearer","secret":"B_SECRET","options":{"host":"a.test"}}
DELETE /api/v2/sandboxes/{name}/credentials/{credential} ; policy
GET /api/v2/sandboxes/sessions ; read
GET /api/v2/sandboxes/sessions/{id} ; read
POST /api/v2/sandboxes/sessions/{id}/stop ; write ; {}
POST /api/v2/sandboxes/sessions/{id}/extend-timeout ; write ; {"duration":1000}
POST /api/v2/sandboxes/sessions/{id}/network-policy ; policy ; {"mode":"deny-all"}
POST /api/v2/sandboxes/sessions/{id}/snapshot ; write ; {}
POST /api/v2/sandboxes/sessions/{id}/cmd ; exec ; {"command":"true"}
GET /api/v2/sandboxes/sessions/{id}/cmd ; read,exec
GET /api/v2/sandboxes/sessions/{id}/cmd/{cmd} ; read,exec
POST /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/kill ; exec ; {"signal":15}
GET /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/logs ; read,exec
POST /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/stdin ; exec ; {"data":""}
POST /api/v2/sandboxes/sessions/{id}/fs/mkdir ; exec ; {"path":"x"}
POST /api/v2/sandboxes/sessions/{id}/fs/write ; exec
POST /api/v2/sandboxes/sessions/{id}/fs/read ; read,exec ; {"path":"x"}
GET /api/v2/sandboxes/snapshots ; read
GET /api/v2/sandboxes/snapshots/tree ; read ; ; snapshotId={snapshot}
GET /api/v2/sandboxes/snapshots/{id} ; read
DELETE /api/v2/sandboxes/snapshots/{id} ; write
GET /api/v2/sandboxes/drives ; read
POST /api/v2/sandboxes/drives/{name} ; write ; {}
GET /api/v2/sandboxes/drives/{name} ; read
DELETE /api/v2/sandboxes/drives/{name} ; write
POST /api/v2/sandboxes/drives/{name}/fork ; write ; {"name":"b-copy"}
POST /api/v1/sandboxes ; write ; {"projectId":"b"}
GET /api/v1/sandboxes ; read
GET /api/v1/sandboxes/{id} ; read
POST /api/v1/sandboxes/{id}/stop ; write ; {}
POST /api/v1/sandboxes/{id}/extend-timeout ; write ; {"duration":1000}
POST /api/v1/sandboxes/{id}/network-policy ; policy ; {"mode":"deny-all"}
POST /api/v1/sandboxes/{id}/snapshot ; write ; {}
POST /api/v1/sandboxes/{id}/cmd ; exec ; {"command":"true"}
GET /api/v1/sandboxes/{id}/cmd/{cmd} ; read,exec
GET /api/v1/sandboxes/{id}/cmd/{cmd}/logs ; read,exec
POST /api/v1/sandboxes/{id}/{cmd}/kill ; exec ; {"signal":15}
POST /api/v1/sandboxes/{id}/fs/mkdir ; exec ; {"path":"x"}
POST /api/v1/sandboxes/{id}/fs/write ; exec
POST /api/v1/sandboxes/{id}/fs/read ; read,exec ; {"path":"x"}
GET /api/v1/sandboxes/snapshots ; read
GET /api/v1/sandboxes/snapshots/{id} ; read
DELETE /api/v1/sandboxes/snapshots/{id} ; write
"#;

struct Operation {
    method: Method,
    path: &'static str,
    needs: BTreeSet<&'static str>,
    body: &'static str,
    query: &'static str,
}

fn table() -> Vec<Operation> {
    let line = |line: &'static str| {
        let mut parts = line.split(';').map(str::trim);
        let (method, path) = parts.next().unwrap().split_once(' ').unwrap();
        Operation {
            method: method.parse().unwrap(),
            path,
            needs: parts.next().unwrap().split(',').collect(),
            body: parts.next().unwrap_or_default(),
            query: parts.next().unwrap_or_default(),
        }
    };
    TABLE.lines().filter(|text| !text.is_empty()).map(line).collect()
}

/// What there is in the namespace `t/b`.
struct There {
    session: String,
    command: String,
    snapshot: String,
}

const UNKNOWN_SESSION: &str = "sbx_00000000000000000000000000";
const UNKNOWN_SNAPSHOT: &str = "snap_00000000000000000000000000";

impl There {
    async fn make(bed: &Bed) -> Self {
        let scope = "teamId=t&projectId=b";
        let path = format!("/api/v2/sandboxes/drives/b-vol?{scope}");
        bed.ok(Method::POST, &path, Some(json!({}))).await;
        let path = format!("/api/v2/secrets/B_SECRET?{scope}");
        bed.ok(Method::PUT, &path, Some(json!({"value": "v"}))).await;
        let body = json!({"name": "b-box", "projectId": "b", "ports": [3000]});
        let made = bed.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body)).await;
        let session = made["session"]["id"].as_str().unwrap().to_owned();
        let path = format!("/api/bivouac/v1/sandboxes/b-box/snapshots?{scope}");
        let taken = bed.ok(Method::POST, &path, Some(json!({"live": true}))).await;
        let path = format!("/api/v2/sandboxes/sessions/{session}/cmd?{scope}");
        let body = json!({"command": "sleep"});
        let begun = bed.ok(Method::POST, &path, Some(body)).await;
        Self {
            session,
            command: begun["command"]["id"].as_str().unwrap().to_owned(),
            snapshot: taken["snapshot"]["id"].as_str().unwrap().to_owned(),
        }
    }

    /// The path of an operation on what is there; with `unknown` on what is not.
    fn path(&self, of: &Operation, unknown: bool) -> String {
        let (session, snapshot) = match unknown {
            true => (UNKNOWN_SESSION, UNKNOWN_SNAPSHOT),
            false => (self.session.as_str(), self.snapshot.as_str()),
        };
        let id = if of.path.contains("/snapshots/") { snapshot } else { session };
        let name = if of.path.contains("/drives/") {
            "b-vol"
        } else if of.path.contains("/secrets/") {
            "B_SECRET"
        } else {
            "b-box"
        };
        let path = of.path.replace("{id}", id).replace("{cmd}", &self.command);
        let path = path.replace("{name}", name).replace("{credential}", "bearer");
        let path =
            path.replace("{team}", "t").replace("{project}", "b").replace("{token}", "b-other");
        let path =
            path.replace("{terminal}", "main").replace("{key}", "none").replace("{port}", "3000");
        let path = path.replace("{session}", session).replace("{command}", &self.command);
        let query = of.query.replace("{snapshot}", snapshot);
        format!("{path}?teamId=t&projectId=b&{query}")
    }
}

impl Bed {
    /// Makes a token; answers the whole of it.
    async fn token(&self, name: &str, namespaces: &[&str], verbs: &[&str]) -> String {
        let body = json!({"name": name, "namespaces": namespaces, "verbs": verbs});
        let made = self.ok(Method::POST, "/api/bivouac/v1/tokens", Some(body)).await;
        made["secret"].as_str().unwrap().to_owned()
    }

    /// Status and, unless it is a success, the error. What goes well may have no end.
    async fn try_as(&self, token: &str, method: &Method, path: &str, body: &str) -> (u16, Value) {
        let request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header("authorization", format!("Bearer {token}"))
            .header("content-length", body.len())
            .header("content-type", "application/json");
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = self.send(request).await;
        let status = response.status();
        if status.is_success() {
            return (status.as_u16(), Value::Null);
        }
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status.as_u16(), serde_json::from_slice(&bytes).unwrap_or_default())
    }

    async fn get_as(&self, token: &str, path: &str) -> (u16, Value) {
        let request =
            Request::builder().uri(path).header("authorization", format!("Bearer {token}"));
        let response = self.send(request.body(Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    /// All that there is to see in `t/b`, but for times that pass by themselves.
    async fn seen(&self) -> BTreeMap<&'static str, Value> {
        let mut out = BTreeMap::new();
        for path in [
            "/api/v2/sandboxes",
            "/api/v2/sandboxes/sessions",
            "/api/v2/sandboxes/snapshots",
            "/api/v2/sandboxes/drives",
            "/api/v2/secrets",
            "/api/v2/sandboxes/b-box",
            "/api/bivouac/v1/sandboxes/b-box/policy",
            "/api/v2/sandboxes/b-box/credentials",
        ] {
            let query = "?teamId=t&projectId=b&project=b";
            out.insert(path, self.ok(Method::GET, &format!("{path}{query}"), None).await);
        }
        out
    }
}

#[test]
fn every_operation_is_in_the_table() {
    let document = openapi::document(&api().into_openapi());
    let mut served = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            served.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    let table = table();
    let listed: BTreeSet<String> =
        table.iter().map(|of| format!("{} {}", of.method, of.path)).collect();
    assert_eq!(served, listed, "write down which right each operation takes");
}

#[tokio::test]
async fn a_token_of_another_namespace_finds_nothing_and_changes_nothing() {
    let bed = Bed::new().await;
    let there = There::make(&bed).await;
    bed.token("b-other", &["t/b"], &["read"]).await;
    // The same team, so that an id alone would be enough.
    let verbs = ["read", "exec", "preview", "write", "policy"];
    let token = bed.token("a", &["t/a"], &verbs).await;
    let before = bed.seen().await;
    let mut wrong = Vec::new();
    for of in table() {
        let path = there.path(&of, false);
        let (status, error) = bed.try_as(&token, &of.method, &path, of.body).await;
        let needs = |word: &str| of.needs.contains(word);
        // A pull is in a namespace that it does not see; nobody hands on what he has not.
        let refused = needs("admin") && !of.path.ends_with("/pull") || of.path.ends_with("/tokens");
        let wanted: &[u16] = match () {
            () if needs("upgrade") => &[400, 426],
            () if needs("free") => &[200, 201, 404],
            () if refused => &[403],
            () => &[404, 410],
        };
        let message = error["error"]["message"].as_str().unwrap_or_default();
        if !wanted.contains(&status) || (!refused && message.contains("right")) {
            wrong.push(format!("{} {}: {status} {error}", of.method, of.path));
        }
        if of.path.contains("{id}") {
            let unknown = there.path(&of, true);
            let other = bed.try_as(&token, &of.method, &unknown, of.body).await;
            let told = error.to_string().replace(&there.session, UNKNOWN_SESSION);
            let told = told.replace(&there.snapshot, UNKNOWN_SNAPSHOT);
            if (other.0, other.1.to_string()) != (status, told) {
                let unknown = other.1;
                wrong.push(format!("{} {}: {error} and not {unknown}", of.method, of.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(bed.seen().await, before, "something was changed");
}

#[tokio::test]
async fn each_right_opens_what_it_says_and_nothing_else() {
    let mut wrong = Vec::new();
    for right in ["read", "exec", "preview", "write", "policy", "admin"] {
        let bed = Bed::new().await;
        let there = There::make(&bed).await;
        let all = if right == "admin" { "*" } else { "t/b" };
        let token = bed.token("one", &[all], &[right]).await;
        bed.token("b-other", &["t/b"], &["read"]).await;
        // What takes the sandbox away comes last.
        let mut operations = table();
        operations.sort_by_key(|of| {
            let ends = ["stop", "snapshot", "rollback", "hold", "pause"];
            let after = ends.iter().position(|end| of.path.ends_with(end)).map_or(0, |_| 1);
            if of.method == Method::DELETE { 2 } else { after }
        });
        for of in operations {
            let path = there.path(&of, false);
            let (status, error) = bed.try_as(&token, &of.method, &path, of.body).await;
            let may = ["free", "upgrade", right].iter().any(|word| of.needs.contains(word));
            let may = may || right == "admin";
            let told = error["error"]["right"].is_string() || of.path.ends_with("/tokens");
            // The simulated broker explains nothing.
            let failed = status >= 500 && !of.path.ends_with("/explain");
            if status == 401 || failed || (status == 403) == may || (!may && !told) {
                wrong.push(format!("{right}: {} {}: {status} {error}", of.method, of.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn lists_show_what_somebody_sees() {
    let bed = Bed::new().await;
    There::make(&bed).await;
    for (team, project, name) in [("t", "a", "a-box"), ("u", "x", "x-box"), ("u", "y", "y-box")] {
        let path = format!("/api/v3/sandboxes?teamId={team}");
        let body = json!({"name": name, "projectId": project});
        bed.ok(Method::POST, &path, Some(body)).await;
    }
    let names = async |token: &str, query: &str| {
        let mut all = Vec::new();
        let mut cursor = String::new();
        loop {
            let path = format!("/api/bivouac/v1/sandboxes?all=true&limit=1{query}{cursor}");
            let (status, page) = bed.get_as(token, &path).await;
            assert_eq!(status, 200, "{page}");
            let found = page["sandboxes"].as_array().unwrap();
            all.extend(found.iter().map(|s| s["name"].as_str().unwrap().to_owned()));
            match page["pagination"]["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        all.sort();
        all
    };
    let one = bed.token("one", &["t/a"], &["read"]).await;
    assert_eq!(names(&one, "").await, ["a-box"]);
    let team = bed.token("team", &["u/*", "t/a"], &["read"]).await;
    assert_eq!(names(&team, "").await, ["a-box", "x-box", "y-box"]);
    assert_eq!(names(TOKEN, "").await, ["a-box", "b-box", "x-box", "y-box"]);
    let stats = bed.get_as(&one, "/api/bivouac/v1/stats?all=true").await.1;
    assert_eq!(stats["stats"].as_array().unwrap().len(), 1);
    assert_eq!(stats["stats"][0]["sandbox"], "a-box");
    let blind = bed.token("blind", &["t/a"], &["exec"]).await;
    let refused = bed.get_as(&blind, "/api/bivouac/v1/sandboxes?all=true").await;
    assert_eq!(refused.0, 403);
}

#[tokio::test]
async fn account_calls_know_the_token_s_namespaces_and_no_other() {
    let bed = Bed::new().await;
    let token = bed.token("scoped", &["u/x", "v/*"], &["read", "write"]).await;
    let (_, user) = bed.get_as(&token, "/api/v2/user").await;
    assert_eq!(
        (&user["user"]["username"], &user["user"]["defaultTeamId"]),
        (&json!("scoped"), &json!("u"))
    );
    let (_, teams) = bed.get_as(&token, "/api/v2/teams").await;
    let ids: Vec<_> = teams["teams"].as_array().unwrap().iter().map(|t| t["id"].clone()).collect();
    assert_eq!(ids, ["u", "v"]);
    assert_eq!(bed.get_as(&token, "/api/v2/teams/w").await.0, 404);
    assert_eq!(bed.get_as(&token, "/api/v2/projects/x").await.1["accountId"], "u");
    assert_eq!(bed.get_as(&token, "/api/v2/projects/y").await.0, 404);
    assert_eq!(bed.get_as(&token, "/api/v2/projects/y?teamId=v").await.0, 200);
    // Who names no namespace means the first.
    let made = bed.try_as(&token, &Method::POST, "/api/v3/sandboxes", r#"{"name":"one"}"#).await;
    assert_eq!(made.0, 200, "{}", made.1);
    let path = "/api/v2/sandboxes/one?teamId=u&projectId=x";
    assert_eq!(bed.get_as(TOKEN, path).await.0, 200);
    let (_, engine) = bed.get_as(&token, "/api/bivouac/v1/engine").await;
    assert!(engine["version"].is_string());
    for hidden in ["dataDir", "pid", "node", "storage", "sessions"] {
        assert!(engine.get(hidden).is_none(), "{hidden}");
    }
    assert_eq!(bed.get_as(TOKEN, "/api/bivouac/v1/engine").await.1["dataDir"], "/data");
    assert_eq!(bed.get_as(&token, "/metrics").await.0, 403);
    assert_eq!(bed.get_as(TOKEN, "/metrics").await.0, 200);
}

#[tokio::test]
async fn what_a_create_uses_is_checked_as_well() {
    let bed = Bed::new().await;
    let there = There::make(&bed).await;
    let writer = bed.token("writer", &["t/a"], &["read", "write"]).await;
    let make = async |token: &str, body: Value| {
        let path = "/api/v3/sandboxes?teamId=t&projectId=a";
        bed.try_as(token, &Method::POST, path, &body.to_string()).await
    };
    let from = json!({"source": {"type": "snapshot", "snapshotId": there.snapshot}});
    let foreign = make(&writer, from.clone()).await;
    let unknown = json!({"source": {"type": "snapshot", "snapshotId": UNKNOWN_SNAPSHOT}});
    let unknown = make(&writer, unknown).await;
    assert_eq!(foreign.0, 410, "{}", foreign.1);
    let told = foreign.1.to_string().replace(&there.snapshot, UNKNOWN_SNAPSHOT);
    assert_eq!(told, unknown.1.to_string());
    let both = bed.token("both", &["t/a", "t/b"], &["read", "write"]).await;
    assert_eq!(make(&both, from).await.0, 200, "positive control");
    for body in [
        json!({"networkPolicy": {"mode": "deny-all"}}),
        json!({"credentials": [{"type": "github"}]}),
        json!({"image": "docker://127.0.0.1:1/none:1"}),
    ] {
        let refused = make(&writer, body.clone()).await;
        assert_eq!(refused.0, 403, "{body}: {}", refused.1);
    }
    let policy = bed.token("policy", &["t/a"], &["write", "policy"]).await;
    assert_eq!(make(&policy, json!({"networkPolicy": {"mode": "deny-all"}})).await.0, 200);
    // With a key that another namespace has used.
    let body = json!({"name": "b-keyed", "projectId": "b"}).to_string();
    let keyed = |token: &str, project: &str, body: String| {
        Request::builder()
            .method(Method::POST)
            .uri(format!("/api/v3/sandboxes?teamId=t&projectId={project}"))
            .header("authorization", format!("Bearer {token}"))
            .header("content-type", "application/json")
            .header("idempotency-key", "same")
            .body(Body::from(body))
            .unwrap()
    };
    assert_eq!(bed.send(keyed(TOKEN, "b", body)).await.status(), 200);
    let response = bed.send(keyed(&writer, "a", "{}".to_owned())).await;
    let made = lines(response).await.remove(0);
    assert_ne!(made["sandbox"]["name"], "b-keyed");
}

#[tokio::test]
async fn a_stopped_sandbox_is_woken_by_who_may_work_in_it() {
    let bed = Bed::new().await;
    let there = There::make(&bed).await;
    let stop = format!("/api/v2/sandboxes/sessions/{}/stop?teamId=t", there.session);
    bed.ok(Method::POST, &stop, None).await;
    let reader = bed.token("reader", &["t/b"], &["read"]).await;
    let worker = bed.token("worker", &["t/b"], &["exec"]).await;
    let wake = "/api/v2/sandboxes/b-box?teamId=t&projectId=b&resume=true";
    assert_eq!(bed.get_as(&reader, wake).await.0, 403);
    assert!(bed.sim.running().is_empty());
    let (status, woken) = bed.get_as(&worker, wake).await;
    assert_eq!((status, &woken["resumed"]), (200, &json!(true)));
}
