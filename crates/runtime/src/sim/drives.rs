//! Drives without a kernel: sets of names by number, so that a drive's place can be taken by a copy while
//! somebody still writes into the old one.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use bivouac_types::id::SessionId;

use super::{Sim, broken};
use crate::{
    DriveEntry, DriveMount, DriveUsage, Drives, EntryKind, FileError, FileErrorKind, FileReader,
    FileWriter, RuntimeError,
};

/// All drives of a host.
#[derive(Debug, Default)]
pub(super) struct SimDrives {
    /// Every volume that was ever made.
    volumes: Vec<BTreeSet<String>>,
    drives: BTreeMap<String, usize>,
    views: BTreeMap<String, usize>,
    mounts: BTreeMap<(SessionId, String), usize>,
    busy: BTreeSet<(SessionId, String)>,
    fail_attaches: usize,
}

impl SimDrives {
    fn add(&mut self, files: BTreeSet<String>) -> usize {
        self.volumes.push(files);
        self.volumes.len() - 1
    }

    /// Names of all private copies.
    pub(super) fn view_names(&self) -> Vec<String> {
        self.views.keys().cloned().collect()
    }

    fn copy(&mut self, drive: &str) -> Result<usize, RuntimeError> {
        let number = self.number(drive)?;
        let files = self.volumes[number].clone();
        Ok(self.add(files))
    }

