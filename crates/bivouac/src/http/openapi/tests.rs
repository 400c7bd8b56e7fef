//! The document and the router say the same.

use std::collections::BTreeSet;

use super::*;

fn operations(document: &Value) -> BTreeSet<(String, String)> {
    let paths = document["paths"].as_object().unwrap();
    paths
        .iter()
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().keys();
            methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
        })
        .collect()
}

/// What reference/vercel-api.md lists, and ours.
const EXPECTED: &str = "
GET /api/openapi.json
GET /api/bivouac/v1/engine
GET /api/bivouac/v1/sandboxes
POST /api/bivouac/v1/sandboxes/{name}/hold
POST /api/bivouac/v1/sandboxes/{name}/snapshots
POST /api/bivouac/v1/sandboxes/{name}/forks
POST /api/bivouac/v1/sandboxes/{name}/rollback
POST /api/bivouac/v1/sandboxes/{name}/pause
POST /api/bivouac/v1/sandboxes/{name}/unpause
POST /api/bivouac/v1/sandboxes/{name}/keep-alive
GET /api/bivouac/v1/sandboxes/{name}/terminals
POST /api/bivouac/v1/sandboxes/{name}/terminals
DELETE /api/bivouac/v1/sandboxes/{name}/terminals/{terminal}
GET /api/bivouac/v1/sandboxes/{name}/terminals/{terminal}/attach
GET /api/bivouac/v1/sessions/{session}/terminals/{command}/attach
PATCH /api/bivouac/v1/snapshots/{id}
GET /api/bivouac/v1/sandboxes/{name}/ports
PUT /api/bivouac/v1/sandboxes/{name}/ports/{port}
POST /api/bivouac/v1/sandboxes/{name}/ports/{port}/link
POST /api/bivouac/v1/sandboxes/{name}/ports/revoke
GET /api/bivouac/v1/sandboxes/{name}/tunnel
POST /api/bivouac/v1/drives/{name}/attach
POST /api/bivouac/v1/drives/{name}/detach
GET /api/bivouac/v1/drives/{name}/file
PUT /api/bivouac/v1/drives/{name}/file
GET /api/bivouac/v1/drives/{name}/files
GET /api/bivouac/v1/drives/{name}/usage
POST /api/bivouac/v1/gc
POST /api/bivouac/v1/images/pull
POST /api/bivouac/v1/snapshots/import
GET /api/bivouac/v1/snapshots/{id}/export
GET /api/bivouac/v1/usage
GET /api/bivouac/v1/stats
GET /api/bivouac/v1/tokens
POST /api/bivouac/v1/tokens
DELETE /api/bivouac/v1/tokens/{token}
GET /api/bivouac/v1/whoami
GET /api/bivouac/v1/access-log
GET /api/v2/user
GET /api/v2/teams
GET /api/v2/teams/{team}
GET /api/v2/projects/{project}
POST /api/v11/projects
GET /api/bivouac/v1/sandboxes/{name}/policy
PUT /api/bivouac/v1/sandboxes/{name}/policy
PATCH /api/bivouac/v1/sandboxes/{name}/policy
POST /api/bivouac/v1/sandboxes/{name}/policy/explain
POST /api/bivouac/v1/sandboxes/{name}/policy/learn
DELETE /api/bivouac/v1/sandboxes/{name}/policy/learn
GET /api/bivouac/v1/sandboxes/{name}/egress-log
POST /api/v2/sandboxes
POST /api/v3/sandboxes
POST /api/v4/sandboxes
GET /api/v2/sandboxes
GET /api/v2/sandboxes/{name}
PATCH /api/v2/sandboxes/{name}
DELETE /api/v2/sandboxes/{name}
POST /api/v2/sandboxes/{name}/fork
GET /api/v2/secrets
PUT /api/v2/secrets/{name}
DELETE /api/v2/secrets/{name}
GET /api/v2/sandboxes/{name}/credentials
POST /api/v2/sandboxes/{name}/credentials
DELETE /api/v2/sandboxes/{name}/credentials/{credential}
GET /api/v2/sandboxes/sessions
GET /api/v2/sandboxes/sessions/{id}
POST /api/v2/sandboxes/sessions/{id}/stop
POST /api/v2/sandboxes/sessions/{id}/extend-timeout
POST /api/v2/sandboxes/sessions/{id}/network-policy
POST /api/v2/sandboxes/sessions/{id}/snapshot
POST /api/v2/sandboxes/sessions/{id}/interactive
POST /api/v2/sandboxes/sessions/{id}/cmd
GET /api/v2/sandboxes/sessions/{id}/cmd
GET /api/v2/sandboxes/sessions/{id}/cmd/{cmd}
POST /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/kill
GET /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/logs
POST /api/v2/sandboxes/sessions/{id}/cmd/{cmd}/stdin
POST /api/v2/sandboxes/sessions/{id}/fs/mkdir
POST /api/v2/sandboxes/sessions/{id}/fs/write
POST /api/v2/sandboxes/sessions/{id}/fs/read
GET /api/v2/sandboxes/snapshots
GET /api/v2/sandboxes/snapshots/tree
GET /api/v2/sandboxes/snapshots/{id}
DELETE /api/v2/sandboxes/snapshots/{id}
GET /api/v2/sandboxes/drives
POST /api/v2/sandboxes/drives/{name}
GET /api/v2/sandboxes/drives/{name}
DELETE /api/v2/sandboxes/drives/{name}
POST /api/v2/sandboxes/drives/{name}/fork
POST /api/v1/sandboxes
GET /api/v1/sandboxes
GET /api/v1/sandboxes/{id}
POST /api/v1/sandboxes/{id}/stop
POST /api/v1/sandboxes/{id}/extend-timeout
POST /api/v1/sandboxes/{id}/network-policy
POST /api/v1/sandboxes/{id}/snapshot
POST /api/v1/sandboxes/{id}/cmd
GET /api/v1/sandboxes/{id}/cmd/{cmd}
GET /api/v1/sandboxes/{id}/cmd/{cmd}/logs
POST /api/v1/sandboxes/{id}/{cmd}/kill
POST /api/v1/sandboxes/{id}/fs/mkdir
POST /api/v1/sandboxes/{id}/fs/write
POST /api/v1/sandboxes/{id}/fs/read
GET /api/v1/sandboxes/snapshots
GET /api/v1/sandboxes/snapshots/{id}
DELETE /api/v1/sandboxes/snapshots/{id}
";

