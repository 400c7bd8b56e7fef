//! What the executable adds to the runtime's hidden roles.
//!
//! Owns the joint between crates that do not know each other. Invariant: nothing here decides; it hands
//! one crate's things to the other in the other's words. Called by `main`.

mod gate;
pub mod shim;
