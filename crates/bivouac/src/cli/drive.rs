//! `bivouac drive`: volumes that outlive sandboxes.
//!
//! Invariant: a file goes in whole or not at all, and one that could not be read whole leaves no file that
//! looks as if it had been. Links of a drive are shown and never followed: that is the engine's to see to.

use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::TryStreamExt as _;
use reqwest::Body;
use serde_json::{Value, json};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio_util::io::ReaderStream;

use super::args::{Drive, Global};
use super::beside::Beside;
use super::busy::{Busy, guarded};
use super::client::{Client, Query};
use super::clock::{now_ms, span};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::parse::{FilePlace, InDrive, MountArg};
use super::snapshot::size as shown_size;
use super::table::{self, Column};
use super::{each, output};

/// Most bytes of standard input that are kept until their number is known.
const MAX_STDIN: u64 = 256 << 20;
/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;

const DRIVES: [Column; 5] = [
    Column::new("NAME"),
    Column::short("SIZE").spare(1),
    Column::new("WRITER").spare(1),
    Column::short("CREATED").spare(2),
    Column::id("ID").spare(3),
];
const FILES: [Column; 5] = [
    Column::short("KIND").spare(1),
    Column::short("MODE").spare(3),
    Column::short("SIZE"),
    Column::short("CHANGED").spare(2),
    Column::text("NAME"),
];

pub(crate) async fn run(global: &Global, verb: Drive) -> Outcome {
    let client = Client::find(global)?;
    match verb {
        Drive::Create { name, size, region } => {
            create(global, &client, &name, size, region.as_deref()).await
        }
        Drive::Ls { place: Some(place), quiet, .. } => files(global, &client, &place, quiet).await,
        Drive::Ls { prefix, quiet, .. } => list(global, &client, prefix.as_deref(), quiet).await,
        Drive::Show { name } => show(global, &client, &name).await,
        Drive::Rm { names } => {
            let remove = async |name: &str| {
                let answer = client.delete(&path(name), &client.scope()).await?;
                output::progress(&format!("deleted {name}"));
                Ok(answer)
            };
            each(global, &names, remove).await
        }
        Drive::Fork { source, name } => fork(global, &client, &source, &name).await,
        Drive::Attach { sandbox, mount } => attach(global, &client, &sandbox, &mount).await,
        Drive::Detach { sandbox, drive, path, force } => {
            let body = json!({ "sandbox": sandbox, "path": path, "force": force });
            let answer = client.post(&own(&drive, "detach"), &client.scope(), &body).await?;
            told(global, &answer, "detached", "from")
        }
        Drive::Cp { source, target } => guarded(copy(global, &client, source, target)).await,
        Drive::Cat { place } if global.json => {
            let mut all = Vec::new();
            let bytes = download(global, &client, &place, &mut all).await?;
            output::json(&json!({ "bytes": bytes, "base64": STANDARD.encode(all) }))?;
            Ok(ExitStatus::Success)
        }
        Drive::Cat { place } => {
            guarded(download(global, &client, &place, tokio::io::stdout())).await?;
            Ok(ExitStatus::Success)
        }
        Drive::Push { .. } | Drive::Pull { .. } => Err(Failure::usage(
            "this version has no blob store: drives are pushed and pulled in a later release",
        )
        .hint("bivouac drive fork keeps a state of it; bivouac drive cp copies single files")),
    }
}

fn path(name: &str) -> String {
    format!("/v2/sandboxes/drives/{name}")
}

fn own(name: &str, what: &str) -> String {
    format!("/bivouac/v1/drives/{name}/{what}")
}

async fn create(
    global: &Global,
    client: &Client,
    name: &str,
    size: Option<i64>,
    region: Option<&str>,
) -> Outcome {
    let mut body = json!({ "projectId": client.project() });
    if let Some(size) = size {
        body["maxSizeBytes"] = size.into();
    }
    if let Some(region) = region {
        body["region"] = region.into();
    }
    let answer = client.post(&path(name), &client.scope(), &body).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    output::line(name)?;
    output::hint(&format!(
        "use it: bivouac create --mount {name}:/data, or bivouac drive attach SANDBOX {name}:/data"
    ));
    Ok(ExitStatus::Success)
}

async fn fork(global: &Global, client: &Client, source: &str, name: &str) -> Outcome {
    let path = format!("{}/fork", path(source));
    let answer = client.post(&path, &client.scope(), &json!({ "name": name })).await?;
    if global.json {
        output::json(&answer)?;
    } else {
        output::line(name)?;
    }
    Ok(ExitStatus::Success)
}

