//! The egress broker: what it costs to be decrypted, to pass and to be relayed, beside no broker and
//! beside another intercepting proxy.
//!
//! Invariant: the engine, the origin and the peer are in a world of their own without an uplink, and
//! nothing of it is left. Each path takes its turn in each round, and who was first in one is not in the
//! next. CPU time is what the kernel has booked for the process that stands in the way: the shim, or the
//! peer. Called by `main`; `client` and `origin` run as processes of their own.

mod client;
mod origin;
mod peer;
mod rows;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bivouac_testkit::{Tar, TestSandbox, TestServer, World};
use serde_json::{Value, json};

pub(crate) use self::client::Load;
pub(crate) use self::client::run as load;
pub(crate) use self::origin::OriginArgs;
pub(crate) use self::origin::run as serve_origin;
use self::origin::{CREDENTIAL, HELLO_NAME, RAW, WEB_NAME};
use self::peer::Peer;
pub(crate) use self::peer::version as peer_version;
use crate::bench::Bench;

/// The authority of a session, inside of it.
const ANCHOR: &str = "/usr/local/share/ca-certificates/vercel-proxy-ca.pem";
/// The client, inside.
const INSIDE: &str = "/vercel/sandbox/bivouac-bench";
/// The kernel counts CPU time in hundredths of a second.
const TICKS: f64 = 100.0;

/// Where in `text` it begins.
pub(crate) fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// How much.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EgressSize {
    pub(crate) rounds: usize,
    /// Of one path in one round.
    pub(crate) time: Duration,
    pub(crate) flows: usize,
    /// Held connections that are decrypted.
    pub(crate) tls_flows: usize,
    pub(crate) mib: u64,
    pub(crate) queries: usize,
}

/// The far side's process.
struct Origin(Child);

impl Drop for Origin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Everything that takes part.
struct Bed<'a> {
    // In this order: what uses the world ends before it does.
    peer: Option<Peer>,
    guest: Guest<'a>,
    _origin: Origin,
    server: TestServer,
    world: World,
    threads: &'a tokio::runtime::Runtime,
    program: PathBuf,
    size: EgressSize,
}

/// A sandbox with the client in it.
struct Guest<'a> {
    sandbox: TestSandbox,
    shim: u32,
    threads: &'a tokio::runtime::Runtime,
}

/// Measures; `mitmdump` is the peer's program.
pub(crate) fn run(bench: &mut Bench, mitmdump: Option<&Path>) -> Result<()> {
    // A thread of its own: it moves into the world and does not come back.
    let (image, size) = (bench.image.clone(), bench.size.egress);
    let folder = bench.folder.join("egress");
    std::fs::create_dir_all(&folder)?;
    let (skipped, rows) = std::thread::scope(|scope| {
        let ready = &*bench;
        let work = || -> Result<_> {
            let threads = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (bed, skipped) = Bed::new(&threads, &folder, &image, size, mitmdump)?;
            ready.remember(&bed.guest.sandbox.session);
            let rows = rows::measure(ready, &bed);
            let closed = bed.close();
            let rows = rows?;
            closed?;
            Ok((skipped, rows))
        };
        scope.spawn(work).join().map_err(|_| anyhow::anyhow!("the egress rows panicked"))?
    })?;
    bench.skipped.extend(skipped);
    for row in rows {
        bench.add(row);
    }
    Ok(())
}

impl<'a> Bed<'a> {
    fn new(
        threads: &'a tokio::runtime::Runtime,
        folder: &Path,
        image: &str,
        size: EgressSize,
        mitmdump: Option<&Path>,
    ) -> Result<(Self, Vec<String>)> {
        let program = std::env::current_exe()?;
        let world = World::unrecorded()?;
        world.enter()?;
        for (name, door) in [(WEB_NAME, origin::WEB), (HELLO_NAME, origin::HELLO)] {
            world.name(name, &[door.split(':').next().unwrap_or_default()]);
        }
        let _origin = start_origin(&world, &program, folder)?;
        let mut builder = TestServer::builder().embedded_database().arg("--image").arg(image);
        for arg in world.serve_args() {
            builder = builder.arg(arg);
        }
        let server = threads.block_on(builder.start()).context("the engine in the world")?;
        let guest = Guest::new(threads, &server, &program)?;
        let mut skipped = Vec::new();
        let peer = if let Some(program) = mitmdump {
            Some(Peer::start(program, folder)?)
        } else {
            skipped
                .push("mitmproxy: it could not be had, so its rows and ratios are missing".into());
            None
        };
        Ok((Self { peer, guest, _origin, server, world, threads, program, size }, skipped))
    }

    /// Runs it on the engine's side, with nothing in between.
    fn beside(&self, args: &[&str]) -> Result<Value> {
        outside(Command::new(&self.program), args)
    }

    /// Runs it on the origin's side.
    fn beyond(&self, args: &[&str]) -> Result<Value> {
        let prefix = self.world.far_prefix();
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(&self.program);
        outside(command, args)
    }

    /// Another sandbox, whose shim has done nothing yet.
    fn fresh(&self) -> Result<Guest<'a>> {
        Guest::new(self.threads, &self.server, &self.program)
    }

    fn close(self) -> Result<()> {
        drop(self.peer);
        let gone = self.guest.close();
        let ended = self.threads.block_on(self.server.stop());
        gone?;
        let status = ended.context("the end of the engine in the world")?;
        ensure!(status.success(), "the engine ended with {status}\n{}", self.server.tail());
        Ok(())
    }
}

