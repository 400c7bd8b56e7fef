//! Takes connections from the gate.
//!
//! Invariant: a failure of one connection, or of many, never ends a loop; when the process is out of
//! descriptors, connections are reset instead of left hanging. Called by [`super::Broker::start`].

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};

use super::flow::Works;
use super::relay::reset;
use crate::flows::Flows;
use crate::reason::Reason;

/// Most connections of a session.
pub const MOST_FLOWS: usize = 10_000;
/// Descriptors that are not for connections.
const OTHER_DESCRIPTORS: u64 = 256;

/// How many connections this process can carry: two descriptors each.
pub(super) fn most_flows() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let room = limit.saturating_sub(OTHER_DESCRIPTORS) / 2;
    usize::try_from(room).unwrap_or(MOST_FLOWS).clamp(16, MOST_FLOWS)
}

/// Accepts for ever.
pub(super) async fn accept(works: Rc<Works>, flows: Flows, listener: TcpListener) {
    let mut spare = duplicate(&listener);
    let mut pause = Duration::from_millis(5);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                pause = Duration::from_millis(5);
                if spare.is_none() {
                    spare = duplicate(&listener);
                }
                let Ok(local) = stream.local_addr() else { continue };
                let asked = SocketAddr::new(local.ip().to_canonical(), local.port());
                take(&works, &flows, stream, asked);
            }
            Err(error) if passing(&error) => {}
            Err(error) => {
                if out_of_descriptors(&error) && spare.take().is_some() {
                    // The descriptor that was kept for this takes one from the queue, to reset it.
                    if let Ok((stream, _)) = listener.accept().await {
                        reset(&stream);
                    }
                    spare = duplicate(&listener);
                }
                tracing::warn!(%error, "a connection of the sandbox was not accepted");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
}

/// Takes a connection in, or refuses it when there are too many.
pub(super) fn take(works: &Rc<Works>, flows: &Flows, stream: TcpStream, asked: SocketAddr) {
    let Some(flow) = flows.register(asked) else {
        works.refuse(&stream, asked, flows.number(), Reason::Limit);
        return;
    };
    let works = Rc::clone(works);
    // A panic in it ends this connection alone: the runtime catches it.
    tokio::task::spawn_local(async move { works.serve(stream, flow).await });
}

fn duplicate(listener: &TcpListener) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(listener, 0).ok()
}

/// Errors of the connection that was to be accepted, not of the listener.
fn passing(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::CONNABORTED | Errno::CONNRESET | Errno::INTR | Errno::PROTO | Errno::PERM)
    )
}

fn out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}