async fn list(global: &Global, client: &Client, prefix: Option<&str>, quiet: bool) -> Outcome {
    let mut query = client.list_scope().with("limit", "50").with("sortBy", "name");
    query = query.with("sortOrder", "asc");
    if let Some(prefix) = prefix {
        query = query.with("namePrefix", prefix);
    }
    let drives = client.pages("/v2/sandboxes/drives", &query, "drives").await?;
    if global.json {
        output::json(&drives.into())?;
        return Ok(ExitStatus::Success);
    }
    if quiet {
        return output::names(&drives, "name");
    }
    let now = now_ms();
    let row = |drive: &Value| {
        let text = |key: &str| drive[key].as_str().unwrap_or("-").to_owned();
        vec![
            text("name"),
            drive["maxSizeBytes"].as_u64().map(shown_size).unwrap_or_default(),
            text("currentSandboxName"),
            drive["createdAt"]
                .as_i64()
                .map(|at| format!("{} ago", span(now - at)))
                .unwrap_or_default(),
            text("id"),
        ]
    };
    table::print(&DRIVES, drives.iter().map(row).collect())?;
    Ok(ExitStatus::Success)
}

async fn show(global: &Global, client: &Client, name: &str) -> Outcome {
    let answer = client.get(&own(name, "usage"), &client.scope()).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let drive = &answer["drive"];
    let text = |key: &str| drive[key].as_str().unwrap_or("-").to_owned();
    let bytes = |value: &Value| value.as_u64().map_or_else(|| "-".to_owned(), shown_size);
    output::facts(&[
        ("name", text("name")),
        ("id", text("id")),
        ("size", bytes(&drive["maxSizeBytes"])),
        ("used", bytes(&answer["usedBytes"])),
        ("only here", bytes(&answer["uniqueBytes"])),
        ("writer", text("currentSandboxName")),
        ("forked from", text("parentDriveId")),
        ("region", text("region")),
    ])?;
    Ok(ExitStatus::Success)
}

async fn attach(global: &Global, client: &Client, sandbox: &str, mount: &MountArg) -> Outcome {
    let body = json!({ "sandbox": sandbox, "path": mount.path, "mode": mount.mode.as_str() });
    let answer = client.post(&own(&mount.drive, "attach"), &client.scope(), &body).await?;
    told(global, &answer, "attached", "to")
}

/// Says what an attach or a detach has done.
fn told(global: &Global, answer: &Value, done: &str, direction: &str) -> Outcome {
    if global.json {
        output::json(answer)?;
        return Ok(ExitStatus::Success);
    }
    let text = |key: &str| answer[key].as_str().unwrap_or("-");
    let when = if answer["live"] == true { "" } else { ", from its next start on" };
    let (drive, sandbox, at) = (text("drive"), text("sandbox"), text("path"));
    output::progress(&format!("{done} {drive} {direction} {sandbox} at {at}{when}"));
    Ok(ExitStatus::Success)
}

fn at(client: &Client, place: &InDrive) -> Query {
    let path = if place.path.is_empty() { "/" } else { &place.path };
    client.scope().with("path", path)
}

async fn files(global: &Global, client: &Client, place: &InDrive, quiet: bool) -> Outcome {
    let query = at(client, place);
    let answer = client.get(&own(&place.drive, "files"), &query).await?;
    if global.json {
        output::json(&answer["entries"])?;
        return Ok(ExitStatus::Success);
    }
    if quiet {
        let names = answer["entries"].as_array().map_or(&[][..], Vec::as_slice);
        for name in names.iter().filter_map(|entry| entry["name"].as_str()) {
            // A name may hold anything; one line is one name.
            output::line(&output::printable(name))?;
        }
        return Ok(ExitStatus::Success);
    }
    let now = now_ms();
    let row = |entry: &Value| {
        let text = |key: &str| entry[key].as_str().unwrap_or("-").to_owned();
        let name = match entry["target"].as_str() {
            Some(target) => format!("{} -> {target}", text("name")),
            None => text("name"),
        };
        vec![
            text("kind"),
            format!("{:o}", entry["mode"].as_u64().unwrap_or(0)),
            entry["size"].as_u64().map(shown_size).unwrap_or_default(),
            entry["modifiedAt"]
                .as_i64()
                .map(|at| format!("{} ago", span(now - at)))
                .unwrap_or_default(),
            name,
        ]
    };
    let rows = answer["entries"].as_array().map(|all| all.iter().map(row).collect());
    table::print(&FILES, rows.unwrap_or_default())?;
    if answer["more"] == true {
        output::warning("there are more: only the first are shown");
    }
    Ok(ExitStatus::Success)
}

