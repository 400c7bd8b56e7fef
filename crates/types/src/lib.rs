//! The nouns that every other crate shares, and the pure rules about them.
//!
//! Owns: names and their limits, the session transition table, the shape of a network policy.
//! Invariant: nothing in here does I/O, reads a clock or draws a random number, so every rule can
//! be tested by value. Called by all other crates.
#![forbid(unsafe_code)]

pub mod access;
pub mod command;
pub mod drive;
pub mod host;
pub mod id;
pub mod image;
pub mod life;
pub mod meter;
pub mod name;
pub mod oci;
pub mod policy;
pub mod sandbox;
pub mod secret;
pub mod session;
pub mod snapshot;
pub mod terminal;

/// Milliseconds since the Unix epoch, as the API writes all times.
pub type Millis = i64;
