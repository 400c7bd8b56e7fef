//! Ends a refused connection so that its client learns why.
//!
//! HTTP gets a 403 with a JSON body, TLS the alert `access_denied`, everything else a reset.
//! Invariant: bounded in time and bytes, and nothing of it depends on anything outside of the sandbox.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::denial::{ACCESS_DENIED, Denial, response};
use super::hear::{Heard, Hearing};
use super::judge::Refusal;
use super::relay::{Buffers, reset};
use crate::canonical::{self, Host};
use crate::classify::First;
use crate::policy::{Compiled, Hint};
use crate::reason::Reason;

/// How long a refused HTTP request may take to send its head.
const HEAD: Duration = Duration::from_secs(2);
/// A connection that its address alone refuses: how long it may take to show that it would read an
/// answer. The guest is near, so whoever speaks first has spoken by then.
const GLIMPSE: Duration = Duration::from_millis(250);
/// How long an answer may take to be read, and how much a client may send meanwhile.
const DRAIN: Duration = Duration::from_secs(2);
const DRAIN_BYTES: usize = 256 * 1024;

/// What the client turned out to be, for the audit line.
#[derive(Debug, Default)]
pub(super) struct Taught {
    pub(super) protocol: Option<&'static str>,
    pub(super) host: Option<String>,
}

/// What is known about a refused connection.
pub(super) struct Lesson<'a> {
    pub(super) refusal: &'a Refusal,
    /// The first bytes, if they were looked at.
    pub(super) first: Option<&'a First>,
    pub(super) port: u16,
    pub(super) policy: &'a Compiled,
    /// The sandbox's name, for commands.
    pub(super) sandbox: &'a str,
    pub(super) buffers: &'a Buffers,
}

impl Lesson<'_> {
    /// Tells the client; `note` is called with what it is before it learns anything. The caller drops
    /// the socket.
    pub(super) async fn teach(
        &self,
        guest: &TcpStream,
        heard: &mut Hearing,
        note: impl FnOnce(&Taught),
    ) {
        let mut looked = None;
        if self.first.is_none() && glimpses(self.refusal.reason) {
            let until = Instant::now() + GLIMPSE;
            if let Ok(Heard::First(first)) = heard.first(guest, self.buffers, until).await {
                looked = Some(first);
            }
        }
        match self.first.or(looked.as_ref()) {
            Some(First::Tls(hello)) => {
                note(&Taught { protocol: Some("tls"), host: hello.name.clone() });
                answer(guest, &ACCESS_DENIED, self.buffers).await;
            }
            Some(First::Http) => {
                let until = Instant::now() + HEAD;
                let whole = heard.head(guest, self.buffers, until).await.is_ok();
                let host = host_of(heard.bytes());
                let named = host.as_ref().map(ToString::to_string);
                note(&Taught { protocol: Some("http"), host: named.clone() });
                if !whole {
                    return reset(guest);
                }
                let denial = Denial {
                    host: named.or_else(|| self.refusal.name.clone()),
                    port: Some(self.port),
                    entry: self.refusal.entry.as_ref().map(ToString::to_string),
                    hint: host.and_then(|host| self.hint(&host)),
                    detail: self.refusal.detail.clone(),
                };
                answer(guest, &response(self.refusal.reason, &denial), self.buffers).await;
            }
            other => {
                note(&Taught { protocol: other.map(protocol), host: None });
                reset(guest);
            }
        }
    }

    fn hint(&self, host: &Host) -> Option<String> {
        match self.refusal.reason {
            Reason::AddressForbidden => None,
            // Plain HTTP to a name that is listed wants https; to one that is not, the name.
            Reason::PlainHttp => Some(match self.policy.hint(host, 443) {
                Some(hint) => command(self.sandbox, &hint),
                None => format!("use https://{host}, which is allowed"),
            }),
            _ => self.policy.hint(host, self.port).map(|hint| command(self.sandbox, &hint)),
        }
    }
}

/// Whether a connection that was not looked at is looked at now. Not when there are too many already,
/// and not when everything is denied: that is closed by the kernel for whoever comes later.
fn glimpses(reason: Reason) -> bool {
    matches!(reason, Reason::AddressForbidden | Reason::SubnetDenied)
}

fn protocol(first: &First) -> &'static str {
    match first {
        First::Tls(_) | First::Odd(_) => "tls",
        First::Http | First::Http2 => "http",
        First::Postgres | First::PostgresGss => "postgres",
        First::Unknown => "raw",
    }
}

/// The change of the policy, as a command.
fn command(sandbox: &str, hint: &Hint) -> String {
    let (Hint::Domain(entry) | Hint::Range(entry) | Hint::Lift(entry)) = hint;
    format!("bivouac policy allow {sandbox} {entry}")
}

/// The host that a request names; for words alone, nothing is decided by it.
pub(super) fn host_of(head: &[u8]) -> Option<Host> {
    head.split(|b| *b == b'\n').skip(1).find_map(|line| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let (name, value) = line.split_at_checked(line.iter().position(|b| *b == b':')?)?;
        name.eq_ignore_ascii_case(b"host")
            .then(|| canonical::authority(value[1..].trim_ascii()).ok())
            .flatten()
            .map(|(host, _)| host)
    })
}

/// Sends a last answer and waits until the client has read it: closing with bytes unread is a reset,
/// which would take the answer away again.
async fn answer(guest: &TcpStream, bytes: &[u8], buffers: &Buffers) {
    let until = Instant::now() + DRAIN;
    let mut rest = bytes;
    while !rest.is_empty() {
        let ready = timeout_at(until, guest.writable()).await;
        match ready.map(|_| guest.try_write(rest)) {
            Ok(Ok(n)) => rest = &rest[n..],
            Ok(Err(e)) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => return reset(guest),
        }
    }
    if rustix::net::shutdown(guest, rustix::net::Shutdown::Write).is_err() {
        return;
    }
    let mut drained = 0;
    loop {
        tokio::select! {
            ready = guest.readable() => if ready.is_err() { return },
            () = sleep_until(until) => return reset(guest),
        }
        match buffers.with(|shared| guest.try_read(shared)) {
            Ok(0) => return,
            Ok(n) => {
                drained += n;
                if drained > DRAIN_BYTES {
                    return reset(guest);
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_request_is_read_for_words() {
        let host = |head: &str| host_of(head.as_bytes()).map(|h| h.to_string());
        assert_eq!(
            host("GET / HTTP/1.1\r\nHOST:  Ok.test:80 \r\n\r\n").as_deref(),
            Some("ok.test")
        );
        assert_eq!(host("GET / HTTP/1.1\nhost: 192.0.2.1\n\n").as_deref(), Some("192.0.2.1"));
        assert_eq!(host("GET / HTTP/1.1\r\nhost: a@b\r\n\r\n"), None);
        assert_eq!(host("GET / HTTP/1.1\r\n\r\n"), None);
        assert_eq!(host("GET / HTTP/1.1"), None);
    }
}
