//! The engine on a simulated host.
