//! What the engine tells of itself and of its sessions, for `top` and `/metrics`.
//!
//! Invariant: nothing is changed, and a session that ends while it is looked at is left out, never an
//! error. The cost is a few small files for each session.

use std::sync::Arc;

use bivouac_runtime::{Space, Usage};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::meter::Times;
use bivouac_types::name::Namespace;
use bivouac_types::session::{Session, SessionStatus};
use futures_util::StreamExt;

use crate::Engine;
use crate::api::Principal;
use crate::counters::Count;
use crate::egress::desk::EgressCount;
use crate::error::Error;
use crate::inner::{Inner, Live, locked};
use crate::lifecycle::chain;

/// Sessions that are looked at at the same time.
const PARALLEL: usize = 8;

/// What a running session uses.
#[derive(Debug, Clone)]
pub struct SessionUse {
    /// Whose it is.
    pub namespace: Namespace,
    /// Its record.
    pub session: Session,
    /// CPU, memory and processes.
    pub usage: Usage,
    /// Bytes that it holds over its image, as its `df` says; absent where the host does not count.
    pub disk_bytes: Option<u64>,
    /// How many it may.
    pub disk_limit: u64,
    /// Commands that run.
    pub commands: usize,
    /// When this was read.
    pub at: Millis,
}

/// What the engine counted and measured.
#[derive(Debug, Clone)]
pub struct Meters {
    /// Sessions in service, by status.
    pub sessions: Vec<(SessionStatus, usize)>,
    /// Commands whose end is not recorded yet.
    pub open_commands: usize,
    /// Operations in the middle of their steps.
    pub operations: usize,
    /// What was done since the start.
    pub counts: Vec<Count>,
    /// What egress brokers decided and carried since the start.
    pub egress: Vec<EgressCount>,
    /// Times of launch steps, by name.
    pub launches: Vec<(String, Times)>,
    /// Times of the database, by kind of work.
    pub database: [(&'static str, Times); 3],
    /// How full the storage is; absent when it cannot be told.
    pub space: Option<Space>,
}

impl Inner {
    pub(crate) fn all_live(&self) -> Vec<Arc<Live>> {
        self.live_ids().iter().filter_map(|id| self.live(id)).collect()
    }

    async fn measure(&self, live: Arc<Live>) -> Option<SessionUse> {
        let row = live.row();
        if row.session.status != SessionStatus::Running {
            return None;
        }
        let usage = live.handle.usage().await.ok()?;
        let disk = self.runtime.disk_level(&row.session.id).await.ok()?;
        let disk_limit = self.disk_of(&row.session.resources);
        Some(SessionUse {
            namespace: row.namespace,
            session: row.session,
            usage,
            disk_bytes: disk.map(|disk| disk_limit.saturating_sub(disk.left())),
            disk_limit,
            commands: locked(&live.commands).len(),
            at: self.now(),
        })
    }
}

impl Engine {
    /// What running sessions use: those of a namespace, or all that somebody sees. Sorted by namespace and name.
    ///
    /// # Errors
    /// 404 for a namespace that it does not see, 403.
    pub async fn usage(
        &self,
        who: &Principal,
        of: Option<&Namespace>,
    ) -> Result<Vec<SessionUse>, Error> {
        match of {
            Some(ns) => who.may(Verb::Read, ns)?,
            None => who.may_somewhere(Verb::Read)?,
        }
        let mut wanted = self.inner.all_live();
        wanted.retain(|live| {
            let ns = live.namespace();
            of.map_or_else(|| who.grant.sees(&ns), |of| ns == *of)
        });
        let measured = futures_util::stream::iter(wanted)
            .map(|live| self.inner.measure(live))
            .buffer_unordered(PARALLEL);
        let mut found: Vec<SessionUse> = measured.filter_map(std::future::ready).collect().await;
        let key = |u: &SessionUse| {
            let n = &u.namespace;
            (n.team.clone(), n.project.clone(), u.session.sandbox_name.clone())
        };
        found.sort_by_cached_key(key);
        Ok(found)
    }

    /// What was counted and measured since the start.
    pub async fn meters(&self) -> Meters {
        const SHOWN: [SessionStatus; 4] = [
            SessionStatus::Pending,
            SessionStatus::Running,
            SessionStatus::Snapshotting,
            SessionStatus::Stopping,
        ];
        let inner = &self.inner;
        let mut sessions = SHOWN.map(|status| (status, 0)).to_vec();
        let mut open_commands = 0;
        for live in inner.all_live() {
            let status = live.row().session.status;
            open_commands += locked(&live.commands).len();
            match sessions.iter_mut().find(|(known, _)| *known == status) {
                Some((_, count)) => *count += 1,
                // Ended, and still being settled.
                None => sessions.push((status, 1)),
            }
        }
        let space = inner.runtime.space().await.unwrap_or_else(|error| {
            tracing::warn!(cause = %chain(&error), "cannot tell how full the storage is");
            None
        });
        Meters {
            sessions,
            open_commands,
            operations: inner.operations(),
            counts: inner.counters.read(),
            egress: inner.egress_counters.read(),
            launches: inner.runtime.launch_times(),
            database: inner.db.times(),
            space,
        }
    }
}
