//! Power cuts: the data folder lies on a disk of which pictures are taken at random moments of work; an
//! engine starts on each, and whatever was acknowledged before the picture is verified by hash.
//!
//! What is promised to outlive the power: snapshots (also those of a stop), their deletion, a rollback,
//! drives and what fsync(2) answered for on them, the token. A running session may lose what it wrote since; its sandbox must start again.
//!
//! `BIVOUAC_TEST_CUTS` says how many cuts (5), `BIVOUAC_TEST_SEED` repeats a run. That the search can
//! find a loss is tested as well: with a flush left out, it must.

mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use bivouac_testkit::{
    Builder, Cache, Client, LONG, Picture, PowerDisk, TestSandbox, TestServer, shared,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::work::{Dice, Ledger, Tree, Work, hashes};

/// Sandboxes that work at the same time.
const WORKERS: u64 = 3;
const TEAM: &str = "power";

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("BIVOUAC_TEST_SEED").unwrap_or(u64::from(now.subsec_nanos()));
    eprintln!("BIVOUAC_TEST_SEED={seed} repeats this run's choices");
    seed
}

/// Files that every image has and no sandbox changes.
async fn image(sandbox: &TestSandbox) -> Tree {
    let files = "/etc/passwd /etc/group /etc/profile /etc/nsswitch.conf /etc/services";
    hashes(&sandbox.sh(&format!("sha256sum {files} 2>/dev/null || true")).await.good())
}

/// All files of versions in a running sandbox.
async fn tree(sandbox: &TestSandbox) -> Tree {
    hashes(&sandbox.sh("sha256sum v* 2>/dev/null || true").await.good())
}

async fn all(client: &Client, list: &str, field: &str) -> Vec<Value> {
    let (mut found, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = client.get(&format!("/v2/sandboxes{list}?limit=50{cursor}")).await.ok();
        found.extend(page[field].as_array().unwrap().iter().cloned());
        match page["pagination"]["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return found,
        }
    }
}

/// The engine that starts after a cut.
struct After {
    client: Client,
    promised: Ledger,
    losses: Vec<String>,
}

impl After {
    fn lost(&mut self, what: impl Into<String>) {
        self.losses.push(what.into());
    }

    /// Every sandbox starts without help, and holds what it was promised to hold.
    async fn sandboxes(&mut self) {
        let list = all(&self.client, "", "sandboxes").await;
        let names: BTreeSet<String> =
            list.iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect();
        let promised = self.promised.clone();
        for name in promised.kept.keys().filter(|name| !names.contains(*name)) {
            self.lost(format!("sandbox {name} is gone"));
        }
        for name in promised.deleted.intersection(&names) {
            self.lost(format!("sandbox {name} was deleted and is back"));
        }
        for name in names {
            let answer = self.client.get(&format!("/v2/sandboxes/{name}?resume=true")).await;
            if answer.status == 404 && !promised.kept.contains_key(&name) {
                continue;
            }
            if answer.status != 200 {
                self.lost(format!("sandbox {name} does not start: {answer}"));
                continue;
            }
            let sandbox = TestSandbox::of(&self.client, answer.json);
            let found = tree(&sandbox).await;
            if let Some(version) = promised.kept.get(&name) {
                for (file, hash) in &promised.written[&name][version] {
                    if found.get(file) != Some(hash) {
                        let is = found.get(file);
                        self.lost(format!("{file} of sandbox {name}, version {version}: {is:?}"));
                    }
                }
            }
            for file in promised.undone.get(&name).into_iter().flatten() {
                if promised.kept.contains_key(&name) && found.contains_key(file) {
                    self.lost(format!("{file} of sandbox {name} is back from before a rollback"));
                }
            }
            let _ = sandbox.stop().await.ok();
        }
    }

