//! What the host keeps and no record wants, and what records want and the host has not.
//!
//! Owns: the decision (`decide`, pure) and its execution. Invariants: what is there is listed before
//! the records are read, and records are written before what they want is made, so that what is found
//! without a record is nobody's; what an operation of this process holds, or what is younger than the oldest
//! operation in the middle of its steps, is left alone all the same. A record without data is told and
//! marked, never filled with something. Called by `gc` of users, by the start and by the orphan reconciler.

use std::collections::BTreeSet;
use std::sync::Arc;

use bivouac_runtime::{Stored, StoredKind, StoredUsage};
use bivouac_types::Millis;
use bivouac_types::id::{self, SnapshotId};
use bivouac_types::snapshot::SnapshotStatus;

use crate::Engine;
use crate::api::Principal;
use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::Inner;
use crate::lifecycle::chain;

/// Something that is kept for nobody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// What it is.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// Why nobody wants it.
    pub reason: &'static str,
    /// What it takes; absent when that cannot be told.
    pub usage: Option<StoredUsage>,
    /// It is gone now.
    pub removed: bool,
    /// Why it is not, although it should be.
    pub error: Option<String>,
}

/// A record whose data is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// What it is.
    pub kind: &'static str,
    /// Its id.
    pub name: String,
    /// What is wrong, for the user.
    pub what: String,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Things that nobody wants.
    pub orphans: Vec<Orphan>,
    /// Records without data.
    pub damage: Vec<Damage>,
    /// Things without a record that are too young to be told from those that are being made.
    pub young: usize,
    /// Header values that no policy named any more and that were removed.
    pub values: u64,
}

/// What records say.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// What may be there.
    pub(crate) wanted: BTreeSet<Stored>,
    /// What has to be.
    pub(crate) needed: BTreeSet<Stored>,
}

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) orphans: Vec<Stored>,
    pub(crate) young: Vec<Stored>,
    pub(crate) missing: Vec<Stored>,
}

/// Decides about everything that is there and everything that is recorded. `oldest`: when the oldest
/// operation began that is in the middle of its steps.
pub(crate) fn decide(found: &[Stored], records: &Records, oldest: Option<Millis>) -> Decision {
    let mut decision = Decision::default();
    let there: BTreeSet<&Stored> = found.iter().collect();
    for one in &there {
        if records.wanted.contains(*one) || records.needed.contains(*one) {
            continue;
        }
        let made = id::made_at(&one.name);
        let young = oldest.is_some_and(|oldest| made.is_some_and(|made| made >= oldest));
        let list = if young { &mut decision.young } else { &mut decision.orphans };
        list.push((*one).clone());
    }
    let missing = records.needed.iter().filter(|one| !there.contains(one));
    decision.missing.extend(missing.cloned());
    decision
}

/// Why nobody wants something of this kind that no record names.
fn reason(kind: StoredKind) -> &'static str {
    match kind {
        StoredKind::Session => "no session of this id is open",
        StoredKind::Snapshot => "no usable snapshot has this id",
        StoredKind::Drive => "no drive has this id",
        StoredKind::View | StoredKind::Trust => "its session is over",
        StoredKind::Logs => "its session is not recorded any more",
    }
}

fn stored(kind: StoredKind, name: &str) -> Stored {
    Stored { kind, name: name.to_owned() }
}

impl Inner {
    /// What the records want of this node.
    async fn records(&self, found: &[Stored]) -> Result<Records, Error> {
        let node = &self.config.node;
        let mut records = Records::default();
        // Asked for before the records are read: what is being made is held first and recorded later.
        let held = found.iter().filter(|one| self.holds.is_held(&one.name));
        records.wanted.extend(held.cloned());
        let open = self.db.unsettled_sessions(node).await?;
        for row in &open {
            let id = row.session.id.as_str();
            let kinds = [StoredKind::Session, StoredKind::Trust, StoredKind::Logs];
            records.wanted.extend(kinds.map(|kind| stored(kind, id)));
            let closing = row.closing.iter().map(|c| c.snapshot_id.as_str());
            records.wanted.extend(closing.map(|id| stored(StoredKind::Snapshot, id)));
        }
        let views = found.iter().filter(|one| one.kind == StoredKind::View);
        let of_open = |view: &&Stored| {
            let session = view.name.split('.').next();
            open.iter().any(|row| Some(row.session.id.as_str()) == session)
        };
        records.wanted.extend(views.filter(of_open).cloned());
        for id in self.db.session_ids_on(node).await? {
            records.wanted.insert(stored(StoredKind::Logs, id.as_str()));
        }
        for row in self.db.snapshots_on(node).await? {
            records.needed.insert(stored(StoredKind::Snapshot, row.snapshot.id.as_str()));
        }
        for row in self.db.drives_on(node).await? {
            let one = stored(StoredKind::Drive, row.drive.id.as_str());
            let ready = row.state == bivouac_store::DriveState::Ready;
            if ready {
                records.needed.insert(one)
            } else {
                records.wanted.insert(one)
            };
        }
        Ok(records)
    }

