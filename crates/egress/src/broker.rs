//! The broker of one session.

pub mod denial;
mod gate;

pub use gate::{Datagrams, Gate, Received, Receiving, Steer};
