//! Drives: get or make, list, show, delete, fork.
//!
//! (Mounting them is in `mounts`, on a running sandbox in `attach`, their files in `files`, what a crash left in
//! `settle`.) Invariants: a drive is told to clients only while its data is there: its record comes first
//! (`making`) and goes last (`deleting`), and the engine that starts removes what is in between. A drive that
//! anybody has mounted is not deleted: a mount moves the generation that a delete compares.

mod attach;
mod files;
mod mounts;
mod settle;

use std::sync::Arc;

use bivouac_runtime::DriveUsage;
use bivouac_store::{
    DriveFilter, DriveOrder, DriveRow, DriveState, Durability, Position, SortKey, StoreError,
};
use bivouac_types::access::Verb;
use bivouac_types::drive::{DEFAULT_DRIVE_BYTES, Drive, check_drive_name, check_drive_size};
use bivouac_types::id::DriveId;
use bivouac_types::name::Namespace;

pub use attach::Attachment;

use crate::Engine;
use crate::api::{Page, Principal};
use crate::cursor;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::inner::{Inner, busy};
use crate::resolve::{REGION, check_namespace};

/// Longest region.
const MAX_REGION: usize = 255;
/// How often a compare-and-set is tried again.
const ATTEMPTS: u32 = 50;

/// A drive that is wanted.
#[derive(Debug, Clone, Default)]
pub struct NewDrive {
    /// Absent: any, and the default one for a new drive.
    pub region: Option<String>,
    /// Most bytes that it may hold. Absent: any, and 1 TiB for a new drive.
    pub max_bytes: Option<i64>,
}

/// A drive and who writes it.
#[derive(Debug, Clone)]
pub struct DriveView {
    /// The drive.
    pub drive: Drive,
    /// Name of the sandbox that has it mounted for writing.
    pub writer: Option<String>,
}

/// What a list of drives is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortDrives {
    /// Time of creation.
    #[default]
    CreatedAt,
    /// Time of the last change.
    UpdatedAt,
    /// Name.
    Name,
}

/// Which drives to list: newest first unless told otherwise.
#[derive(Debug, Clone, Default)]
pub struct ListDrives {
    /// 1..=50; absent is 20.
    pub limit: Option<u32>,
    /// `next` of the page before.
    pub cursor: Option<String>,
    /// The order.
    pub sort_by: SortDrives,
    /// Smallest or oldest first.
    pub ascending: bool,
    /// Only names that start so.
    pub name_prefix: Option<String>,
}

/// Bytes as the runtime takes them.
fn bytes(max_bytes: i64) -> u64 {
    u64::try_from(max_bytes).unwrap_or(0)
}

fn no_drive(name: &str) -> Error {
    let shown: String = name.chars().take(80).collect();
    Error::not_found(format!("Drive '{}' was not found in this project.", shown.escape_debug()))
}

fn conflict(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Conflict, "conflict", message)
}

/// The lock of a name while there may be no drive of it yet.
fn name_lock(ns: &Namespace, name: &str) -> String {
    format!("{}/{} {name}", ns.team, ns.project)
}

impl Inner {
    /// A drive that can be used, by its name or id.
    pub(crate) async fn drive_named(&self, ns: &Namespace, name: &str) -> Result<DriveRow, Error> {
        let by_id = match DriveId::parse(name) {
            Ok(id) => self.db.drive(&id).await?.filter(|row| row.drive.namespace == *ns),
            Err(_) => None,
        };
        let row = match by_id {
            Some(row) => Some(row),
            None => self.db.drive_by_name(ns, name).await?,
        };
        row.filter(|row| row.state == DriveState::Ready).ok_or_else(|| no_drive(name))
    }

    async fn drive_view(&self, drive: Drive) -> Result<DriveView, Error> {
        let writer = match &drive.writer {
            Some(session) => self.db.session(session).await?.map(|row| row.session.sandbox_name),
            None => None,
        };
        Ok(DriveView { drive, writer })
    }

