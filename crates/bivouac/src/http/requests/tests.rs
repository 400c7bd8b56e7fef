//! Bodies: the recorded ones of real clients are taken, wrong ones are refused by name.

use serde_json::json;

use super::*;

fn create(body: Value) -> Result<CreateSandbox, ApiError> {
    let body: CreateBody =
        serde_json::from_value(body).map_err(|e| ApiError::invalid(e.to_string()))?;
    body.spec(None)
}

#[test]
fn recorded_creates() {
    for body in [
        json!({"projectId": "prj_local", "ports": []}),
        json!({"projectId": "prj_local"}),
        json!({"projectId": "prj_local", "ports": [], "runtime": "node24"}),
        json!({"projectId": "prj_local", "ports": [], "image": "vercel/sandbox/node:24", "persistent": false}),
        json!({"projectId": "p", "source": {"type": "tarball", "url": "https://example.com/x.tgz"}}),
        json!({"projectId": "p", "source": {"type": "snapshot", "snapshotId": "snap_x"}}),
    ] {
        assert!(create(body.clone()).is_ok(), "{body}");
    }
    let spec = create(json!({
        "projectId": "prj_local", "ports": [3000], "timeout": 600_000, "resources": {"vcpus": 4},
        "name": "c1", "persistent": true,
        "networkPolicy": {"allow": ["*.example.org"], "subnets": {"deny": ["10.0.0.0/8"]}},
        "env": {"A": "1"}, "tags": {"env": "dev"}, "snapshotExpiration": 604_800_000,
        "keepLastSnapshots": {"count": 2, "expiration": 0}, "mounts": {}, "region": "iad1",
        "failoverRegions": [], "__interactive": true, "__other": 1,
    }))
    .expect("the official command line's");
    assert_eq!(spec.resources.map(|r| r.memory_mb), Some(8192));
    assert_eq!(spec.keep_last.map(|k| (k.count, k.expiration)), Some((2, Some(0))));
    assert!(spec.policy.is_some_and(|draft| matches!(draft.policy, NetworkPolicy::Custom(_))));
}

#[test]
fn refused_creates_name_the_field() {
    for (body, field) in [
        (json!({"name": "a/b"}), "name"),
        (json!({"name": "x".repeat(129)}), "name"),
        (json!({"name": "sessions"}), "name"),
        (json!({"resources": {"vcpus": 3}}), "resources.vcpus"),
        (json!({"resources": {"vcpus": 2, "memory": 1024}}), "resources.memory"),
        (json!({"ports": (3000..3016).collect::<Vec<_>>()}), "ports"),
        (json!({"ports": [80]}), "ports"),
        (json!({"timeout": 999}), "timeout"),
        (json!({"timeout": 86_400_001}), "timeout"),
        (json!({"runtime": "node1"}), "runtime"),
        (json!({"runtime": "node24", "image": "x"}), "runtime"),
        (json!({"image": ""}), "image"),
        (json!({"image": "x".repeat(256)}), "image"),
        (json!({"networkId": "x\n"}), "networkId"),
        (json!({"env": {"A=B": "x"}}), "env"),
        (json!({"tags": {"k": "v".repeat(257)}}), "tags"),
        (json!({"networkPolicy": {"mode": "open"}}), "networkPolicy.mode"),
        (json!({"snapshotExpiration": -1}), "expiration"),
        (json!({"keepLastSnapshots": {"count": 0}}), "keepLastSnapshots.count"),
        (json!({"region": "iad1", "failoverRegions": ["sfo1", "iad1"]}), "failoverRegions"),
        (json!({"region": "../x"}), "region"),
        (json!({"source": {"type": "zip"}}), "source.type"),
        (json!({"source": {"type": "git"}}), "source.url"),
        (json!({"source": {"type": "git", "url": "file:///etc"}}), "source.url"),
        (json!({"source": {"type": "git", "url": "https://u:S3CRET@x.com/r"}}), "source.url"),
        (json!({"source": {"type": "git", "url": "https://x.com/r", "depth": 0}}), "source.depth"),
        (
            json!({"source": {"type": "git", "url": "https://x.com/r", "revision": "--upload-pack=x"}}),
            "source.revision",
        ),
        (json!({"source": {"type": "snapshot"}}), "source.snapshotId"),
    ] {
        let error = create(body.clone()).expect_err(&body.to_string());
        assert_eq!(error.code(), "bad_request");
        let message = error.message();
        assert!(message.starts_with(&format!("Invalid {field}:")), "{body}: {message}");
        assert!(!message.contains("S3CRET"), "{message}");
    }
}

