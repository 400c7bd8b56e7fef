//! `image import`: an image out of a file.
//!
//! Invariant: the file is a stranger's; the runtime reads it. Works without an engine.

use std::fs::File;
use std::io::{IsTerminal as _, stdin};
use std::path::Path;

use bivouac_runtime::image::folder::ImageFolder;
use bivouac_runtime::image::oci::Cancel;
use bivouac_runtime::image::oci::layout::{Input, Wanted, import};

use super::{Screen, shown, unbuilt};
use crate::cli::args::Global;
use crate::cli::busy::guarded_blocking;
use crate::cli::failure::{ExitStatus, Explain as _, Failure, Outcome};
use crate::cli::{output, snapshot};

/// Does what `image import` says.
pub(super) fn run(
    global: &Global,
    folder: &ImageFolder,
    from: &Path,
    name: Option<String>,
    reference: Option<String>,
) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            "an image is imported as root: its files belong to root and others",
        )
        .hint("start it again with sudo"));
    }
    let (input, source) = open(from)?;
    let wanted = Wanted { name, reference, source };
    let (target, shows) = (ImageFolder::new(folder.path().to_owned()), global.clone());
    let making = move || {
        let mut screen = Screen::new(&shows);
        import(&target, input, &wanted, &Cancel::default(), |step| screen.show(&step))
            .map_err(unbuilt)
    };
    // What is left of one that was killed goes at the next look: see `ImageFolder::sweep`.
    let (manifest, new) = crate::cli::client_runtime(guarded_blocking(making))?;
    if global.json {
        let mut value = shown(&manifest, &[]);
        value["built"] = new.into();
        output::json(&value)?;
        return Ok(ExitStatus::Success);
    }
    output::line(&manifest.reference())?;
    let (name, size) = (&manifest.name, snapshot::size(manifest.bytes));
    output::progress(&match new {
        true => format!("imported {name}: {size} in {}", folder.path().display()),
        false => format!("{name} is here already: {size} in {}", folder.path().display()),
    });
    output::hint(&format!("bivouac create --image {name}"));
    Ok(ExitStatus::Success)
}

fn open(from: &Path) -> Outcome<(Input, String)> {
    if from == Path::new("-") {
        if stdin().is_terminal() {
            return Err(Failure::usage("standard input is a terminal: pipe an archive into it"));
        }
        return Ok((Input::Archive(Box::new(stdin())), "standard input".to_owned()));
    }
    let shown = || format!("the image {} cannot be read", from.display());
    let name = from.file_name().unwrap_or(from.as_os_str()).to_string_lossy().into_owned();
    let file = File::open(from).explain(shown)?;
    if file.metadata().explain(shown)?.is_dir() {
        return Ok((Input::Folder(from.to_owned()), name));
    }
    Ok((Input::Archive(Box::new(file)), name))
}