    /// Why a drive cannot be had for writing: names who has it.
    pub(crate) async fn held(&self, drive: &Drive) -> Result<Error, Error> {
        let view = self.drive_view(drive.clone()).await?;
        let Some(sandbox) = view.writer else {
            return Ok(busy(&format!("drive '{}'", drive.name)));
        };
        let message = format!(
            "Drive '{}' is mounted read-write by sandbox '{sandbox}'. One sandbox at a time writes a drive: \
             stop that one or detach the drive from it, mount it in mode 'snapshot', or fork the drive.",
            drive.name
        );
        let session = drive.writer.as_ref().map(ToString::to_string);
        Ok(conflict(message).with("sandbox", sandbox).with("sessionId", session))
    }

    /// Makes a drive whose name nobody has. Holds the name's lock. `None`: somebody has it after all.
    async fn make_drive(
        self: &Arc<Self>,
        mut row: DriveRow,
        from: Option<&DriveId>,
    ) -> Result<Option<Drive>, Error> {
        let mut tx = self.db.begin(Durability::Power).await?;
        match tx.insert_drive(&row).await {
            Ok(()) => tx.commit().await?,
            Err(StoreError::Taken(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let made = async {
            self.reach(FaultPoint::DriveInserted).await?;
            let id = row.drive.id.as_str();
            let from = from.map(DriveId::as_str);
            self.runtime.make_drive(id, from, bytes(row.drive.max_bytes)).await?;
            self.reach(FaultPoint::DriveMade).await?;
            let mut tx = self.db.begin(Durability::Power).await?;
            tx.move_drive(&mut row, DriveState::Ready, self.now()).await?;
            tx.commit().await?;
            Ok::<_, Error>(())
        };
        if let Err(error) = made.await {
            self.undo_drive(&row.drive.id).await;
            return Err(error);
        }
        self.reach(FaultPoint::DriveReady).await?;
        Ok(Some(row.drive))
    }

    fn draft_drive(&self, ns: &Namespace, name: &str) -> Result<DriveRow, Error> {
        let now = self.now();
        let drive = Drive {
            id: self.ids.drive(now)?,
            namespace: ns.clone(),
            name: name.to_owned(),
            node: self.config.node.clone(),
            region: REGION.to_owned(),
            max_bytes: DEFAULT_DRIVE_BYTES,
            initialized: false,
            parent_id: None,
            root_id: None,
            writer: None,
            fence: 0,
            created_at: now,
            updated_at: now,
        };
        Ok(DriveRow { drive, state: DriveState::Making, generation: 1 })
    }

    async fn get_or_make(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        wanted: &NewDrive,
    ) -> Result<(Drive, bool), Error> {
        let _held = self.drive_locks.lock(&name_lock(ns, name)).await;
        for _ in 0..ATTEMPTS {
            match self.db.drive_by_name(ns, name).await? {
                Some(row) if row.state == DriveState::Ready => {
                    check_same(&row.drive, wanted)?;
                    return Ok((row.drive, false));
                }
                // On its way out, or left by an error: nobody makes it, that lock is held here.
                Some(row) => {
                    let _held = self.drive_locks.lock(row.drive.id.as_str()).await;
                    self.finish_drive(&row.drive.id).await?;
                }
                None => {
                    self.admit().await?;
                    let mut row = self.draft_drive(ns, name)?;
                    let d = &mut row.drive;
                    d.region = wanted.region.clone().unwrap_or_else(|| REGION.to_owned());
                    d.max_bytes = wanted.max_bytes.unwrap_or(DEFAULT_DRIVE_BYTES);
                    if let Some(drive) = self.make_drive(row, None).await? {
                        return Ok((drive, true));
                    }
                }
            }
        }
        Err(busy(&format!("drive '{name}'")))
    }

    async fn fork_drive(
        self: &Arc<Self>,
        ns: &Namespace,
        source: &str,
        name: &str,
    ) -> Result<Drive, Error> {
        let _name = self.drive_locks.lock(&name_lock(ns, name)).await;
        let id = self.drive_named(ns, source).await?.drive.id;
        // It must not be deleted while it is copied.
        let _held = self.drive_locks.lock(id.as_str()).await;
        let parent = self.drive_named(ns, id.as_str()).await?.drive;
        self.admit().await?;
        let mut row = self.draft_drive(ns, name)?;
        let d = &mut row.drive;
        d.region.clone_from(&parent.region);
        d.max_bytes = parent.max_bytes;
        d.initialized = parent.initialized;
        d.parent_id = Some(parent.id.clone());
        d.root_id = Some(parent.root_id.clone().unwrap_or_else(|| parent.id.clone()));
        match self.make_drive(row, Some(&parent.id)).await? {
            Some(drive) => Ok(drive),
            None => Err(conflict(format!(
                "A drive with the name '{name}' already exists for this project."
            ))),
        }
    }

    async fn delete_drive(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
    ) -> Result<DriveView, Error> {
        let id = self.drive_named(ns, name).await?.drive.id;
        let _held = self.drive_locks.lock(id.as_str()).await;
        for _ in 0..ATTEMPTS {
            let mut row = self.drive_named(ns, id.as_str()).await?;
            if let Some(error) = self.attached(&row.drive).await? {
                return Err(error);
            }
            let mut tx = self.db.begin(Durability::Power).await?;
            match tx.move_drive(&mut row, DriveState::Deleting, self.now()).await {
                Ok(()) => tx.commit().await?,
                // Somebody mounted it, or it was written, in between: another look.
                Err(StoreError::Changed { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            let gone = async {
                self.reach(FaultPoint::DriveDeleteIntent).await?;
                self.finish_drive(&id).await
            };
            if let Err(error) = gone.await {
                self.undo_drive(&id).await;
                return Err(error);
            }
            return self.drive_view(row.drive).await;
        }
        Err(busy(&format!("drive '{name}'")))
    }

    /// The refusal of a delete, when somebody has the drive.
    async fn attached(&self, drive: &Drive) -> Result<Option<Error>, Error> {
        let mut names = Vec::new();
        for mount in self.db.mounts_of_drive(&drive.id).await? {
            if let Some(row) = self.db.session(&mount.session_id).await?
                && !names.contains(&row.session.sandbox_name)
            {
                names.push(row.session.sandbox_name);
            }
        }
        let Some(first) = names.first().cloned() else { return Ok(None) };
        let message = format!(
            "Drive '{}' is attached to sandbox '{}'; stop it or detach the drive first.",
            drive.name,
            names.join("', '")
        );
        Ok(Some(conflict(message).with("sandbox", first)))
    }
}

/// Refuses to take a drive for one that differs from what is wanted.
fn check_same(drive: &Drive, wanted: &NewDrive) -> Result<(), Error> {
    let name = &drive.name;
    if let Some(region) = wanted.region.as_ref().filter(|region| **region != drive.region) {
        let has = &drive.region;
        let message = format!("Drive '{name}' exists in region '{has}', not in '{region}'.");
        return Err(conflict(message));
    }
    if let Some(size) = wanted.max_bytes.filter(|size| *size != drive.max_bytes) {
        let has = drive.max_bytes;
        let message = format!("Drive '{name}' exists with a size of {has} bytes, not {size}.");
        return Err(conflict(message));
    }
    Ok(())
}

fn check_region(region: &str) -> Result<(), Error> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if region.is_empty() || region.len() > MAX_REGION || !region.bytes().all(good) {
        let reason = "Invalid region: must have 1 to 255 letters, digits, '-' and '_'";
        return Err(Error::invalid(reason));
    }
    Ok(())
}

impl Engine {
    /// The drive of that name, made when there is none. Answers whether it was made.
    ///
    /// # Errors
    /// 400 for a bad name, size or region, 409 when it exists with another size or region, 429 when the host
    /// is full.
    pub async fn get_or_create_drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        wanted: NewDrive,
    ) -> Result<(DriveView, bool), Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        check_namespace(ns)?;
        check_drive_name("name", name)?;
        wanted.max_bytes.map(check_drive_size).transpose()?;
        wanted.region.as_deref().map(check_region).transpose()?;
        let inner = Arc::clone(&self.inner);
        let (by, ns, name) = (who.name.clone(), ns.clone(), name.to_owned());
        let work = async move {
            let (drive, made) = inner.get_or_make(&ns, &name, &wanted).await?;
            if made {
                tracing::info!(%by, drive = %name, id = %drive.id, "drive made");
            }
            Ok((inner.drive_view(drive).await?, made))
        };
        self.inner.run(work).await
    }

    /// A drive by its name or id.
    ///
    /// # Errors
    /// 404.
    pub async fn drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<DriveView, Error> {
        who.may(Verb::Read, ns)?;
        let drive = self.inner.drive_named(ns, name).await?.drive;
        self.inner.drive_view(drive).await
    }

    /// Drives of a namespace.
    ///
    /// # Errors
    /// 400 for a bad limit or cursor.
    pub async fn drives(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListDrives,
    ) -> Result<Page<DriveView>, Error> {
        who.may(Verb::Read, ns)?;
        let limit = cursor::limit(query.limit)?;
        let (order, list) = match query.sort_by {
            SortDrives::CreatedAt => (DriveOrder::CreatedAt, "drives.createdAt"),
            SortDrives::UpdatedAt => (DriveOrder::UpdatedAt, "drives.updatedAt"),
            SortDrives::Name => (DriveOrder::Name, "drives.name"),
        };
        let filter = DriveFilter {
            namespace: ns.clone(),
            name_prefix: query.name_prefix,
            order,
            ascending: query.ascending,
            after: cursor::read_opt(list, query.ascending, query.cursor.as_deref())?,
            limit: i64::try_from(limit + 1).unwrap_or(i64::MAX),
        };
        let rows = self.inner.db.drives(&filter).await?;
        let (rows, next) = cursor::page(rows, limit, list, query.ascending, |row| {
            let d = &row.drive;
            let key = match order {
                DriveOrder::CreatedAt => SortKey::Int(d.created_at),
                DriveOrder::UpdatedAt => SortKey::Int(d.updated_at),
                DriveOrder::Name => SortKey::Text(d.name.clone()),
            };
            Position { key, id: d.id.as_str().to_owned() }
        });
        let mut items = Vec::with_capacity(rows.len());
        for row in rows {
            items.push(self.inner.drive_view(row.drive).await?);
        }
        Ok(Page { items, next })
    }

    /// Deletes a drive and all that it holds.
    ///
    /// # Errors
    /// 404, 409 while a sandbox has it mounted.
    pub async fn delete_drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<DriveView, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, drive = %name, "delete drive");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        self.inner.run(async move { inner.delete_drive(&ns, &name).await }).await
    }

    /// Makes a drive out of another one, as that is at this moment, whoever has it mounted.
    ///
    /// # Errors
    /// 400 for a bad name, 404 for the source, 409 for a name that is taken.
    pub async fn fork_drive(
        &self,
        who: &Principal,
        ns: &Namespace,
        source: &str,
        name: &str,
    ) -> Result<DriveView, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        check_drive_name("name", name)?;
        tracing::info!(by = %who.name, %source, drive = %name, "fork drive");
        let inner = Arc::clone(&self.inner);
        let (ns, source, name) = (ns.clone(), source.to_owned(), name.to_owned());
        let work = async move {
            let drive = inner.fork_drive(&ns, &source, &name).await?;
            inner.drive_view(drive).await
        };
        self.inner.run(work).await
    }

    /// What a drive holds.
    ///
    /// # Errors
    /// 404.
    pub async fn drive_usage(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<(DriveView, DriveUsage), Error> {
        who.may(Verb::Read, ns)?;
        let drive = self.inner.drive_named(ns, name).await?.drive;
        let usage = self.inner.runtime.drive_usage(drive.id.as_str()).await?;
        Ok((self.inner.drive_view(drive).await?, usage))
    }
}
