//! The egress broker as the keeper of a shim's gate: joins `bivouac_egress` to `bivouac_runtime`.
//!
//! Invariant: no message, configuration or error of a parser is repeated in an error here: they hold
//! secrets. A broker that does not start leaves the gate closed and says so to whoever asks it. Called by
//! `main` (in the zygote) and by the shim.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use bivouac_egress::audit;
use bivouac_egress::broker::{Broker, Parts};
use bivouac_egress::message::{Config, FromBroker, Reply, ToBroker};
use bivouac_egress::trust::{Authority, Roots};
use bivouac_runtime::gate::Gate;
use bivouac_runtime::keeper::{AuditFile, Deliver, Delivery, GateKeeper, Outbox, Prepared, Trust};

/// Makes a broker for each session that has a configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keeper;

impl GateKeeper for Keeper {
    fn prepare(&self, config: &[u8]) -> io::Result<Box<dyn Prepared>> {
        let config: Config = serde_json::from_slice(config).map_err(|e| unread("config", &e))?;
        // While it can still be opened: later this process opens nothing any more.
        let roots = File::open(&config.roots).map_err(|e| {
            let text = format!("the file of root certificates, {}: {e}", config.roots);
            io::Error::new(e.kind(), text)
        })?;
        let authority = Authority::new(&config.identity.session, Authority::UNKNOWN_LIFE)?;
        Ok(Box::new(Ready { config, roots, authority: Rc::new(authority) }))
    }
}

/// Where a text stopped making sense. What it says stays out: it may be a secret.
fn unread(what: &str, error: &serde_json::Error) -> io::Error {
    let (line, column) = (error.line(), error.column());
    let text = format!("the egress broker's {what} is not understood at {line}:{column}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

struct Ready {
    config: Config,
    roots: File,
    authority: Rc<Authority>,
}

impl Prepared for Ready {
    fn trust(&self) -> Trust {
        Trust {
            session: self.authority.pem().as_bytes().to_vec(),
            extra: self.config.extra_ca.as_bytes().to_vec(),
        }
    }

    fn serve(
        self: Box<Self>,
        gate: Gate,
        out: Outbox,
        audit: Box<dyn AuditFile>,
    ) -> Rc<dyn Deliver> {
        let Self { config, roots, authority } = *self;
        let started = super::gate::of(gate).map_err(|e| e.to_string()).and_then(|gate| {
            let parts = Parts {
                config,
                roots: Rc::new(Roots::new(Box::new(move || read(&roots)))),
                authority,
                gate,
                out: Rc::new(move |message| say(&out, &message)),
                sink: Rc::new(Lines(audit)),
            };
            Broker::start(parts).map_err(|e| e.to_string())
        });
        match started {
            Ok(broker) => Rc::new(Working(broker)),
            Err(why) => Rc::new(Failed(why)),
        }
    }
}

/// The whole file, wherever its offset is.
fn read(file: &File) -> io::Result<Vec<u8>> {
    let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut text = vec![0; length];
    file.read_exact_at(&mut text, 0)?;
    Ok(text)
}

fn say(out: &Outbox, message: &FromBroker) {
    // Such a message always has a text.
    if let Ok(text) = serde_json::to_vec(message) {
        out.send(text);
    }
}

struct Lines(Box<dyn AuditFile>);

impl audit::Sink for Lines {
    fn append(&self, line: &[u8]) {
        self.0.append(line);
    }
}

/// A broker at work.
struct Working(Rc<Broker>);

impl Deliver for Working {
    fn deliver(&self, message: Vec<u8>) -> Delivery {
        match serde_json::from_slice::<ToBroker>(&message) {
            Ok(message) => {
                let broker = self.0.clone();
                Box::pin(async move { text(&broker.deliver(message).await) })
            }
            Err(e) => refuse(unread("message", &e).to_string()),
        }
    }
}

/// A broker that did not start.
struct Failed(String);

impl Deliver for Failed {
    fn deliver(&self, _message: Vec<u8>) -> Delivery {
        refuse(format!("the session's egress broker did not start: {}", self.0))
    }
}

fn refuse(message: String) -> Delivery {
    let reply = text(&Reply::Refused { field: None, message });
    Box::pin(std::future::ready(reply))
}

fn text(reply: &Reply) -> Vec<u8> {
    // Such a reply always has a text; an empty one would be an error to its reader.
    serde_json::to_vec(reply).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_not_repeated() {
        let config = br#"{"identity": "hunter2"}"#;
        let error = Keeper.prepare(config).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("not understood at 1:") && !error.contains("hunter2"), "{error}");
    }
}
