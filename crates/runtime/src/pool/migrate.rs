//! Moving a data folder's volumes from one mode to another, while no engine runs.
//!
//! Invariant: `pool.json` names a pool that is whole, at every moment. The new one is made in its own place
//! while the record still names the old one; it is written, read again and compared, and then the record is
//! renamed over: that is the switch. Whatever a cut leaves is in the place of a mode that the record does not
//! name, and goes at the next start or the next try. Called by `bivouac pool` under the engine's lock.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;
use rustix::process::{Signal, getpid, kill_process};

use super::loopfile::LoopFile;
use super::volumes::is_work;
use super::{
    Kind, Pool, PoolCheck, PoolMode, PoolOptions, RESERVE, Storage, copy, digest, folder,
    free_bytes, is_mounted, make_folder, named, native, record, storage, trash, walk,
};
use crate::linux::cgroup::Hierarchies;
use crate::sys::btrfs;

/// Where the new pool is mounted while it is being filled, in the data folder.
const MOVING: &str = "pool.moving";
/// The pool's folders that hold no volumes.
const PLAIN: [&str; 3] = ["logs", "images", "trust"];
/// Variable that ends the process at a step (of a migration, or of a growth), for tests of what that leaves.
const KILL: &str = "BIVOUAC_TEST_POOL_KILL";

/// What a migration did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// The mode before.
    pub from: PoolMode,
    /// The mode now.
    pub to: PoolMode,
    /// Volumes that were moved; none when the folder had the mode already.
    pub volumes: u64,
    /// Bytes of their files.
    pub bytes: u64,
}

/// What can be seen of a data folder's pool without an engine.
#[derive(Debug, Clone)]
pub struct Shown {
    /// Absent: there is no pool yet.
    pub mode: Option<PoolMode>,
    /// Where the volumes lie.
    pub place: Option<PathBuf>,
    /// Absent while it is not mounted.
    pub storage: Option<Storage>,
    /// What the last check found.
    pub check: Option<PoolCheck>,
    /// Left of a migration that was cut short.
    pub leftovers: Vec<PathBuf>,
}

/// Looks at a data folder's pool. Changes nothing.
///
/// # Errors
/// When the record cannot be read.
pub fn show(data: &Path) -> io::Result<Shown> {
    let mode = record::mode(data)?;
    let root = data.join("pool");
    let mounted = |mode: &PoolMode| {
        root.exists()
            && is_mounted(&root).unwrap_or(false)
            && is_right(data, *mode).unwrap_or(false)
    };
    let mounted = mode.filter(mounted);
    let storage = match mounted {
        Some(mode) => {
            let squota =
                || native::quota(&root).is_ok_and(|kind| kind.is_none_or(|k| k == "squota"));
            Some(storage(data, mode, mode != PoolMode::Folder && squota())?)
        }
        None => None,
    };
    let leftovers = mode.map_or_else(Vec::new, |mode| places_besides(data, mode));
    let (place, check) = (mode.map(|mode| record::place(data, mode)), record::check(data)?);
    Ok(Shown { mode, place, storage, check, leftovers })
}

/// Moves the volumes of a data folder to another mode. The caller holds the engine's lock; `instance` is the
/// folder's name among control groups; `tell` hears what is being done.
///
/// # Errors
/// A sentence; the data folder then has the mode that it had.
pub fn migrate(
    data: &Path,
    instance: &str,
    to: PoolMode,
    tell: &mut dyn FnMut(&str),
) -> io::Result<Migrated> {
    let Some(from) = record::mode(data)? else {
        let text = format!(
            "{} has no pool yet: `bivouac serve --pool {to}` makes one of that mode",
            data.display()
        );
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    };
    refuse_living(instance)?;
    record::set_mode(data, from)?;
    settle(data, from)?;
    for place in leftovers(data, from)? {
        tell(&format!("removing {}, which an earlier try has left", place.display()));
        remove_place(&place, &|| true)?;
    }
    if from == to {
        return Ok(Migrated { from, to, volumes: 0, bytes: 0 });
    }
    let moved = Migration::begin(data, from, to)?.run(tell);
    // The new one after a switch, else the old one: the record knows.
    let kept = record::mode(data)?.unwrap_or(from);
    let cleaned = put_away(data).and_then(|()| {
        leftovers(data, kept)?.iter().try_for_each(|place| {
            tell(&format!("removing {}", place.display()));
            remove_place(place, &|| true)
        })
    });
    let moved = moved?;
    cleaned?;
    record::mark_closed(data);
    Ok(moved)
}

