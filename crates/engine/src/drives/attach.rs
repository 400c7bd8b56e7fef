//! Attach and detach: a sandbox's drives, changed while it runs or while it does not.
//!
//! Both change what the next session is to have, and what the running one has. Steps on a running one: the
//! intent is written on the mount's row, the deed is done, the result is recorded together with the
//! sandbox's own list; what a crash leaves in between is settled from the row (`settle_mounts_of`). Invariant:
//! a writer lets go of its drive only when nothing of it can reach the drive any more: after the unmount
//! the drive's data is fenced, because a guest may have bound it elsewhere or may hold a file of it open.
//! Who works here holds the sandbox's lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_runtime::{FileError, FileErrorKind, Handle, RuntimeError};
use bivouac_store::{
    Deleting, DriveMountRow, Durability, MountState, SandboxRow, SessionRow, StoreError,
};
use bivouac_types::access::Verb;
use bivouac_types::drive::{Drive, DriveMode, Mount, Mounts, check_mounts};
use bivouac_types::id::SandboxId;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;

use super::mounts::{mount_of, view_name};
use super::{ATTEMPTS, bytes, conflict, no_drive};
use crate::Engine;
use crate::api::Principal;
use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::{Inner, Live, busy};
use crate::lifecycle::chain;

/// What an attach or a detach was about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The drive's name.
    pub drive: String,
    /// The sandbox's.
    pub sandbox: String,
    /// Where inside.
    pub path: String,
    /// How.
    pub mode: DriveMode,
    /// In the running session too, not only for the next one.
    pub live: bool,
}

/// What is recorded of a mount when its deed is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// It is there.
    Attached,
    /// It is gone, and the sandbox is to have it no more.
    Detached,
    /// It never came to be.
    TakenBack,
}

impl Inner {
    /// The sandbox of that name and its running session, if it has one.
    async fn attachable(
        self: &Arc<Self>,
        id: &SandboxId,
        name: &str,
    ) -> Result<(SandboxRow, Option<(SessionRow, Arc<Live>)>), Error> {
        let row = match self.db.sandbox(id).await? {
            Some(row) if row.deleting == Deleting::No => row,
            _ => return Err(Error::no_sandbox(name)),
        };
        let session = self.known_session(&row.sandbox.current_session_id).await?;
        let running = session.session.status == SessionStatus::Running;
        if !running || !self.still_runs(&session).await? {
            return Ok((row, None));
        }
        let live = self.live(&session.session.id);
        Ok((row, live.map(|live| (session, live))))
    }

    async fn attach(
        self: &Arc<Self>,
        ns: &Namespace,
        sandbox: &str,
        path: &str,
        mount: Mount,
    ) -> Result<Attachment, Error> {
        let id = self.named(ns, sandbox).await?.sandbox.id;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        let (row, running) = self.attachable(&id, sandbox).await?;
        let found = self.drive_named(ns, &mount.drive).await?;
        let mount = Mount { drive: found.drive.name.clone(), mode: mount.mode };
        let told = Attachment {
            drive: mount.drive.clone(),
            sandbox: sandbox.to_owned(),
            path: path.to_owned(),
            mode: mount.mode,
            live: running.is_some(),
        };
        let mut wanted = row.sandbox.mounts.clone();
        match wanted.insert(path.to_owned(), mount.clone()) {
            Some(before) if before != mount => return Err(taken(sandbox, path, &before.drive)),
            _ => check_mounts(&wanted)?,
        }
        let Some((session, live)) = running else {
            self.check_mount(&found, mount.mode, &row.sandbox.region).await?;
            self.change_mounts(&id, |mounts| mounts.clone_from(&wanted)).await?;
            return Ok(told);
        };
        let present = self.db.mounts_of(&session.session.id).await?;
        if let Some(same) = present.iter().find(|m| m.path == path) {
            let again = same.drive_id == found.drive.id
                && same.mode == mount.mode
                && same.state == MountState::Mounted;
            if !again {
                return Err(taken(sandbox, path, same.drive_id.as_str()));
            }
            self.change_mounts(&id, |mounts| mounts.clone_from(&wanted)).await?;
            return Ok(told);
        }
        check_beside(&present, path, &found.drive, mount.mode)?;
        self.check_mount(&found, mount.mode, &session.session.region).await?;
        let new = self.draft_mount(&session, &present, path, &found.drive, mount.mode);
        self.attach_live(&id, &live, new, &found.drive).await?;
        Ok(told)
    }

