//! `bivouac secret`: write-only secrets of a project.
//!
//! Invariant: a secret comes from standard input, a file or a reference, never from the command line,
//! where everybody on the machine could read it; it is never printed.

use std::io::{self, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};

use bivouac_types::secret::Secret as Text;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::{Value, json};

use super::args::{Global, Secret};
use super::client::Client;
use super::clock::{now_ms, span};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::{each, output};

/// Largest secret, bytes: the engine's limit.
const MAX: u64 = 64 * 1024;

pub(crate) async fn run(global: &Global, verb: Secret) -> Outcome {
    let client = Client::find(global)?;
    match verb {
        Secret::Set { name, file, from, value } => {
            if !value.is_empty() {
                return Err(Failure::usage(
                    "a secret on the command line can be read by everybody on this machine",
                )
                .hint(format!("write it to standard input: bivouac secret set {name} < FILE")));
            }
            set(global, &client, &name, file.as_deref(), from.as_deref()).await
        }
        Secret::Ls => list(global, &client).await,
        Secret::Rm { names } => {
            let remove = async |name: &str| {
                let answer = client.delete(&path(name), &client.scope()).await?;
                output::progress(&format!("removed {name}"));
                Ok(answer)
            };
            each(global, &names, remove).await
        }
    }
}

fn path(name: &str) -> String {
    format!("/v2/secrets/{name}")
}

async fn set(
    global: &Global,
    client: &Client,
    name: &str,
    file: Option<&Path>,
    from: Option<&str>,
) -> Outcome {
    let mut body = json!({});
    if let Some(from) = from {
        body["from"] = from.into();
    }
    // A reference says where the secret is; an App has a key besides.
    let wanted = from.is_none_or(|from| from.starts_with("github-app:"));
    if wanted || file.is_some() {
        let text = match file {
            Some(file) => read_file(file)?,
            None if io::stdin().is_terminal() => ask(name)?,
            None => read(io::stdin().lock(), "standard input")?,
        };
        body["value"] = text.expose().into();
    }
    let answer = client.put(&path(name), &client.scope(), &body).await?;
    let secret = &answer["secret"];
    if global.json {
        output::json(secret)?;
    } else {
        let (kind, version) = (&secret["kind"], &secret["version"]);
        let kind = kind.as_str().unwrap_or("-");
        output::progress(&format!("{name} is set ({kind}, version {version})"));
        output::hint(&format!(
            "use it in a policy as ${{secret:{name}}}, or with --credential KIND={name}"
        ));
    }
    Ok(ExitStatus::Success)
}

fn read_file(file: &Path) -> Outcome<Text> {
    let shown = file.display().to_string();
    let open = std::fs::File::open(file).explain(|| format!("could not read {shown}"))?;
    read(open, &shown)
}

/// All of it, without the line end that editors and `echo` add.
fn read(from: impl io::Read, what: &str) -> Outcome<Text> {
    let mut text = String::new();
    from.take(MAX + 2).read_to_string(&mut text).explain(|| format!("could not read {what}"))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    if text.is_empty() {
        return Err(Failure::usage(format!("{what} is empty: there is no secret in it")));
    }
    if text.len() as u64 > MAX {
        return Err(Failure::usage(format!("{what} has more than {MAX} bytes")));
    }
    Ok(Text::new(text.to_owned()))
}

/// One line from a terminal that does not show it.
fn ask(name: &str) -> Outcome<Text> {
    /// Shows again what is typed, however the question ends.
    struct Shown(rustix::termios::Termios);
    impl Drop for Shown {
        fn drop(&mut self) {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        }
    }
    output::progress(&format!("the secret {name}, then Enter (it is not shown):"));
    let before = tcgetattr(io::stdin()).explain(|| "could not ask the terminal".to_owned())?;
    let mut hidden = before.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    let shown = Shown(before);
    tcsetattr(io::stdin(), OptionalActions::Flush, &hidden)
        .explain(|| "could not ask the terminal".to_owned())?;
    let mut line = String::new();
    let read_line = io::stdin().read_line(&mut line);
    drop(shown);
    read_line.explain(|| "could not read the terminal".to_owned())?;
    read(line.as_bytes(), "the line")
}

async fn list(global: &Global, client: &Client) -> Outcome {
    let mut answer = client.get("/v2/secrets", &client.scope()).await?;
    let secrets = answer.get_mut("secrets").map(Value::take).unwrap_or_default();
    if global.json {
        output::json(&secrets)?;
        return Ok(ExitStatus::Success);
    }
    let now = now_ms();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let ago = |value: &Value| match value.as_i64() {
        Some(at) => format!("{} ago", span(now - at)),
        None => "-".to_owned(),
    };
    let row = |secret: &Value| {
        vec![
            text(&secret["name"]),
            text(&secret["kind"]),
            secret["version"].to_string(),
            ago(&secret["updatedAt"]),
        ]
    };
    let rows = secrets.as_array().map(|all| all.iter().map(row).collect()).unwrap_or_default();
    output::table(&["NAME", "KIND", "VERSION", "SET"], rows)?;
    Ok(ExitStatus::Success)
}

/// Where a file of a secret is. The flag's value, for completion.
pub(crate) fn file(text: &str) -> Result<PathBuf, String> {
    if text == "-" {
        return Err("standard input is read without --file".to_owned());
    }
    Ok(PathBuf::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_the_secret_s() {
        let read = |text: &str| read(text.as_bytes(), "x").map(|text| text.expose().to_owned());
        assert_eq!(read("a\n").unwrap(), "a");
        assert_eq!(read("a\r\n").unwrap(), "a");
        assert_eq!(read("a\n\n").unwrap(), "a\n");
        assert_eq!(read(" a ").unwrap(), " a ");
        assert!(read("").is_err() && read("\n").is_err());
        assert!(read(&"a".repeat(64 * 1024)).is_ok());
        assert!(read(&"a".repeat(64 * 1024 + 1)).is_err());
    }
}
