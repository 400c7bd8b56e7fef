//! Reads images out of files: what `docker save` writes, and OCI layouts as archives or folders.
//!
//! Invariants: nothing in the input names a place: its files are copied under numbers, and found again by the
//! name that they had or by the hash of what was copied; what a layout names by digest is looked up by
//! that hash, so it is what the digest says. Called by `bivouac image import`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context, SHA256};
use bivouac_types::oci::{
    Descriptor, Document, Platform, check_local_name, choose, read_config, read_document,
};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use super::{Cancel, Layer, Parts, make, present};
use crate::archive::decompressor;
use crate::image::blobs::written;
use crate::image::build::{BuildError, Progress};
use crate::image::folder::{ImageFolder, Manifest};

/// Most files of an input.
const MAX_FILES: usize = 20_000;
/// Most bytes of an input.
const MAX_BYTES: u64 = 64 << 30;
/// Longest document.
const MAX_DOCUMENT: u64 = 8 << 20;
/// Deepest folder of a layout.
const MAX_DEPTH: usize = 4;
/// How many indexes lie in one another at most.
const MAX_NESTED: usize = 4;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const FULL_NAME: &str = "io.containerd.image.name";

/// Where an image is read from.
pub enum Input {
    /// An archive, compressed or not.
    Archive(Box<dyn Read + Send>),
    /// A folder with a layout in it.
    Folder(PathBuf),
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Archive(_) => "Archive",
            Self::Folder(_) => "Folder",
        })
    }
}

/// What is wanted of an input.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The name that the image gets; absent: the one that it has in the input.
    pub name: Option<String>,
    /// Which of several images, by the name that it has in the input.
    pub reference: Option<String>,
    /// What the input is called, for people.
    pub source: String,
}

fn unfit(text: impl Into<String>) -> BuildError {
    BuildError::Unfit(text.into())
}

/// Makes an image of an input. Answers whether something had to be made.
///
/// # Errors
/// What is wrong with the input; nothing half-made is left.
pub fn import(
    folder: &ImageFolder,
    input: Input,
    wanted: &Wanted,
    cancel: &Cancel,
    mut tell: impl FnMut(Progress),
) -> Result<(Manifest, bool), BuildError> {
    folder.ensure()?;
    folder.sweep()?;
    let (work, held) = folder.make_import()?;
    let made = (|| {
        tell(Progress::Step("reading the image".to_owned()));
        let mut spool = Spool::new(&work, cancel);
        match input {
            Input::Archive(archive) => spool.archive(archive)?,
            Input::Folder(path) => spool.folder(&path)?,
        }
        let parts = spool.parts(wanted)?;
        if let Some(manifest) = &parts.manifest
            && let Some(found) = present(folder, &parts.name, &parts.source, manifest)?
        {
            return Ok((found, false));
        }
        make(folder, parts, cancel, &mut tell).map(|manifest| (manifest, true))
    })();
    let removed = std::fs::remove_dir_all(&work);
    drop(held);
    let made = made?;
    removed?;
    Ok(made)
}

/// One file of the input.
#[derive(Debug, Clone)]
struct Piece {
    file: PathBuf,
    digest: String,
    size: u64,
}

/// The files of an input.
struct Spool<'a> {
    work: &'a Path,
    cancel: &'a Cancel,
    pieces: Vec<Piece>,
    by_name: BTreeMap<String, usize>,
    /// Names that stand for other names.
    links: BTreeMap<String, String>,
    bytes: u64,
}