    fn draft_mount(
        &self,
        session: &SessionRow,
        present: &[DriveMountRow],
        path: &str,
        drive: &Drive,
        mode: DriveMode,
    ) -> DriveMountRow {
        let id = &session.session.id;
        let mut views = (0..).map(|index| view_name(id, index));
        let free = views.find(|name| !present.iter().any(|m| m.volume == *name));
        let volume = match mode {
            DriveMode::ReadWrite => drive.id.as_str().to_owned(),
            DriveMode::Snapshot => free.unwrap_or_default(),
        };
        DriveMountRow {
            session_id: id.clone(),
            path: path.to_owned(),
            drive_id: drive.id.clone(),
            mode,
            volume,
            state: MountState::Attaching,
            created_at: self.now(),
        }
    }

    /// Mounts a drive in a running session.
    async fn attach_live(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        live: &Arc<Live>,
        row: DriveMountRow,
        drive: &Drive,
    ) -> Result<(), Error> {
        let mut tx = self.db.begin(Durability::Process).await?;
        match tx.mount_drive(&row).await {
            Ok(()) => tx.commit().await?,
            Err(StoreError::Changed { .. }) => {
                drop(tx);
                // Somebody was quicker: say who.
                let now = self.db.drive(&row.drive_id).await?;
                return Err(match now {
                    Some(now) if now.drive.writer.is_some() => self.held(&now.drive).await?,
                    _ => busy(&format!("drive '{}'", drive.name)),
                });
            }
            Err(error) => return Err(error.into()),
        }
        let done = async {
            self.reach(FaultPoint::AttachIntent).await?;
            // It is mounted by a process inside.
            Box::pin(self.unpause_held(live)).await?;
            let id_range = live.row().session.id_range;
            live.handle.attach_drive(&mount_of(&row, drive), id_range).await?;
            self.reach(FaultPoint::AttachMounted).await?;
            if row.mode == DriveMode::ReadWrite {
                self.db.note_written(&row.session_id, self.now()).await?;
            }
            self.record(sandbox, &row, Outcome::Attached, Some(drive)).await
        };
        if let Err(error) = done.await {
            if let Err(undo) = self.take_away(sandbox, live, &row, Outcome::TakenBack).await {
                tracing::error!(session = %row.session_id, cause = %chain(&undo), "cannot take a mount back yet");
                self.leftovers.store(true, Ordering::Release);
            }
            return Err(error);
        }
        self.reach(FaultPoint::AttachRecorded).await
    }

    async fn detach(
        self: &Arc<Self>,
        ns: &Namespace,
        drive: &str,
        sandbox: &str,
        path: Option<&str>,
        force: bool,
    ) -> Result<Attachment, Error> {
        let id = self.named(ns, sandbox).await?.sandbox.id;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        let (row, running) = self.attachable(&id, sandbox).await?;
        let drive = self.drive_named(ns, drive).await?.drive;
        let is_meant = |at: &str| path.is_none_or(|path| path == at);
        let mut present = match &running {
            Some((session, _)) => self.db.mounts_of(&session.session.id).await?,
            None => Vec::new(),
        };
        present.retain(|m| m.drive_id == drive.id && is_meant(&m.path));
        let configured = row.sandbox.mounts.iter().filter(|(at, mount)| {
            let named = mount.drive == drive.name || mount.drive == drive.id.as_str();
            named && is_meant(at)
        });
        let mut places: Vec<(&str, DriveMode)> =
            configured.map(|(at, m)| (at.as_str(), m.mode)).collect();
        let live_places = present.iter().map(|m| (m.path.as_str(), m.mode));
        places.extend(live_places.filter(|(at, _)| !row.sandbox.mounts.contains_key(*at)));
        let (at, mode) = match places.as_slice() {
            [one] => *one,
            [] => {
                let message =
                    format!("Drive '{}' is not attached to sandbox '{sandbox}'.", drive.name);
                return Err(Error::not_found(message));
            }
            several => {
                let all: Vec<&str> = several.iter().map(|(at, _)| *at).collect();
                return Err(Error::invalid(format!(
                    "Invalid path: drive '{}' is attached to sandbox '{sandbox}' at {}; say which.",
                    drive.name,
                    all.join(" and ")
                )));
            }
        };
        let told = Attachment {
            drive: drive.name.clone(),
            sandbox: sandbox.to_owned(),
            path: at.to_owned(),
            mode,
            live: !present.is_empty(),
        };
        let mounted = present.into_iter().find(|m| m.path == told.path);
        match (mounted, running) {
            (Some(mounted), Some((_, live))) => {
                self.detach_live(&id, &live, mounted, &told, force).await?;
            }
            _ => self.change_mounts(&id, |mounts| drop(mounts.remove(&told.path))).await?,
        }
        Ok(told)
    }

