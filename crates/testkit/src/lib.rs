//! What the tests of the built program share: a server on its own data folder, an HTTP client that
//! knows the API's habits, and a list of everything that an engine can leave on a machine.
//!
//! Invariant: nothing here links the product's crates. The tests see what a user sees: a process, a
//! socket, a folder, `/proc`. Called by `crates/bivouac/tests/it`, for its databases by the tests of `store`
//! and `engine`, and by nothing that is shipped.
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the kit starts the built program, looks at the clock and builds its own HTTP client"
)]

mod archive;
mod client;
mod database;
mod lock;
mod power;
mod sandbox;
mod schema;
mod server;
mod sweep;
mod traces;
mod wait;
mod world;

pub use archive::{Entry, Tar};
pub use client::{Answer, Client, Lines};
pub use database::TestDatabase;
pub use lock::{MachineLock, exclusive, shared};
pub use power::{Cache, Picture, PowerDisk, Restored};
pub use sandbox::{Ran, TestSandbox};
pub use schema::schema_breaches;
pub use server::{Builder, Cli, TestServer, binary};
pub use traces::{Kind, Trace, Traces};
pub use wait::{LONG, SHORT, eventually};
pub use world::{
    Answer as NameAnswer, BadCertificate, NAME_SERVER, Packet, Query, Seen, Wire, World,
};