    /// Every snapshot that is shown is whole; those that were promised are there.
    async fn snapshots(&mut self, taken_before: i64) {
        let promised = self.promised.clone();
        for id in &promised.deleted_snapshots {
            let source = json!({ "source": { "type": "snapshot", "snapshotId": id } });
            if TestSandbox::try_create(&self.client, source).await.is_ok() {
                self.lost(format!("snapshot {id} was deleted and is back"));
            }
        }
        let list = all(&self.client, "/snapshots", "snapshots").await;
        let mut shown: BTreeMap<String, String> = list
            .iter()
            .filter(|s| s["status"] == "created" && s["createdAt"].as_i64() < Some(taken_before))
            .map(|s| {
                (
                    s["id"].as_str().unwrap().into(),
                    s["sourceSandboxName"].as_str().unwrap_or("?").into(),
                )
            })
            .collect();
        shown.extend(promised.snapshots.iter().map(|(id, (of, _))| (id.clone(), of.clone())));
        for (id, of) in shown {
            let source = json!({ "source": { "type": "snapshot", "snapshotId": id },
                "persistent": false });
            let sandbox = match TestSandbox::try_create(&self.client, source).await {
                Ok(sandbox) => sandbox,
                Err(answer) => {
                    self.lost(format!("nothing starts from snapshot {id} of {of}: {answer}"));
                    continue;
                }
            };
            let found = tree(&sandbox).await;
            let versions = promised.written.get(&of);
            match promised.snapshots.get(&id) {
                Some((_, version)) if versions.and_then(|v| v.get(version)) != Some(&found) => {
                    self.lost(format!("snapshot {id} of {of}, version {version}: {found:?}"));
                }
                Some(_) => {}
                // Not acknowledged: it is there as a whole, or not at all.
                None if versions.is_some_and(|v| v.values().any(|tree| *tree == found)) => {}
                None => self.lost(format!("snapshot {id} of {of} is torn: {found:?}")),
            }
            let _ = sandbox.delete().await.ok();
        }
    }

    /// Drives hold what fsync(2) answered for, and can be written to: their writer died in the cut.
    async fn drives(&mut self) {
        for (name, files) in self.promised.drives.clone() {
            let mounts = json!({ "/vercel/drive": { "drive": name } });
            let body = json!({ "persistent": false, "mounts": mounts });
            let sandbox = match TestSandbox::try_create(&self.client, body).await {
                Ok(sandbox) => sandbox,
                Err(answer) => {
                    self.lost(format!("drive {name} cannot be mounted: {answer}"));
                    continue;
                }
            };
            let line = "cd /vercel/drive && echo x > new && sha256sum f* 2>/dev/null || true";
            let found = hashes(&sandbox.sh(line).await.good());
            for (file, hash) in files {
                if found.get(&file) != Some(&hash) {
                    self.lost(format!("{file} of drive {name}: {:?}", found.get(&file)));
                }
            }
            let _ = sandbox.delete().await.ok();
        }
    }

    async fn new_work(&mut self) {
        let mut fresh = TestSandbox::create(&self.client, json!({ "name": "fresh" })).await;
        let found = image(&fresh).await;
        if found != self.promised.image {
            self.lost(format!("the image, {found:?} for {:?}", self.promised.image));
        }
        let _ = fresh.sh("echo fresh > file").await.good();
        let _ = fresh.stop().await.ok();
        let _ = fresh.resume().await;
        assert_eq!(fresh.run(&["cat", "file"]).await.good(), "fresh");
        let _ = fresh.delete().await.ok();
    }
}