    /// Takes a mount of a running session away.
    async fn detach_live(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        live: &Arc<Live>,
        mut row: DriveMountRow,
        told: &Attachment,
        force: bool,
    ) -> Result<(), Error> {
        let to = if force { MountState::DetachingByForce } else { MountState::Detaching };
        if row.state != to {
            let mut tx = self.db.begin(Durability::Process).await?;
            if !tx.move_mount(&row, to).await? {
                return Err(busy(&format!("drive '{}'", told.drive)));
            }
            tx.commit().await?;
            row.state = to;
        }
        let done = async {
            self.reach(FaultPoint::DetachIntent).await?;
            self.take_away(sandbox, live, &row, Outcome::Detached).await
        };
        match done.await {
            Ok(true) => self.reach(FaultPoint::DetachRecorded).await,
            Ok(false) => Err(conflict(format!(
                "Drive '{}' is in use at '{}' in sandbox '{}': end what has files or folders of it open, or \
                 detach it by force, which cuts them off from the drive.",
                told.drive, told.path, told.sandbox
            ))
            .with("sandbox", told.sandbox.clone())),
            Err(error) => {
                // Once more at once; what resists is the reconciler's.
                self.settle_mounts_or_log(live).await;
                Err(error)
            }
        }
    }

    /// Unmounts, fences and records, from wherever an earlier attempt was interrupted. `false`: it is in use,
    /// and stays.
    async fn take_away(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        live: &Arc<Live>,
        row: &DriveMountRow,
        outcome: Outcome,
    ) -> Result<bool, Error> {
        let drive = self.db.drive(&row.drive_id).await?;
        let drive = drive.ok_or_else(|| no_drive(row.drive_id.as_str()))?.drive;
        let force = row.state != MountState::Detaching;
        Box::pin(self.unpause_held(live)).await?;
        if !unmount(&live.handle, row, &drive, force).await? {
            let mut tx = self.db.begin(Durability::Process).await?;
            tx.move_mount(row, MountState::Mounted).await?;
            tx.commit().await?;
            return Ok(false);
        }
        let detach = outcome == Outcome::Detached;
        if detach {
            self.reach(FaultPoint::DetachUnmounted).await?;
        }
        match row.mode {
            DriveMode::ReadWrite => {
                self.runtime.fence_drive(row.drive_id.as_str(), bytes(drive.max_bytes)).await?;
            }
            DriveMode::Snapshot => self.runtime.remove_view(&row.volume).await?,
        }
        if detach {
            self.reach(FaultPoint::DetachFenced).await?;
        }
        self.record(sandbox, row, outcome, Some(&drive)).await?;
        Ok(true)
    }

    /// Changes what a sandbox is to have mounted.
    async fn change_mounts(
        &self,
        id: &SandboxId,
        alter: impl Fn(&mut Mounts),
    ) -> Result<(), Error> {
        self.change_sandbox(id, |row| {
            let before = row.sandbox.mounts.clone();
            alter(&mut row.sandbox.mounts);
            Ok(row.sandbox.mounts != before)
        })
        .await?;
        Ok(())
    }

