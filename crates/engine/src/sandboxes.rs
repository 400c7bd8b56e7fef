//! Sandboxes: create, get and resume, list, update, delete. (Forks are in `forks`.)
//!
//! Invariants: a name is taken from the first row to the last; a create or fork that fails leaves
//! nothing; parallel resumes give one session; what has several steps runs in a task of its own, so
//! a caller that goes away changes nothing.

use std::sync::Arc;

use bivouac_store::{
    Deleting, Durability, Position, SandboxFilter, SandboxOrder, SandboxRow, SessionRow,
    SnapshotRow, SortKey, StoreError, Unique,
};
use bivouac_types::access::Verb;
use bivouac_types::id::SandboxId;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::{Route, Sandbox, Source};
use bivouac_types::session::{Session, SessionStatus};

use crate::Engine;
use crate::api::{CreateSandbox, ListSandboxes, Page, Principal, SortBy, UpdateSandbox, View};
use crate::commands::check_key;
use crate::counters::Operation;
use crate::cursor;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::ids;
use crate::inner::{Inner, busy, locked};
use crate::lifecycle::chain;
use crate::resolve::{CWD, Plan, apply, check_change, check_regions, parse_snapshot};
use crate::sources::Fetch;

/// How often something that must be unique is drawn anew.
const DRAWS: u32 = 20;

/// The rows of a sandbox that is being made.
struct Draft {
    sandbox: SandboxRow,
    session: SessionRow,
    routes: Vec<(u16, String)>,
}

impl Inner {
    pub(crate) fn route(&self, port: u16, subdomain: String, public: bool) -> Route {
        Route { port, url: self.label_url(&subdomain), subdomain, public }
    }

    pub(crate) async fn routes(&self, id: &SandboxId) -> Result<Vec<Route>, Error> {
        let rows = self.db.route_rows(id).await?;
        let declared = rows.into_iter().filter(|row| row.port > 0);
        Ok(declared.map(|row| self.route(row.port, row.subdomain, row.public)).collect())
    }

    /// A sandbox by name, unless it is being deleted.
    pub(crate) async fn named(&self, ns: &Namespace, name: &str) -> Result<SandboxRow, Error> {
        match self.db.sandbox_by_name(ns, name).await? {
            Some(row) if row.deleting == Deleting::No => Ok(row),
            _ => Err(Error::no_sandbox(name)),
        }
    }

    pub(crate) async fn view(&self, sandbox: Sandbox, resumed: bool) -> Result<View, Error> {
        let session = self.known_session(&sandbox.current_session_id).await?.session;
        let routes = self.routes(&sandbox.id).await?;
        Ok(View { sandbox, session, routes, resumed })
    }

    pub(crate) async fn admit(&self) -> Result<(), Error> {
        self.runtime.admit().await.map_err(|error| {
            // The runtime's sentence is for the user: how much room there is, and what to remove.
            Error::new(ErrorKind::TooMany, "no_capacity", error.to_string()).because(error)
        })
    }

    fn take_range(&self) -> Result<u32, Error> {
        locked(&self.ranges).take().ok_or_else(|| {
            let message = format!(
                "This host runs {} sandboxes, which is as many as it has id ranges; stop some first.",
                self.config.id_ranges
            );
            Error::new(ErrorKind::TooMany, "no_capacity", message)
        })
    }

    /// A session of `sandbox` that is not launched yet.
    fn draft_session(
        &self,
        sandbox: &Sandbox,
        first: bool,
        from: Option<&SnapshotRow>,
    ) -> Result<SessionRow, Error> {
        let now = self.now();
        let id_range = self.take_range()?;
        let session = Session {
            id: self.ids.session(now)?,
            sandbox_id: sandbox.id.clone(),
            sandbox_name: sandbox.name.clone(),
            status: SessionStatus::Pending,
            generation: 1,
            resources: sandbox.resources,
            timeout_ms: sandbox.timeout_ms,
            cwd: sandbox.cwd.clone(),
            runtime: sandbox.runtime.clone(),
            image: sandbox.image.clone(),
            env: sandbox.env.clone(),
            mounts: sandbox.mounts.clone(),
            policy: sandbox.policy.clone(),
            policy_generation: 1,
            policy_before: None,
            paused_at: None,
            paused_ms: 0,
            keep_until: None,
            source_snapshot_id: from.map(|f| f.snapshot.id.clone()),
            id_range,
            node: self.config.node.clone(),
            region: sandbox.region.clone(),
            reason: None,
            requested_at: now,
            created_at: now,
            updated_at: now,
            started_at: None,
            requested_stop_at: None,
            stopped_at: None,
            aborted_at: None,
            snapshotted_at: None,
            active_cpu_ms: None,
        };
        let namespace = sandbox.namespace.clone();
        Ok(SessionRow { session, namespace, first, closing: None, settled: false })
    }

