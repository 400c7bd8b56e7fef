//! `bivouac ssh-key`: which public keys open SSH connections in the caller's name.

use serde_json::json;

use super::files::Folder;
use super::keys_of;
use crate::cli::args::{Global, SshKey};
use crate::cli::client::Client;
use crate::cli::clock::{now_ms, span};
use crate::cli::failure::{ExitStatus, Explain as _, Failure, Outcome};
use crate::cli::{each, output};

const PATH: &str = "/bivouac/v1/ssh-keys";
/// Longest file that is read.
const MAX: u64 = 16 << 10;

pub(in crate::cli) async fn run(global: &Global, verb: SshKey) -> Outcome {
    let client = Client::find(global)?;
    match verb {
        SshKey::Add { file, name } => {
            let text = match file {
                None => Folder::find()?.ensure_key()?,
                Some(file) => read(&file)?,
            };
            let mut body = json!({ "publicKey": text.trim() });
            if let Some(name) = name {
                body["name"] = name.into();
            }
            let answer = client.post(PATH, &client.scope(), &body).await?;
            let key = &answer["key"];
            if global.json {
                output::json(key)?;
            } else {
                let text = |field: &str| output::printable(key[field].as_str().unwrap_or("-"));
                output::progress(&format!("registered {} ({})", text("name"), text("fingerprint")));
            }
            Ok(ExitStatus::Success)
        }
        SshKey::Ls => list(global, &client).await,
        SshKey::Rm { keys } => {
            let remove = async |key: &str| {
                let path = format!("{PATH}/{}", crate::cli::client::percent(key));
                let answer = client.delete(&path, &client.scope()).await?;
                output::progress(&format!("removed {}", output::printable(key)));
                Ok(answer)
            };
            each(global, &keys, remove).await
        }
    }
}

fn read(file: &std::path::Path) -> Outcome<String> {
    use std::io::Read as _;
    let could_not = || format!("could not read {}", file.display());
    let mut text = String::new();
    let open = std::fs::File::open(file).explain(could_not)?;
    open.take(MAX).read_to_string(&mut text).explain(could_not)?;
    if text.contains("PRIVATE KEY") {
        return Err(Failure::usage(format!(
            "{} is a private key, which stays where it is",
            file.display()
        ))
        .hint(format!("name the public one: {}.pub", file.display())));
    }
    Ok(text)
}

async fn list(global: &Global, client: &Client) -> Outcome {
    let mut answer = client.get(PATH, &client.scope()).await?;
    let keys = keys_of(&mut answer);
    if global.json {
        output::json(&keys.into())?;
        return Ok(ExitStatus::Success);
    }
    let now = now_ms();
    let ago = |value: &serde_json::Value| match value.as_i64() {
        Some(at) => format!("{} ago", span(now - at)),
        None => "-".to_owned(),
    };
    let row = |key: &serde_json::Value| {
        let text = |field: &str| key[field].as_str().unwrap_or("-").to_owned();
        vec![text("name"), text("fingerprint"), ago(&key["createdAt"]), ago(&key["lastUsedAt"])]
    };
    output::table(&["NAME", "FINGERPRINT", "ADDED", "USED"], keys.iter().map(row).collect())?;
    Ok(ExitStatus::Success)
}
