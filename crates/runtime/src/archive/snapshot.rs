//! The archive of a snapshot: `.tar.zst`.
//!
//! A tar, compressed by zstd. Its first entry is [`MANIFEST`]: which image it lies on, and what a sandbox made
//! from it needs to know. Then, for each layer of the image, what was written over it, below `u0`, `u1`, …: as the
//! files look inside, with a device 0:0 for what was removed and the record `BIVOUAC.opaque` for a folder that
//! hides what the image has in it. The last entry, [`END`], holds the hash of all bytes in front of it, so what
//! was cut off or changed on the way is found. Equal snapshots make equal archives.
//!
//! Invariant: what is imported is complete and hashed, or refused. The manifest is a stranger's: what it says of
//! the image is checked by the engine, the rest are words.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use super::pax::Xattrs;
use super::read::{Entry, Kind, Name, Reader};
use super::walk::{LeftOut, Marks, Walk};
use super::write::Writer;
use super::{
    ArchiveError, LayerStat, Limits, Unpacker, Whiteouts, decompressor, pax, refused, shown,
};

/// Version of the form. A later one that an earlier engine cannot read has another number.
pub const FORMAT: u32 = 1;
/// The first entry.
pub(crate) const MANIFEST: &str = "bivouac.json";
/// The last entry.
pub(crate) const END: &str = "bivouac.end.json";
/// Longest of the two.
const LONGEST: u64 = 256 << 10;
/// Bytes of an import after which the host's room is looked at again.
const ASK_EVERY: u64 = 64 << 20;
/// How hard zstd tries: the standard.
const LEVEL: i32 = 3;

/// What a snapshot is, in front of its archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always [`FORMAT`] when it is written.
    pub bivouac_snapshot: u32,
    /// The image that it lies on.
    pub image: ManifestImage,
    /// `node24` and the like.
    #[serde(default)]
    pub runtime: String,
    /// Working folder of its sandbox.
    #[serde(default)]
    pub cwd: String,
    /// Name of its sandbox.
    #[serde(default)]
    pub name: String,
    /// Words of its owner.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// When it was taken, ms.
    #[serde(default)]
    pub created_at: i64,
}

/// An image, in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManifestImage {
    /// Its name.
    pub name: String,
    /// The name of exactly this version.
    pub reference: String,
    /// What it is made of.
    pub digest: String,
}

/// The last entry.
#[derive(Debug, Serialize, Deserialize)]
struct End {
    blake3: String,
    entries: u64,
}

/// What goes through is hashed.
struct Hashing<W> {
    out: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// An upper, and the overlay of it and its layer of the image: both read-only.
#[derive(Debug)]
pub(crate) struct Changed {
    pub(crate) upper: OwnedFd,
    pub(crate) shown: OwnedFd,
}

/// A file of ours in the archive.
pub(super) fn own_file(name: &str, size: u64, created_ms: i64) -> Entry {
    Entry {
        name: Name::trusted(name.as_bytes().to_vec()),
        kind: Kind::File { size, pieces: None },
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: pax::Time { seconds: created_ms.div_euclid(1000), nanos: 0 },
        xattrs: Xattrs::new(),
        dropped: 0,
        opaque: false,
    }
}

/// Name of the folder of an upper.
pub(crate) fn folder_of(index: usize) -> String {
    crate::linux::rootfs::upper_name(index)
}

/// An archive that is being written.
pub(crate) struct Outgoing<'a, W: Write>(Writer<Hashing<zstd::Encoder<'a, W>>>, i64);

