//! The wire shapes: nothing optional is null, everything required is there.

use std::collections::BTreeMap;

use bivouac_types::id::{CommandId, SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::Resources;
use bivouac_types::snapshot::Purpose;
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn session_id(n: u8) -> SessionId {
    SessionId::new(u64::from(n), [n; 10])
}

fn a_session(status: SessionStatus, all: bool) -> Session {
    let time = |t: i64| all.then_some(t);
    Session {
        id: session_id(1),
        sandbox_id: SandboxId::new(1, [1; 10]),
        sandbox_name: "box".to_owned(),
        status,
        generation: 1,
        resources: Resources::default(),
        timeout_ms: 300_000,
        cwd: "/vercel/sandbox".to_owned(),
        runtime: "node24".to_owned(),
        image: "host".to_owned(),
        env: BTreeMap::from([("SECRET".to_owned(), "canary7f3a".to_owned())]),
        mounts: BTreeMap::new(),
        policy: NetworkPolicy::DenyAll,
        policy_generation: 1,
        policy_before: None,
        paused_at: None,
        paused_ms: 0,
        keep_until: None,
        source_snapshot_id: all.then(|| SnapshotId::new(1, [3; 10])),
        id_range: 1,
        node: "node".to_owned(),
        region: "iad1".to_owned(),
        reason: all.then(|| "it ran out of luck".to_owned()),
        requested_at: 1,
        created_at: 2,
        updated_at: 3,
        started_at: time(10),
        requested_stop_at: time(20),
        stopped_at: time(30),
        aborted_at: None,
        snapshotted_at: time(25),
        active_cpu_ms: time(4),
    }
}

fn a_sandbox(all: bool) -> Sandbox {
    Sandbox {
        id: SandboxId::new(1, [1; 10]),
        namespace: Namespace { team: "t".to_owned(), project: "p".to_owned() },
        name: "box".to_owned(),
        ephemeral: false,
        persistent: true,
        mounts: bivouac_types::drive::Mounts::default(),
        resources: Resources::default(),
        timeout_ms: 300_000,
        ports: vec![3000],
        env: BTreeMap::from([("SECRET".to_owned(), "canary7f3a".to_owned())]),
        tags: BTreeMap::new(),
        image: "host".to_owned(),
        runtime: "host".to_owned(),
        cwd: "/vercel/sandbox".to_owned(),
        policy: NetworkPolicy::AllowAll,
        snapshot_expiration_ms: all.then_some(0),
        keep_last: all.then_some(KeepLastSnapshots {
            count: 1,
            expiration: None,
            delete_evicted: None,
        }),
        life: bivouac_types::life::Life::default(),
        restarts: bivouac_types::life::Restarts::default(),
        network_id: all.then(|| "n".to_owned()),
        region: "iad1".to_owned(),
        failover_regions: Vec::new(),
        current_session_id: session_id(1),
        current_snapshot_id: all.then(|| SnapshotId::new(1, [3; 10])),
        status: SessionStatus::Running,
        status_updated_at: 3,
        generation: 1,
        created_at: 1,
        updated_at: 2,
        total_active_cpu_ms: 5,
        total_duration_ms: 6,
    }
}

fn a_snapshot(all: bool) -> Snapshot {
    Snapshot {
        id: SnapshotId::new(1, [3; 10]),
        source_session_id: session_id(1),
        sandbox_name: "box".to_owned(),
        status: SnapshotStatus::Created,
        image: "host".to_owned(),
        runtime: "host".to_owned(),
        region: "iad1".to_owned(),
        size_bytes: 1,
        automatic: all,
        parent_id: all.then(|| SnapshotId::new(1, [4; 10])),
        expiration_ms: 0,
        expires_at: all.then_some(9),
        created_at: 1,
        updated_at: 2,
        last_used_at: all.then_some(3),
        labels: all.then(|| ("k".to_owned(), "v".to_owned())).into_iter().collect(),
        purpose: if all { Purpose::Rollback } else { Purpose::Kept },
        stall_us: i64::from(all),
        measured: true,
    }
}

/// Every field but the allowed ones is not null, and numbers are whole.
fn check(value: &Value, path: &str) {
    match value {
        Value::Null => {
            let name = path.rsplit('.').next().unwrap_or_default();
            assert!(["exitCode", "next", "prev"].contains(&name), "{path} is null");
        }
        Value::Number(number) => assert!(number.is_i64(), "{path} is {number}"),
        Value::Array(list) => list.iter().for_each(|item| check(item, path)),
        Value::Object(map) => map.iter().for_each(|(k, v)| check(v, &format!("{path}.{k}"))),
        _ => {}
    }
}

#[test]
fn nothing_optional_is_null_and_no_environment_is_shown() {
    for all in [false, true] {
        let view = View {
            sandbox: a_sandbox(all),
            session: a_session(SessionStatus::Running, all),
            routes: vec![Route {
                port: 3000,
                subdomain: "a".to_owned(),
                url: "http://a".to_owned(),
                public: false,
            }],
            resumed: all,
        };
        let page = Page { items: vec![a_snapshot(all)], next: all.then(|| "c".to_owned()) };
        let end = all.then_some(CommandEnd {
            exit_code: None,
            duration_ms: 1,
            reason: Some(EndReason::Lost),
        });
        let command = Command {
            id: CommandId::new(1, [1; 10]),
            session_id: session_id(1),
            name: "true".to_owned(),
            args: Vec::new(),
            cwd: "/".to_owned(),
            attach_stdin: false,
            tty: false,
            terminal: None,
            started_at: 1,
            end,
        };
        for value in [
            json!(ViewBody::from(&view)),
            json!(SnapshotsBody::from(&page)),
            json!(SnapshotView::from(&page.items[0]).v1()),
            json!(CommandView::from(&command)),
            json!(CommandView::from(&command).v1()),
            json!(
                SandboxView::listed(&view.sandbox, Some(1), Some(2))
                    .with_namespace(&view.sandbox.namespace)
            ),
            json!(SessionView::from(&view.session).interactive()),
        ] {
            check(&value, "");
            assert!(!value.to_string().contains("canary7f3a"), "{value}");
        }
    }
}

#[test]
fn required_fields_are_there() {
    let has = |value: &Value, names: &str| {
        for name in names.split_whitespace() {
            assert!(value.get(name).is_some(), "{name} is missing in {value}");
        }
    };
    let session = json!(SessionView::from(&a_session(SessionStatus::Pending, false)));
    has(
        &session,
        "id memory vcpus region timeout status requestedAt createdAt updatedAt cwd runtime",
    );
    let sandbox = json!(SandboxView::from(&a_sandbox(false)));
    has(&sandbox, "name persistent createdAt updatedAt currentSessionId status");
    let snapshot = json!(SnapshotView::from(&a_snapshot(false)));
    has(&snapshot, "id sourceSessionId region status sizeBytes createdAt updatedAt");
    let old = json!(SnapshotView::from(&a_snapshot(false)).v1());
    has(&old, "sourceSandboxId");
    assert!(old.get("sourceSessionId").is_none());
}

#[test]
fn a_deadline_is_shown_while_the_newest_session_runs() {
    let expires = |sandbox: &Sandbox, session: &Session| {
        json!(SandboxView::with_session(sandbox, session)).get("expiresAt").cloned()
    };
    let sandbox = a_sandbox(false);
    let running = a_session(SessionStatus::Running, true);
    assert_eq!(expires(&sandbox, &running), Some(json!(10 + 300_000)));
    assert_eq!(expires(&sandbox, &a_session(SessionStatus::Stopped, true)), None);
    let other = Sandbox { current_session_id: session_id(2), ..a_sandbox(false) };
    assert_eq!(expires(&other, &running), None);
    let listed =
        |deadline| json!(SandboxView::listed(&sandbox, deadline, None)).get("expiresAt").cloned();
    assert_eq!((listed(Some(7)), listed(None)), (Some(json!(7)), None));
}

#[test]
fn a_duration_is_from_start_to_end() {
    let view = json!(SessionView::from(&a_session(SessionStatus::Stopped, true)));
    assert_eq!(view["duration"], 20);
    let mut never = a_session(SessionStatus::Stopped, true);
    never.started_at = None;
    assert!(json!(SessionView::from(&never)).get("duration").is_none());
}

proptest! {
    /// A session in any state, with any of its optional parts, is a valid answer.
    #[test]
    fn any_session(index in 0usize..7, times in proptest::collection::vec(proptest::option::of(0i64..1 << 50), 6)) {
        let mut session = a_session(SessionStatus::ALL[index], false);
        session.started_at = times[0];
        session.requested_stop_at = times[1];
        session.stopped_at = times[2];
        session.aborted_at = times[3];
        session.snapshotted_at = times[4];
        session.active_cpu_ms = times[5];
        let view = json!(SessionView::from(&session));
        check(&view, "");
        prop_assert!(view.get("duration").is_none_or(|d| d.as_i64().is_some_and(|d| d >= 0)));
    }
}