impl<'a> Guest<'a> {
    fn new(
        threads: &'a tokio::runtime::Runtime,
        server: &TestServer,
        program: &Path,
    ) -> Result<Self> {
        let client = server.client("team_bench")?;
        let body = json!({ "persistent": false, "networkPolicy": policy() });
        let sandbox = threads.block_on(TestSandbox::try_create(&client, body));
        let sandbox = sandbox.map_err(|answer| anyhow::anyhow!("{answer}"))?;
        let shim = shim(&sandbox.session)?;
        let archive = Tar::new().file_mode("bivouac-bench", 0o755, &std::fs::read(program)?).gzip();
        let written = threads.block_on(sandbox.write("/vercel/sandbox", archive));
        ensure!(written.status == 200, "{written}");
        Ok(Self { sandbox, shim, threads })
    }

    /// Runs the client inside the sandbox.
    fn inside(&self, args: &[&str]) -> Result<Value> {
        let whole: Vec<&str> = [INSIDE, "load"].into_iter().chain(args.iter().copied()).collect();
        let ran = self.threads.block_on(self.sandbox.run(&whole));
        ensure!(ran.exit == Some(0), "load {args:?} in the sandbox: {}{}", ran.out(), ran.err());
        serde_json::from_str(&ran.out()).with_context(|| format!("what it said: {}", ran.out()))
    }

    /// Replaces the policy; milliseconds until the call answered.
    fn set(&self, policy: &Value) -> Result<f64> {
        let begin = std::time::Instant::now();
        let answer = self.threads.block_on(self.sandbox.post("/network-policy", policy));
        let took = begin.elapsed().as_secs_f64() * 1e3;
        ensure!(answer.status == 200, "{answer}");
        Ok(took)
    }

    /// Starts a client inside that holds connections, and waits until it does.
    fn hold(&self, args: &[&str]) -> Result<String> {
        let whole: Vec<&str> = ["load", "hold"].into_iter().chain(args.iter().copied()).collect();
        let argv: Vec<&str> = [INSIDE].into_iter().chain(whole).collect();
        self.threads.block_on(async {
            let id = self.sandbox.start(&argv, json!({})).await;
            let mut lines = self.sandbox.logs(&id).await;
            // Its first line of output says that all are open.
            while let Some(line) = lines.next(Duration::from_secs(90)).await? {
                match line["stream"].as_str() {
                    Some("stdout") => return Ok(id),
                    Some("stderr") => break,
                    _ => {}
                }
            }
            let ran = self.sandbox.output(&id).await;
            bail!("hold {args:?}: {}{}", ran.out(), ran.err())
        })
    }

    /// What a holding client said at its end.
    fn held(&self, id: &str) -> Result<Value> {
        let ran = self.threads.block_on(async {
            let _ = self.sandbox.wait(id).await;
            self.sandbox.output(id).await
        });
        ensure!(ran.exit == Some(0) || ran.exit.is_none(), "hold: {}{}", ran.out(), ran.err());
        let out = ran.out();
        serde_json::from_str(out.lines().last().unwrap_or_default())
            .with_context(|| format!("what it said: {out}"))
    }

    fn close(self) -> Result<()> {
        let gone = self.threads.block_on(self.sandbox.delete());
        ensure!((200..300).contains(&gone.status), "{gone}");
        Ok(())
    }
}

fn outside(mut command: Command, args: &[&str]) -> Result<Value> {
    let output = command.arg("load").args(args).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "load {args:?}: {said}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn start_origin(world: &World, program: &Path, folder: &Path) -> Result<Origin> {
    let (certificate, key) = world.certificate(&[WEB_NAME])?;
    let (certificate_file, key_file) = (folder.join("origin.pem"), folder.join("origin.key"));
    std::fs::write(&certificate_file, certificate)?;
    std::fs::write(&key_file, key)?;
    let prefix = world.far_prefix();
    let child = Command::new(&prefix[0])
        .args(&prefix[1..])
        .arg(program)
        .arg("origin")
        .arg("--certificate")
        .arg(certificate_file)
        .arg("--key")
        .arg(key_file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the origin")?;
    let mut origin = Origin(child);
    let stdout = origin.0.stdout.take().context("no output of the origin")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "the origin did not start");
    Ok(origin)
}

/// One name that is decrypted, one that passes, one address that is relayed.
fn policy() -> Value {
    let rule = json!([{ "transform": [{ "headers": { "authorization": CREDENTIAL } }] }]);
    let relayed = format!("{}/32", RAW.split(':').next().unwrap_or_default());
    json!({ "allow": { WEB_NAME: rule, HELLO_NAME: [] }, "subnets": { "allow": [relayed] } })
}

/// The host's process of a session.
fn shim(session: &str) -> Result<u32> {
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let files = std::fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        if name.starts_with("bivouac-shim") && links.any(|link| link.ends_with(session)) {
            return Ok(pid);
        }
    }
    bail!("no process of the session {session}")
}

/// CPU seconds that a process has used, with all of its threads.
fn cpu(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit_once(") ").context("no name in stat")?.1;
    let fields: Vec<&str> = rest.split(' ').collect();
    // utime and stime, fields 14 and 15 of proc(5).
    let ticks = |n: usize| fields.get(n).and_then(|f| f.parse::<u64>().ok()).context("stat");
    Ok((ticks(11)? + ticks(12)?) as f64 / TICKS)
}

/// Memory of a process, KiB (PSS).
fn memory(pid: u32) -> Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