    /// Looks at everything; removes and marks unless it is a rehearsal. With `measure`, what orphans take is
    /// found out first.
    pub(crate) async fn collect(
        &self,
        rehearsal: bool,
        measure: bool,
        oldest: Option<Millis>,
    ) -> Result<Collected, Error> {
        let found = self.runtime.stored().await?;
        let records = self.records(&found).await?;
        let decision = decide(&found, &records, oldest);
        let mut collected = Collected { young: decision.young.len(), ..Collected::default() };
        for one in decision.orphans {
            collected.orphans.push(self.drop_orphan(one, rehearsal, measure).await);
        }
        self.tell_missing(&decision.missing, rehearsal, &mut collected).await?;
        Ok(collected)
    }

    async fn drop_orphan(&self, one: Stored, rehearsal: bool, measure: bool) -> Orphan {
        let (kind, why) = (one.kind.as_str(), reason(one.kind));
        let usage = match measure {
            true => self.runtime.stored_usage(&one).await.ok().flatten(),
            false => None,
        };
        let mut orphan = Orphan {
            kind,
            name: one.name.clone(),
            reason: why,
            usage,
            removed: false,
            error: None,
        };
        if rehearsal {
            return orphan;
        }
        tracing::warn!(kind, name = %one.name, why, "removing what nobody wants");
        let removed = async {
            self.runtime.remove_stored(&one).await?;
            self.reach(FaultPoint::GcRemoved).await
        };
        match removed.await {
            Ok(()) => orphan.removed = true,
            Err(error) => {
                let cause = chain(&error).to_string();
                tracing::error!(kind, name = %one.name, %cause, "cannot remove it yet");
                orphan.error = Some(cause);
            }
        }
        orphan
    }

    /// Records without data. Those that were made since the first look have theirs by now.
    async fn tell_missing(
        &self,
        missing: &[Stored],
        rehearsal: bool,
        collected: &mut Collected,
    ) -> Result<(), Error> {
        if missing.is_empty() {
            return Ok(());
        }
        let now: BTreeSet<Stored> = self.runtime.stored().await?.into_iter().collect();
        for one in missing.iter().filter(|one| !now.contains(one)) {
            let kind = one.kind.as_str();
            if !self.still_needed(one).await? {
                continue;
            }
            tracing::error!(kind, id = %one.name, "it has a record and no data");
            let mut what = format!("{kind} {} has a record and no data", one.name);
            if one.kind == StoredKind::Snapshot
                && !rehearsal
                && let Ok(id) = SnapshotId::parse(&one.name)
            {
                let mut tx = self.db.begin(bivouac_store::Durability::Process).await?;
                tx.end_snapshot(&id, SnapshotStatus::Failed, self.now()).await?;
                tx.commit().await?;
                what.push_str(": it is marked as failed");
            }
            collected.damage.push(Damage { kind, name: one.name.clone(), what });
        }
        Ok(())
    }

    /// Whether a record still wants data that is not there: it may have been deleted since.
    async fn still_needed(&self, one: &Stored) -> Result<bool, Error> {
        Ok(match one.kind {
            StoredKind::Snapshot => match SnapshotId::parse(&one.name) {
                Ok(id) => self
                    .db
                    .snapshot(&id)
                    .await?
                    .is_some_and(|row| row.snapshot.status == SnapshotStatus::Created),
                Err(_) => false,
            },
            StoredKind::Drive => match id::DriveId::parse(&one.name) {
                Ok(id) => self
                    .db
                    .drive(&id)
                    .await?
                    .is_some_and(|row| row.state == bivouac_store::DriveState::Ready),
                Err(_) => false,
            },
            _ => false,
        })
    }