fn described() -> Value {
    document(&crate::http::api().into_openapi())
}

#[test]
fn the_document_lists_what_is_expected() {
    let expected: BTreeSet<(String, String)> = EXPECTED
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(method, path)| (method.to_owned(), path.to_owned()))
        .collect();
    assert_eq!(operations(&described()), expected);
}

/// The router cannot be asked for its paths, so the sources are: what is not registered together
/// with its description is one of these.
#[test]
fn nothing_is_routed_past_the_document() {
    let sources = [
        ("mod.rs", include_str!("../mod.rs")),
        ("account.rs", include_str!("../account.rs")),
        ("live.rs", include_str!("../live.rs")),
        ("own.rs", include_str!("../own.rs")),
        ("policy.rs", include_str!("../policy.rs")),
        ("secrets.rs", include_str!("../secrets.rs")),
        ("openapi.rs", include_str!("../openapi.rs")),
        ("v1/mod.rs", include_str!("../v1/mod.rs")),
        ("v1/commands.rs", include_str!("../v1/commands.rs")),
        ("v1/sandboxes.rs", include_str!("../v1/sandboxes.rs")),
        ("v1/snapshots.rs", include_str!("../v1/snapshots.rs")),
        ("v2/mod.rs", include_str!("../v2/mod.rs")),
        ("v2/commands.rs", include_str!("../v2/commands.rs")),
        ("v2/drives.rs", include_str!("../v2/drives.rs")),
        ("v2/files.rs", include_str!("../v2/files.rs")),
        ("v2/sandboxes.rs", include_str!("../v2/sandboxes.rs")),
        ("v2/sessions.rs", include_str!("../v2/sessions.rs")),
        ("v2/snapshots.rs", include_str!("../v2/snapshots.rs")),
    ];
    for (name, source) in sources {
        let direct: Vec<&str> = source
            .lines()
            .filter(|line| line.contains(".route(") || line.contains(".route_service("))
            .collect();
        let allowed = if name == "mod.rs" {
            // What is no part of the API.
            vec![
                r#"    let metrics = Router::new().route("/metrics", get(metrics::serve)).with_state(app.clone());"#,
                r#"        .route("/health", get(health))"#,
                r#"        .route("/interactive/{session}", get(interactive::connect))"#,
                r#"        .route("/metrics", get(metrics::serve))"#,
            ]
        } else {
            vec![]
        };
        assert_eq!(direct, allowed, "{name}");
        // And each described handler is registered.
        let described = source.matches("#[utoipa::path(").count();
        let registered: usize = source
            .split("routes!(")
            .skip(1)
            .map(|rest| rest.split(')').next().unwrap_or_default().matches(',').count() + 1)
            .sum();
        let elsewhere = usize::from(name == "mod.rs");
        let own = usize::from(name == "openapi.rs");
        assert_eq!(registered + own, described + elsewhere, "{name}");
    }
}

#[test]
fn the_document_is_sound() {
    let document = described();
    let text = document.to_string();
    for reference in text.split("\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(document["components"]["schemas"].get(name).is_some(), "{name} is not defined");
    }
    let mut ids = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} is there twice");
            assert!(
                operation["summary"].as_str().is_some_and(|s| !s.is_empty()),
                "{method} {path}"
            );
            let parameters = operation["parameters"].as_array().unwrap();
            for name in path.split(['{', '}']).skip(1).step_by(2) {
                let found = parameters.iter().any(|p| p["name"] == name && p["in"] == "path");
                assert!(found, "{method} {path} does not describe {name}");
            }
        }
    }
}

#[test]
fn optional_fields_are_absent_not_null() {
    let schemas = &described()["components"]["schemas"];
    let session = &schemas["SessionView"]["properties"];
    assert_eq!(session["startedAt"]["type"], "integer");
    assert_eq!(
        schemas["CommandView"]["properties"]["exitCode"]["type"],
        json!(["integer", "null"])
    );
}
