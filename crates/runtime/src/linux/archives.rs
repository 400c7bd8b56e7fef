//! Snapshots on their way out and in: see [`crate::archive`].
//!
//! Invariant: what is shown of a snapshot for its export is mounted detached, by nobody's name, and goes with
//! the last descriptor; an import is a session's volume until it is whole, and a snapshot on disk after that.

use std::io::{self, BufWriter};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use async_trait::async_trait;
use bivouac_types::id::SessionId;
use rustix::event::{PollFd, PollFlags};
use rustix::pipe::PipeFlags;
use tokio::sync::oneshot;

use super::{LinuxRuntime, blocking, overlay, rootfs};
use crate::archive::oci::{self, About};
use crate::archive::snapshot::{Changed, Outgoing};
use crate::archive::walk::{LeftOut, Marks, Walk};
use crate::archive::write::Writer;
use crate::archive::{ArchiveError, Archives, Format, Incoming, LayerStat, Limits, Manifest};
use crate::pool::Kind;
use crate::proto::Layer;
use crate::{Completion, FileReader, RuntimeError, SnapshotStat};

/// Room in a pipe, so that the two ends need not meet for each page.
const PIPE: usize = 1 << 20;
/// How much an export hands to its pipe at once.
const PIECE: usize = 256 << 10;

/// A layer of a snapshot's image, and what was changed of it.
struct Source {
    /// Where it is inside, without slashes at its ends.
    at: String,
    image: OwnedFd,
    changed: Changed,
}

/// Opens everything that an export reads.
fn sources(way: overlay::Way, snapshot: &Path, layers: &[Layer]) -> io::Result<Vec<Source>> {
    let each = layers.iter().enumerate();
    each.map(|(index, layer)| {
        let upper = snapshot.join(rootfs::upper_name(index));
        // What is mounted below a layer on the host is no part of it.
        let upper = rootfs::clone_tree(&upper.to_string_lossy())?;
        let image = rootfs::clone_tree(&layer.lower)?;
        let shown = overlay::shown(way, &[upper.as_fd(), image.as_fd()])?;
        let at = layer.at.trim_matches('/').to_owned();
        Ok(Source { at, image, changed: Changed { upper, shown } })
    })
    .collect()
}

fn write(
    out: OwnedFd,
    name: &str,
    manifest: &Manifest,
    format: Format,
    sources: &[Source],
) -> io::Result<()> {
    let watch = out.try_clone()?;
    let out = BufWriter::with_capacity(PIECE, std::fs::File::from(out));
    match format {
        Format::TarZst => {
            let mut archive = Outgoing::begin(out, manifest)?;
            for (index, source) in sources.iter().enumerate() {
                let left_out = archive.layer(index, &source.changed)?;
                tell(name, left_out);
            }
            archive.end()
        }
        Format::Oci => {
            let about = About {
                name: oci::image_name(&manifest.name, name),
                cwd: if manifest.cwd.is_empty() { "/".to_owned() } else { manifest.cwd.clone() },
                labels: manifest.labels.clone(),
                created_at: manifest.created_at,
                image: manifest.image.reference.clone(),
            };
            let whole: oci::Layer<'_> =
                Box::new(|out| layer(out, sources, |walk, source| walk.whole(&source.image)));
            let changes: oci::Layer<'_> = Box::new(|out| {
                layer(out, sources, |walk, source| {
                    walk.upper(&source.changed.upper, &source.changed.shown)
                })
            });
            let created = format!("bivouac snapshot {name}");
            let layers = [(manifest.image.reference.as_str(), whole), (created.as_str(), changes)];
            oci::write(out, &about, &layers, &|| is_closed(&watch))
        }
    }
}

/// Whether nobody has a pipe's other end.
fn is_closed(pipe: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::empty())];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    let asked = rustix::event::poll(&mut polled, Some(&now));
    asked.is_ok() && polled[0].revents().contains(PollFlags::ERR)
}

