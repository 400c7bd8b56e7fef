//! Interception against origins and guests of our own, on loopback. The numbers in the tests' names are
//! the cases of reference/egress.md §2.

mod credentials;
mod http1;
mod http2;
mod lifecycle;
mod memory;
mod sockets;
mod world;
