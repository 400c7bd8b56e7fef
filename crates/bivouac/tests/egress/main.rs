//! The egress firewall and the credential broker, seen from outside: the built program in a namespace
//! without an uplink, a world of names, origins and an attacker behind it, and real sandboxes.
//!
//! Tests are named after the cases of the attack catalogue (docs/egress-tests.md has the table).
//! Invariant: what decides a test is what reached the world, by its own record ([`World::wire`],
//! [`World::seen`], [`World::queries`]) or what the sandbox received; never a log of the engine.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test says what is wrong by panicking, starts programs and looks at the clock"
)]

mod address;
mod clients;
mod credentials;
mod differential;
mod dns;
mod floods;
mod guard;
mod http1;
mod http2;
mod keys;
mod lifecycle;
mod modes;
mod names;
mod origins;
mod pause;
mod pki;
mod restart;
mod table;
mod tools;
mod world;

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bivouac_testkit::{Client, MachineLock, TestSandbox, TestServer, World, shared};
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// An engine in a world. All tests of this program share one, for as long as one of them uses it.
struct Bed {
    inner: Arc<Inner>,
    client: Client,
}

struct Inner {
    // In this order: the engine ends before its world does.
    server: TestServer,
    world: World,
    _lock: MachineLock,
}

static CURRENT: Mutex<Weak<Inner>> = Mutex::const_new(Weak::new());
static TEAMS: AtomicU64 = AtomicU64::new(0);

impl Bed {
    /// Enters the world with the calling thread: a test runs in one thread.
    async fn new() -> Self {
        let mut current = CURRENT.lock().await;
        let inner = if let Some(inner) = current.upgrade() {
            inner.world.enter().unwrap();
            inner
        } else {
            let _lock = shared().unwrap();
            let world = World::new().unwrap();
            world.enter().unwrap();
            let mut builder = TestServer::builder().embedded_database();
            for arg in world.serve_args() {
                builder = builder.arg(arg);
            }
            let server = builder.start().await.unwrap();
            let inner = Arc::new(Inner { server, world, _lock });
            *current = Arc::downgrade(&inner);
            inner
        };
        // A namespace of each test's own: names of sandboxes and secrets do not meet.
        let team = format!("team_{}", TEAMS.fetch_add(1, Ordering::Relaxed));
        let client = inner.server.client(&team).unwrap();
        Self { inner, client }
    }

    fn server(&self) -> &TestServer {
        &self.inner.server
    }

    /// A sandbox under a policy.
    async fn sandbox(&self, policy: Value) -> TestSandbox {
        let body = json!({ "persistent": false, "networkPolicy": policy });
        TestSandbox::create(&self.client, body).await
    }

    /// Replaces the policy of a running sandbox.
    async fn set(&self, sandbox: &TestSandbox, policy: &Value) {
        let _ = sandbox.post("/network-policy", policy).await.ok();
    }
}

impl Deref for Bed {
    type Target = World;
    fn deref(&self) -> &World {
        &self.inner.world
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.inner.server.tail());
        }
    }
}

/// A name of the world that no other test uses, below `suffix`.
fn fresh(suffix: &str) -> String {
    format!("t{}.{suffix}", TEAMS.fetch_add(1, Ordering::Relaxed))
}
