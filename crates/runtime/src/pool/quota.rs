//! The disk limit of a volume, as btrfs's simple quota can keep it.
//!
//! A simple quota charges the volume that allocated, for as long as anybody keeps what was allocated, and
//! never the volume that only shares it. A limit on what is charged is therefore no limit on what a volume
//! holds: one that started from a snapshot holds what another is charged for, and one that was snapshotted
//! stays charged for what it has deleted. The rule: a volume that holds `written` bytes and may hold
//! `bytes` may be charged for `charged + (bytes - written)`. What it holds is known after a walk, so
//! between two walks the limit errs on the side of too little. Called by `linux`; the engine's reconciler
//! says when (`reconcile::disk`).

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use super::{Kind, Pool, PoolMode, VolumeUsage, folder, named, walk};
use crate::sys::btrfs;

/// How often a walk is tried whose tree changes under its feet.
const TRIES: u32 = 3;

/// What a volume is charged for, and what it may be charged for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) charged: u64,
    pub(crate) limit: u64,
}

/// The rule of the module.
pub(crate) fn limit_for(bytes: u64, written: u64, charged: u64) -> u64 {
    charged.saturating_add(bytes.saturating_sub(written))
}

/// For tests of a host that is full: the file that `BIVOUAC_TEST_RESERVE` names holds the MiB that are to be
/// kept free. It is read each time, so that a running engine's host can become full.
pub(super) fn reserve_of_test() -> Option<u64> {
    static FILE: std::sync::OnceLock<Option<PathBuf>> = std::sync::OnceLock::new();
    let file = FILE.get_or_init(|| std::env::var_os("BIVOUAC_TEST_RESERVE").map(PathBuf::from));
    let text = std::fs::read_to_string(file.as_deref()?).ok()?;
    text.trim().parse::<u64>().ok().map(|mib| mib << 20)
}

impl Pool {
    /// Folder in sysfs where the kernel tells of a volume's quota. `None`: there is none.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume.
    pub(crate) fn quota_group(&self, kind: Kind, name: &str) -> io::Result<Option<PathBuf>> {
        if self.mode() == PoolMode::Folder {
            return Ok(None);
        }
        let volume = folder(&self.volume(kind, name))?;
        let group = PathBuf::from("/sys/fs/btrfs").join(btrfs::quota_group(volume.as_fd())?);
        Ok(group.is_dir().then_some(group))
    }

    /// How a volume stands. `None`: nothing is counted here.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume.
    pub(crate) fn level(&self, kind: Kind, name: &str) -> io::Result<Option<Level>> {
        let Some(group) = self.quota_group(kind, name)? else { return Ok(None) };
        let number = |file: &str| -> io::Result<u64> {
            let path = group.join(file);
            let text = std::fs::read_to_string(&path).map_err(|e| named(path.display(), e))?;
            text.trim().parse().map_err(|e| named(path.display(), io::Error::other(e)))
        };
        // What waits to be written counts: it has its place already.
        let waiting = ["rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"];
        let waiting: u64 = waiting.iter().filter_map(|file| number(file).ok()).sum();
        let charged = number("referenced")?.saturating_add(waiting);
        Ok(Some(Level { charged, limit: number("max_referenced")? }))
    }

    /// Walks through a volume and sets its limit by the rule, so that it may hold `bytes` in all. Answers
    /// what it holds and how it stands then. `None`: limits are not to be had here.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume; when its tree changes faster than it can be read. The limit
    /// is then as it was.
    pub(crate) fn fit_limit(
        &self,
        kind: Kind,
        name: &str,
        bytes: u64,
    ) -> io::Result<Option<(u64, Level)>> {
        // What was deleted stays charged until the file system has committed that.
        self.flush()?;
        let Some(before) = self.level(kind, name)? else { return Ok(None) };
        let mut walked = self.walk_volume(kind, name, false);
        for _ in 1..TRIES {
            match walked {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {}
                other => {
                    walked = other;
                    break;
                }
            }
            walked = self.walk_volume(kind, name, false);
        }
        let written = walked?.bytes;
        // What is written or deleted during the walk is in `written` or not; the lower of the two charges errs
        // on the side of too little in each case. A guest that does both at once, in just these moments, gains
        // as much for as long as it takes to the next pass.
        self.flush()?;
        let after = self.level(kind, name)?.unwrap_or(before);
        let limit = limit_for(bytes, written, before.charged.min(after.charged));
        self.limit_volume(kind, name, limit)?;
        Ok(Some((written, Level { charged: after.charged, limit })))
    }

