//! What an engine is asked for while its power is cut, and the ledger of its answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use bivouac_testkit::{Client, TestSandbox};
use serde_json::{Value, json};
use tokio::sync::Notify;

/// What a test writes at most into one file.
const LARGEST: u64 = 3_000_000;

/// Random numbers that a seed repeats.
#[derive(Debug, Clone)]
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % end
    }
}

/// Files of a tree: name and hash.
pub(super) type Tree = BTreeMap<String, String>;

/// What `sha256sum` says.
pub(super) fn hashes(text: &str) -> Tree {
    let lines = text.lines().filter_map(|line| line.split_once("  "));
    lines.map(|(hash, name)| (name.to_owned(), hash.to_owned())).collect()
}

/// What was acknowledged, and what was written for it. A promise is taken out before its end is asked
/// for: between the question and the answer both are right.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger {
    /// Trees by sandbox and version.
    pub(super) written: BTreeMap<String, BTreeMap<u64, Tree>>,
    /// Sandboxes, and the version that they start from at least.
    pub(super) kept: BTreeMap<String, u64>,
    /// Files that a rollback has taken out of a sandbox.
    pub(super) undone: BTreeMap<String, BTreeSet<String>>,
    /// Snapshots, and what is in each.
    pub(super) snapshots: BTreeMap<String, (String, u64)>,
    pub(super) deleted_snapshots: BTreeSet<String>,
    pub(super) deleted: BTreeSet<String>,
    /// Drives, and files in them that fsync(2) has answered for.
    pub(super) drives: BTreeMap<String, Tree>,
    /// Files of the image: as it was made by the first engine it must be for all that follow.
    pub(super) image: Tree,
}

impl Ledger {
    /// The promises that hold throughout a picture: made before it, not taken back in it.
    pub(super) fn and_after(&self, after: &Self) -> Self {
        let mut both = self.clone();
        both.kept.retain(|name, _| after.kept.contains_key(name));
        both.snapshots.retain(|id, _| after.snapshots.contains_key(id));
        both.drives.retain(|name, _| after.drives.contains_key(name));
        both.written.clone_from(&after.written);
        both
    }
}

/// An engine at work, and what it has acknowledged.
pub(super) struct Work {
    pub(super) client: Client,
    ledger: Mutex<Ledger>,
    /// Told of each answer that promises something.
    pub(super) answered: Notify,
    over: AtomicBool,
}

fn id_of(snapshot: &Value) -> String {
    snapshot["id"].as_str().unwrap_or_else(|| panic!("no snapshot: {snapshot}")).to_owned()
}

impl Work {
    pub(super) fn new(client: Client, image: Tree) -> Self {
        let ledger = Mutex::new(Ledger { image, ..Ledger::default() });
        Self { client, ledger, answered: Notify::new(), over: AtomicBool::new(false) }
    }

