//! A snapshot as an image for other tools: a tar of an OCI layout with two layers, the image's whole tree and what
//! was changed of it.
//!
//! A layout names each layer by the hash of its bytes, in front of which nothing can be sent that holds the name.
//! So each is made twice, once for its hash, once for the reader: nothing is kept anywhere, whatever the size.
//! Invariant: the second time is the same as the first, or the archive is broken off. The layers are not
//! compressed, and the whole can be.

use std::collections::BTreeMap;
use std::io::{self, Write};

use aws_lc_rs::digest::{Context, SHA256};
use serde_json::{Value, json};

use super::snapshot::own_file;
use super::walk::LeftOut;
use super::write::Writer;

/// What an image's configuration says of how to run it.
#[derive(Debug, Clone)]
pub(crate) struct About {
    /// What it is called, with a tag.
    pub(crate) name: String,
    pub(crate) cwd: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// Ms.
    pub(crate) created_at: i64,
    /// The image below, for people.
    pub(crate) image: String,
}

/// Writes a layer, an uncompressed tar, as often as it is asked.
pub(crate) type Layer<'a> = Box<dyn Fn(&mut dyn Write) -> io::Result<LeftOut> + 'a>;

/// Counts and hashes, and does something with each piece.
struct Sink<'a> {
    each: &'a mut dyn FnMut(&[u8]) -> io::Result<()>,
    hash: Context,
    size: u64,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.each)(bytes)?;
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> Sink<'a> {
    fn new(each: &'a mut dyn FnMut(&[u8]) -> io::Result<()>) -> Self {
        Self { each, hash: Context::new(&SHA256), size: 0 }
    }

    fn end(self) -> Blob {
        Blob { hash: hex(self.hash.finish().as_ref()), size: self.size }
    }
}

/// A blob of the layout.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Blob {
    hash: String,
    size: u64,
}

impl Blob {
    fn of(text: &[u8]) -> Self {
        let hash = aws_lc_rs::digest::digest(&SHA256, text);
        Self { hash: hex(hash.as_ref()), size: text.len() as u64 }
    }

    fn descriptor(&self, kind: &str) -> Value {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{}", self.hash),
            "size": self.size,
        })
    }

    fn place(&self) -> String {
        format!("blobs/sha256/{}", self.hash)
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Writes the layout. `gone` says whether nobody reads it any more.
///
/// # Errors
/// As the output's; `BrokenPipe` when nobody reads; when a layer is not the same twice.
pub(crate) fn write(
    out: impl Write,
    about: &About,
    layers: &[(&str, Layer<'_>)],
    gone: &dyn Fn() -> bool,
) -> io::Result<()> {
    let mut blobs = Vec::new();
    for (_, layer) in layers {
        // Nothing is written for as long as this takes: whoever has gone away is noticed here.
        let mut ask = |_: &[u8]| {
            if gone() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        };
        let mut sink = Sink::new(&mut ask);
        layer(&mut sink)?;
        blobs.push(sink.end());
    }
    let config = serde_json::to_vec(&config(about, &blobs, layers))?;
    let config_blob = Blob::of(&config);
    let each: Vec<Value> = blobs.iter().map(|blob| blob.descriptor("layer.v1.tar")).collect();
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config_blob.descriptor("config.v1+json"),
        "layers": each,
    }))?;
    let manifest_blob = Blob::of(&manifest);
    let mut entry = manifest_blob.descriptor("manifest.v1+json");
    entry["annotations"] = json!({ "org.opencontainers.image.ref.name": about.name });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    });
    let mut writer = Writer::new(out);
    let mut file = |name: &str, text: &[u8]| {
        writer.entry(&own_file(name, text.len() as u64, about.created_at))?;
        writer.content(text)
    };
    file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    file("index.json", &serde_json::to_vec(&index)?)?;
    file(&manifest_blob.place(), &manifest)?;
    file(&config_blob.place(), &config)?;
    let mut written: Vec<&Blob> = Vec::new();
    for (blob, (_, layer)) in blobs.iter().zip(layers) {
        // Two layers with nothing in them are one blob.
        if written.contains(&blob) {
            continue;
        }
        writer.entry(&own_file(&blob.place(), blob.size, about.created_at))?;
        let mut pass = |bytes: &[u8]| writer.content(bytes);
        let mut sink = Sink::new(&mut pass);
        layer(&mut sink)?;
        if sink.end() != *blob {
            return Err(io::Error::other("the image has changed while it was exported"));
        }
        written.push(blob);
    }
    writer.finish()?.flush()
}

fn config(about: &About, blobs: &[Blob], layers: &[(&str, Layer<'_>)]) -> Value {
    let created = rfc3339(about.created_at);
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let diff_ids: Vec<String> = blobs.iter().map(|blob| format!("sha256:{}", blob.hash)).collect();
    let history: Vec<Value> =
        layers.iter().map(|(what, _)| json!({ "created": created, "created_by": what })).collect();
    let mut labels = about.labels.clone();
    labels.insert("dev.bivouac.image".to_owned(), about.image.clone());
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    json!({
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": "1000:1000",
            "Env": [format!("PATH={path}"), "HOME=/home/vercel-sandbox", "LANG=C.UTF-8"],
            "WorkingDir": about.cwd,
            "Cmd": ["/bin/bash"],
            "Labels": labels,
        },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
        "history": history,
    })
}

/// A name of an image that every tool takes.
pub(crate) fn image_name(name: &str, tag: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).collect();
    // No two separators on each other, none at an end.
    let parts: Vec<&str> = text.split('-').filter(|part| !part.is_empty()).collect();
    let text = if parts.is_empty() { "snapshot".to_owned() } else { parts.join("-") };
    format!("localhost/bivouac/{text}:{tag}")
}

/// A moment as text, in UTC.
fn rfc3339(ms: i64) -> String {
    let (days, rest) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    // Days since 1 March of the year 0, in eras of 400 years, which are all alike.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + carry;
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, milli) = (rest / 1_000 % 60, rest % 1_000);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(rfc3339(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(rfc3339(1_796_040_001_000), "2026-11-30T12:00:01.000Z");
    }

    #[test]
    fn names_of_images() {
        assert_eq!(image_name("My Box_1", "t"), "localhost/bivouac/my-box-1:t");
        assert_eq!(image_name("--", "t"), "localhost/bivouac/snapshot:t");
    }

    #[test]
    fn a_layer_that_changes_breaks_the_archive_off() {
        let about = About {
            name: "n:t".to_owned(),
            cwd: "/".to_owned(),
            labels: BTreeMap::new(),
            created_at: 0,
            image: String::new(),
        };
        let calls = std::cell::Cell::new(0);
        let layer: Layer<'_> = Box::new(|out| {
            calls.set(calls.get() + 1);
            out.write_all(&[calls.get()])?;
            Ok(LeftOut::default())
        });
        let error = write(Vec::new(), &about, &[("x", layer)], &|| false).unwrap_err();
        assert!(error.to_string().contains("has changed"), "{error}");
        let same = || -> Layer<'_> {
            Box::new(|out| {
                out.write_all(b"layer")?;
                Ok(LeftOut::default())
            })
        };
        let (mut one, mut two) = (Vec::new(), Vec::new());
        write(&mut one, &about, &[("x", same()), ("y", same())], &|| false).unwrap();
        write(&mut two, &about, &[("x", same()), ("y", same())], &|| false).unwrap();
        assert!(one == two && !one.is_empty());
        let error = write(Vec::new(), &about, &[("x", same())], &|| true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