    /// Images that nothing lies on and that are kept from being removed.
    async fn unused_images(&self, rehearsal: bool) -> Result<Vec<Orphan>, Error> {
        let (mark, kept) = self.runtime.kept_images().await?;
        let mut unused = Vec::new();
        for reference in kept {
            if !self.db.image_is_used(&reference).await? {
                unused.push(reference);
            }
        }
        let mut removed = false;
        if !rehearsal && !unused.is_empty() {
            self.runtime.release_images(mark, &unused).await?;
            let (_, kept) = self.runtime.kept_images().await?;
            removed = unused.iter().all(|reference| !kept.contains(reference));
        }
        let orphans = unused.into_iter().map(|name| Orphan {
            kind: "image lease",
            name,
            reason: "no sandbox and no snapshot lies on this image",
            usage: None,
            removed,
            error: None,
        });
        Ok(orphans.collect())
    }
}

impl Engine {
    /// Finds what the host keeps for nobody and removes it, and marks records whose data is gone. A
    /// rehearsal only tells.
    ///
    /// # Errors
    /// The database or the runtime does not answer. Single things that cannot be removed are told.
    pub async fn collect_garbage(
        &self,
        who: &Principal,
        rehearsal: bool,
    ) -> Result<Collected, Error> {
        who.may_rule()?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, rehearsal, "gc");
        let inner = Arc::clone(&self.inner);
        let work = async move {
            // This very operation is one of those in flight: what is made from now on is left alone.
            let oldest = inner.oldest_operation();
            let mut collected = inner.collect(rehearsal, true, oldest).await?;
            collected.orphans.extend(inner.unused_images(rehearsal).await?);
            if !rehearsal {
                collected.values = inner.sweep_values().await?;
            }
            Ok(collected)
        };
        self.inner.run(work).await
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [StoredKind; 6] = [
        StoredKind::Session,
        StoredKind::Snapshot,
        StoredKind::Drive,
        StoredKind::View,
        StoredKind::Logs,
        StoredKind::Trust,
    ];

    fn thing(kind: usize, made: u8) -> Stored {
        stored(KINDS[kind], &format!("x_{}", id::encode(u64::from(made), [0; 10])))
    }

    fn things() -> impl Strategy<Value = Vec<Stored>> {
        proptest::collection::vec((0..KINDS.len(), 0u8..20).prop_map(|(k, m)| thing(k, m)), 0..30)
    }

    proptest! {
        /// Whatever is there and whatever is recorded: nothing that is wanted or young goes, everything
        /// else does, and each record without data is told.
        #[test]
        fn the_decision(
            found in things(), wanted in things(), needed in things(),
            oldest in proptest::option::of(0i64..20),
        ) {
            let records = Records {
                wanted: wanted.iter().cloned().collect(),
                needed: needed.iter().cloned().collect(),
            };
            let decision = decide(&found, &records, oldest);
            for one in &found {
                let recorded = wanted.contains(one) || needed.contains(one);
                let young = oldest.is_some_and(|oldest| id::made_at(&one.name).unwrap() >= oldest);
                prop_assert_eq!(decision.orphans.contains(one), !recorded && !young);
                prop_assert_eq!(decision.young.contains(one), !recorded && young);
            }
            prop_assert!(decision.orphans.iter().chain(&decision.young).all(|o| found.contains(o)));
            for one in &needed {
                prop_assert_eq!(decision.missing.contains(one), !found.contains(one));
            }
            prop_assert!(decision.missing.iter().all(|one| needed.contains(one)));
        }

        /// What is done settles it: a second look finds nothing more to remove.
        #[test]
        fn once_is_enough(found in things(), wanted in things()) {
            let records = Records { wanted: wanted.into_iter().collect(), ..Records::default() };
            let first = decide(&found, &records, None);
            let left: Vec<Stored> =
                found.into_iter().filter(|one| !first.orphans.contains(one)).collect();
            prop_assert_eq!(decide(&left, &records, None), Decision::default());
        }
    }

    #[test]
    fn views_are_as_old_as_their_session() {
        let name = format!("sbx_{}.3", id::encode(7, [9; 10]));
        assert_eq!(id::made_at(&name), Some(7));
        assert_eq!(id::made_at("lost+found"), None);
        // A name that is no id has no age: it is no operation's of this engine.
        let odd = stored(StoredKind::Drive, "odd");
        assert_eq!(decide(std::slice::from_ref(&odd), &Records::default(), Some(0)).orphans, [odd]);
    }
}
