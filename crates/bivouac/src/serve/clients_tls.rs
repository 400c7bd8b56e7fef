//! `--clients-tls`: the engine under the names that official clients have built in.
//!
//! Owns: the listener on 127.0.0.1:443 and its TLS. Invariant: it is reached over loopback only; it
//! serves [`NAMES`] and nothing else, with the same router, credentials and limits as the plain
//! address; nothing is ever passed on to the real service. `/etc/hosts` is the user's: it is not
//! touched. Called by `serve`.

mod authority;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::http::StandIn;
use authority::{Authority, Leaves, NAMES};

/// Where it listens: clients know no other port, and nobody beyond this machine is asked in.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 443);

/// A listener under the clients' names.
pub(super) struct ClientsTls {
    pub(super) listener: TcpListener,
    pub(super) acceptor: TlsAcceptor,
    /// What clients have to know.
    pub(super) told: StandIn,
}

impl ClientsTls {
    /// Takes the address, and the certificate authority of the data folder.
    ///
    /// # Errors
    /// The address is taken or not permitted, or the authority cannot be used.
    pub(super) async fn open(data_dir: &Path) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(ADDRESS).await.map_err(refused)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let authority = Authority::open(data_dir, provider.clone())
            .context("no certificates for --clients-tls")?;
        let told = StandIn {
            address: ADDRESS.to_string(),
            hosts: NAMES.map(str::to_owned).to_vec(),
            ca: authority.pem().to_owned(),
        };
        let leaves = Leaves::new(authority).context("no certificates for --clients-tls")?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("TLS cannot be set up")?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(leaves));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { listener, acceptor: TlsAcceptor::from(Arc::new(config)), told })
    }
}

/// Why there is no listener, and what to do about it.
fn refused(error: io::Error) -> anyhow::Error {
    let what = match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "--clients-tls needs {ADDRESS}, and something else listens there ('ss -ltnp' tells what): \
             end it, or start without --clients-tls"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "--clients-tls needs {ADDRESS}, and this user may not listen there: start as root, or give \
             the program the capability to bind such ports (CAP_NET_BIND_SERVICE)"
        ),
        _ => format!("--clients-tls could not listen on {ADDRESS}"),
    };
    anyhow!(error).context(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let text = |kind: io::ErrorKind| format!("{:#}", refused(kind.into()));
        assert!(text(io::ErrorKind::AddrInUse).contains("something else listens there"));
        assert!(text(io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        assert!(text(io::ErrorKind::AddrNotAvailable).contains("127.0.0.1:443"));
    }
}