#[test]
fn drives_and_their_places() {
    let spec = create(json!({"mounts": {"/data/": {"drive": "d", "mode": "read-only"},
        "/w": {"drive": "w"}}}));
    let mounts = spec.unwrap().mounts;
    assert_eq!(mounts["/data"].mode, bivouac_types::drive::DriveMode::Snapshot);
    assert_eq!(mounts["/w"].mode, bivouac_types::drive::DriveMode::ReadWrite);
    for bad in [
        json!({"/": {"drive": "d"}}),
        json!({"/a": {"drive": "d"}, "/a/b": {"drive": "e"}}),
        json!({"/a": {"drive": "../d"}}),
        json!({"/a": {"drive": "d", "mode": "rw"}}),
    ] {
        let error = create(json!({"mounts": bad})).expect_err("a bad place");
        assert!(error.message().contains("mounts"), "{}", error.message());
    }
}

#[test]
fn a_login_is_no_part_of_the_source() {
    let login = |kind: &str, password: &str| {
        let url = "https://x.com/r";
        create(json!({"source":
            {"type": kind, "url": url, "username": "u", "password": password}}))
    };
    let spec = login("git", "S3CRET").unwrap();
    assert!(!format!("{spec:?}").contains("S3CRET"));
    assert_eq!(spec.source_login.unwrap().expose(), "Basic dTpTM0NSRVQ=");
    for (kind, password) in [("tarball", "S3CRET"), ("git", "S3CRET\n")] {
        let error = login(kind, password).expect_err("refused");
        assert!(!error.message().contains("S3CRET"), "{}", error.message());
    }
}

#[test]
fn an_update_tells_absent_from_null() {
    let change = |body: Value| {
        let body: UpdateBody = serde_json::from_value(body).unwrap();
        body.change().unwrap()
    };
    let nothing = change(json!({}));
    assert!(nothing.network_id.is_none() && nothing.keep_last.is_none() && nothing.tags.is_none());
    // Recorded from the official SDK.
    let all = change(json!({
        "persistent": true, "resources": {"vcpus": 8, "memory": 16384}, "timeout": 900_000,
        "networkPolicy": {"mode": "allow-all"}, "networkId": null, "tags": {"a": "b"},
        "ports": [4000], "snapshotExpiration": 0, "keepLastSnapshots": null, "region": "sfo1",
        "failoverRegions": [], "mounts": {},
    }));
    assert_eq!(all.network_id, Some(None));
    assert_eq!(all.keep_last, Some(None));
    assert_eq!(all.ports, Some(vec![4000]));
    let set = change(json!({"networkId": "n", "keepLastSnapshots": {"count": 1}}));
    assert_eq!(set.network_id, Some(Some("n".to_owned())));
    assert_eq!(set.keep_last.flatten().map(|k| k.count), Some(1));
}

#[test]
fn a_fork_overrides() {
    let body: ForkBody = serde_json::from_value(
        json!({"name": "f", "mounts": {}, "env": {"A": "1"}, "networkId": null, "__interactive": true}),
    )
    .unwrap();
    assert!(body.wants_interactive());
    let spec = body.spec(Some("key".to_owned())).unwrap();
    assert_eq!(spec.name.as_deref(), Some("f"));
    assert_eq!(spec.update.network_id, Some(None));
    assert_eq!(spec.update.env.unwrap()["A"], "1");
    assert_eq!(spec.idempotency_key.as_deref(), Some("key"));
    let empty: ForkBody = serde_json::from_value(json!({})).unwrap();
    assert!(empty.spec(None).unwrap().update.network_id.is_none());
}

#[test]
fn commands() {
    let spec = |body: Value| {
        let body: CommandRequest = serde_json::from_value(body).unwrap();
        body.spec()
    };
    let full = spec(json!({"command": "npm", "args": ["i"], "cwd": "app", "env": {"X": "1"},
        "sudo": true, "wait": true, "logs": true, "timeout": 5000}))
    .unwrap();
    assert_eq!((full.program.as_str(), full.sudo, full.timeout_ms), ("npm", true, Some(5000)));
    assert!(!full.attach_stdin);
    let least = spec(json!({"command": "true"})).unwrap();
    assert_eq!((least.args.len(), least.cwd, least.timeout_ms), (0, None, None));
    for (body, field) in [
        (json!({"command": ""}), "command"),
        (json!({"command": "a\0"}), "command"),
        (json!({"command": "a", "args": ["\0"]}), "args"),
        (json!({"command": "a", "cwd": "\0"}), "cwd"),
        (json!({"command": "a", "timeout": 99}), "timeout"),
        (json!({"command": "a", "timeout": -1}), "timeout"),
        (json!({"command": "a", "env": {"": "x"}}), "env"),
    ] {
        let error = spec(body.clone()).expect_err(&body.to_string());
        assert!(error.message().starts_with(&format!("Invalid {field}:")), "{}", error.message());
    }
}
