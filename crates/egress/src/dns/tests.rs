//! The cases of reference/egress.md §2.4 that show at this level, and the client's own.

mod client;
mod guest;
mod wire;