    /// Records what came of a mount, and what the sandbox is to have from now on, in one.
    async fn record(
        &self,
        sandbox: &SandboxId,
        mount: &DriveMountRow,
        outcome: Outcome,
        drive: Option<&Drive>,
    ) -> Result<(), Error> {
        for _ in 0..ATTEMPTS {
            let mut row = self.known_sandbox(sandbox).await?;
            let before = row.sandbox.mounts.clone();
            match (outcome, drive) {
                (Outcome::Attached, Some(drive)) => {
                    let wanted = Mount { drive: drive.name.clone(), mode: mount.mode };
                    row.sandbox.mounts.insert(mount.path.clone(), wanted);
                }
                (Outcome::Detached, _) => drop(row.sandbox.mounts.remove(&mount.path)),
                _ => {}
            }
            // A writer that has let go must not have it back after a power cut.
            let mut tx = self.db.begin(Durability::Power).await?;
            if row.sandbox.mounts != before {
                row.sandbox.updated_at = self.now();
                match tx.update_sandbox(&mut row).await {
                    Ok(()) => {}
                    Err(StoreError::Changed { .. }) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            match outcome {
                Outcome::Attached => {
                    tx.move_mount(mount, MountState::Mounted).await?;
                }
                _ => tx.unmount_drive(mount, self.now()).await?,
            }
            return Ok(tx.commit().await?);
        }
        Err(busy(&format!("sandbox {sandbox}")))
    }

    /// Goes on with what was interrupted on a session's mounts. Holds the sandbox's lock.
    pub(super) async fn settle_mounts_of(self: &Arc<Self>, live: &Arc<Live>) -> Result<(), Error> {
        let session = live.row().session;
        for row in self.db.mounts_of(&session.id).await? {
            let outcome = match row.state {
                MountState::Mounted => continue,
                // Nobody was told that it is there.
                MountState::Attaching => Outcome::TakenBack,
                MountState::Detaching | MountState::DetachingByForce => Outcome::Detached,
            };
            let gone = self.take_away(&session.sandbox_id, live, &row, outcome).await?;
            tracing::warn!(session = %session.id, path = %row.path, gone, "went on with a change of its drives");
        }
        Ok(())
    }
}

/// Takes a mount away. `false`: it is in use. A session that has ended has none.
async fn unmount(
    handle: &Arc<dyn Handle>,
    row: &DriveMountRow,
    drive: &Drive,
    force: bool,
) -> Result<bool, Error> {
    match handle.detach_drive(&mount_of(row, drive), force).await {
        Ok(()) => Ok(true),
        Err(RuntimeError::Gone(_)) => Ok(true),
        // One that does not answer is cut off from the drive as well.
        Err(RuntimeError::File(FileError { kind: FileErrorKind::Busy, .. })) => Ok(force),
        Err(error) => Err(error.into()),
    }
}

fn taken(sandbox: &str, path: &str, drive: &str) -> Error {
    conflict(format!(
        "Sandbox '{sandbox}' has drive '{drive}' at '{path}': detach it first, or choose another path."
    ))
}

/// Checks a new mount beside those that a session has.
fn check_beside(
    present: &[DriveMountRow],
    path: &str,
    drive: &Drive,
    mode: DriveMode,
) -> Result<(), Error> {
    let of = |m: &DriveMountRow| Mount { drive: m.drive_id.as_str().to_owned(), mode: m.mode };
    let mut all: Mounts = present.iter().map(|m| (m.path.clone(), of(m))).collect();
    all.insert(path.to_owned(), Mount { drive: drive.id.as_str().to_owned(), mode });
    Ok(check_mounts(&all)?)
}

impl Engine {
    /// Gives a sandbox a drive, in its running session (if it has one) and for those to come. Again is the
    /// same.
    ///
    /// # Errors
    /// 400 for a bad path, 404 for drive or sandbox, 409 when another sandbox writes it or the path is taken.
    pub async fn attach_drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        path: &str,
        mount: Mount,
    ) -> Result<Attachment, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        check_mounts(&Mounts::from([(path.to_owned(), mount.clone())]))?;
        tracing::info!(by = %who.name, %sandbox, drive = %mount.drive, "attach drive");
        let inner = Arc::clone(&self.inner);
        let (ns, sandbox, path) = (ns.clone(), sandbox.to_owned(), path.to_owned());
        self.inner.run(async move { inner.attach(&ns, &sandbox, &path, mount).await }).await
    }

    /// Takes a drive from a sandbox, in its running session and for those to come. What was written to it is
    /// on disk when this answers. With `force` also one that is in use: nothing is killed, but what is open
    /// is cut off from the drive.
    ///
    /// # Errors
    /// 404 for drive or sandbox and when it is not attached, 409 when it is in use.
    pub async fn detach_drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        drive: &str,
        sandbox: &str,
        path: Option<&str>,
        force: bool,
    ) -> Result<Attachment, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, %sandbox, %drive, force, "detach drive");
        let inner = Arc::clone(&self.inner);
        let (ns, drive, sandbox) = (ns.clone(), drive.to_owned(), sandbox.to_owned());
        let path = path.map(str::to_owned);
        let work = async move { inner.detach(&ns, &drive, &sandbox, path.as_deref(), force).await };
        self.inner.run(work).await
    }
}
