//! The origin of the egress rows: as lean as can be, so that it is the floor and not what is measured.
//!
//! Invariant: it keeps nothing of what it gets. Run by `bivouac-bench origin` on the far side of the
//! world; ends when its standard input does. Three doors, one address each:
//! [`WEB`] speaks TLS and HTTP/1.1 and tells whether the request carried the credential; [`HELLO`] takes
//! a TLS hello and then speaks as [`RAW`], which reads eight bytes, a count, and sends so many bytes.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// HTTPS.
pub(crate) const WEB: &str = "198.51.100.20:443";
/// Bytes behind a TLS hello.
pub(crate) const HELLO: &str = "198.51.100.21:443";
/// Bytes.
pub(crate) const RAW: &str = "198.51.100.22:5001";
/// Name of [`WEB`].
pub(crate) const WEB_NAME: &str = "web.bench.test";
/// Name of [`HELLO`].
pub(crate) const HELLO_NAME: &str = "hello.bench.test";
/// What the broker adds to requests.
pub(crate) const CREDENTIAL: &str = "Bearer bench-of-the-egress-broker";

/// The answer to a request that carries the credential, and to one that does not.
pub(crate) const WITH: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 64\r\n\r\n\
with the credential.............................................";
const WITHOUT: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 64\r\n\r\n\
without.........................................................";

/// Arguments of `bivouac-bench origin`.
#[derive(Debug, clap::Args)]
pub(crate) struct OriginArgs {
    /// PEM of its certificate
    #[arg(long)]
    certificate: PathBuf,
    /// PEM of its key
    #[arg(long)]
    key: PathBuf,
}

/// Serves until standard input ends.
pub(crate) fn run(args: &OriginArgs) -> Result<()> {
    let chain: Vec<_> =
        CertificateDer::pem_file_iter(&args.certificate)?.collect::<Result<_, _>>()?;
    let key = PrivateKeyDer::from_pem_file(&args.key)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(tls));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (web, hello, raw) = (listen(WEB)?, listen(HELLO)?, listen(RAW)?);
        accept(web, move |stream| {
            let tls = tls.clone();
            async move { Ok(requests(tls.accept(stream).await?).await?) }
        });
        accept(hello, |mut stream| async move {
            let mut head = [0; 5];
            stream.read_exact(&mut head).await?;
            let mut rest = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
            stream.read_exact(&mut rest).await?;
            Ok(bytes(stream).await?)
        });
        accept(raw, |stream| async move { Ok(bytes(stream).await?) });
        println!("ready");
        std::io::stdout().flush()?;
        // Not tokio's standard input: its thread would hold up the end.
        let (ended, end) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _ = ended.send(());
        });
        let _ = end.await;
        Ok(())
    })
}

/// Beside the world's own servers, which listen at every address of these ports.
fn listen(at: &str) -> Result<TcpListener> {
    let at: SocketAddr = at.parse()?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        flags,
        Some(ipproto::TCP),
    )?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &at).with_context(|| format!("bind {at}"))?;
    rustix::net::listen(&socket, 4096)?;
    Ok(TcpListener::from_std(std::net::TcpListener::from(socket))?)
}

fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F + Send + 'static)
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    tokio::spawn(async move {
        loop {
            // Out of descriptors, say: the client sees it.
            let Ok((stream, _)) = listener.accept().await else { continue };
            let _ = stream.set_nodelay(true);
            // A client that goes away is its own affair.
            tokio::spawn(serve(stream));
        }
    });
}

async fn requests(mut stream: tokio_rustls::server::TlsStream<TcpStream>) -> std::io::Result<()> {
    let mut buffer = vec![0u8; 8192];
    let mut have = 0;
    loop {
        let n = stream.read(&mut buffer[have..]).await?;
        if n == 0 {
            return Ok(());
        }
        have += n;
        while let Some(end) = crate::egress::find(&buffer[..have], b"\r\n\r\n") {
            let head = &buffer[..end];
            let carried = crate::egress::find(head, CREDENTIAL.as_bytes()).is_some();
            stream.write_all(if carried { WITH } else { WITHOUT }).await?;
            stream.flush().await?;
            buffer.copy_within(end + 4..have, 0);
            have -= end + 4;
        }
        if have == buffer.len() {
            return Err(std::io::Error::other("a head of more than 8 KiB"));
        }
    }
}

async fn bytes(mut stream: TcpStream) -> std::io::Result<()> {
    let chunk = vec![b'x'; 256 * 1024];
    // A client that only holds the connection sends nothing.
    while let Ok(mut left) = stream.read_u64().await {
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
            stream.write_all(&chunk[..now]).await?;
            left -= now as u64;
        }
    }
    Ok(())
}