    fn draft(&self, ns: &Namespace, plan: &Plan) -> Result<Draft, Error> {
        let now = self.now();
        let name = plan.name.clone().map_or_else(ids::sandbox_name, Ok)?;
        let mut sandbox = Sandbox {
            id: self.ids.sandbox(now)?,
            namespace: ns.clone(),
            name,
            ephemeral: plan.ephemeral,
            persistent: true,
            resources: bivouac_types::sandbox::Resources::default(),
            timeout_ms: 0,
            ports: Vec::new(),
            env: std::collections::BTreeMap::new(),
            tags: std::collections::BTreeMap::new(),
            image: plan.base.image.clone(),
            runtime: plan.base.runtime.clone(),
            cwd: self
                .images
                .known(&plan.base.image)
                .and_then(|config| config.folder())
                .unwrap_or_else(|| CWD.to_owned()),
            policy: bivouac_types::policy::NetworkPolicy::default(),
            snapshot_expiration_ms: None,
            keep_last: None,
            mounts: bivouac_types::drive::Mounts::new(),
            life: bivouac_types::life::Life::default(),
            restarts: bivouac_types::life::Restarts::default(),
            network_id: None,
            region: String::new(),
            failover_regions: Vec::new(),
            // Replaced by the session's own id below.
            current_session_id: self.ids.session(now)?,
            current_snapshot_id: plan.base.snapshot.as_ref().map(|s| s.snapshot.id.clone()),
            status: SessionStatus::Pending,
            status_updated_at: now,
            generation: 1,
            created_at: now,
            updated_at: now,
            total_active_cpu_ms: 0,
            total_duration_ms: 0,
        };
        apply(&plan.config, &mut sandbox);
        let routes = sandbox
            .ports
            .iter()
            .map(|port| Ok((*port, ids::subdomain()?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let session = self.draft_session(&sandbox, true, plan.base.snapshot.as_ref())?;
        sandbox.current_session_id = session.session.id.clone();
        let deleting = if plan.unborn { Deleting::Unborn } else { Deleting::No };
        let sandbox = SandboxRow { sandbox, create_key: plan.key.clone(), deleting };
        Ok(Draft { sandbox, session, routes })
    }

    async fn insert(&self, draft: &Draft) -> Result<Result<(), Unique>, Error> {
        let range = draft.session.session.id_range;
        let wanted = self.wanted_mounts(&draft.session).await;
        let mounts = wanted.inspect_err(|_| self.free_range(range))?;
        let written = async {
            let mut tx = self.db.begin(Durability::Process).await?;
            tx.insert_sandbox(&draft.sandbox).await?;
            tx.insert_session(&draft.session).await?;
            for mount in &mounts {
                tx.mount_drive(mount).await?;
            }
            if !draft.routes.is_empty() {
                tx.write_routes(&draft.sandbox.sandbox.id, &draft.routes).await?;
            }
            if let Some(id) = &draft.session.session.source_snapshot_id
                && !tx.use_snapshot(id, self.now()).await?
            {
                return Ok(false);
            }
            tx.commit().await.map(|()| true)
        };
        let result = match written.await {
            Ok(true) => return Ok(Ok(())),
            Ok(false) => {
                let id = draft.session.session.source_snapshot_id.as_ref();
                Err(Error::no_snapshot(id.map_or("", |i| i.as_str())))
            }
            Err(StoreError::Taken(what)) => Ok(Err(what)),
            // Somebody else was quicker with a drive: another look finds out who.
            Err(StoreError::Changed { .. }) if !mounts.is_empty() => Ok(Err(Unique::Other)),
            Err(error) => Err(error.into()),
        };
        self.free_range(range);
        result
    }

    /// Waits for the end of a deletion that holds the name. `false`: somebody uses the name.
    async fn wait_for_name(&self, ns: &Namespace, name: &str) -> Result<bool, Error> {
        match self.db.sandbox_by_name(ns, name).await? {
            None => Ok(true),
            Some(row) if row.deleting != Deleting::No => {
                drop(self.sandbox_locks.lock(row.sandbox.id.as_str()).await);
                Ok(true)
            }
            Some(_) => Ok(false),
        }
    }

    /// Makes a sandbox and starts its first session.
    pub(crate) async fn start_new(
        self: &Arc<Self>,
        ns: &Namespace,
        plan: Plan,
    ) -> Result<View, Error> {
        self.admit().await?;
        for _ in 0..DRAWS {
            let draft = self.draft(ns, &plan)?;
            let id = draft.sandbox.sandbox.id.clone();
            let held = self.sandbox_locks.lock(id.as_str()).await;
            match self.insert(&draft).await? {
                Ok(()) => {
                    let view =
                        self.start_first(draft, plan.base.snapshot, plan.fetch.as_ref()).await;
                    drop(held);
                    return view;
                }
                Err(Unique::Name) => {
                    if let Some(name) = &plan.name
                        && !self.wait_for_name(ns, name).await?
                    {
                        return Err(name_taken(name));
                    }
                }
                Err(Unique::CreateKey) => {
                    let key = plan.key.as_deref().unwrap_or("");
                    if let Some(row) = self.db.sandbox_by_create_key(ns, key).await? {
                        return self.view(row.sandbox, false).await;
                    }
                }
                Err(_) => {}
            }
        }
        Err(match &plan.name {
            Some(name) => Error::new(
                ErrorKind::TooMany,
                "name_busy",
                format!(
                    "The sandbox that was named '{name}' is still being removed; try again shortly."
                ),
            ),
            None => busy("sandbox names"),
        })
    }

    /// Launches the first session of a sandbox whose rows are written. Holds the lock.
    async fn start_first(
        self: &Arc<Self>,
        draft: Draft,
        from: Option<SnapshotRow>,
        fetch: Option<&Fetch>,
    ) -> Result<View, Error> {
        let id = draft.session.session.id.clone();
        if let Err(error) = self.reach(FaultPoint::CreateInserted).await {
            self.undo_launch(&id).await;
            return Err(error);
        }
        let session = self.launch(draft.session, from.as_ref(), fetch).await?;
        let sandbox = self.known_sandbox(&draft.sandbox.sandbox.id).await?;
        if let Err(error) = self.reach(FaultPoint::CreateRunning).await {
            // The caller gets an error, so nothing may be left.
            self.mark_deleting(&sandbox.sandbox.id, Deleting::Yes).await?;
            let sandbox = self.known_sandbox(&sandbox.sandbox.id).await?;
            self.finish_delete(&sandbox).await?;
            return Err(error);
        }
        let routes = draft.routes.into_iter().map(|(port, label)| self.route(port, label, false));
        let (sandbox, session) = (sandbox.sandbox, session.session);
        Ok(View { sandbox, session, routes: routes.collect(), resumed: false })
    }

    /// Undoes a launch; what cannot be undone now is left to the reconciler.
    async fn undo_launch(self: &Arc<Self>, id: &bivouac_types::id::SessionId) {
        if let Err(undo) = self.launch_failed(id, "it could not be started").await {
            tracing::error!(session = %id, cause = %chain(&undo), "cannot undo a launch yet");
        }
    }

    /// With a key: the second of two equal calls gets the first one's sandbox.
    pub(crate) async fn once(
        self: &Arc<Self>,
        ns: &Namespace,
        key: Option<String>,
        work: impl Future<Output = Result<View, Error>> + Send,
    ) -> Result<View, Error> {
        let Some(key) = key else { return work.await };
        let lock = format!("create {}/{} {key}", ns.team, ns.project);
        let _held = self.key_locks.lock(&lock).await;
        match self.db.sandbox_by_create_key(ns, &key).await? {
            Some(row) if row.deleting == Deleting::No => {
                match self.undo_interrupted(&row.sandbox.id).await? {
                    Some(sandbox) => self.view(sandbox, false).await,
                    None => work.await,
                }
            }
            Some(row) => {
                // Deleted in the meantime: the key is free when that is done.
                drop(self.sandbox_locks.lock(row.sandbox.id.as_str()).await);
                work.await
            }
            None => work.await,
        }
    }

    /// A running session of the sandbox: the present one, or a new one.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
    ) -> Result<View, Error> {
        let id = self.named(ns, name).await?.sandbox.id;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        for _ in 0..DRAWS {
            let sandbox = match self.db.sandbox(&id).await? {
                Some(row) if row.deleting == Deleting::No => row,
                _ => return Err(Error::no_sandbox(name)),
            };
            let session = self.known_session(&sandbox.sandbox.current_session_id).await?;
            match session.session.status {
                SessionStatus::Running => {
                    if self.still_runs(&session).await? {
                        if let Some(live) = self.live(&session.session.id) {
                            self.unpause_held(&live).await?;
                        }
                        self.activity.touch(&id);
                        return self.view(sandbox.sandbox, false).await;
                    }
                }
                SessionStatus::Pending => {
                    // Nobody holds the lock, so nobody launches it any more.
                    let why = "its start was interrupted";
                    self.launch_failed(&session.session.id, why).await?;
                }
                SessionStatus::Stopping | SessionStatus::Snapshotting => {
                    let live = self.live(&session.session.id);
                    let handle = live.map(|l| Arc::clone(&l.handle));
                    self.finish_stop(session, handle).await?;
                }
                SessionStatus::Stopped | SessionStatus::Failed | SessionStatus::Aborted => {
                    if sandbox.sandbox.ephemeral {
                        return Err(Error::not_running(&session.session));
                    }
                    if !session.settled {
                        self.settle(session).await?;
                        continue;
                    }
                    // Somebody wants it: what its restart policy did before does not count any more.
                    let mut sandbox = sandbox;
                    sandbox.sandbox.restarts.in_a_row = 0;
                    if let Some(view) = self.start_again(sandbox).await? {
                        return Ok(view);
                    }
                }
            }
        }
        Err(busy(&format!("sandbox '{name}'")))
    }

    /// Whether a session that is recorded as running runs. If not, it is settled. Holds the lock.
    pub(crate) async fn still_runs(self: &Arc<Self>, row: &SessionRow) -> Result<bool, Error> {
        let id = &row.session.id;
        let alive = self.live(id).map(|live| !*live.handle.gone().borrow());
        match alive {
            Some(true) => Ok(true),
            Some(false) => {
                self.lost(id, "its processes ended unexpectedly").await?;
                Ok(false)
            }
            None => self.adopt_session(row.clone()).await,
        }
    }

    /// Starts a new session of a sandbox that has none. Holds the lock. `None`: somebody else
    /// changed it, look again.
    pub(crate) async fn start_again(
        self: &Arc<Self>,
        mut row: SandboxRow,
    ) -> Result<Option<View>, Error> {
        self.admit().await?;
        let team = row.sandbox.namespace.team.clone();
        let from = match &row.sandbox.current_snapshot_id {
            Some(id) => Some(self.usable_snapshot(&team, id).await?),
            None => None,
        };
        let image = from.as_ref().map_or(&row.sandbox.image, |f| &f.snapshot.image).clone();
        row.sandbox.image = self.image(&image).await?;
        let session = self.draft_session(&row.sandbox, false, from.as_ref())?;
        let (id, range, now) =
            (session.session.id.clone(), session.session.id_range, session.session.created_at);
        let mounts = self.wanted_mounts(&session).await.inspect_err(|_| self.free_range(range))?;
        let s = &mut row.sandbox;
        s.current_session_id = id.clone();
        s.status = SessionStatus::Pending;
        s.status_updated_at = now;
        s.updated_at = now;
        let written = async {
            let mut tx = self.db.begin(Durability::Process).await?;
            tx.update_sandbox(&mut row).await?;
            tx.insert_session(&session).await?;
            for mount in &mounts {
                tx.mount_drive(mount).await?;
            }
            if let Some(from) = &from
                && !tx.use_snapshot(&from.snapshot.id, now).await?
            {
                return Ok(false);
            }
            tx.commit().await.map(|()| true)
        };
        match written.await {
            Ok(true) => {}
            Ok(false) => {
                self.free_range(range);
                let id = from.map(|f| f.snapshot.id.to_string()).unwrap_or_default();
                return Err(Error::no_snapshot(&id));
            }
            Err(error) => {
                self.free_range(range);
                return match error {
                    StoreError::Changed { .. } | StoreError::Taken(_) => Ok(None),
                    error => Err(error.into()),
                };
            }
        }
        self.expiry_changed.notify_one();
        if let Err(error) = self.reach(FaultPoint::ResumeInserted).await {
            self.undo_launch(&id).await;
            return Err(error);
        }
        let session = self.launch(session, from.as_ref(), None).await?;
        self.reach(FaultPoint::ResumeRunning).await?;
        let sandbox = self.known_sandbox(&row.sandbox.id).await?.sandbox;
        let routes = self.routes(&sandbox.id).await?;
        Ok(Some(View { sandbox, session: session.session, routes, resumed: true }))
    }

    pub(crate) async fn change(
        &self,
        ns: &Namespace,
        name: &str,
        mut change: UpdateSandbox,
    ) -> Result<View, Error> {
        check_change(&change)?;
        self.check_disk(change.resources.as_ref())?;
        let present = self.named(ns, name).await?.sandbox.policy;
        let snapshot = match &change.current_snapshot_id {
            Some(text) => Some(self.usable_snapshot(&ns.team, &parse_snapshot(text)?).await?),
            None => None,
        };
        let image = match &change.runtime {
            Some(runtime) => Some(self.image_of_runtime(runtime).await?),
            None => None,
        };
        if let Some(mounts) = &change.mounts {
            self.check_drives(ns, mounts).await?;
        }
        self.seal_change(ns, &mut change, &present).await?;
        for _ in 0..DRAWS {
            let mut row = self.named(ns, name).await?;
            let sandbox = &mut row.sandbox;
            apply(&change, sandbox);
            sandbox.life.check()?;
            check_regions(&sandbox.region, &sandbox.failover_regions)?;
            if let Some(runtime) = &change.runtime {
                sandbox.runtime.clone_from(runtime);
            }
            if let Some(image) = image.as_ref().filter(|_| sandbox.current_snapshot_id.is_none()) {
                sandbox.image.clone_from(image);
            }
            if let Some(found) = &snapshot {
                sandbox.current_snapshot_id = Some(found.snapshot.id.clone());
                sandbox.image.clone_from(&found.snapshot.image);
            }
            sandbox.updated_at = self.now();
            let old = self.db.routes(&sandbox.id).await?;
            let routes = sandbox
                .ports
                .iter()
                .map(|port| match old.iter().find(|(known, _)| known == port) {
                    Some(known) => Ok(known.clone()),
                    None => Ok((*port, ids::subdomain()?)),
                })
                .collect::<Result<Vec<_>, Error>>()?;
            let mut tx = self.db.begin(Durability::Process).await?;
            let mut written = match tx.update_sandbox(&mut row).await {
                Ok(()) if routes != old => tx.write_routes(&row.sandbox.id, &routes).await,
                other => other,
            };
            if let (Ok(()), Some(found)) = (&written, &snapshot) {
                let id = &found.snapshot.id;
                match tx.use_snapshot(id, self.now()).await {
                    Ok(true) => {}
                    Ok(false) => return Err(Error::no_snapshot(id.as_str())),
                    Err(error) => written = Err(error),
                }
            }
            match written {
                Ok(()) => {
                    tx.commit().await?;
                    if routes != old {
                        self.routes_of_changed(&row.sandbox.id);
                    }
                    if let Some(live) = self.live(&row.sandbox.current_session_id) {
                        *locked(&live.life) = Some(row.sandbox.life.clone());
                    }
                    if change.life.is_some() {
                        self.lost_changed.notify_one();
                    }
                    if snapshot.is_some() {
                        self.expiry_changed.notify_one();
                        self.forks_changed.notify_one();
                    }
                    return self.view(row.sandbox, false).await;
                }
                Err(StoreError::Changed { .. } | StoreError::Taken(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(busy(&format!("sandbox '{name}'")))
    }
}

fn name_taken(name: &str) -> Error {
    Error::invalid(format!("A sandbox with the name '{name}' already exists for this project."))
}

/// `:PORT` of a URL, or nothing when it names none.
pub(crate) fn port_suffix(url: &str) -> String {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = authority.split(['/', '?', '#']).next().unwrap_or("");
    match authority.rsplit_once(':') {
        Some((_, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => {
            format!(":{port}")
        }
        _ => String::new(),
    }
}

impl Engine {
    /// Makes a sandbox and answers when its first session runs. A policy or credentials in it take that right too.
    ///
    /// # Errors
    /// 400 for a bad field or a taken name, 404 for an image, 410 for a snapshot, 429 when the host
    /// is full. A create that fails leaves nothing, and its name free.
    pub async fn create(
        &self,
        who: &Principal,
        ns: &Namespace,
        spec: CreateSandbox,
    ) -> Result<View, Error> {
        who.may(Verb::Write, ns)?;
        if spec.policy.is_some() || !spec.credentials.is_empty() {
            who.may(Verb::Policy, ns)?;
        }
        self.inner.check_pull(who, spec.image.as_deref()).await?;
        if let Some(Source::Snapshot { snapshot_id }) = &spec.source {
            self.inner.check_snapshot(who, &ns.team, &parse_snapshot(snapshot_id)?).await?;
        }
        self.inner.check_open()?;
        check_key(spec.idempotency_key.as_deref())?;
        who.may_hook(&spec.life, ns)?;
        let inner = Arc::clone(&self.inner);
        let (by, ns) = (who.name.clone(), ns.clone());
        let work = async move {
            let key = spec.idempotency_key.clone();
            let make = async {
                let plan = inner.plan_create(&ns, spec).await?;
                inner.start_new(&ns, plan).await
            };
            let view = inner.once(&ns, key, make).await?;
            tracing::info!(%by, sandbox = %view.sandbox.name, session = %view.session.id, "created");
            Ok(view)
        };
        self.inner.run(self.inner.counted(Operation::Create, work)).await
    }

    /// A sandbox. With `resume`, one that runs: if it does not, a new session is started from its
    /// current snapshot.
    ///
    /// # Errors
    /// 404; with `resume` also 410 when the snapshot is gone or the sandbox is ephemeral.
    pub async fn get(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        resume: bool,
    ) -> Result<View, Error> {
        if !resume {
            who.may(Verb::Read, ns)?;
            let row = self.inner.named(ns, name).await?;
            return self.inner.view(row.sandbox, false).await;
        }
        who.may_any(&[Verb::Exec, Verb::Write], ns)?;
        self.inner.check_open()?;
        let inner = Arc::clone(&self.inner);
        let (by, ns, name) = (who.name.clone(), ns.clone(), name.to_owned());
        let work = async move {
            let outcome = inner.resume(&ns, &name).await;
            // One that runs already is only looked at.
            if outcome.as_ref().map_or(true, |view| view.resumed) {
                inner.counters.note(Operation::Resume, &outcome);
            }
            let view = outcome?;
            if view.resumed {
                tracing::info!(%by, sandbox = %name, session = %view.session.id, "resumed");
            }
            Ok(view)
        };
        self.inner.run(work).await
    }

    /// Sandboxes of a namespace, or of all.
    ///
    /// # Errors
    /// 400 for a bad limit, cursor or combination of filters.
    pub async fn list(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListSandboxes,
    ) -> Result<Page<Sandbox>, Error> {
        if query.all_namespaces {
            who.may_somewhere(Verb::Read)?;
        } else {
            who.may(Verb::Read, ns)?;
        }
        let limit = cursor::limit(query.limit)?;
        if query.name_prefix.is_some() && query.sort_by != SortBy::Name {
            return Err(Error::invalid("Invalid namePrefix: it needs sortBy=name"));
        }
        let (order, list) = match query.sort_by {
            SortBy::CreatedAt => (SandboxOrder::CreatedAt, "sandboxes.createdAt"),
            SortBy::Name => (SandboxOrder::Name, "sandboxes.name"),
            SortBy::StatusUpdatedAt => (SandboxOrder::StatusUpdatedAt, "sandboxes.statusUpdatedAt"),
            SortBy::CurrentSnapshotId => {
                (SandboxOrder::CurrentSnapshotId, "sandboxes.currentSnapshotId")
            }
        };
        let filter = SandboxFilter {
            namespace: (!query.all_namespaces).then(|| ns.clone()),
            within: query.all_namespaces.then(|| who.grant.namespaces.iter().cloned().collect()),
            name_prefix: query.name_prefix,
            tag: query.tag,
            order,
            ascending: query.ascending,
            after: cursor::read_opt(list, query.ascending, query.cursor.as_deref())?,
            limit: i64::try_from(limit + 1).unwrap_or(i64::MAX),
        };
        let rows = self.inner.db.sandboxes(&filter).await?;
        let (rows, next) = cursor::page(rows, limit, list, query.ascending, |row| {
            let s = &row.sandbox;
            let key = match order {
                SandboxOrder::CreatedAt => SortKey::Int(s.created_at),
                SandboxOrder::Name => SortKey::Text(s.name.clone()),
                SandboxOrder::StatusUpdatedAt => SortKey::Int(s.status_updated_at),
                SandboxOrder::CurrentSnapshotId => {
                    let id = s.current_snapshot_id.as_ref();
                    SortKey::Text(id.map(ToString::to_string).unwrap_or_default())
                }
            };
            Position { key, id: s.id.as_str().to_owned() }
        });
        Ok(Page { items: rows.into_iter().map(|row| row.sandbox).collect(), next })
    }

    /// Changes a sandbox's configuration, for its next session. Ports get their routes at once.
    ///
    /// # Errors
    /// 400 for a bad field, 404, 410 for a snapshot that is gone.
    pub async fn update(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        change: UpdateSandbox,
    ) -> Result<View, Error> {
        who.may(Verb::Write, ns)?;
        if change.policy.is_some() {
            who.may(Verb::Policy, ns)?;
        }
        if let Some(text) = &change.current_snapshot_id {
            self.inner.check_snapshot(who, &ns.team, &parse_snapshot(text)?).await?;
        }
        self.inner.check_open()?;
        if let Some(life) = &change.life {
            who.may_hook(life, ns)?;
        }
        tracing::info!(by = %who.name, sandbox = %name, "update");
        self.inner.change(ns, name, change).await
    }

    /// Stops a sandbox without a snapshot and removes it. Its snapshots stay, unless
    /// `delete_orphan_snapshots` and no other sandbox would start from them.
    ///
    /// # Errors
    /// 404.
    pub async fn delete(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        delete_orphan_snapshots: bool,
    ) -> Result<Sandbox, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        let how = if delete_orphan_snapshots { Deleting::WithOrphans } else { Deleting::Yes };
        tracing::info!(by = %who.name, sandbox = %name, delete_orphan_snapshots, "delete");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        let work = async move { inner.remove(&ns, &name, how).await };
        self.inner.run(self.inner.counted(Operation::Delete, work)).await
    }
}

#[cfg(test)]
mod tests {
    use super::port_suffix;

    #[test]
    fn routes_take_the_port_of_the_public_url() {
        assert_eq!(port_suffix("http://127.0.0.1:7070/x?y#z"), ":7070");
        assert_eq!(port_suffix("https://boxes.example"), "");
        assert_eq!(port_suffix("http://[::1]:80/"), ":80");
        assert_eq!(port_suffix("http://[::1]"), "");
    }
}