    fn note<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        change(&mut self.ledger.lock().unwrap())
    }

    /// Notes what an answer promises.
    fn promise<T>(&self, change: impl FnOnce(&mut Ledger) -> T) {
        self.note(change);
        self.answered.notify_waiters();
    }

    pub(super) fn seen(&self) -> Ledger {
        self.ledger.lock().unwrap().clone()
    }

    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn own(&self, sandbox: &TestSandbox, tail: &str) -> String {
        format!("/api/bivouac/v1/sandboxes/{}/{tail}", sandbox.name)
    }

    /// Adds a file to a sandbox that has the tree of version `base`, and notes the new version's tree
    /// before anything is asked of the engine.
    pub(super) async fn write(&self, sandbox: &TestSandbox, base: u64, dice: &mut Dice) -> u64 {
        let name = &sandbox.name;
        let last = self.note(|l| l.written.get(name).and_then(|w| w.keys().max().copied()));
        let version = last.unwrap_or(0) + 1;
        let bytes = 1 + dice.below(LARGEST) / (1 << (3 * dice.below(4)));
        let line = format!("head -c {bytes} /dev/urandom > v{version}; sha256sum v{version}");
        let tree = hashes(&sandbox.sh(&line).await.good());
        self.note(|l| {
            let versions = l.written.entry(name.clone()).or_default();
            let mut all = versions.get(&base).cloned().unwrap_or_default();
            all.extend(tree);
            versions.insert(version, all);
        });
        version
    }

    /// A sandbox from its first file to its deletion, or until the work is over.
    pub(super) async fn life(&self, name: String, mut dice: Dice) {
        // One of two keeps its last snapshot only: what a cut leaves must not take its place.
        let short = dice.below(2) == 0;
        let mut body = json!({ "name": name });
        if short {
            body["keepLastSnapshots"] = json!({ "count": 1 });
        }
        let mut sandbox = TestSandbox::create(&self.client, body).await;
        let mut forks = Vec::new();
        let mut base = 0;
        for round in 0..3 + dice.below(3) {
            if self.is_over() {
                return;
            }
            base = self.write(&sandbox, base, &mut dice).await;
            if dice.below(4) == 0 {
                forks.extend(self.fork_live(&sandbox, base, round, &mut dice).await);
            }
            if short {
                self.note(|l| l.snapshots.retain(|_, (of, _)| *of != name));
            }
            let runs = self.keep(&sandbox, base, &mut dice).await;
            if round > 0 && dice.below(3) == 0 {
                self.forget_a_snapshot(&name).await;
            }
            // A live snapshot is not what this kind of fork starts from.
            if !runs && dice.below(2) == 0 && !self.is_over() {
                forks.push(self.fork(&sandbox, base, round, &mut dice).await);
            }
            let _ = sandbox.resume().await;
            if !short && dice.below(3) == 0 {
                base = self.roll_back(&mut sandbox, base, &mut dice).await;
            }
        }
        for gone in forks.iter().chain([&sandbox]) {
            self.delete(gone).await;
        }
    }

    /// Stops it, or asks for a snapshot, of which one kind lets it go on: whether it does.
    pub(super) async fn keep(&self, sandbox: &TestSandbox, version: u64, dice: &mut Dice) -> bool {
        let name = &sandbox.name;
        let how = dice.below(3);
        let id = match how {
            0 => {
                let _ = sandbox.stop().await.ok();
                let view = sandbox.get(false).await.ok();
                let id = view["sandbox"]["currentSnapshotId"].as_str();
                id.unwrap_or_else(|| panic!("{view}")).to_owned()
            }
            1 => id_of(&sandbox.post("/snapshot", &json!({})).await.ok()["snapshot"]),
            _ => {
                let path = self.own(sandbox, "snapshots");
                id_of(&self.client.post(&path, &json!({ "live": true })).await.ok()["snapshot"])
            }
        };
        self.promise(|l| {
            l.kept.insert(name.clone(), version);
            l.snapshots.insert(id, (name.clone(), version));
        });
        how > 1
    }

    /// Deletes the oldest snapshot of a sandbox that it does not start from.
    async fn forget_a_snapshot(&self, name: &str) {
        let oldest = self.note(|l| {
            let kept = l.kept.get(name).copied();
            let own = l.snapshots.iter().filter(|(_, (of, v))| of == name && Some(*v) != kept);
            let oldest = own.min_by_key(|(_, (_, version))| *version).map(|(id, _)| id.clone())?;
            l.snapshots.remove(&oldest);
            Some(oldest)
        });
        let Some(id) = oldest else { return };
        let _ = self.client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await.ok();
        self.promise(|l| l.deleted_snapshots.insert(id));
    }

    /// A fork's first tree is its source's.
    fn begin_fork(&self, source: &TestSandbox, base: u64, fork: &TestSandbox) {
        self.note(|l| {
            let from = l.written[&source.name].range(..=base);
            let from = from.map(|(version, tree)| (*version, tree.clone())).collect();
            l.written.insert(fork.name.clone(), from);
        });
    }

    /// Forks it from its current snapshot, writes into the fork, keeps that.
    async fn fork(
        &self,
        source: &TestSandbox,
        base: u64,
        round: u64,
        dice: &mut Dice,
    ) -> TestSandbox {
        let body = json!({ "name": format!("{}-fork-{round}", source.name) });
        let path = format!("/v2/sandboxes/{}/fork", source.name);
        let fork = TestSandbox::of(&self.client, self.client.post(&path, &body).await.ok());
        self.begin_fork(source, base, &fork);
        let version = self.write(&fork, base, dice).await;
        self.keep(&fork, version, dice).await;
        fork
    }

    /// Forks it as it runs, twice; one of the forks is written to and kept.
    async fn fork_live(
        &self,
        source: &TestSandbox,
        base: u64,
        round: u64,
        dice: &mut Dice,
    ) -> Vec<TestSandbox> {
        let name = format!("{}-live-{round}", source.name);
        let body = json!({ "name": name, "count": 2, "live": true });
        let made = self.client.post(&self.own(source, "forks"), &body).await.ok();
        let made = made["sandboxes"].as_array().unwrap_or_else(|| panic!("{made}")).clone();
        let forks: Vec<_> =
            made.into_iter().map(|view| TestSandbox::of(&self.client, view)).collect();
        for fork in &forks {
            self.begin_fork(source, base, fork);
        }
        let version = self.write(&forks[0], base, dice).await;
        self.keep(&forks[0], version, dice).await;
        forks
    }

    /// Goes back to one of its snapshots; the version that it is at then.
    async fn roll_back(&self, sandbox: &mut TestSandbox, base: u64, dice: &mut Dice) -> u64 {
        let name = sandbox.name.clone();
        let discard = dice.below(2) == 0;
        let target = self.note(|l| {
            let mut own = l.snapshots.iter().filter(|(_, (of, _))| *of == name);
            let target = own.nth(dice.below(2) as usize).map(|(id, (_, v))| (id.clone(), *v))?;
            l.kept.remove(&name);
            Some(target)
        });
        let Some((id, version)) = target else { return base };
        let body = json!({ "snapshotId": id, "discard": discard });
        let answer = self.client.post(&self.own(sandbox, "rollback"), &body).await.ok();
        self.promise(|l| {
            if !discard {
                l.snapshots.insert(id_of(&answer["kept"]), (name.clone(), base));
            }
            let (left, now) = (&l.written[&name][&base], &l.written[&name][&version]);
            let undone = left.keys().filter(|file| !now.contains_key(*file)).cloned();
            l.undone.entry(name.clone()).or_default().extend(undone);
            l.kept.insert(name.clone(), version);
        });
        *sandbox = TestSandbox::of(&self.client, answer);
        version
    }

    /// A drive that one sandbox writes to, with fsync(2) for each file, and that is deleted at the end.
    pub(super) async fn drive_life(&self, name: &str, mut dice: Dice) {
        let path = format!("/v2/sandboxes/drives/{name}");
        let body = json!({ "projectId": self.client.project() });
        let _ = self.client.post(&path, &body).await.ok();
        self.promise(|l| l.drives.insert(name.to_owned(), Tree::new()));
        let mounts = json!({ "/vercel/drive": { "drive": name } });
        let body = json!({ "persistent": false, "mounts": mounts });
        let sandbox = TestSandbox::create(&self.client, body).await;
        for file in 0..3 + dice.below(5) {
            if self.is_over() {
                return;
            }
            let bytes = 1 + dice.below(LARGEST) / (1 << (3 * dice.below(4)));
            let line = format!(
                "cd /vercel/drive && head -c {bytes} /dev/urandom | dd of=f{file} conv=fsync status=none \
                 && sync f{file} . && sha256sum f{file}"
            );
            let tree = hashes(&sandbox.sh(&line).await.good());
            self.promise(|l| l.drives.entry(name.to_owned()).or_default().extend(tree));
        }
        let _ = sandbox.delete().await.ok();
        self.note(|l| l.drives.remove(name));
        let _ = self.client.delete(&path).await.ok();
    }

    async fn delete(&self, sandbox: &TestSandbox) {
        let name = &sandbox.name;
        // One that was never kept was not promised to outlive the power, nor is its end.
        let was_kept = self.note(|l| {
            l.snapshots.retain(|_, (of, _)| of != name);
            l.kept.remove(name).is_some()
        });
        let _ = sandbox.delete().await.ok();
        self.promise(|l| was_kept && l.deleted.insert(name.clone()));
    }
}
