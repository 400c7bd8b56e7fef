//! What goes in and out of a sandbox by TCP: the words for it.
//!
//! Invariant: a connection is made inside, by a process of the sandbox's own network, so it reaches what a
//! program there would. Called by [`crate::Handle`].

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// Where to connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DialTo {
    /// A port of the sandbox itself: `127.0.0.1`, then `::1`, then the address of its `eth0`.
    Port(u16),
    /// Any host, found and reached as a program inside would.
    Host {
        /// A name, or an address.
        host: String,
        /// Its port.
        port: u16,
    },
}

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ListenAt {
    /// TCP. Port 0 is any that is free.
    Tcp {
        /// `localhost`, an address, or empty for all.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket that belongs to the default user, mode 0600; one that is there is an error.
    Unix {
        /// Absolute path inside.
        path: String,
    },
}

/// A socket that listens inside.
#[derive(Debug)]
pub struct Listening {
    /// To accept on by a [`crate::GuestListener`]; non-blocking.
    pub socket: OwnedFd,
    /// Which port it is, if it is TCP.
    pub port: u16,
}

/// A port that a program inside listens on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// The port.
    pub port: u16,
    /// Where: `127.0.0.1`, `0.0.0.0`, `::` and so on.
    pub address: String,
    /// Process id inside; absent when it is not to be found.
    pub pid: Option<i32>,
    /// Its program's name.
    pub program: Option<String>,
}