/// A session that runs, or that the next engine has to settle, has things that name the pool.
fn refuse_living(instance: &str) -> io::Result<()> {
    let sessions = Hierarchies::detect()?.sessions(&format!("bivouac-{instance}"))?;
    if sessions.is_empty() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        format!(
            "{} sessions are still there: start the engine and stop its sandboxes (bivouac serve \
             --stop-sandboxes, then end it), and try again",
            sessions.len()
        ),
    ))
}

/// What is mounted at the pool's folder must be what the record names: a migration may have been cut short
/// right behind its switch.
pub(super) fn settle(data: &Path, mode: PoolMode) -> io::Result<()> {
    let root = data.join("pool");
    if !root.exists() || !is_mounted(&root)? {
        return Ok(());
    }
    if is_right(data, mode)? { Ok(()) } else { unmount(&root) }
}

/// Whether what is mounted at the pool's folder is the place of this mode.
fn is_right(data: &Path, mode: PoolMode) -> io::Result<bool> {
    let (at, beside) = (std::fs::metadata(data.join("pool"))?, std::fs::metadata(data)?);
    Ok(match mode {
        PoolMode::Loop => at.dev() != beside.dev(),
        mode => std::fs::metadata(record::place(data, mode))
            .is_ok_and(|place| (place.dev(), place.ino()) == (at.dev(), at.ino())),
    })
}

fn unmount(root: &Path) -> io::Result<()> {
    rustix::mount::unmount(root, UnmountFlags::empty())
        .map_err(|e| named(format!("unmount {}", root.display()), e))
}

/// Unmounts both pools of a migration.
fn put_away(data: &Path) -> io::Result<()> {
    for name in [MOVING, "pool"] {
        let root = data.join(name);
        if root.exists() && is_mounted(&root)? {
            unmount(&root)?;
        }
    }
    let _ = std::fs::remove_dir(data.join(MOVING));
    Ok(())
}

/// Places of modes that the data folder does not have, no longer mounted.
///
/// # Errors
/// When one of them is in use.
pub(super) fn leftovers(data: &Path, mode: PoolMode) -> io::Result<Vec<PathBuf>> {
    let moving = data.join(MOVING);
    if moving.exists() {
        if is_mounted(&moving)? {
            unmount(&moving)?;
        }
        let _ = std::fs::remove_dir(&moving);
    }
    Ok(places_besides(data, mode))
}

fn places_besides(data: &Path, mode: PoolMode) -> Vec<PathBuf> {
    let all = [PoolMode::Loop, PoolMode::Native, PoolMode::Folder];
    let others = all.into_iter().filter(|other| *other != mode);
    others.map(|other| record::place(data, other)).filter(|place| place.exists()).collect()
}

/// Removes what a migration has left; says what it cannot.
pub(super) fn remove_leftover(place: &Path, go_on: &dyn Fn() -> bool) {
    tracing::info!("removing {}, which a move of the storage pool has left", place.display());
    if let Err(e) = remove_place(place, go_on) {
        tracing::warn!("{} cannot be removed: {e}", place.display());
    }
}

fn remove_place(place: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    let gone = |e: io::Error| named(format!("remove {}", place.display()), e);
    if place.is_file() {
        return std::fs::remove_file(place).map_err(gone);
    }
    if native::is_btrfs(place)? {
        for kind in Kind::ALL {
            let Ok(parent) = folder(&place.join(kind.folder())) else { continue };
            for name in walk::names(parent.as_fd())? {
                // A plain folder stays for the step behind this one.
                let _ = btrfs::delete_subvolume(parent.as_fd(), &name.to_string_lossy());
            }
        }
    }
    trash::clear(folder(place)?.as_fd(), go_on).map_err(gone)?;
    if go_on() { std::fs::remove_dir(place).map_err(gone) } else { Ok(()) }
}

/// Ends the process here, when a test wants to see what that leaves.
/// Ends the process if a test wants that at this step.
pub(super) fn reach(step: &str) {
    if std::env::var(KILL).is_ok_and(|told| told == step) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

/// What is copied as one, and compared.
struct Part {
    /// A volume, else one of the plain folders.
    kind: Option<Kind>,
    name: String,
    bytes: u64,
}

impl Part {
    fn skip(&self) -> impl Fn(&CStr) -> bool {
        let kind = self.kind;
        // Copies of images' bundles are made again.
        move |name: &CStr| match kind {
            Some(kind) => is_work(kind, name),
            None => name == c"bases",
        }
    }

    fn open(&self, pool: &Pool) -> io::Result<OwnedFd> {
        match self.kind {
            Some(kind) => folder(&pool.volume(kind, &self.name)),
            None => folder(&pool.root.join(&self.name)),
        }
    }

    fn shown(&self) -> String {
        match self.kind {
            Some(kind) => format!("{}/{}", kind.folder(), self.name),
            None => self.name.clone(),
        }
    }
}

struct Migration<'a> {
    data: &'a Path,
    from: Pool,
    to: PoolMode,
    parts: Vec<Part>,
}