/// One image of `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl<'a> Spool<'a> {
    fn new(work: &'a Path, cancel: &'a Cancel) -> Self {
        Self {
            work,
            cancel,
            pieces: Vec::new(),
            by_name: BTreeMap::new(),
            links: BTreeMap::new(),
            bytes: 0,
        }
    }

    fn archive(&mut self, archive: Box<dyn Read + Send>) -> Result<(), BuildError> {
        let broken = |e: io::Error| unfit(format!("the archive cannot be read: {e}"));
        let mut archive = tar::Archive::new(decompressor(archive, None).map_err(broken)?);
        for entry in archive.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            let name = normal(&entry.path_bytes(), "")?;
            let kind = entry.header().entry_type();
            if kind.is_file() {
                self.take(name, &mut entry)?;
            } else if kind.is_symlink() || kind.is_hard_link() {
                // Older versions of docker share layers in this way.
                let target = entry.link_name_bytes().unwrap_or_default();
                let from = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                let from = if kind.is_symlink() { from } else { "" };
                let target = normal(&target, from)?;
                self.links.insert(name, target);
            }
        }
        Ok(())
    }

    fn folder(&mut self, path: &Path) -> Result<(), BuildError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let named = |e: rustix::io::Errno| {
            unfit(format!("the folder {} cannot be read: {e}", path.display()))
        };
        let root = rustix::fs::open(path, flags, Mode::empty()).map_err(named)?;
        self.walk(&root, "", 0)
    }

    fn walk(&mut self, root: &OwnedFd, folder: &str, depth: usize) -> Result<(), BuildError> {
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let open = |path: &str, flags: OFlags| {
            let path = if path.is_empty() { "." } else { path };
            let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            rustix::fs::openat2(root, path, flags, Mode::empty(), inside)
                .map_err(|e| unfit(format!("'{path}' of the layout cannot be read: {e}")))
        };
        let mut names = Vec::new();
        let here = open(folder, OFlags::DIRECTORY)?;
        for entry in rustix::fs::Dir::read_from(&here).map_err(io::Error::from)? {
            let entry = entry.map_err(io::Error::from)?;
            names.push((entry.file_name().to_bytes().to_vec(), entry.file_type()));
            if names.len() > MAX_FILES {
                return Err(unfit(format!("the layout has more than {MAX_FILES} files")));
            }
        }
        names.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, kind) in names {
            if name == b"." || name == b".." {
                continue;
            }
            let name = normal(&[folder.as_bytes(), b"/", &name].concat(), "")?;
            match kind {
                FileType::Directory if depth < MAX_DEPTH => self.walk(root, &name, depth + 1)?,
                FileType::RegularFile => {
                    let mut file = File::from(open(&name, OFlags::empty())?);
                    self.take(name, &mut file)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Copies one file of the input.
    fn take(&mut self, name: String, from: &mut impl Read) -> Result<(), BuildError> {
        if self.pieces.len() >= MAX_FILES {
            return Err(unfit(format!("the input has more than {MAX_FILES} files")));
        }
        let path = self.work.join(format!("piece-{}", self.pieces.len()));
        let mut file = File::create_new(&path)?;
        let mut hash = Context::new(&SHA256);
        let mut size = 0;
        let mut buffer = vec![0u8; 256 << 10];
        loop {
            let length = from
                .read(&mut buffer)
                .map_err(|e| unfit(format!("'{name}' of the input cannot be read: {e}")))?;
            if length == 0 {
                break;
            }
            if self.cancel.is_cancelled() {
                return Err(BuildError::Interrupted(libc::SIGTERM));
            }
            self.bytes += length as u64;
            if self.bytes > MAX_BYTES {
                return Err(unfit(format!("the input has more than {MAX_BYTES} bytes")));
            }
            size += length as u64;
            hash.update(&buffer[..length]);
            file.write_all(&buffer[..length])?;
        }
        let digest = written(hash.finish().as_ref());
        self.by_name.insert(name, self.pieces.len());
        self.pieces.push(Piece { file: path, digest, size });
        Ok(())
    }

    fn named(&self, name: &str) -> Option<&Piece> {
        let mut name = normal(name.as_bytes(), "").ok()?;
        for _ in 0..8 {
            match self.links.get(&name) {
                Some(target) if !self.by_name.contains_key(&name) => name.clone_from(target),
                _ => break,
            }
        }
        self.pieces.get(*self.by_name.get(&name)?)
    }

    fn described(&self, descriptor: &Descriptor) -> Result<&Piece, BuildError> {
        let digest = &descriptor.digest;
        let fits = |piece: &&Piece| piece.digest == *digest;
        let piece = self.pieces.iter().find(fits).ok_or_else(|| {
            unfit(format!("the layout names {digest}, and no file in it has these bytes"))
        })?;
        if piece.size != descriptor.size {
            return Err(unfit(format!(
                "the layout says that {digest} has {} bytes, and it has {}",
                descriptor.size, piece.size
            )));
        }
        Ok(piece)
    }

    fn text(piece: &Piece) -> Result<Vec<u8>, BuildError> {
        if piece.size > MAX_DOCUMENT {
            return Err(unfit(format!("a document of the layout has {} bytes", piece.size)));
        }
        Ok(std::fs::read(&piece.file)?)
    }

    /// Which image is meant, and all of its parts.
    fn parts(&self, wanted: &Wanted) -> Result<Parts, BuildError> {
        if let Some(index) = self.named("index.json") {
            return self.of_layout(index, wanted);
        }
        if let Some(list) = self.named("manifest.json") {
            return self.of_saved(list, wanted);
        }
        Err(unfit(
            "this is no image: it has neither an index.json (OCI layout) nor a manifest.json (docker save)",
        ))
    }

    /// The images of `manifest.json`.
    fn saved(&self, list: &Piece) -> Result<Vec<Saved>, BuildError> {
        serde_json::from_slice(&Self::text(list)?)
            .map_err(|e| unfit(format!("manifest.json cannot be read: {e}")))
    }

    fn of_layout(&self, index: &Piece, wanted: &Wanted) -> Result<Parts, BuildError> {
        let wrong = |why: String| unfit(format!("index.json {why}"));
        let Document::Index(all) = read_document(&Self::text(index)?).map_err(wrong)? else {
            return Err(wrong("is no index".to_owned()));
        };
        let names = |one: &Descriptor| -> Vec<String> {
            [FULL_NAME, REF_NAME]
                .iter()
                .filter_map(|key| one.annotations.get(*key).cloned())
                .collect()
        };
        let ours = Platform::ours();
        let mut fits: Vec<&Descriptor> = all
            .iter()
            .filter(|one| wanted.reference.as_ref().is_none_or(|name| names(one).contains(name)))
            .collect();
        if fits.len() > 1 {
            fits.retain(|one| one.platform.as_ref().is_none_or(|other| ours.runs(other)));
            fits.dedup_by(|a, b| a.digest == b.digest);
        }
        let chosen = match fits.as_slice() {
            [one] => *one,
            [] if wanted.reference.is_none() => {
                return Err(unfit(
                    choose(&all, &ours).err().unwrap_or_else(|| "the layout is empty".to_owned()),
                ));
            }
            _ => return Err(which(wanted, all.iter().flat_map(&names).collect())),
        };
        let (manifest, outer, config, layers) = self.resolve(chosen, &ours)?;
        let piece = self.described(&config)?;
        let config = read_config(&Self::text(piece)?, &ours)
            .map_err(|why| unfit(format!("the image {why}")))?;
        let mut said = Vec::new();
        if let Some(list) = self.named("manifest.json") {
            let same =
                |one: &Saved| self.named(&one.config).is_some_and(|p| p.digest == piece.digest);
            let saved = self.saved(list).unwrap_or_default();
            said.extend(
                saved.into_iter().filter(same).flat_map(|one| one.repo_tags.unwrap_or_default()),
            );
        }
        said.extend(names(chosen));
        let layer = |one: &Descriptor| -> Result<Layer, BuildError> {
            let piece = self.described(one)?;
            let media_type = Some(one.media_type.clone()).filter(|kind| !kind.is_empty());
            Ok(Layer {
                file: piece.file.clone(),
                media_type,
                digest: piece.digest.clone(),
                size: piece.size,
            })
        };
        Ok(Parts {
            name: name(wanted, &said)?,
            source: wanted.source.clone(),
            manifest: Some(manifest),
            index: outer,
            config_digest: piece.digest.clone(),
            config,
            layers: layers.iter().map(layer).collect::<Result<_, _>>()?,
        })
    }

    /// From a descriptor, through indexes, to a manifest: its digest, that of the last index, configuration and
    /// layers.
    #[allow(clippy::type_complexity)]
    fn resolve(
        &self,
        chosen: &Descriptor,
        ours: &Platform,
    ) -> Result<(String, Option<String>, Descriptor, Vec<Descriptor>), BuildError> {
        let mut at = chosen.clone();
        let mut outer = None;
        for _ in 0..MAX_NESTED {
            let text = Self::text(self.described(&at)?)?;
            let wrong = |why: String| unfit(format!("{} {why}", at.digest));
            match read_document(&text).map_err(wrong)? {
                Document::Manifest { config, layers } => {
                    return Ok((at.digest, outer, config, layers));
                }
                Document::Index(all) => {
                    let next = choose(&all, ours).map_err(unfit)?.clone();
                    outer = Some(at.digest);
                    at = next;
                }
            }
        }
        Err(unfit(format!("the layout has indexes in indexes, {MAX_NESTED} deep")))
    }

    fn of_saved(&self, list: &Piece, wanted: &Wanted) -> Result<Parts, BuildError> {
        let all = self.saved(list)?;
        let tags = |one: &Saved| one.repo_tags.clone().unwrap_or_default();
        let fits: Vec<&Saved> = all
            .iter()
            .filter(|one| wanted.reference.as_ref().is_none_or(|name| tags(one).contains(name)))
            .collect();
        let [chosen] = fits.as_slice() else {
            return Err(which(wanted, all.iter().flat_map(tags).collect()));
        };
        let find = |name: &String| {
            self.named(name).ok_or_else(|| {
                unfit(format!("manifest.json names '{}', which is not there", name.escape_debug()))
            })
        };
        let piece = find(&chosen.config)?;
        let config = read_config(&Self::text(piece)?, &Platform::ours())
            .map_err(|why| unfit(format!("the image {why}")))?;
        let layer = |name: &String| -> Result<Layer, BuildError> {
            let piece = find(name)?;
            Ok(Layer {
                file: piece.file.clone(),
                media_type: None,
                digest: piece.digest.clone(),
                size: piece.size,
            })
        };
        Ok(Parts {
            name: name(wanted, &tags(chosen))?,
            source: wanted.source.clone(),
            manifest: None,
            index: None,
            config_digest: piece.digest.clone(),
            config,
            layers: chosen.layers.iter().map(layer).collect::<Result<_, _>>()?,
        })
    }
}

/// The refusal of an input in which it is not clear which image is meant.
fn which(wanted: &Wanted, mut names: Vec<String>) -> BuildError {
    names.sort();
    names.dedup();
    let there = if names.is_empty() { "none has a name".to_owned() } else { names.join(", ") };
    let there = there.escape_debug().to_string();
    unfit(match &wanted.reference {
        Some(name) => format!("the input has no one image '{name}'; there is: {there}"),
        None => format!("the input has several images: say which with --ref ({there})"),
    })
}

/// The name that the image gets.
fn name(wanted: &Wanted, said: &[String]) -> Result<String, BuildError> {
    if let Some(name) = &wanted.name {
        check_local_name(name)
            .map_err(|why| unfit(format!("the name '{}' {why}", name.escape_debug())))?;
        return Ok(name.clone());
    }
    // A tag alone says too little.
    let good = |name: &&String| name.contains(':') && check_local_name(name).is_ok();
    said.iter()
        .find(good)
        .cloned()
        .ok_or_else(|| unfit("the input does not tell the image's name: give it one with --name"))
}

/// A name of the input without dots, seen from a folder of it.
fn normal(name: &[u8], from: &str) -> Result<String, BuildError> {
    let text =
        std::str::from_utf8(name).map_err(|_| unfit("the input has a name that is no UTF-8"))?;
    let odd =
        || unfit(format!("the input has a name that leads out of it: '{}'", text.escape_debug()));
    if text.len() > 512 {
        return Err(unfit("the input has a name of over 512 bytes"));
    }
    let mut parts: Vec<&str> = from.split('/').filter(|part| !part.is_empty()).collect();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop().ok_or_else(odd)?),
            other => parts.push(other),
        }
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::blobs::sha256;
    use serde_json::json;

    #[test]
    fn names_stay_inside_of_the_input() {
        assert_eq!(normal(b"./a//b", "").unwrap(), "a/b");
        assert_eq!(normal(b"../c/layer.tar", "a").unwrap(), "c/layer.tar");
        assert!(normal(b"../../x", "a").is_err());
        assert!(normal(b"..", "").is_err());
    }

    /// A layout in a folder: its documents and pieces.
    struct Bed {
        dir: tempfile::TempDir,
    }

    impl Bed {
        fn new() -> Self {
            Self { dir: tempfile::tempdir().unwrap() }
        }

        fn put(&self, text: &[u8]) -> serde_json::Value {
            let digest = sha256(text);
            let folder = self.dir.path().join("in/blobs/sha256");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(&digest["sha256:".len()..]), text).unwrap();
            json!({ "digest": digest, "size": text.len() })
        }

        /// A manifest of one layer, for an architecture.
        fn image(&self, architecture: &str, layer: &[u8]) -> serde_json::Value {
            let config = json!({ "os": "linux", "architecture": architecture,
                "rootfs": { "type": "layers", "diff_ids": [sha256(layer)] } });
            let config = self.put(config.to_string().as_bytes());
            let layer = self.put(layer);
            let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [layer] });
            let mut said = self.put(manifest.to_string().as_bytes());
            said["platform"] = json!({ "os": "linux", "architecture": architecture });
            said
        }

        fn index(&self, manifests: &serde_json::Value) {
            let text = json!({ "schemaVersion": 2, "manifests": manifests }).to_string();
            std::fs::write(self.dir.path().join("in/index.json"), text).unwrap();
        }

        fn parts(&self, reference: Option<&str>) -> Result<Parts, String> {
            let work = tempfile::tempdir_in(self.dir.path()).unwrap();
            let cancel = Cancel::default();
            let mut spool = Spool::new(work.path(), &cancel);
            let wanted = Wanted {
                name: Some("app".to_owned()),
                reference: reference.map(str::to_owned),
                source: "test".to_owned(),
            };
            let done =
                spool.folder(&self.dir.path().join("in")).and_then(|()| spool.parts(&wanted));
            done.map_err(|e| e.to_string())
        }
    }

    #[test]
    fn the_image_of_this_machine_is_taken_out_of_an_index() {
        let bed = Bed::new();
        let ours = Platform::ours().architecture;
        let (mine, other) = (bed.image(&ours, b"mine"), bed.image("s390x", b"other"));
        bed.index(&json!([other, mine]));
        let parts = bed.parts(None).unwrap();
        assert_eq!(parts.layers[0].digest, sha256(b"mine"));
        assert_eq!(parts.manifest.as_deref(), mine["digest"].as_str());
        // The same one level deeper.
        let inner = json!({ "schemaVersion": 2, "manifests": [other, mine] });
        let inner = bed.put(inner.to_string().as_bytes());
        bed.index(&json!([inner]));
        let parts = bed.parts(None).unwrap();
        assert_eq!(parts.index.as_deref(), inner["digest"].as_str());
        bed.index(&json!([other]));
        let said = bed.parts(None).unwrap_err();
        assert!(said.contains("linux/s390x"), "{said}");
    }

    #[test]
    fn a_layout_that_is_not_what_it_says_is_refused() {
        let bed = Bed::new();
        let ours = Platform::ours().architecture;
        let mut image = bed.image(&ours, b"layer");
        let path = format!("in/blobs/sha256/{}", &sha256(b"layer")["sha256:".len()..]);
        let path = bed.dir.path().join(path);
        bed.index(&json!([image]));
        bed.parts(None).unwrap();
        std::fs::write(&path, b"other").unwrap();
        assert!(bed.parts(None).unwrap_err().contains("no file in it has these bytes"));
        std::fs::write(&path, b"layer").unwrap();
        image["size"] = json!(3);
        bed.index(&json!([image]));
        assert!(bed.parts(None).unwrap_err().contains("has 3 bytes"));
        // A link is no file of the layout.
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(bed.parts(None).is_err());
        std::fs::write(bed.dir.path().join("in/index.json"), "{").unwrap();
        assert!(bed.parts(None).unwrap_err().contains("index.json"));
    }

    #[test]
    fn several_images_have_to_be_told_apart() {
        let bed = Bed::new();
        let ours = Platform::ours().architecture;
        let (mut one, mut two) = (bed.image(&ours, b"one"), bed.image(&ours, b"two"));
        one["annotations"] = json!({ REF_NAME: "v1" });
        two["annotations"] = json!({ REF_NAME: "v2" });
        bed.index(&json!([one, two]));
        let said = bed.parts(None).unwrap_err();
        assert!(said.contains("--ref") && said.contains("v1") && said.contains("v2"), "{said}");
        assert_eq!(bed.parts(Some("v2")).unwrap().layers[0].digest, sha256(b"two"));
        assert!(bed.parts(Some("v3")).is_err());
    }

    #[test]
    fn an_archive_of_docker_is_read_with_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            json!({ "rootfs": { "diff_ids": [sha256(b"layer"), sha256(b"layer")] } }).to_string();
        let list = json!([{ "Config": "c.json", "RepoTags": ["app:1"], "Layers": ["a/layer.tar", "b/layer.tar"] }]);
        let mut out = tar::Builder::new(Vec::new());
        let mut add = |name: &str, text: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            out.append_data(&mut header, name, text).unwrap();
        };
        add("a/layer.tar", b"layer");
        add("c.json", config.as_bytes());
        add("manifest.json", list.to_string().as_bytes());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        out.append_link(&mut header, "b/layer.tar", "../a/layer.tar").unwrap();
        let bytes = out.into_inner().unwrap();
        let cancel = Cancel::default();
        let mut spool = Spool::new(dir.path(), &cancel);
        spool.archive(Box::new(io::Cursor::new(bytes))).unwrap();
        let parts = spool.parts(&Wanted { source: "x".to_owned(), ..Wanted::default() }).unwrap();
        assert_eq!(parts.name, "app:1");
        assert_eq!(parts.layers.len(), 2);
        assert_eq!(parts.layers[1].digest, sha256(b"layer"));
    }
}
