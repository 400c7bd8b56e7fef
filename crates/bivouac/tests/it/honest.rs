//! What a sandbox sees of its own resources: not the host's, and still there whatever else dies.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bivouac_testkit::{SHORT, TestSandbox, TestServer, eventually, shared};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::crash::again;
use crate::{sandbox, server};

/// The fields of a meminfo, KiB.
fn meminfo(text: &str) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let (key, rest) = line.split_once(':')?;
            Some((key.to_owned(), rest.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}

fn host_cpus() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

async fn with_vcpus(sandbox: &TestSandbox, vcpus: u32) -> TestSandbox {
    let body = json!({ "persistent": false, "resources": { "vcpus": vcpus } });
    TestSandbox::create(&sandbox.client, body).await
}

/// The processes that serve the views of an engine: they have its log open.
fn view_servers(server: &TestServer) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let fds = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut links = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
        if name.trim_end() == "bivouac-view" && links.any(|l| l.starts_with(&server.data)) {
            found.extend(entry.file_name().to_str().unwrap().parse().ok().and_then(Pid::from_raw));
        }
    }
    found
}

#[tokio::test]
async fn memory_is_what_was_asked_for() {
    let (_server, first) = sandbox("memory-view").await;
    let host = meminfo(&fs::read_to_string("/proc/meminfo").unwrap());
    for vcpus in [1u32, 2, 4, 32] {
        let sandbox = with_vcpus(&first, vcpus).await;
        let seen = meminfo(&sandbox.run(&["cat", "/proc/meminfo"]).await.good());
        let asked = u64::from(vcpus) * 2048 * 1024;
        assert_eq!(seen["MemTotal"], asked.min(host["MemTotal"]), "{vcpus} vcpus");
        assert!(
            seen["MemFree"] <= seen["MemAvailable"] && seen["MemAvailable"] <= seen["MemTotal"]
        );
        assert!(seen["SwapTotal"] <= host["SwapTotal"], "{seen:?}");
        let free = sandbox.sh("free -k | awk '/^Mem:/ { print $2 }'").await.good();
        assert_eq!(free, seen["MemTotal"].to_string());
        // What a program takes is missing, and comes back.
        let hold = "my $x = 'x' x 300_000_000; open my $f, '<', '/proc/meminfo'; print <$f>";
        let taken = meminfo(&sandbox.run(&["perl", "-e", hold]).await.good());
        let gone = seen["MemAvailable"].saturating_sub(taken["MemAvailable"]);
        assert!((250_000..700_000).contains(&gone), "300 MB in use show as {gone} KiB");
        assert!(taken["AnonPages"] > 250_000, "{taken:?}");
        let after = meminfo(&sandbox.run(&["cat", "/proc/meminfo"]).await.good());
        assert!(after["MemAvailable"] > taken["MemAvailable"] + 250_000, "it does not come back");
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn cpus_are_what_was_asked_for() {
    let (_server, first) = sandbox("cpu-view").await;
    for vcpus in [1u32, 2, 32] {
        let sandbox = with_vcpus(&first, vcpus).await;
        let expected = (vcpus as usize).min(host_cpus());
        assert_eq!(sandbox.run(&["nproc"]).await.good(), expected.to_string());
        let count = async |line: &str| sandbox.sh(line).await.good().parse::<usize>().unwrap();
        assert_eq!(count("grep -c '^cpu[0-9]' /proc/stat").await, expected);
        assert_eq!(count("grep -c '^processor' /proc/cpuinfo").await, expected);
        assert_eq!(count("getconf _NPROCESSORS_ONLN").await, expected);
        // All of it names the same CPUs.
        let named = "grep -o '^cpu[0-9]*' /proc/stat | grep -o '[0-9]*' | paste -sd, ; \
                     awk '/^processor/ { print $3 }' /proc/cpuinfo | paste -sd, ; \
                     perl -ne 'print join(\",\", map { /(\\d+)-(\\d+)/ ? $1..$2 : $_ } split /,/, $1), qq(\\n) if /Cpus_allowed_list:\\s*(.*)/' /proc/self/status";
        let named = sandbox.sh(named).await.good();
        let lines: Vec<&str> = named.lines().collect();
        assert!(lines.len() == 3 && lines.iter().all(|l| *l == lines[0]), "{named}");
        let _ = sandbox.delete().await.ok();
    }
}

fn cpu_line(line: &str) -> Vec<u64> {
    line.split_whitespace().skip(1).map(|field| field.parse().unwrap()).collect()
}

#[tokio::test]
async fn cpu_time_counts_up_and_is_its_own() {
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let (_server, sandbox) = sandbox("stat-view").await;
    let script = "for i in $(seq 60); do cat /proc/stat; echo --; timeout 0.05 sh -c 'while :; do :; done'; done";
    let text = sandbox.sh(script).await.out();
    let mut last: Option<Vec<u64>> = None;
    let mut first = Vec::new();
    for one in text.split("--\n").filter(|one| !one.trim().is_empty()) {
        let total = cpu_line(one.lines().next().unwrap());
        assert_eq!(total.len(), 10, "{one}");
        let mut sum = vec![0; 10];
        for line in one.lines().skip(1).take_while(|l| l.starts_with("cpu")) {
            for (all, part) in sum.iter_mut().zip(cpu_line(line)) {
                *all += part;
            }
        }
        assert_eq!(sum, total, "the CPUs do not add up: {one}");
        if let Some(last) = &last {
            assert!(last.iter().zip(&total).all(|(a, b)| a <= b), "{last:?} then {total:?}");
        } else {
            first.clone_from(&total);
        }
        last = Some(total);
        let start: u64 =
            one.lines().find_map(|l| l.strip_prefix("btime ")).unwrap().parse().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!((before - 1..=now + 1).contains(&start), "started at {start}, not {before}..{now}");
    }
    let (first, last) = (first, last.unwrap());
    let busy = last[0] + last[2] - first[0] - first[2];
    assert!(busy > 20, "60 times 50 ms of work are {busy} ticks");
    // An idle neighbour has none of it.
    let other = TestSandbox::create(&sandbox.client, json!({ "persistent": false })).await;
    let text = other.run(&["cat", "/proc/stat"]).await.good();
    let own = cpu_line(text.lines().next().unwrap());
    assert!(own[0] + own[2] < busy / 2, "{text}");
}

#[tokio::test]
async fn age_and_load_are_its_own() {
    let began = Instant::now();
    let (_server, sandbox) = sandbox("age").await;
    let age = async || {
        let text = sandbox.run(&["cat", "/proc/uptime"]).await.good();
        let fields: Vec<f64> = text.split(' ').map(|f| f.parse().unwrap()).collect();
        assert_eq!(fields.len(), 2, "{text}");
        fields[0]
    };
    let first = age().await;
    assert!(first <= began.elapsed().as_secs_f64() + 0.1, "{first} s old");
    let work = "timeout 2 sh -c 'while :; do :; done'; cat /proc/loadavg";
    let loads = sandbox.sh(work).await.good();
    let second = age().await;
    assert!(second >= first + 1.5, "{first} then {second}");
    assert!(second <= began.elapsed().as_secs_f64() + 0.1, "{second} s old");
    let fields: Vec<&str> = loads.split(' ').collect();
    assert_eq!(fields.len(), 5, "{loads}");
    let averages: Vec<f64> = fields[..3].iter().map(|f| f.parse().unwrap()).collect();
    assert!(averages[0] > 0.0 && averages[0] <= host_cpus() as f64, "{loads}");
    let (running, tasks) = fields[3].split_once('/').unwrap();
    let (running, tasks): (u64, u64) = (running.parse().unwrap(), tasks.parse().unwrap());
    assert!(running >= 1 && running <= tasks && tasks < 30, "{loads}");
    assert!(sandbox.run(&["uptime"]).await.good().contains("load average"));
    let top = sandbox.sh("top -bn1 | head -n 5").await.good();
    assert!(top.contains("Tasks:") && top.contains("MiB Mem"), "{top}");
    // Swap devices are the host's affair.
    let swaps = sandbox.run(&["cat", "/proc/swaps"]).await.good();
    assert!(swaps.starts_with("Filename") && !swaps.contains("/dev"), "{swaps}");
}

/// Finds the limits as runtimes do: by /proc/self/cgroup and the mounts of that type.
const LIMITS: &str = r#"
open my $g, '<', '/proc/self/cgroup'; my %at;
while (<$g>) { chomp; my (undef, $names, $path) = split /:/, $_, 3; $at{$_} = $path for $names eq '' ? ('') : split /,/, $names; }
open my $m, '<', '/proc/self/mountinfo'; my %mount;
while (<$m>) { my ($l, $r) = split / - /; my $point = (split ' ', $l)[4]; my ($kind, undef, $super) = split ' ', $r;
  if ($kind eq 'cgroup2') { $mount{''} //= $point } elsif ($kind eq 'cgroup') { $mount{$_} //= $point for split /,/, $super } }
sub value { my ($name, $file) = @_; my $p = ($mount{$name} // die "no mount of $name") . ($at{$name} eq '/' ? '' : $at{$name}) . "/$file";
  open my $f, '<', $p or die "$p: $!"; my $v = <$f>; chomp $v; $v }
my $memory = exists $at{memory} ? value('memory', 'memory.limit_in_bytes') : value('', 'memory.max');
my $cpu = exists $at{cpu} ? value('cpu', 'cpu.cfs_quota_us') . ' ' . value('cpu', 'cpu.cfs_period_us') : value('', 'cpu.max');
my $pids = exists $at{pids} ? value('pids', 'pids.max') : value('', 'pids.max');
print "$memory|$cpu|$pids";
"#;

#[tokio::test]
async fn limits_can_be_read_but_not_changed() {
    let (_server, sandbox) = sandbox("group-view").await;
    let two = with_vcpus(&sandbox, 2).await;
    let limits = "4294967296|200000 100000|2048";
    for root in [false, true] {
        let ran = two.run_with(&["perl", "-e", LIMITS], json!({ "sudo": root })).await;
        assert_eq!(ran.good(), limits);
    }
    // No file of it can be written, not even by root, not even with mounts of root's own.
    let write = "for f in $(find /sys/fs/cgroup /mnt -type f \\( -name 'memory*' -o -name 'cpu*' -o -name 'pids*' \\) 2>/dev/null); do \
                 for v in max -1 1 0; do ( echo $v > $f ) 2>/dev/null && echo $f; done; done; true";
    assert_eq!(two.sudo(write).await.good(), "");
    let mkdir = "mkdir /sys/fs/cgroup/x 2>/dev/null && echo made; touch /sys/fs/cgroup/y 2>/dev/null && echo made; true";
    assert_eq!(two.sudo(mkdir).await.good(), "");
    let open = "for m in $(awk '$2 ~ \"^/sys/fs/cgroup\" { print $2 }' /proc/mounts); do mount -o remount,bind,rw $m; done; \
                mount -t cgroup2 own /mnt; for c in memory cpu pids; do mkdir -p /tmp/$c; mount -t cgroup -o $c own /tmp/$c; done";
    let _ = two.sudo(&format!("{open}; {write}")).await;
    let ran = two.sudo(&format!("({open}) >/dev/null 2>&1; {write}")).await;
    assert_eq!(ran.good(), "", "a limit could be written");
    assert_eq!(two.run(&["perl", "-e", LIMITS]).await.good(), limits);
    // Nothing above or beside its own groups is there.
    let names = two.sudo("find /sys/fs/cgroup -maxdepth 3 -type d").await.good();
    for other in ["bivouac", "shim", "sbx_", "docker", "system.slice"] {
        assert!(!names.contains(other), "{other} shows:\n{names}");
    }
}

#[tokio::test]
async fn nested_sandboxes_work_under_the_view() {
    let (_server, sandbox) = sandbox("nested-view").await;
    // script/test installs it; a small machine may do without.
    let has_bwrap = sandbox.sh("command -v bwrap").await.exit == Some(0);
    let bwrap = "bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev";
    let unshare = "unshare -Urp --fork --mount-proc";
    for line in [
        format!("{bwrap} true"),
        format!("{unshare} true"),
        format!("sudo {bwrap} true"),
        format!("sudo {unshare} true"),
        // Twice nested, and with a sysfs of a network namespace of its own.
        format!("{bwrap} {unshare} true"),
        "unshare -Urmn --fork sh -c 'mount -t sysfs -o ro,nosuid,nodev,noexec s /mnt && test -e /mnt/class/net/lo'".into(),
        "sudo unshare -mn --fork sh -c 'mount -t sysfs -o ro,nosuid,nodev,noexec s /mnt && test -e /mnt/class/net/lo'".into(),
        "unshare -UrmC --fork sh -c 'mount -t cgroup2 c /mnt && test -e /mnt/cgroup.procs'".into(),
    ] {
        if line.contains("bwrap") && !has_bwrap {
            continue;
        }
        let ran = sandbox.sh(&line).await;
        assert_eq!(ran.exit, Some(0), "{line}: {}{}", ran.out(), ran.err());
    }
    // Of the whole sysfs, root may write to nothing but its own network's.
    let writable = "find /run/bivouac/sys/ -type f -writable 2>/dev/null | grep -v /net/ | head -n 3; test -e /run/bivouac/sys/kernel && echo there";
    assert_eq!(sandbox.sudo(writable).await.good(), "there");
    // The complete copies are root's alone.
    let ran = sandbox.sh("ls /run/bivouac/ /run/bivouac/proc /run/bivouac/view 2>/dev/null").await;
    assert_eq!((ran.exit == Some(0), ran.out().as_str()), (false, ""));
}

#[tokio::test]
async fn runtimes_size_themselves_to_the_sandbox() {
    let (_server, first) = sandbox("runtimes").await;
    let one = with_vcpus(&first, 1).await;
    let node = "const os = require('os'); console.log(os.totalmem(), os.availableParallelism?.() ?? os.cpus().length, os.cpus().length, os.uptime() < 600, os.freemem() <= os.totalmem(), process.constrainedMemory?.() ?? 2147483648)";
    if one.sh("command -v node").await.exit == Some(0) {
        let said = one.run(&["node", "-e", node]).await.good();
        assert_eq!(said, "2147483648 1 1 true true 2147483648");
    }
    if one.sh("command -v java").await.exit == Some(0) {
        let source = "public class Size { public static void main(String[] a) { Runtime r = Runtime.getRuntime(); \
                      System.out.println(r.availableProcessors() + \" \" + (r.maxMemory() >> 20)); } }";
        let line = format!("cat > Size.java <<'E'\n{source}\nE\njava Size.java");
        let said = one.sh(&line).await;
        if said.err().contains("compiler") {
            // A runtime without its compiler still tells.
            let told = one.sh("java -XshowSettings:system -version 2>&1").await.out();
            assert!(told.contains("Effective CPU Count: 1"), "{told}");
            assert!(told.contains("Memory Limit: 2.00G"), "{told}");
        } else {
            let said = said.good();
            let fields: Vec<u64> = said.split(' ').map(|f| f.parse().unwrap()).collect();
            // A quarter of the memory is what a JVM takes unless it is told.
            assert!(fields[0] == 1 && (300..=520).contains(&fields[1]), "{said}");
        }
    }
    let python =
        "import os; print(len(os.sched_getaffinity(0)), os.sysconf('SC_NPROCESSORS_ONLN'))";
    if one.sh("command -v python3").await.exit == Some(0) {
        assert_eq!(one.run(&["python3", "-c", python]).await.good(), "1 1");
    }
}

#[tokio::test]
async fn init_is_closed_to_the_inside() {
    let (_server, sandbox) = sandbox("init").await;
    let own = sandbox.sh("for f in exe environ mem maps; do test -r /proc/self/$f || echo no; done; head -c 1 /proc/self/environ | wc -c").await;
    assert_eq!(own.good(), "1", "positive control");
    for file in ["exe", "environ", "mem", "maps", "auxv", "root/etc/passwd", "cwd/etc/passwd"] {
        for root in [false, true] {
            let read = format!("head -c 1 /proc/1/{file} >/dev/null 2>&1 && echo read; true");
            let write = format!("(echo x > /proc/1/{file}) 2>/dev/null && echo wrote; true");
            for line in [read, write] {
                let ran = if root { sandbox.sudo(&line).await } else { sandbox.sh(&line).await };
                assert_eq!(ran.good(), "", "/proc/1/{file}, root: {root}");
            }
        }
    }
    let links = "readlink /proc/1/exe; readlink /proc/1/cwd; readlink /proc/1/root; ls /proc/1/fd; ls /proc/1/map_files; true";
    assert_eq!(sandbox.sudo(&format!("({links}) 2>/dev/null")).await.good(), "");
    // Nor through the complete proc, nor with a proc of its own.
    let copies = "cat /run/bivouac/proc/1/environ; mount -t proc p /mnt && cat /mnt/1/environ; readlink /mnt/1/exe; true";
    assert_eq!(sandbox.sudo(&format!("({copies}) 2>/dev/null")).await.good(), "");
}

#[tokio::test]
async fn the_view_cannot_be_turned_against_anybody() {
    let (_server, first) = sandbox("view-a").await;
    let second = TestSandbox::create(&first.client, json!({ "persistent": false })).await;
    // Nothing of it can be changed.
    let change = "for f in meminfo stat uptime loadavg swaps; do for d in /proc /run/bivouac/view; do \
                  (echo x > $d/$f) 2>/dev/null && echo wrote $d/$f; chmod 666 $d/$f 2>/dev/null && echo mode; chown 1000 $d/$f 2>/dev/null && echo owner; \
                  truncate -s 5 $d/$f 2>/dev/null && echo size; rm -f $d/$f 2>/dev/null && echo gone; done; done; \
                  touch /run/bivouac/view/new 2>/dev/null && echo made; \
                  mount -o remount,bind,rw /proc/meminfo 2>/dev/null; (echo x > /proc/meminfo) 2>/dev/null && echo wrote; true";
    assert_eq!(first.sudo(change).await.good(), "");
    // Neither its root nor another session is to be had from it.
    let up = "ls -d /run/bivouac/view/../view/* | wc -l; ls /run/bivouac/view/$(hostname) /run/bivouac/view/sbx_00000000000000000000000000.0.1 2>/dev/null; \
              mount --bind /run/bivouac/view /mnt && ls /mnt/.. | grep -c sbx_; true";
    // Its own files only, and two more of them when it has not all CPUs.
    let found = first.sudo(up).await.good();
    assert!(["5 0", "7 0"].contains(&found.replace('\n', " ").trim()), "{found}");
    // Ended by force, it ends for nobody.
    let force = "umount -f /run/bivouac/view; umount -f /proc/stat; umount -lf /proc/swaps; true";
    let _ = first.sudo(&format!("({force}) 2>/dev/null")).await;
    let _ = second.run(&["cat", "/proc/stat"]).await.good();
    // Locks are not shared: the files of two sandboxes are two.
    let hold = "flock -x /proc/uptime sh -c 'echo held; sleep 86051'";
    let id = first.start(&["sh", "-c", hold], json!({})).await;
    let mut lines = first.logs(&id).await;
    assert_eq!(lines.next(SHORT).await.unwrap().unwrap()["stream"], "stdout");
    assert_eq!(second.run(&["flock", "-xn", "/proc/uptime", "echo", "free"]).await.good(), "free");
    // Odd reads, in great number, and readers that are killed in the middle.
    let odd = r#"for my $size (1, 7, 4096, 1 << 20) { for my $at (0, 1, 100, 5000, 1 << 40, (1 << 62)) {
        open my $f, '<:raw', '/proc/meminfo' or die; sysseek $f, $at, 0; my $n = sysread $f, my $b, $size; die "$at $size: $!" if !defined $n || $n > $size || ($at > 4999 && $n) } }
        my $whole = ''; open my $f, '<:raw', '/proc/meminfo'; while (sysread $f, my $b, 13) { $whole .= $b } die $whole unless $whole =~ /^MemTotal: +\d+ kB\n.*VmallocChunk: +0 kB\n$/s; print 'fine'"#;
    assert_eq!(first.run(&["perl", "-e", odd]).await.good(), "fine");
    let storm = "for i in $(seq 40); do (timeout -s KILL 2 sh -c 'while :; do read x < /proc/stat; read x < /proc/loadavg; done') & done; wait";
    let id = first.start(&["sh", "-c", storm], json!({})).await;
    for _ in 0..20 {
        let text = second.run(&["cat", "/proc/meminfo"]).await.good();
        assert!(text.starts_with("MemTotal:"), "{text}");
    }
    let _ = first.wait(&id).await;
    let _ = first.run(&["cat", "/proc/uptime"]).await.good();
}

#[tokio::test]
async fn the_view_outlives_the_engine() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let sandbox = TestSandbox::create(&server.client("view-crash").unwrap(), json!({})).await;
    let read =
        "cat /proc/meminfo /proc/stat /proc/uptime /proc/loadavg | grep -E '^(MemTotal|btime)'";
    let before = sandbox.sh(read).await.good();
    let reader =
        "while [ ! -e go ]; do cat /proc/meminfo >/dev/null || exit 9; sleep 0.05; done; exit 4";
    let id = sandbox.start(&["sh", "-c", reader], json!({})).await;
    server.restart().await.unwrap();
    let sandbox = again(&server, &sandbox, "view-crash");
    assert_eq!(sandbox.sh(read).await.good(), before, "the same session has the same view");
    let _ = sandbox.run(&["touch", "go"]).await.good();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 4, "a read failed while nobody served");
    // The new engine has a server of its own; the old one ends with its last sandbox.
    let other = TestSandbox::create(&sandbox.client, json!({ "persistent": false })).await;
    assert!(other.sh(read).await.good().starts_with("MemTotal"));
    assert_eq!(view_servers(&server).len(), 2);
    let _ = sandbox.delete().await.ok();
    eventually("the old server to end", SHORT, async || {
        if view_servers(&server).len() == 1 { Ok(()) } else { Err(view_servers(&server)) }
    })
    .await;
    assert!(other.sh(read).await.good().starts_with("MemTotal"));
    drop((server, lock));
}

#[tokio::test]
async fn a_dead_view_fails_at_once_and_only_it() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("view-dead").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let servers = view_servers(&server);
    assert_eq!(servers.len(), 1, "{servers:?}");
    // One that hangs holds neither the sandbox nor its end.
    let stuck = TestSandbox::create(&client, json!({ "persistent": false })).await;
    kill_process(servers[0], Signal::STOP).unwrap();
    // A request that it took before it stood still could not be given up.
    eventually("the server to stand still", SHORT, async || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", servers[0].as_raw_nonzero()));
        let stat = stat.unwrap_or_default();
        if stat.contains(") T ") { Ok(()) } else { Err(stat) }
    })
    .await;
    let id = stuck.start(&["cat", "/proc/meminfo"], json!({})).await;
    assert_eq!(stuck.run(&["echo", "on"]).await.good(), "on");
    let _ = stuck.kill(&id, 9).await.ok();
    assert_eq!(stuck.wait(&id).await["exitCode"], 137, "a reader cannot be killed");
    let _ = stuck.start(&["cat", "/proc/stat"], json!({})).await;
    let _ = stuck.stop().await.ok();
    kill_process(servers[0], Signal::CONT).unwrap();
    assert!(sandbox.run(&["cat", "/proc/meminfo"]).await.good().starts_with("MemTotal"));
    kill_process(servers[0], Signal::KILL).unwrap();
    eventually("the server to be gone", SHORT, async || {
        if view_servers(&server).is_empty() { Ok(()) } else { Err("still there") }
    })
    .await;
    let ran = sandbox.sh("timeout 10 cat /proc/meminfo").await;
    assert!(![Some(0), Some(124)].contains(&ran.exit), "{:?}: {}", ran.exit, ran.out());
    assert!(ran.err().contains("not connected"), "{}", ran.err());
    assert_eq!(sandbox.run(&["echo", "on"]).await.good(), "on", "commands go on");
    assert_eq!(sandbox.run(&["nproc"]).await.exit, Some(0));
    // The next sandbox gets a server that lives.
    let next = eventually("a new server", SHORT, async || {
        TestSandbox::try_create(&client, json!({ "persistent": false })).await
    })
    .await;
    assert!(next.run(&["cat", "/proc/meminfo"]).await.good().starts_with("MemTotal"));
    drop((server, lock));
}

#[tokio::test]
async fn age_begins_anew_with_each_session() {
    let server = server().await;
    let mut sandbox = TestSandbox::create(&server.team("view-age"), json!({})).await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let age = async |s: &TestSandbox| -> f64 {
        s.sh("cut -d' ' -f1 /proc/uptime").await.good().parse().unwrap()
    };
    let old = age(&sandbox).await;
    let _ = sandbox.stop().await.ok();
    let began = Instant::now();
    assert!(sandbox.resume().await);
    let new = age(&sandbox).await;
    assert!(old >= 1.2 && new <= began.elapsed().as_secs_f64() + 0.1, "{old} then {new}");
    let _ = sandbox.delete().await.ok();
}
