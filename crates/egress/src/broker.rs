//! The broker of one session.

mod gate;

pub use gate::{Datagrams, Gate, Received, Receiving, Steer};