async fn copy(global: &Global, client: &Client, source: FilePlace, target: FilePlace) -> Outcome {
    let bytes = match (source, target) {
        (FilePlace::Drive(from), FilePlace::Stdio) => {
            download(global, client, &from, tokio::io::stdout()).await?
        }
        (FilePlace::Drive(from), FilePlace::Local(to)) => fetch(global, client, &from, &to).await?,
        (FilePlace::Local(from), FilePlace::Drive(to)) => send(global, client, &from, &to).await?,
        (FilePlace::Stdio, FilePlace::Drive(to)) => {
            // By another thread: this one hears of signals.
            let read = tokio::task::spawn_blocking(|| {
                let mut all = Vec::new();
                io::stdin().lock().take(MAX_STDIN + 1).read_to_end(&mut all).map(|_| all)
            });
            let all = read.await?.explain(|| "could not read standard input".to_owned())?;
            if all.len() as u64 > MAX_STDIN {
                return Err(Failure::usage("standard input is longer than 256 MiB")
                    .hint("write it to a file first and copy that"));
            }
            let size = all.len() as u64;
            put(client, &to, Body::from(all), size, 0o644).await?
        }
        (FilePlace::Drive(_), FilePlace::Drive(_)) => {
            return Err(Failure::usage("one end of a copy is on this machine")
                .hint("through a pipe: bivouac drive cat A:FILE | bivouac drive cp - B:FILE"));
        }
        _ => return Err(Failure::usage("one end of a copy is in a drive: write DRIVE:PATH")),
    };
    if global.json {
        output::json(&json!({ "files": 1, "bytes": bytes }))?;
    } else {
        output::progress(&format!("copied {}", shown_size(bytes)));
    }
    Ok(ExitStatus::Success)
}

/// Writes a file of a drive to `sink`; how many bytes it has.
async fn download(
    global: &Global,
    client: &Client,
    from: &InDrive,
    mut sink: impl AsyncWrite + Unpin,
) -> Outcome<u64> {
    let mut answer = client.get_stream(&own(&from.drive, "file"), &at(client, from)).await?;
    // Output to a terminal shows by itself how far it is.
    let busy = Busy::bytes(global, "copying", answer.content_length());
    let mut bytes = 0;
    let shown = || format!("{}:{}", from.drive, from.path);
    while let Some(piece) = answer.chunk().await.explain(|| format!("{} broke off", shown()))? {
        sink.write_all(&piece)
            .await
            .explain(|| format!("could not write what {} holds", shown()))?;
        busy.add(piece.len() as u64);
        bytes += piece.len() as u64;
    }
    sink.flush().await.explain(|| "could not write it".to_owned())?;
    Ok(bytes)
}

/// Into a file beside the target first: one that broke off is no file.
async fn fetch(global: &Global, client: &Client, from: &InDrive, to: &str) -> Outcome<u64> {
    let name = from.path.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let target = if Path::new(to).is_dir() { Path::new(to).join(name) } else { to.into() };
    let beside = Beside::new(&target)?;
    let bytes = download(global, client, from, beside.writer()?).await?;
    beside.keep()?;
    Ok(bytes)
}

async fn send(global: &Global, client: &Client, from: &str, to: &InDrive) -> Outcome<u64> {
    let shown = || format!("could not read {from}");
    let file = tokio::fs::File::open(from).await.explain(shown)?;
    let meta = file.metadata().await.explain(shown)?;
    if !meta.is_file() {
        return Err(Failure::usage(format!("{from} is no regular file")).hint(
            "folders go through a sandbox: bivouac drive attach SANDBOX DRIVE:/data, then bivouac cp",
        ));
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o777;
    let busy = Arc::new(Busy::bytes(global, "copying", Some(meta.len())));
    let counted = Arc::clone(&busy);
    let pieces = ReaderStream::with_capacity(file, PIECE);
    let pieces = pieces.inspect_ok(move |piece| counted.add(piece.len() as u64));
    put(client, to, Body::wrap_stream(pieces), meta.len(), mode).await
}

async fn put(client: &Client, to: &InDrive, body: Body, size: u64, mode: u32) -> Outcome<u64> {
    let query = at(client, to).with("mode", &format!("{mode:o}"));
    client.put_body(&own(&to.drive, "file"), &query, body, size).await?;
    Ok(size)
}