    fn number(&self, drive: &str) -> Result<usize, RuntimeError> {
        self.drives.get(drive).copied().ok_or_else(|| RuntimeError::Io {
            what: format!("open drive {drive}"),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// Mounts a drive, or a new copy of it.
    pub(super) fn mount(
        &mut self,
        session: &SessionId,
        mount: &DriveMount,
    ) -> Result<(), RuntimeError> {
        let number = match &mount.view {
            Some(view) => {
                let number = self.copy(&mount.drive)?;
                self.views.insert(view.clone(), number);
                number
            }
            None => self.number(&mount.drive)?,
        };
        self.mounts.insert((session.clone(), mount.at.clone()), number);
        Ok(())
    }

    /// Nothing of the session is left.
    pub(super) fn forget(&mut self, session: &SessionId) {
        self.mounts.retain(|(of, _), _| of != session);
        self.busy.retain(|(of, _)| of != session);
        let prefix = format!("{session}.");
        self.views.retain(|name, _| !name.starts_with(&prefix));
    }

    /// The files of the mount that a path of a session is below, and its name there.
    pub(super) fn find<'a>(
        &mut self,
        session: &SessionId,
        path: &'a str,
    ) -> Option<(&mut BTreeSet<String>, &'a str)> {
        let below = |at: &str| path.strip_prefix(at)?.strip_prefix('/');
        let ((_, at), number) =
            self.mounts.iter().find(|((of, at), _)| of == session && below(at).is_some())?;
        let name = below(at)?;
        self.volumes.get_mut(*number).map(|files| (files, name))
    }
}

impl Sim {
    /// Names of drives whose data is there.
    #[must_use]
    pub fn drive_names(&self) -> Vec<String> {
        self.world().drives.drives.keys().cloned().collect()
    }

    /// Names of private copies.
    #[must_use]
    pub fn view_names(&self) -> Vec<String> {
        self.world().drives.views.keys().cloned().collect()
    }

    /// What a drive holds.
    #[must_use]
    pub fn drive_files(&self, drive: &str) -> BTreeSet<String> {
        let world = self.world();
        let number = world.drives.drives.get(drive);
        number.map(|number| world.drives.volumes[*number].clone()).unwrap_or_default()
    }

    /// Makes the data of a drive that no engine knows.
    pub fn plant_drive(&self, drive: &str) {
        let mut world = self.world();
        let number = world.drives.add(BTreeSet::new());
        world.drives.drives.insert(drive.to_owned(), number);
    }

    /// Somebody in the session has a file of the mount open.
    pub fn use_mount(&self, session: &SessionId, at: &str) {
        self.world().drives.busy.insert((session.clone(), at.to_owned()));
    }

    /// Makes the next `count` attaches fail after they were done.
    pub fn fail_attaches(&self, count: usize) {
        self.world().drives.fail_attaches = count;
    }

    /// Where a session has drives.
    #[must_use]
    pub fn mounts_of(&self, session: &SessionId) -> Vec<String> {
        let world = self.world();
        let own = world.drives.mounts.keys().filter(|(of, _)| of == session);
        own.map(|(_, at)| at.clone()).collect()
    }

    /// `touch` and `test` of a name on a drive: the exit code. `None`: it is not on one.
    pub(super) fn on_drive(&self, id: &SessionId, argv: &[&str]) -> Option<(String, i32)> {
        let [verb @ ("touch" | "test"), path] = argv else { return None };
        let mut world = self.world();
        let (files, name) = world.drives.find(id, path)?;
        let code = if *verb == "touch" {
            files.insert(name.to_owned());
            0
        } else {
            i32::from(!files.contains(name))
        };
        Some((String::new(), code))
    }

    pub(super) fn attach(&self, id: &SessionId, mount: &DriveMount) -> Result<(), RuntimeError> {
        let mut world = self.world();
        if !world.sessions.get(id).is_some_and(|session| *session.alive.borrow()) {
            return Err(RuntimeError::Gone(id.clone()));
        }
        world.drives.mount(id, mount)?;
        if world.drives.fail_attaches > 0 {
            world.drives.fail_attaches -= 1;
            return Err(broken("attach a drive"));
        }
        Ok(())
    }

    pub(super) fn detach(
        &self,
        id: &SessionId,
        mount: &DriveMount,
        force: bool,
    ) -> Result<(), RuntimeError> {
        let mut world = self.world();
        if !world.sessions.get(id).is_some_and(|session| *session.alive.borrow()) {
            return Err(RuntimeError::Gone(id.clone()));
        }
        let place = (id.clone(), mount.at.clone());
        if world.drives.busy.contains(&place) {
            if !force {
                let message = format!("'{}' is in use", mount.at);
                return Err(FileError { kind: FileErrorKind::Busy, message }.into());
            }
            // What has it open goes on with what it has: the mount is only out of sight.
            return Ok(());
        }
        world.drives.mounts.remove(&place);
        Ok(())
    }
}

#[async_trait]
impl Drives for Sim {
    async fn make_drive(
        &self,
        drive: &str,
        from: Option<&str>,
        _max_bytes: u64,
    ) -> Result<(), RuntimeError> {
        tokio::task::yield_now().await;
        let mut world = self.world();
        let number = match from {
            Some(source) => world.drives.copy(source)?,
            None => world.drives.add(BTreeSet::new()),
        };
        world.drives.drives.insert(drive.to_owned(), number);
        Ok(())
    }

    async fn remove_drive(&self, drive: &str) -> Result<(), RuntimeError> {
        self.world().drives.drives.remove(drive);
        Ok(())
    }

    async fn drives(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(self.drive_names())
    }

    async fn drive_usage(&self, drive: &str) -> Result<DriveUsage, RuntimeError> {
        let world = self.world();
        let number = world.drives.number(drive)?;
        Ok(DriveUsage { bytes: world.drives.volumes[number].len() as u64, unique_bytes: None })
    }

    async fn fence_drive(&self, drive: &str, _max_bytes: u64) -> Result<(), RuntimeError> {
        let mut world = self.world();
        let number = world.drives.copy(drive)?;
        world.drives.drives.insert(drive.to_owned(), number);
        Ok(())
    }

    async fn remove_view(&self, view: &str) -> Result<(), RuntimeError> {
        self.world().drives.views.remove(view);
        Ok(())
    }

    async fn list_drive(
        &self,
        drive: &str,
        _path: &str,
        most: usize,
    ) -> Result<(Vec<DriveEntry>, bool), RuntimeError> {
        let world = self.world();
        let files = &world.drives.volumes[world.drives.number(drive)?];
        let entry = |name: &String| DriveEntry {
            name: name.clone(),
            kind: EntryKind::File,
            size: 1,
            mode: 0o644,
            owner: (1000, 1000),
            modified_at: 0,
            target: None,
        };
        Ok((files.iter().take(most).map(entry).collect(), files.len() > most))
    }

    async fn read_drive(&self, drive: &str, path: &str) -> Result<FileReader, RuntimeError> {
        self.world().drives.number(drive)?;
        let message = format!("{path}: a simulated drive holds names only");
        Err(FileError { kind: FileErrorKind::NotFound, message }.into())
    }

    async fn write_drive(
        &self,
        drive: &str,
        path: &str,
        _size: u64,
        _mode: u32,
    ) -> Result<FileWriter, RuntimeError> {
        self.world().drives.number(drive)?;
        let message = format!("{path}: a simulated drive takes no files");
        Err(FileError { kind: FileErrorKind::Other, message }.into())
    }
}