impl<W: Write> Outgoing<'_, W> {
    /// Begins an archive.
    ///
    /// # Errors
    /// As the output's.
    pub(crate) fn begin(out: W, manifest: &Manifest) -> io::Result<Self> {
        let out = Hashing { out: zstd::Encoder::new(out, LEVEL)?, hasher: blake3::Hasher::new() };
        let mut writer = Writer::new(out);
        let text = serde_json::to_vec_pretty(manifest)?;
        writer.entry(&own_file(MANIFEST, text.len() as u64, manifest.created_at))?;
        writer.content(&text)?;
        Ok(Self(writer, manifest.created_at))
    }

    /// Writes what was changed of a layer.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn layer(&mut self, index: usize, changed: &Changed) -> io::Result<LeftOut> {
        let prefix = folder_of(index);
        Walk::new(&mut self.0, Marks::Overlay, prefix.as_bytes())
            .upper(&changed.upper, &changed.shown)
    }

    /// Writes an empty file below the first upper: for a runtime that keeps names alone.
    ///
    /// # Errors
    /// As the output's.
    pub(crate) fn name(&mut self, name: &str) -> io::Result<()> {
        self.0.entry(&own_file(&format!("{}/{name}", folder_of(0)), 0, self.1))
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// As the output's.
    pub(crate) fn end(self) -> io::Result<()> {
        let Self(mut writer, created) = self;
        writer.finish_entry()?;
        let entries = writer.entries();
        let blake3 = writer.get_mut().hasher.finalize().to_hex().to_string();
        let text = serde_json::to_vec(&End { blake3, entries })?;
        writer.entry(&own_file(END, text.len() as u64, created))?;
        writer.content(&text)?;
        writer.finish()?.out.finish()?.flush()
    }
}

/// Asks for room before it reads more.
struct Watched<R, F> {
    input: R,
    room: F,
    left: u64,
}

impl<R: Read, F: FnMut() -> io::Result<()>> Read for Watched<R, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            (self.room)().map_err(|e| io::Error::new(io::ErrorKind::StorageFull, e))?;
            self.left = ASK_EVERY;
        }
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.input.read(&mut buffer[..most])?;
        self.left -= count as u64;
        Ok(count)
    }
}

/// An archive that is being read. What is left of its input is in here.
pub struct Incoming {
    /// What it says it is.
    pub manifest: Manifest,
    limits: Limits,
    reader: Reader<Box<dyn Read + Send>>,
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incoming").field("manifest", &self.manifest).finish_non_exhaustive()
    }
}

impl Incoming {
    /// Reads the manifest. `room` is asked from time to time whether the host has room for what comes.
    ///
    /// # Errors
    /// When it is no archive of a snapshot, or of a version that this engine does not know.
    pub(crate) fn open(
        input: impl Read + Send + 'static,
        limits: Limits,
        room: impl FnMut() -> io::Result<()> + Send + 'static,
    ) -> Result<Self, ArchiveError> {
        let input = decompressor(input, None).map_err(ArchiveError::Read)?;
        let input: Box<dyn Read + Send> = Box::new(Watched { input, room, left: 0 });
        let mut reader = Reader::hashing(input, limits);
        let foreign = || {
            let text = "it is no snapshot of Bivouac (those are made by `bivouac snapshots export`); images \
                        are taken in by `bivouac image import`";
            ArchiveError::Refused(text.to_owned())
        };
        let entry = reader.next()?.ok_or_else(foreign)?;
        if entry.name.bytes() != MANIFEST.as_bytes() {
            return Err(foreign());
        }
        let text = small(&mut reader, &entry)?;
        let version = serde_json::from_slice::<serde_json::Value>(&text).ok();
        match version.and_then(|value| value["bivouacSnapshot"].as_u64()) {
            Some(version) if version == u64::from(FORMAT) => {}
            Some(version) => {
                let text = format!(
                    "it is of version {version} of the form, and this engine reads version {FORMAT}: use the \
                     engine that made it, or a later one"
                );
                return Err(ArchiveError::Refused(text));
            }
            None => return Err(foreign()),
        }
        let manifest = serde_json::from_slice(&text)
            .map_err(|e| ArchiveError::Refused(format!("its manifest cannot be read: {e}")))?;
        Ok(Self { manifest, limits, reader })
    }