/// Reads every file, so that the file system compares every checksum.
fn read_all(folder: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let (path, kind) = (entry.as_ref().unwrap().path(), entry.as_ref().unwrap().file_type()?);
        if kind.is_dir() {
            read_all(&path)?;
        } else if kind.is_file() {
            let read = File::open(&path)
                .and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
            read.with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

/// Starts an engine on a picture; what it has lost.
async fn look(disk: &PowerDisk, picture: Picture, promised: Ledger, token: &str) -> Vec<String> {
    let restored = match disk.open(picture) {
        Ok(restored) => restored,
        Err(error) => return vec![format!("the host's file system: {error:#}")],
    };
    let data = restored.folder().join("data");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    let server = match engine().data_folder(data.clone()).start().await {
        Ok(server) => server,
        Err(error) => return vec![format!("no engine starts: {error:#}")],
    };
    let kept = fs::read_to_string(data.join("token")).unwrap_or_default();
    let mut losses = Vec::new();
    if kept.trim() != token {
        losses.push("the token has changed".to_owned());
    }
    let client = Client::new(&server.url, kept.trim(), TEAM, "prj_test").unwrap();
    let mut after = After { client, promised, losses };
    // Before the sandboxes: each of those is stopped in its turn, which may evict an older snapshot.
    after.snapshots(i64::try_from(now).unwrap()).await;
    after.sandboxes().await;
    after.drives().await;
    after.new_work().await;
    if let Err(error) = read_all(&data.join("pool")) {
        after.lost(format!("the pool: {error:#}"));
    }
    if !after.losses.is_empty() {
        eprintln!("{}", server.tail());
    }
    assert!(server.stop().await.unwrap().success(), "{}", server.tail());
    after.losses
}

/// As [`look`]; that the look itself failed is a loss as well.
async fn find(
    disk: &Arc<PowerDisk>,
    picture: Picture,
    promised: Ledger,
    token: &str,
) -> Vec<String> {
    let (disk, token) = (Arc::clone(disk), token.to_owned());
    let looked = tokio::spawn(async move { look(&disk, picture, promised, &token).await }).await;
    looked.unwrap_or_else(|panic| vec![format!("the engine is of no use: {panic}")])
}

fn engine() -> Builder {
    TestServer::builder().embedded_database().own_token()
}

/// An engine at work on a disk.
async fn begin(disk: &PowerDisk, builder: Builder) -> (TestServer, Arc<Work>, String) {
    let data = disk.folder().join("data");
    let server = builder.data_folder(data.clone()).start().await.unwrap();
    let token = fs::read_to_string(data.join("token")).unwrap().trim().to_owned();
    let client = Client::new(&server.url, &token, TEAM, "prj_test").unwrap();
    let first = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let image = image(&first).await;
    assert!(image.contains_key("/etc/passwd"), "{image:?}");
    let _ = first.delete().await.ok();
    (server, Arc::new(Work::new(client, image)), token)
}

/// Cuts the power while the engine works, `cuts` times; what was lost in each.
async fn cuts(
    cache: Cache,
    builder: Builder,
    cuts: u64,
    dice: &mut Dice,
) -> Vec<(u64, Vec<String>)> {
    let mut disk = PowerDisk::make(cache).unwrap();
    let (server, work, token) = begin(&disk, builder).await;
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let (work, mut dice) = (Arc::clone(&work), Dice(dice.below(u64::MAX)));
        workers.spawn(async move {
            let mut count = 0;
            while !work.is_over() {
                let own = Dice(dice.below(u64::MAX));
                work.life(format!("box-{worker}-{count}"), own).await;
                count += 1;
            }
        });
    }
    let (writer, mut own) = (Arc::clone(&work), Dice(dice.below(u64::MAX)));
    workers.spawn(async move {
        for count in 0.. {
            let next = Dice(own.below(u64::MAX));
            writer.drive_life(&format!("drive-{count}"), next).await;
            if writer.is_over() {
                break;
            }
        }
    });
    let mut pictures = Vec::new();
    for _ in 0..cuts {
        tokio::time::sleep(Duration::from_millis(200 + dice.below(1500))).await;
        if dice.below(2) == 0 {
            // The moment at which a flush that came too late would show.
            let answer = tokio::time::timeout(LONG, work.answered.notified()).await;
            answer.expect("the engine answers something");
        }
        let before = work.seen();
        let picture = disk.picture().unwrap();
        pictures.push((picture, before.and_after(&work.seen())));
    }
    work.end();
    while let Some(done) = workers.join_next().await {
        done.unwrap();
    }
    drop(server);
    let disk = Arc::new(disk);
    let mut found = Vec::new();
    for (cut, (picture, promised)) in (1..).zip(pictures) {
        let (kept, snapshots) = (promised.kept.len(), promised.snapshots.len());
        let files: usize = promised.drives.values().map(BTreeMap::len).sum();
        let start = Instant::now();
        let losses = find(&disk, picture, promised, &token).await;
        eprintln!(
            "cut {cut} ({cache:?}): {kept} sandboxes, {snapshots} snapshots and {files} files of drives \
             were promised, {} s",
            start.elapsed().as_secs()
        );
        found.push((cut, losses));
    }
    found
}

async fn nothing_is_lost(cache: Cache, builder: Builder, share: u64) {
    let _lock = shared().unwrap();
    let mut dice = Dice(seed());
    let count = number("BIVOUAC_TEST_CUTS").unwrap_or(5).div_ceil(share);
    let found = cuts(cache, builder, count, &mut dice).await;
    let losses: Vec<_> = found.iter().filter(|(_, losses)| !losses.is_empty()).collect();
    assert!(losses.is_empty(), "{losses:#?}");
}

#[tokio::test]
async fn a_power_cut_loses_nothing_that_was_acknowledged() {
    // So small that the pool grows while it is written to.
    nothing_is_lost(Cache::Kept, engine().env("BIVOUAC_TEST_POOL_MB", "256"), 3).await;
}

#[tokio::test]
async fn nor_does_one_that_takes_the_cache_of_the_disk() {
    nothing_is_lost(Cache::Lost, engine(), 3).await;
}

#[tokio::test]
async fn nor_does_one_where_the_pool_is_folders() {
    nothing_is_lost(Cache::Kept, engine().arg("--pool").arg("folder"), 5).await;
}

/// Takes pictures right behind acknowledgements, with one kind of flush left out, until one shows a
/// loss; what that was.
async fn loss_without(what: &str, cache: Cache) -> Vec<String> {
    let _lock = shared().unwrap();
    let mut dice = Dice(seed());
    let mut disk = PowerDisk::make(cache).unwrap();
    let builder = engine().env("BIVOUAC_TEST_LOSE", what);
    let (server, work, token) = begin(&disk, builder).await;
    let mut pictures = Vec::new();
    for round in 0..3 {
        let body = json!({ "name": format!("box-{round}") });
        let sandbox = TestSandbox::create(&work.client, body).await;
        let version = work.write(&sandbox, 0, &mut dice).await;
        work.keep(&sandbox, version, &mut dice).await;
        pictures.push((disk.picture().unwrap(), work.seen()));
    }
    drop(server);
    let disk = Arc::new(disk);
    for (picture, promised) in pictures {
        let losses = find(&disk, picture, promised, &token).await;
        if !losses.is_empty() {
            return losses;
        }
    }
    Vec::new()
}

#[tokio::test]
async fn a_record_that_is_not_flushed_is_found() {
    let losses = loss_without("records", Cache::Kept).await;
    assert!(losses.iter().any(|l| l.contains("is gone")), "not found: {losses:?}");
}

/// Takes pictures right behind fsync(2) on a drive, with the pool's flushes left out, until one shows a
/// loss; what that was.
#[tokio::test]
async fn a_pool_that_is_not_flushed_is_found() {
    let _lock = shared().unwrap();
    let dice = Dice(seed());
    let mut disk = PowerDisk::make(Cache::Lost).unwrap();
    let builder = engine().env("BIVOUAC_TEST_LOSE", "pool");
    let (server, work, token) = begin(&disk, builder).await;
    let (writer, answered) = (Arc::clone(&work), work.answered.notified());
    let life = tokio::spawn(async move { writer.drive_life("drive", dice).await });
    answered.await;
    let mut pictures = Vec::new();
    while pictures.len() < 3 && !life.is_finished() {
        let answered = work.answered.notified();
        let _ = tokio::time::timeout(LONG, answered).await;
        let before = work.seen();
        pictures.push((disk.picture().unwrap(), before.and_after(&work.seen())));
    }
    work.end();
    life.await.unwrap();
    drop(server);
    let disk = Arc::new(disk);
    let mut losses = Vec::new();
    for (picture, promised) in pictures {
        losses.extend(find(&disk, picture, promised, &token).await);
    }
    assert!(!losses.is_empty(), "no picture shows that the pool was not flushed");
    eprintln!("{losses:?}");
}
