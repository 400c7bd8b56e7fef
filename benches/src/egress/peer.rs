//! The peer of the intercepting rows: `mitmdump` as a reverse proxy that sets the same header.
//!
//! Invariant: it runs beside the engine, in the same namespace, and ends with the value. It gets what
//! favours it: no record of flows, no check of the origin's certificate, kept connections.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::origin::{CREDENTIAL, WEB};

/// Where it listens.
const AT: &str = "127.0.0.1:8443";

/// What the program calls itself.
pub(crate) fn version(program: &Path) -> Option<String> {
    let told = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    Some(format!("mitmproxy {}", told.lines().next()?.rsplit(' ').next()?))
}

/// A running one.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    pub(crate) at: SocketAddr,
    /// PEM of its certificate authority.
    pub(crate) roots: PathBuf,
}

impl Peer {
    /// Starts it with its files in `folder`.
    pub(crate) fn start(program: &Path, folder: &Path) -> Result<Self> {
        let (at, port) = AT.rsplit_once(':').context("an address without a port")?;
        let addon = folder.join("addon.py");
        std::fs::write(
            &addon,
            format!(
                "def request(flow):\n    flow.request.headers['authorization'] = '{CREDENTIAL}'\n"
            ),
        )?;
        let log = folder.join("mitmdump.log");
        let file = File::create(&log)?;
        // Also when the bench is killed, it does not stay.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["--quiet", "--ssl-insecure", "--set", "flow_detail=0"])
            .args(["--set", "keep_host_header=true", "--set", "termlog_verbosity=error"])
            .args(["--mode", &format!("reverse:https://{WEB}/")])
            .args(["--listen-host", at, "--listen-port", port])
            .arg("--set")
            .arg(format!("confdir={}", folder.display()))
            .arg("--scripts")
            .arg(&addon)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let roots = folder.join("mitmproxy-ca-cert.pem");
        let mut peer = Self { child, at: AT.parse()?, roots };
        let begin = Instant::now();
        while !peer.roots.exists() || TcpStream::connect(peer.at).is_err() {
            let ended = peer.child.try_wait()?.is_some();
            if ended || begin.elapsed() > Duration::from_secs(60) {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("mitmdump does not listen: {said}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(peer)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