    /// What it may hold at most.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Unpacks the uppers into a volume that has their folders, and checks that nothing is missing.
    ///
    /// # Errors
    /// What was unpacked until then stays.
    pub(crate) fn unpack(
        mut self,
        volume: OwnedFd,
        layers: usize,
    ) -> Result<LayerStat, ArchiveError> {
        let mut unpacker = Unpacker::new(volume, self.limits, Whiteouts::Overlay);
        unpacker.begin();
        let stat = self.entries(layers, |entry, reader| {
            unpacker.entry(entry, reader)?;
            Ok(unpacker.stat())
        })?;
        unpacker.finish()?;
        Ok(stat)
    }

    /// Names of the files in it: for a runtime that keeps names alone.
    ///
    /// # Errors
    /// As [`Incoming::unpack`].
    pub(crate) fn names(mut self) -> Result<Vec<String>, ArchiveError> {
        let mut names = Vec::new();
        self.entries(1, |entry, _| {
            if let (Some(name), Kind::File { .. }) = (entry.name.bytes().get(3..), &entry.kind) {
                names.push(String::from_utf8_lossy(name).into_owned());
            }
            Ok(LayerStat::default())
        })?;
        Ok(names)
    }

    fn entries(
        &mut self,
        layers: usize,
        mut each: impl FnMut(
            &Entry,
            &mut Reader<Box<dyn Read + Send>>,
        ) -> Result<LayerStat, ArchiveError>,
    ) -> Result<LayerStat, ArchiveError> {
        let folders: Vec<String> = (0..layers).map(folder_of).collect();
        let mut stat = LayerStat::default();
        let mut seen = 1;
        loop {
            let entry = self.reader.next()?;
            let cut_off = || {
                ArchiveError::Read(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "its end is missing",
                ))
            };
            let entry = entry.ok_or_else(cut_off)?;
            if entry.name.bytes() == END.as_bytes() {
                self.check_end(&entry, seen)?;
                return Ok(stat);
            }
            let first = entry.name.parts().next().unwrap_or_default();
            if !folders.iter().any(|folder| folder.as_bytes() == first) {
                let text = format!("belongs to no layer of the image, which has {layers}");
                return Err(refused(entry.name.bytes(), text));
            }
            if entry.name.bytes() == first && entry.kind != Kind::Folder {
                return Err(refused(first, "is a layer and no folder"));
            }
            stat = each(&entry, &mut self.reader)?;
            seen += 1;
        }
    }

    fn check_end(&mut self, entry: &Entry, seen: u64) -> Result<(), ArchiveError> {
        let hash = self.reader.hash_before().map(|hash| hash.to_hex().to_string());
        let text = small(&mut self.reader, entry)?;
        let end: End = serde_json::from_slice(&text)
            .map_err(|e| ArchiveError::Refused(format!("its end cannot be read: {e}")))?;
        if hash.as_deref() != Some(end.blake3.as_str()) || end.entries != seen {
            let text = "it was changed after it was made: its hash is another one";
            return Err(ArchiveError::Refused(text.to_owned()));
        }
        match self.reader.next()? {
            None => Ok(()),
            Some(more) => Err(refused(more.name.bytes(), "stands behind the end")),
        }
    }
}

/// The content of a small file of ours.
fn small(
    reader: &mut Reader<Box<dyn Read + Send>>,
    entry: &Entry,
) -> Result<Vec<u8>, ArchiveError> {
    let name = shown(entry.name.bytes());
    match entry.kind {
        Kind::File { size, pieces: None } if size <= LONGEST => {
            let mut text = vec![0u8; usize::try_from(size).unwrap_or(0)];
            let mut have = 0;
            while have < text.len() {
                match reader.body(&mut text[have..])? {
                    0 => break,
                    count => have += count,
                }
            }
            Ok(text)
        }
        _ => Err(ArchiveError::Refused(format!("'{name}' is not the file that it should be"))),
    }
}
