//! The built program, seen from outside: one engine per group of tests, real sandboxes, no mocks.
//!
//! Needs root and fails without (it never skips). Tests that only use sandboxes share one server;
//! tests that kill theirs, or look at the whole machine, have their own.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test says what is wrong by panicking, starts programs and looks at the clock"
)]

mod api;
mod archives;
mod cli;
mod commands;
mod confinement;
mod crash;
mod database;
mod disk;
mod drives;
mod faults;
mod files;
mod helpful;
mod honest;
mod hostile;
mod image;
mod images;
mod isolation;
mod life;
mod limits;
mod many;
mod observe;
mod output;
mod pause;
mod pool;
mod power;
mod preview;
mod resources;
mod screen;
mod secrets;
mod shim;
mod ssh;
mod state;
mod stdin;
mod terminals;
mod tokens;
mod traces;

use std::ops::Deref;
use std::sync::{Arc, Weak};

use bivouac_testkit::{Client, MachineLock, TestSandbox, TestServer, shared};
use serde_json::json;
use tokio::sync::Mutex;

/// The server that most tests share. It lives for as long as a test uses it.
struct Shared {
    inner: Arc<(TestServer, MachineLock)>,
}

static CURRENT: Mutex<Weak<(TestServer, MachineLock)>> = Mutex::const_new(Weak::new());

async fn server() -> Shared {
    let mut current = CURRENT.lock().await;
    if let Some(inner) = current.upgrade() {
        return Shared { inner };
    }
    let lock = shared().unwrap();
    let inner = Arc::new((TestServer::start().await.unwrap(), lock));
    *current = Arc::downgrade(&inner);
    Shared { inner }
}

/// A server that no other test uses: for those that look at the whole of it.
async fn own_server() -> Shared {
    let lock = shared().unwrap();
    Shared { inner: Arc::new((TestServer::start().await.unwrap(), lock)) }
}

impl Deref for Shared {
    type Target = TestServer;
    fn deref(&self) -> &TestServer {
        &self.inner.0
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.tail());
        }
    }
}

impl Shared {
    /// A client in a namespace of its own.
    fn team(&self, team: &str) -> Client {
        self.client(team).unwrap()
    }
}

/// A server and a sandbox in the namespace `team`: what most tests start with. The sandbox has no
/// snapshot when it ends, and is deleted with the server.
async fn sandbox(team: &str) -> (Shared, TestSandbox) {
    let server = server().await;
    let client = server.team(team);
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    (server, sandbox)
}
