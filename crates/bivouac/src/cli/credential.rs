//! `bivouac credential` and `--credential`: ready-made credentials.
//!
//! Invariant: nothing here is secret; a credential names a secret of the engine's. What the engine cannot
//! know of the caller (npm's registry) is looked up here.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::{Credential, Global};
use super::client::Client;
use super::clock::{now_ms, span};
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::{self, millis};
use super::{each, output, sandbox};

/// `KIND[=SECRET][,OPTION[=VALUE]]…`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct CredentialArg {
    kind: String,
    secret: Option<String>,
    name: Option<String>,
    actor: Option<String>,
    expires: Option<Duration>,
    options: BTreeMap<String, String>,
}

/// Reads a credential. What its kind takes is the engine's to say.
pub(crate) fn argument(text: &str) -> Result<CredentialArg, String> {
    let mut parts = text.split(',');
    let head = parts.next().unwrap_or_default();
    let (kind, secret) = match head.split_once('=') {
        Some((kind, secret)) => (kind, Some(secret.to_owned())),
        None => (head, None),
    };
    if kind.is_empty() || secret.as_deref() == Some("") {
        return Err("write KIND or KIND=SECRET, then options: github=GH,push,expires=1h".to_owned());
    }
    let mut read = CredentialArg { kind: kind.to_owned(), secret, ..CredentialArg::default() };
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        match name {
            "" => return Err("there is an empty option".to_owned()),
            "name" => read.name = Some(value.to_owned()),
            "actor" => read.actor = Some(value.to_owned()),
            "expires" => read.expires = Some(parse::duration(value)?),
            name => {
                if read.options.insert(name.to_owned(), value.to_owned()).is_some() {
                    return Err(format!("'{name}' is there twice"));
                }
            }
        }
    }
    Ok(read)
}

/// Credentials as a request writes them.
pub(crate) fn bodies(all: &[CredentialArg]) -> Outcome<Vec<Value>> {
    all.iter().map(|one| body(one, npm_registry)).collect()
}

fn body(one: &CredentialArg, registry: impl Fn(Option<&str>) -> Outcome<String>) -> Outcome<Value> {
    let mut options = one.options.clone();
    if one.kind == "npm" && !options.contains_key("registry") {
        let scope = options.remove("scope");
        options.insert("registry".to_owned(), registry(scope.as_deref())?);
        if scope.is_some() {
            options.insert("scoped".to_owned(), "true".to_owned());
        }
    }
    let mut body = Map::new();
    body.insert("type".to_owned(), one.kind.as_str().into());
    for (key, value) in [("secret", &one.secret), ("name", &one.name), ("actor", &one.actor)] {
        if let Some(value) = value {
            body.insert(key.to_owned(), value.as_str().into());
        }
    }
    if let Some(expires) = one.expires {
        body.insert("expiresAt".to_owned(), now_ms().saturating_add(millis(expires)).into());
    }
    if !options.is_empty() {
        body.insert("options".to_owned(), json!(options));
    }
    Ok(body.into())
}

/// The registry of the caller's npm, of a scope (`@acme`) if one is named.
#[expect(
    clippy::disallowed_methods,
    reason = "npm is the judge of its own configuration, and a client has one thread"
)]
fn npm_registry(scope: Option<&str>) -> Outcome<String> {
    let key = match scope {
        None => "registry".to_owned(),
        Some(scope) => format!("@{}:registry", scope.trim_start_matches('@')),
    };
    if let Ok(done) =
        Command::new("npm").args(["config", "get", &key]).stderr(Stdio::null()).output()
    {
        let text = String::from_utf8_lossy(&done.stdout).trim().to_owned();
        if done.status.success() && text.starts_with("http") {
            return Ok(text);
        }
    }
    // Without npm its files still say it.
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user = variable("NPM_CONFIG_USERCONFIG")
        .or_else(|| variable("HOME").map(|home| home.join(".npmrc")));
    let found = [Some(PathBuf::from(".npmrc")), user]
        .into_iter()
        .flatten()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .find_map(|text| setting(&text, &key));
    found.ok_or_else(|| {
        Failure::new(format!("npm's configuration names no {key}"))
            .hint("name it: --credential npm,registry=https://HOST/")
    })
}

/// A setting of an `.npmrc`.
fn setting(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim().trim_matches('"');
        (name.trim() == key && value.starts_with("http")).then(|| value.to_owned())
    })
}

