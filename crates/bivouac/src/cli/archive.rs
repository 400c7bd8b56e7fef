//! `bivouac snapshots export` and `import`: snapshots as files.
//!
//! Invariant: a file has its name when the archive is whole, and not before; what the engine answered is what
//! is told. Part of `snapshots`.

use std::io::{self, IsTerminal as _};
use std::path::Path;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use reqwest::Body;
use serde_json::{Value, json};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio_util::io::ReaderStream;

use super::args::{ExportFormat, Global, Import};
use super::beside::Beside;
use super::busy::{Busy, guarded};
use super::client::Client;
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::snapshot::size;
use super::{output, sandbox};

/// What `-` stands for.
const STDIO: &str = "-";

/// Writes a snapshot into a file, or to standard output.
pub(crate) async fn export(
    client: &Client,
    global: &Global,
    id: &str,
    target: &str,
    format: ExportFormat,
) -> Outcome {
    if target == STDIO {
        if io::stdout().is_terminal() {
            return Err(Failure::usage("an archive is nothing for a terminal")
                .hint(format!("name a file, or pipe it: bivouac snapshots export {id} - | …")));
        }
        if global.json {
            return Err(Failure::usage("standard output takes the archive or --json, not both"));
        }
        let work = download(client, global, id, format, tokio::io::stdout());
        let bytes = guarded(work).await?;
        output::progress(&format!("exported {id}: {}", size(bytes)));
        return Ok(ExitStatus::Success);
    }
    let bytes = guarded(async {
        let beside = Beside::new(Path::new(target))?;
        let bytes = download(client, global, id, format, beside.writer()?).await?;
        beside.keep()?;
        Ok(bytes)
    })
    .await?;
    if global.json {
        output::json(
            &json!({ "id": id, "file": target, "format": format.word(), "bytes": bytes }),
        )?;
        return Ok(ExitStatus::Success);
    }
    output::progress(&format!("exported {id} to {target}: {}", size(bytes)));
    output::hint(&match format {
        ExportFormat::TarZst => {
            format!("on a machine with the same image: bivouac snapshots import {target}")
        }
        ExportFormat::Oci => format!("with another tool: podman load -i {target}"),
    });
    Ok(ExitStatus::Success)
}

async fn download(
    client: &Client,
    global: &Global,
    id: &str,
    format: ExportFormat,
    mut sink: impl AsyncWrite + Unpin,
) -> Outcome<u64> {
    let path = format!("/bivouac/v1/snapshots/{id}/export");
    let query = client.scope().with("format", format.word());
    let mut answer = client.get_stream(&path, &query).await?;
    let busy = Busy::bytes(global, "exporting", None);
    let mut bytes = 0;
    let broke_off = || format!("the export of {id} broke off");
    while let Some(piece) = answer.chunk().await.explain(broke_off)? {
        sink.write_all(&piece).await.explain(|| "could not write the archive".to_owned())?;
        busy.add(piece.len() as u64);
        bytes += piece.len() as u64;
    }
    sink.flush().await.explain(|| "could not write the archive".to_owned())?;
    Ok(bytes)
}

/// Takes in a snapshot out of a file, or from standard input.
pub(crate) async fn import(client: &Client, global: &Global, args: Import) -> Outcome {
    let mut query = client.scope();
    for (key, value) in [("name", &args.name), ("onto", &args.onto)] {
        if let Some(value) = value {
            query = query.with(key, value);
        }
    }
    if !args.labels.is_empty() {
        let labels: serde_json::Map<String, Value> =
            args.labels.into_iter().map(|(key, value)| (key, value.into())).collect();
        query = query.with("labels", &Value::Object(labels).to_string());
    }
    let (body, total) = source(&args.file).await?;
    let busy = Arc::new(Busy::bytes(global, "importing", total));
    let counted = Arc::clone(&busy);
    let body = body.inspect_ok(move |piece| counted.add(piece.len() as u64));
    let headers = [("content-type", "application/zstd".to_owned()), ("accept", "*/*".to_owned())];
    let path = "/bivouac/v1/snapshots/import";
    let sent =
        async { Ok(client.post_body(path, &query, headers, Body::wrap_stream(body)).await?) };
    let answer = guarded(sent).await;
    drop(busy);
    let answer = answer?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let id = sandbox::text(&answer, "/snapshot/id")?;
    output::line(&id)?;
    output::hint(&format!("a sandbox from it: bivouac create --snapshot {id}"));
    Ok(ExitStatus::Success)
}

/// What is sent, and how much that is, if it is a file.
async fn source(file: &str) -> Outcome<(ReaderStream<tokio::fs::File>, Option<u64>)> {
    const PIECE: usize = 256 << 10;
    let stdin = file == STDIO;
    if stdin && io::stdin().is_terminal() {
        return Err(Failure::usage(
            "standard input is a terminal: name a file, or pipe an archive",
        ));
    }
    let path = if stdin { "/dev/stdin" } else { file };
    let shown = || format!("could not read {}", if stdin { "standard input" } else { file });
    let opened = tokio::fs::File::open(path).await.explain(shown)?;
    let meta = opened.metadata().await.explain(shown)?;
    if meta.is_dir() {
        return Err(Failure::usage(format!("{file} is a folder, not an archive")));
    }
    let total = meta.is_file().then_some(meta.len());
    Ok((ReaderStream::with_capacity(opened, PIECE), total))
}
