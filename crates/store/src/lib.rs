//! The database: SQL text, migrations and rows.
//!
//! Owns: every SQL statement of the product. Invariant: each change of a sandbox or session is a
//! compare-and-set, and what belongs together is written in one transaction; no decision is made
//! here. The text runs on SQLite and, unchanged, on PostgreSQL. Called by `engine` only.
#![forbid(unsafe_code)]

mod address;
mod commands;
mod db;
mod drives;
mod env;
mod error;
mod images;
mod migrations;
mod page;
mod postgres;
mod routes;
mod row;
mod sandboxes;
mod secrets;
mod sessions;
mod snapshots;
mod sqlite;
mod ssh_keys;
mod timing;
mod tokens;
mod vault;

pub use address::Address;
pub use commands::CommandRow;
pub use db::{Db, Durability, Tx};
pub use drives::{DriveFilter, DriveMountRow, DriveOrder, DriveRow, DriveState, MountState};
pub use error::{StoreError, Unique};
pub use page::{Position, SortKey};
pub use routes::RouteRow;
pub use sandboxes::{Deleting, SandboxFilter, SandboxOrder, SandboxRow};
pub use secrets::SecretRow;
pub use sessions::{ChildFilter, Closing, SessionRow};
pub use snapshots::SnapshotRow;
pub use ssh_keys::SshKeyRow;
pub use tokens::TokenRow;
pub use vault::short_hash;