pub(crate) async fn run(global: &Global, verb: Credential) -> Outcome {
    let client = Client::find(global)?;
    match verb {
        Credential::Ls { name } => list(global, &client, &name).await,
        Credential::Add { name, credentials } => {
            let mut answers = Vec::new();
            for body in bodies(&credentials)? {
                let answer = client.post(&path(&name), &client.scope(), &body).await?;
                told(&name, &answer);
                answers.push(answer);
            }
            if global.json {
                output::json(&answers.into())?;
            }
            Ok(ExitStatus::Success)
        }
        Credential::Rm { name, credentials } => {
            let remove = async |credential: &str| {
                let path = format!("{}/{}", path(&name), client_path(credential));
                let answer = client.delete(&path, &client.scope()).await?;
                output::progress(&format!("{name} has no credential {credential} any more"));
                let open = words(&answer["stillAllowed"]);
                if !open.is_empty() {
                    output::hint(&format!(
                        "still reachable: {}; close it with: bivouac policy deny {name} {}",
                        open.join(", "),
                        open.join(" ")
                    ));
                }
                Ok(answer)
            };
            each(global, &credentials, remove).await
        }
    }
}

/// The API's path of a sandbox's credentials.
pub(crate) fn path(name: &str) -> String {
    format!("{}/credentials", sandbox::path(name))
}

/// A name of a credential as a segment of a path.
fn client_path(name: &str) -> String {
    use std::fmt::Write as _;
    name.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

fn words(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn told(name: &str, answer: &Value) {
    let credential = &answer["credential"];
    let called = credential["name"].as_str().unwrap_or("-");
    let hosts = words(&credential["hosts"]).join(", ");
    output::progress(&format!("{name} has the credential {called} for {hosts}"));
    let env = words(&answer["env"]).join(", ");
    if !env.is_empty() {
        output::progress(&format!("commands get a dummy in {env}"));
    }
}

async fn list(global: &Global, client: &Client, name: &str) -> Outcome {
    let mut answer = client.get(&path(name), &client.scope()).await?;
    let all = answer.get_mut("credentials").map(Value::take).unwrap_or_default();
    if global.json {
        output::json(&all)?;
        return Ok(ExitStatus::Success);
    }
    let now = now_ms();
    let row = |one: &Value| {
        let expires = match one["expiresAt"].as_i64() {
            None => "never".to_owned(),
            Some(at) if at <= now => "expired".to_owned(),
            Some(at) => format!("in {}", span(at - now)),
        };
        vec![
            one["name"].as_str().unwrap_or("-").to_owned(),
            words(&one["secrets"]).join(" "),
            words(&one["hosts"]).join(" "),
            one["actor"].as_str().unwrap_or("-").to_owned(),
            expires,
        ]
    };
    let rows = all.as_array().map(|all| all.iter().map(row).collect()).unwrap_or_default();
    output::table(&["NAME", "SECRETS", "HOSTS", "ACTOR", "EXPIRES"], rows)?;
    Ok(ExitStatus::Success)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Value {
        body(&argument(text).unwrap(), |scope| {
            Ok(format!("https://npm.test/{}", scope.unwrap_or("")))
        })
        .unwrap()
    }

    #[test]
    fn credentials_are_words_with_options() {
        assert_eq!(written("github"), json!({"type": "github"}));
        assert_eq!(
            written("github=GH,push,repos=a/b+c/d,actor=me,name=gh"),
            json!({"type": "github", "secret": "GH", "name": "gh", "actor": "me",
                "options": {"push": "", "repos": "a/b+c/d"}})
        );
        assert!(written("openai,expires=1h")["expiresAt"].as_i64().unwrap() > now_ms());
        for bad in ["", "=x", "github=", "github,", "github,push,push", "github,expires=soon"] {
            assert!(argument(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn npm_takes_its_registry_from_the_caller() {
        assert_eq!(written("npm")["options"], json!({"registry": "https://npm.test/"}));
        assert_eq!(
            written("npm=T,scope=@acme")["options"],
            json!({"registry": "https://npm.test/@acme", "scoped": "true"})
        );
        let told = written("npm,registry=https://x.test/");
        assert_eq!(told["options"], json!({"registry": "https://x.test/"}));
        let file = "; x\nregistry = \"https://a.test/\"\n@acme:registry=https://b.test/\n//a.test/:_authToken=t\n";
        assert_eq!(setting(file, "registry").as_deref(), Some("https://a.test/"));
        assert_eq!(setting(file, "@acme:registry").as_deref(), Some("https://b.test/"));
        assert_eq!(setting(file, "@other:registry"), None);
    }

    #[test]
    fn names_go_into_paths_whole() {
        assert_eq!(client_path("a/b c"), "a%2Fb%20c");
    }
}