/// A layer of an OCI image out of one tree for each of ours.
fn layer(
    out: &mut dyn io::Write,
    sources: &[Source],
    each: impl Fn(Walk<'_, &mut dyn io::Write>, &Source) -> io::Result<LeftOut>,
) -> io::Result<LeftOut> {
    let mut writer = Writer::new(out);
    let mut sum = LeftOut::default();
    for source in sources {
        let walk = Walk::new(&mut writer, Marks::Oci, source.at.as_bytes());
        sum.add(each(walk, source)?);
    }
    writer.finish()?;
    Ok(sum)
}

fn tell(name: &str, left_out: LeftOut) {
    if left_out != LeftOut::default() {
        let LeftOut { special, xattrs, session } = left_out;
        tracing::info!(snapshot = name, special, xattrs, session, "left out of an export");
    }
}

#[async_trait]
impl Archives for LinuxRuntime {
    async fn export(
        &self,
        name: &str,
        manifest: &Manifest,
        format: Format,
    ) -> Result<FileReader, RuntimeError> {
        if !self.pool.has_snapshot(name) {
            return Err(RuntimeError::NoSnapshot(name.to_owned()));
        }
        let layers = self.layers(&manifest.image.reference).await?;
        let (way, snapshot) = (self.way, self.pool.volume(Kind::Snapshot, name));
        let what = format!("export snapshot {name}");
        let sources = blocking(what.clone(), move || {
            // A thread of its own: one way of mounting changes the mount namespace of who goes it.
            let opened = std::thread::spawn(move || sources(way, &snapshot, &layers)).join();
            opened.unwrap_or_else(|_| Err(io::Error::other("it has panicked")))
        })
        .await?;
        let (data, out) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
            .map_err(|e| RuntimeError::Io { what: what.clone(), source: e.into() })?;
        let _ = rustix::pipe::fcntl_setpipe_size(&out, PIPE);
        let (answer, done) = oneshot::channel();
        let (name, manifest) = (name.to_owned(), manifest.clone());
        tokio::task::spawn_blocking(move || {
            let written = write(out, &name, &manifest, format, &sources);
            // Nobody may be left to hear of it.
            let _ = answer.send(written.map_err(|source| RuntimeError::Io { what, source }));
        });
        let done = Completion::new(async move {
            let gone = || RuntimeError::Io {
                what: "export a snapshot".to_owned(),
                source: io::Error::other("it has ended early"),
            };
            done.await.unwrap_or_else(|_| Err(gone()))
        });
        // Nobody knows how long it will be.
        Ok(FileReader { size: 0, data, done })
    }

    async fn open_archive(&self, data: OwnedFd, limits: Limits) -> Result<Incoming, ArchiveError> {
        let pool = self.pool.clone();
        let _ = rustix::pipe::fcntl_setpipe_size(&data, PIPE);
        in_thread(move || Incoming::open(std::fs::File::from(data), limits, move || pool.admit()))
            .await
    }

    async fn import(
        &self,
        archive: Incoming,
        image: &str,
        scratch: &SessionId,
        name: &str,
    ) -> Result<SnapshotStat, ArchiveError> {
        let layers = self.layers(image).await.map_err(|e| ArchiveError::Refused(e.to_string()))?;
        let (pool, count) = (self.pool.clone(), layers.len());
        let (scratch, name) = (scratch.as_str().to_owned(), name.to_owned());
        in_thread(move || {
            let host = |what: &str| {
                let what = what.to_owned();
                move |source: io::Error| ArchiveError::Host { what, source }
            };
            let made = || -> Result<SnapshotStat, ArchiveError> {
                pool.make_session(&scratch, None, count, archive.limits().bytes)
                    .map_err(host("make room for the import"))?;
                let volume = rootfs::clone_tree(&pool.session(&scratch).to_string_lossy())
                    .map_err(host("open the volume of the import"))?;
                let stat = archive.unpack(volume, count)?;
                if (stat.devices, stat.xattrs, stat.ids) != (0, 0, 0) {
                    let LayerStat { devices, xattrs, ids, .. } = stat;
                    tracing::info!(snapshot = name, devices, xattrs, ids, "left out of an import");
                }
                pool.snapshot(&scratch, &name).map_err(host("keep the import"))?;
                let bytes = pool.snapshot_bytes(&name).map_err(host("measure the import"))?;
                Ok(SnapshotStat { bytes })
            };
            let made = made();
            let removed = pool.remove_session(&scratch).map_err(host("clean up after the import"));
            made.and_then(|stat| removed.map(|()| stat))
        })
        .await
    }
}

async fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
) -> Result<T, ArchiveError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| {
        Err(ArchiveError::Host { what: "read an archive".to_owned(), source: io::Error::other(e) })
    })
}
