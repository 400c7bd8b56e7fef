//! Where secrets come from.
//!
//! Owns: the sources and how each is asked. Invariants: what a source answers is bounded in time and size;
//! an error names the source and never repeats what it said (a program's stderr or a server's body may
//! hold the secret); a program runs without a shell and without the engine's environment. Called by
//! `secrets`, which caches.
//!
//! | reference | what it is |
//! | --- | --- |
//! | (none) | the value that was given, sealed |
//! | `env:NAME` | a variable of the engine's own process |
//! | `file:/path` | a file of the engine's host, read anew each time |
//! | `exec:["argv", …]`, `exec:cmd args` | what a program of the engine's host prints |
//! | `vault:MOUNT/PATH#FIELD` | HashiCorp Vault, KV version 2, by `VAULT_ADDR` and `VAULT_TOKEN` of the engine |
//! | `github-app:APP/INSTALLATION` | an installation token of a GitHub App whose private key was given |

pub(crate) mod github;
mod hashicorp;
mod local;
pub(crate) mod outcalls;

use std::fmt;

use bivouac_types::Millis;
use bivouac_types::secret::Secret;
use serde::{Deserialize, Serialize};

use crate::secrets::{MAX_SECRET, NewSecret};
use outcalls::Outcalls;

/// A source, as it is sealed.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Source {
    Literal { value: String },
    Env { name: String },
    File { path: String },
    Exec { argv: Vec<String> },
    Vault { path: String, field: String },
    GithubApp(github::App),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())
    }
}

/// What a source answered.
pub(crate) struct Fetched {
    pub(crate) text: Secret,
    /// Until when it is good, when the source knows.
    pub(crate) until: Option<Millis>,
}

impl Source {
    /// Reads what a client sent. The error is a sentence that holds no secret.
    pub(crate) fn new(new: NewSecret) -> Result<Self, String> {
        let NewSecret { from, value } = new;
        if let Some(value) = &value {
            let length = value.expose().len();
            if length == 0 || length > MAX_SECRET {
                return Err(format!("a secret has 1 to {MAX_SECRET} bytes, got {length}"));
            }
        }
        let Some(from) = from else {
            let value = value.ok_or("needs a 'value', or a reference in 'from'")?;
            return Ok(Self::Literal { value: value.expose().to_owned() });
        };
        if from.len() > 4096 || from.chars().any(char::is_control) {
            return Err("a reference has at most 4096 printable characters".to_owned());
        }
        let (kind, rest) = from.split_once(':').unwrap_or((&from, ""));
        if kind == "github-app" {
            let key = value.ok_or("a GitHub App needs its private key (PEM) as the value")?;
            return github::App::new(rest, &key).map(Self::GithubApp);
        }
        if value.is_some() {
            return Err(format!("takes either a value or the reference '{kind}:…', not both"));
        }
        match kind {
            "env" if is_variable(rest) => Ok(Self::Env { name: rest.to_owned() }),
            "env" => Err("env: needs the name of a variable: env:NAME".to_owned()),
            "file" if rest.starts_with('/') => Ok(Self::File { path: rest.to_owned() }),
            "file" => Err("file: needs an absolute path: file:/run/secrets/token".to_owned()),
            "exec" => local::argv(rest).map(|argv| Self::Exec { argv }),
            "vault" => hashicorp::parse(rest).map(|(path, field)| Self::Vault { path, field }),
            _ => Err("the reference must begin with env:, file:, exec:, vault: or github-app:"
                .to_owned()),
        }
    }

    /// The word for it in lists.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Literal { .. } => "literal",
            Self::Env { .. } => "env",
            Self::File { .. } => "file",
            Self::Exec { .. } => "exec",
            Self::Vault { .. } => "vault",
            Self::GithubApp(_) => "github-app",
        }
    }

    /// Whether it shows something of the engine's host to whoever may use the secret.
    pub(crate) fn reads_host(&self) -> bool {
        match self {
            Self::Literal { .. } | Self::GithubApp(_) => false,
            Self::Env { .. } | Self::File { .. } | Self::Exec { .. } | Self::Vault { .. } => true,
        }
    }

    /// Whether it has the engine's host call an address that the reference chooses.
    pub(crate) fn calls_elsewhere(&self) -> bool {
        matches!(self, Self::GithubApp(app) if app.calls_elsewhere())
    }

    /// As it is sealed.
    pub(crate) fn to_sealed(&self) -> Secret {
        // Text in a derived form: it always serialises.
        Secret::new(serde_json::to_string(self).unwrap_or_default())
    }

    pub(crate) fn from_sealed(text: &Secret) -> Option<Self> {
        serde_json::from_str(text.expose()).ok()
    }

    /// Asks the source.
    pub(crate) async fn fetch(&self, out: &Outcalls, now: Millis) -> Result<Fetched, String> {
        let text = match self {
            Self::Literal { value } => Secret::new(value.clone()),
            Self::Env { name } => local::variable(name)?,
            Self::File { path } => local::file(path).await?,
            Self::Exec { argv } => local::exec(argv).await?,
            Self::Vault { path, field } => hashicorp::read(out, path, field).await?,
            Self::GithubApp(app) => return app.token(out, now).await,
        };
        if text.expose().is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(Fetched { text, until: None })
    }
}

fn is_variable(name: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    !name.is_empty() && name.bytes().all(good) && !name.as_bytes()[0].is_ascii_digit()
}

/// Milliseconds since the epoch of `2026-11-30T11:38:58Z`, with a fraction or an offset too.
pub(crate) fn rfc3339(text: &str) -> Option<Millis> {
    let text = text.trim();
    let part = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    let (hour, minute, second) = (part(11, 13)?, part(14, 16)?, part(17, 19)?);
    let rest = text.get(19..)?.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let offset = match rest {
        "Z" | "z" => 0,
        _ => {
            let sign = if rest.starts_with('-') { -1 } else { 1 };
            let (hours, minutes) = rest.get(1..)?.split_once(':')?;
            sign * (hours.parse::<i64>().ok()? * 60 + minutes.parse::<i64>().ok()?)
        }
    };
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days from civil: years that begin in March, so that the leap day is the last one.
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let of_era = shifted.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some((((days * 24 + hour) * 60 + minute - offset) * 60 + second) * 1000)
}

#[cfg(test)]
mod tests;