    /// What a folder of ours in the pool takes. Nothing shares it.
    ///
    /// # Errors
    /// `NotFound` when it is not there.
    pub(crate) fn folder_usage(&self, path: &std::path::Path) -> io::Result<VolumeUsage> {
        let usage = walk::usage(folder(path)?, false, |_| false)?;
        Ok(VolumeUsage { unique_bytes: Some(usage.bytes), ..usage })
    }

    /// Sets the limit of a volume of which it is known what it holds, without a walk.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume.
    pub(crate) fn set_limit(
        &self,
        kind: Kind,
        name: &str,
        bytes: u64,
        written: u64,
    ) -> io::Result<()> {
        let Some(level) = self.level(kind, name)? else { return Ok(()) };
        self.limit_volume(kind, name, limit_for(bytes, written, level.charged)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one box does with its disk.
    #[derive(Debug, Clone, Copy)]
    enum Act {
        Write(u64),
        Delete(u64),
        Snapshot,
        DropSnapshots,
        Resume,
    }

    /// A model of simple quota: bytes that the box holds, by who is charged for them.
    #[derive(Debug, Default)]
    struct Model {
        /// Held by the box and charged to it.
        own: u64,
        /// Held by it, charged to a volume before it.
        base: u64,
        /// Held by it and by a snapshot too, charged to it.
        shared: u64,
        /// Charged to it, held by snapshots only.
        kept: u64,
        limit: u64,
    }

    impl Model {
        fn held(&self) -> u64 {
            self.own + self.base + self.shared
        }
        fn charged(&self) -> u64 {
            self.own + self.shared + self.kept
        }
        fn fit(&mut self, bytes: u64) {
            self.limit = limit_for(bytes, self.held(), self.charged());
        }
        fn delete(&mut self, mut bytes: u64) {
            for (part, keeps) in [(0, false), (1, true), (2, false)] {
                let from = match part {
                    0 => &mut self.own,
                    1 => &mut self.shared,
                    _ => &mut self.base,
                };
                let gone = bytes.min(*from);
                *from -= gone;
                bytes -= gone;
                if keeps {
                    self.kept += gone;
                }
            }
        }
    }

    fn acts() -> impl proptest::strategy::Strategy<Value = Vec<Act>> {
        use proptest::prelude::*;
        let act = prop_oneof![
            4 => (1u64..400).prop_map(Act::Write),
            3 => (1u64..600).prop_map(Act::Delete),
            2 => Just(Act::Snapshot),
            1 => Just(Act::DropSnapshots),
            1 => Just(Act::Resume),
        ];
        proptest::collection::vec(act, 1..200)
    }

    proptest::proptest! {
        /// With the limit set by the rule after each change, a box is never given more than it may hold,
        /// and never less, whatever is snapshotted, deleted and resumed.
        #[test]
        fn neither_locked_out_nor_given_more(acts in acts()) {
            const MAY: u64 = 1000;
            let mut model = Model::default();
            model.fit(MAY);
            for act in acts {
                match act {
                    Act::Write(bytes) => {
                        let room = model.limit.saturating_sub(model.charged());
                        proptest::prop_assert_eq!(room, MAY - model.held(), "{:?}", model);
                        model.own += bytes.min(room);
                    }
                    Act::Delete(bytes) => model.delete(bytes),
                    Act::Snapshot => {
                        model.shared += std::mem::take(&mut model.own);
                    }
                    Act::DropSnapshots => {
                        model.kept = 0;
                        model.own += std::mem::take(&mut model.shared);
                    }
                    Act::Resume => {
                        let base = model.held();
                        model = Model { base, ..Model::default() };
                    }
                }
                model.fit(MAY);
                proptest::prop_assert!(model.held() <= MAY);
            }
        }
    }
}
