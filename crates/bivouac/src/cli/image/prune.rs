//! `image prune`: removes what nobody uses.
//!
//! Invariant: an image with a lease stays, and so do pieces that a pull has in hand; what goes can be built or
//! pulled again.

use std::collections::BTreeSet;

use bivouac_runtime::image::folder::{ImageFolder, Manifest, RemoveError};
use serde_json::json;

use crate::cli::args::Global;
use crate::cli::failure::{ExitStatus, Explain as _, Outcome};
use crate::cli::{output, snapshot};

/// Does what `image prune` says.
pub(super) fn run(global: &Global, folder: &ImageFolder, all: bool, dry: bool) -> Outcome {
    if !dry {
        folder.sweep().explain(|| "could not remove what an interrupted build left".to_owned())?;
    }
    let mut named = BTreeSet::new();
    let mut removed: Vec<Manifest> = Vec::new();
    for manifest in folder.list()? {
        // The newest of a name comes first, and is what the name means.
        let current = named.insert(manifest.name.clone());
        if current && !all {
            continue;
        }
        if dry {
            if folder.leases(&manifest)?.is_empty() {
                removed.push(manifest);
            }
            continue;
        }
        match folder.remove(&manifest) {
            Ok(()) => removed.push(manifest),
            // In use, or somebody else has just removed it.
            Err(RemoveError::InUse(_) | RemoveError::Missing) => {}
            Err(error) => {
                let name = manifest.reference();
                return Err(error).explain(|| format!("could not remove the image '{name}'"));
            }
        }
    }
    let pieces = folder.blobs().prune(0, dry).explain(|| "could not remove pieces".to_owned())?;
    if global.json {
        let images: Vec<_> = removed
            .iter()
            .map(|m| json!({ "name": m.name, "reference": m.reference(), "bytes": m.bytes }))
            .collect();
        output::json(&json!({
            "images": images,
            "pieces": { "files": pieces.files, "bytes": pieces.bytes },
            "dryRun": dry,
        }))?;
        return Ok(ExitStatus::Success);
    }
    let word = if dry { "would remove" } else { "removed" };
    for manifest in &removed {
        output::progress(&format!(
            "{word} {}: {}",
            manifest.reference(),
            snapshot::size(manifest.bytes)
        ));
    }
    output::progress(&format!(
        "{word} {} pieces of registries: {}",
        pieces.files,
        snapshot::size(pieces.bytes)
    ));
    Ok(ExitStatus::Success)
}
