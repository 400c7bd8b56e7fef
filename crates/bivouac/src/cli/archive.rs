//! `bivouac snapshots export` and `import`: snapshots as files.
//!
//! Invariant: a file has its name when the archive is whole, and not before; what the engine answered is what
//! is told. Part of `snapshots`.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::path::Path;

use futures_util::TryStreamExt as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reqwest::Body;
use serde_json::{Value, json};
use tokio_util::io::ReaderStream;

use super::args::{ExportFormat, Global, Import};
use super::client::{Client, random_word};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::snapshot::size;
use super::{output, sandbox};

/// What `-` stands for.
const STDIO: &str = "-";

/// Bytes that went by, shown on a terminal.
struct Bar(Option<ProgressBar>);

impl Bar {
    /// With `total`, if it is known.
    fn new(total: Option<u64>) -> Self {
        Self(io::stderr().is_terminal().then(|| {
            let target = ProgressDrawTarget::stderr_with_hz(8);
            let bar = ProgressBar::with_draw_target(total, target);
            let shape = match total {
                Some(_) => "{elapsed:>4} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}",
                None => "{elapsed:>4} {bytes}, {bytes_per_sec}",
            };
            if let Ok(style) = ProgressStyle::with_template(shape) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar
        }))
    }

    fn add(&self, bytes: usize) {
        if let Some(bar) = &self.0 {
            bar.inc(bytes as u64);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

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
        let bytes = download(client, id, format, &mut io::stdout().lock()).await?;
        output::progress(&format!("exported {id}: {}", size(bytes)));
        return Ok(ExitStatus::Success);
    }
    let path = Path::new(target);
    let shown = || format!("could not write {target}");
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = folder.join(format!(".bivouac-{}", random_word()?));
    let mut file = File::create_new(&beside).explain(shown)?;
    let written = async {
        let bytes = download(client, id, format, &mut file).await?;
        file.sync_all().explain(shown)?;
        std::fs::rename(&beside, path).explain(shown)?;
        Ok::<_, Failure>(bytes)
    };
    let bytes = written.await.inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
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
    id: &str,
    format: ExportFormat,
    sink: &mut impl Write,
) -> Outcome<u64> {
    let path = format!("/bivouac/v1/snapshots/{id}/export");
    let query = client.scope().with("format", format.word());
    let mut answer = client.get_stream(&path, &query).await?;
    let bar = Bar::new(None);
    let mut bytes = 0;
    let broke_off = || format!("the export of {id} broke off");
    while let Some(piece) = answer.chunk().await.explain(broke_off)? {
        sink.write_all(&piece).explain(|| "could not write the archive".to_owned())?;
        bar.add(piece.len());
        bytes += piece.len() as u64;
    }
    sink.flush().explain(|| "could not write the archive".to_owned())?;
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
    let bar = Bar::new(total);
    let body = body.inspect_ok(move |piece| bar.add(piece.len()));
    let headers = [("content-type", "application/zstd".to_owned()), ("accept", "*/*".to_owned())];
    let path = "/bivouac/v1/snapshots/import";
    let answer = client.post_body(path, &query, headers, Body::wrap_stream(body)).await?;
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