impl<'a> Migration<'a> {
    /// Opens the old pool and sees what is to be moved.
    fn begin(data: &'a Path, from: PoolMode, to: PoolMode) -> io::Result<Self> {
        let mut from = Pool::make(data, from, &PoolOptions::default(), false)?;
        if !is_mounted(&from.root)? {
            from.mount()?;
        }
        from.ready()?;
        let mut parts = Vec::new();
        for kind in Kind::ALL {
            for name in from.names(kind)? {
                let bytes = from.walk_volume(kind, &name, false)?.bytes;
                parts.push(Part { kind: Some(kind), name, bytes });
            }
        }
        for name in PLAIN {
            let bytes = walk::usage(folder(&from.root.join(name))?, false, |_| false)?.bytes;
            parts.push(Part { kind: None, name: name.to_owned(), bytes });
        }
        Ok(Self { data, from, to, parts })
    }

    fn run(self, tell: &mut dyn FnMut(&str)) -> io::Result<Migrated> {
        let bytes = self.parts.iter().map(|part| part.bytes).sum();
        let target = self.target(bytes)?;
        reach("made");
        for (index, part) in self.parts.iter().enumerate() {
            tell(&format!("copying {} ({} MiB)", part.shown(), part.bytes >> 20));
            self.copy(part, &target).map_err(|e| named(format!("copy {}", part.shown()), e))?;
            if index == 0 {
                reach("copying");
            }
        }
        target.flush()?;
        reach("copied");
        for part in &self.parts {
            tell(&format!("comparing {}", part.shown()));
            let skip = part.skip();
            let old = digest::tree(part.open(&self.from)?, &skip)?;
            if old != digest::tree(part.open(&target)?, &skip)? {
                return Err(io::Error::other(format!(
                    "the copy of {} is not what it was made from; nothing was changed",
                    part.shown()
                )));
            }
        }
        // The file's own name, where the new pool is a file, is on disk since it was made.
        reach("compared");
        record::set_mode(self.data, self.to)?;
        record::forget_check(self.data);
        reach("switched");
        let volumes = self.parts.iter().filter(|part| part.kind.is_some()).count() as u64;
        Ok(Migrated { from: self.from.mode, to: self.to, volumes, bytes })
    }

    /// An empty pool in its place, mounted beside the old one.
    fn target(&self, bytes: u64) -> io::Result<Pool> {
        // Small files take whole blocks, and the tree of them takes room as well.
        let needed = bytes + bytes / 8 + (256 << 20);
        let free = free_bytes(self.data)?;
        if free < needed.saturating_add(RESERVE) {
            let text = format!(
                "no room: the volumes take {} MiB when each is a copy of its own, {} MiB are free and {} MiB \
                 of them are kept in reserve. Remove sandboxes or snapshots, or make room",
                bytes >> 20,
                free >> 20,
                RESERVE >> 20
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        let usual = LoopFile::first_size();
        let first_bytes = (needed > usual / 2).then(|| needed.saturating_mul(2));
        let options = PoolOptions { mode: None, first_bytes };
        let mut target = Pool::make(self.data, self.to, &options, false)?;
        target.root = self.data.join(MOVING);
        make_folder(&target.root, 0o700)?;
        target.mount()?;
        target.ready()?;
        Ok(target)
    }

    fn copy(&self, part: &Part, target: &Pool) -> io::Result<()> {
        let source = part.open(&self.from)?;
        let Some(kind) = part.kind else {
            return copy::tree(source, part.open(target)?, &part.skip(), &mut |_| Ok(()));
        };
        target.make_volume(kind, &part.name)?;
        let made = part.open(target)?;
        copy::tree(source.try_clone()?, made.try_clone()?, &part.skip(), &mut |_| Ok(()))?;
        let read_only = kind == Kind::Snapshot
            || (self.from.is_btrfs() && btrfs::is_read_only(source.as_fd())?);
        if self.from.limits
            && let Some(limit) = btrfs::limit(source.as_fd())?
        {
            target.limit_volume(kind, &part.name, limit)?;
        }
        if read_only && target.is_btrfs() {
            btrfs::make_read_only(made.as_fd())?;
        }
        Ok(())
    }
}
