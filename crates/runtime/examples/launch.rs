//! Times launch, exec and removal on this host, without the engine around them.
//!
//! `cargo run --release -p bivouac-runtime --example launch -- [rounds] [data folder]` as root.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a tool that measures and prints"
)]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bivouac_runtime::linux::{LinuxConfig, LinuxRuntime};
use bivouac_runtime::{ExecSpec, Handle, LaunchSpec, Limits, LogRecord, Runtime};
use bivouac_types::id::{CommandId, SessionId};

static NEXT: AtomicU32 = AtomicU32::new(0);

fn spec() -> LaunchSpec {
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    LaunchSpec {
        session: SessionId::new(u64::from(n) + 1, [0; 10]),
        hostname: format!("probe-{n}"),
        image: "host".into(),
        from_snapshot: None,
        snapshot_bytes: 0,
        fresh: false,
        limits: Limits { memory_bytes: 1 << 30, vcpus: 2, pids: 512, disk_bytes: 1 << 30 },
        id_range: n,
        cwd: "/vercel/sandbox".into(),
        mounts: Vec::new(),
        request: None,
        egress: None,
    }
}

async fn exec(handle: &dyn Handle, argv: &[&str], root: bool) -> Result<CommandId, Box<dyn Error>> {
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let command = CommandId::new(u64::from(n), [7; 10]);
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let exec = ExecSpec {
        command: command.clone(),
        argv: argv.iter().map(|&a| a.to_owned()).collect(),
        env: BTreeMap::from([("PATH".to_owned(), path.to_owned())]),
        cwd: "/vercel/sandbox".into(),
        root,
        timeout_ms: Some(20_000),
        attach_stdin: false,
        tty: None,
        request: None,
    };
    handle.exec(&exec).await?;
    let mut progress = handle.progress(&command).ok_or("no progress")?;
    progress.wait_for(|p| p.end.is_some()).await?;
    Ok(command)
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!("{what:24} median {:7.3} ms  p90 {:7.3}  p99 {:7.3}", at(0.5), at(0.9), at(0.99));
}

async fn run(rounds: usize, data: PathBuf) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(&data)?;
    let config = LinuxConfig {
        pool: bivouac_runtime::pool::PoolOptions::default(),
        images_dir: data.join("image-files"),
        data_dir: data,
        instance: format!("probe{}", std::process::id()),
    };
    let runtime = LinuxRuntime::start(config).await?;
    let script = std::env::var("PROBE").unwrap_or_else(|_| "id; pwd; hostname; ls /".into());
    let first = spec();
    let handle = runtime.launch(&first).await?;
    for root in [false, true] {
        let command = exec(&*handle, &["sh", "-c", &script], root).await?;
        let (records, _) = runtime.read_log(&first.session, &command, 0, u64::MAX).await?;
        for record in records {
            match record {
                LogRecord::Data { bytes, .. } => print!("{}", String::from_utf8_lossy(&bytes)),
                other => println!("{other:?}"),
            }
        }
    }
    handle.kill().await?;
    runtime.remove(&first.session).await?;
    runtime.remove_logs(&first.session).await?;
    let mut steps = BTreeMap::<String, Vec<Duration>>::new();
    let (mut launch, mut execs, mut end) = (vec![], vec![], vec![]);
    for _ in 0..rounds {
        let spec = spec();
        let start = Instant::now();
        let handle = runtime.launch(&spec).await?;
        launch.push(start.elapsed());
        for (step, micros) in runtime.launch_steps() {
            steps.entry(step).or_default().push(Duration::from_micros(micros));
        }
        let start = Instant::now();
        exec(&*handle, &["/bin/true"], false).await?;
        execs.push(start.elapsed());
        let start = Instant::now();
        handle.kill().await?;
        runtime.remove(&spec.session).await?;
        end.push(start.elapsed());
        runtime.remove_logs(&spec.session).await?;
    }
    if rounds > 0 {
        show("launch", launch);
        for (step, times) in steps {
            show(&format!("  {step}"), times);
        }
        show("exec true", execs);
        show("kill+remove", end);
    }
    runtime.close().await?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    bivouac_runtime::roles::maybe_run(&bivouac_runtime::keeper::NoKeeper);
    let mut args = std::env::args().skip(1);
    let rounds = args.next().map_or(Ok(100), |text| text.parse())?;
    let data =
        args.next().map_or_else(|| std::env::temp_dir().join("bivouac-launch"), PathBuf::from);
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run(rounds, data))
}
