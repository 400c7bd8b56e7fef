//! The `bivouac` executable's parts: roles, protocols and the command line.
//!
//! Owns: how requests get in (HTTP, the command line) and how the parts are put together. Invariant:
//! nothing here decides about sandboxes; that is the engine's. Called by `main`.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod env;
pub mod http;
pub mod preview;
pub mod role;
pub mod serve;
pub mod ssh;
pub mod uses;
