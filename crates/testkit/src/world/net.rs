//! Network namespaces without an uplink, held by a sleeping process each.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::sync::oneshot;

/// A namespace. It ends when its holder does.
#[derive(Debug)]
pub(super) struct Namespace {
    holder: Child,
}

/// A thread with servers in a namespace.
#[derive(Debug)]
pub(super) struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The engine's side and the world's side, connected.
///
/// # Errors
/// Without root or the tools.
pub(super) fn pair() -> Result<(Namespace, Namespace)> {
    let (host, world) = (Namespace::new()?, Namespace::new()?);
    let there = world.holder.id();
    host.ip(&format!(
        "link set lo up\n\
         link add up0 type veth peer name down0 netns {there}\n\
         addr add 198.51.100.1/24 dev up0\n\
         addr add 2001:db8:51::1/64 dev up0 nodad\n\
         link set up0 up\n"
    ))?;
    world.ip("link set lo up\n\
         addr add 198.51.100.2/24 dev down0\n\
         addr add 2001:db8:51::2/64 dev down0 nodad\n\
         link set down0 up\n\
         route add local 198.51.100.0/24 dev lo table local\n\
         route add 198.51.100.1/32 dev down0 table local\n\
         route add local default dev lo\n\
         route add 2001:db8:51::1/128 dev down0 table local\n\
         route add local ::/0 dev lo\n")?;
    host.ip("route add default via 198.51.100.2 dev up0\n\
         route add ::/0 via 2001:db8:51::2 dev up0\n")?;
    Ok((host, world))
}

impl Namespace {
    fn new() -> Result<Self> {
        let holder = Command::new("unshare")
            // Ends when its input does: also when the test was killed.
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start unshare (util-linux)")?;
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let path = format!("/proc/{}/ns/net", holder.id());
        let namespace = Self { holder };
        let start = Instant::now();
        while std::fs::read_link(&path).is_ok_and(|theirs| theirs == own) {
            ensure!(start.elapsed() < Duration::from_secs(10), "unshare made no namespace");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(namespace)
    }

    /// A descriptor of it.
    pub(super) fn handle(&self) -> Result<OwnedFd> {
        let path = format!("/proc/{}/ns/net", self.holder.id());
        Ok(std::fs::File::open(path)?.into())
    }

    pub(super) fn enter(&self) -> Result<()> {
        let fd = self.handle()?;
        Ok(move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    pub(super) fn prefix(&self) -> Vec<String> {
        vec![
            "nsenter".to_owned(),
            format!("--net=/proc/{}/ns/net", self.holder.id()),
            "--".to_owned(),
        ]
    }

    fn ip(&self, batch: &str) -> Result<()> {
        let prefix = self.prefix();
        let mut ip = Command::new(&prefix[0])
            .args(&prefix[1..])
            .args(["ip", "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start nsenter")?;
        if let Some(mut stdin) = ip.stdin.take() {
            stdin.write_all(batch.as_bytes())?;
        }
        let output = ip.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ip: {said}\n{batch}");
        Ok(())
    }

    /// Runs what `make` answers, in a thread of its own with its own runtime, until the answer is
    /// dropped. `make` runs inside the namespace and opens its sockets before this returns.
    pub(super) fn serve<F>(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<F> + Send + 'static,
    ) -> Result<Server>
    where
        F: Future<Output = ()>,
    {
        let fd = self.handle()?;
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let prepare = || {
                move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))?;
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                let future = {
                    let _inside = runtime.enter();
                    make()?
                };
                Ok::<_, anyhow::Error>((runtime, future))
            };
            match prepare() {
                Ok((runtime, future)) => {
                    let _ = tell.send(Ok(()));
                    runtime.block_on(async {
                        tokio::select! {
                            () = future => {}
                            _ = stopped => {}
                        }
                    });
                }
                Err(error) => {
                    let _ = tell.send(Err(error));
                }
            }
        })?;
        told.recv().context("the server's thread ended")??;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
