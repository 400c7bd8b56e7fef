//! `image pull`, and the pull before a create that names an image of a registry.
//!
//! Invariant: a login is read from the caller's own file and sent with the one request; it is never printed,
//! stored or put into an argument.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_types::oci::{Reference, is_reference};
use bivouac_types::secret::Secret;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Screen;
use crate::cli::args::{Global, PullImage, RegistryLogin};
use crate::cli::busy::guarded;
use crate::cli::client::Client;
use crate::cli::failure::{ExitStatus, Explain as _, Failure, Outcome};
use crate::cli::ndjson::Lines;
use crate::cli::{output, snapshot};

const PLACE: &str = "/bivouac/v1/images/pull";

/// Does what `image pull` says.
pub(crate) async fn run(global: &Global, args: PullImage) -> Outcome {
    let client = Client::find(global)?;
    let image = guarded(pull(&client, &args.image, &args.login, false)).await?;
    if global.json {
        output::json(&image)?;
        return Ok(ExitStatus::Success);
    }
    let text = |field: &str| image[field].as_str().unwrap_or_default().to_owned();
    output::line(&text("reference"))?;
    let size = |field: &str| snapshot::size(image[field].as_u64().unwrap_or(0));
    output::progress(&match image["new"] == true {
        true => format!("pulled {}: {}, {} fetched", text("name"), size("bytes"), size("fetched")),
        false => format!("{} is up to date", text("name")),
    });
    Ok(ExitStatus::Success)
}

/// Before a create: an image of a registry that is not here is pulled, with the caller's login.
pub(crate) async fn before_create(
    client: &Client,
    image: Option<&str>,
    login: &RegistryLogin,
) -> Outcome<()> {
    match image {
        // One version of ours is here or nowhere.
        Some(image) if is_reference(image) && bivouac_types::image::plain(image) == image => {
            guarded(pull(client, image, login, true)).await.map(drop)
        }
        _ => Ok(()),
    }
}

async fn pull(
    client: &Client,
    image: &str,
    login: &RegistryLogin,
    if_missing: bool,
) -> Outcome<Value> {
    let reference = Reference::parse(image)
        .map_err(|why| Failure::usage(format!("the image '{image}' {why}")))?;
    let mut body = json!({ "image": reference.to_string(), "insecure": login.insecure, "ifMissing": if_missing });
    if let Some(secret) = &login.registry_secret {
        body["secret"] = secret.as_str().into();
    } else if let Some((username, password)) =
        find_login(login.auth_file.as_deref(), reference.host())?
    {
        body["username"] = username.into();
        body["password"] = password.expose().into();
    }
    let mut lines = Lines::new(client.post_stream(PLACE, &client.scope(), &body, None).await?);
    let mut screen = Screen::new(client.global());
    let mut last = String::new();
    while let Some(line) = lines.next().await? {
        match line["type"].as_str() {
            Some("progress") => {
                let step = line["step"].as_str().unwrap_or_default();
                let (bytes, total) = (line["bytes"].as_u64(), line["total"].as_u64());
                if !step.is_empty() && step != last {
                    screen.step(step);
                    last = step.to_owned();
                }
                if let (Some(bytes), Some(total @ 1..)) = (bytes, total) {
                    screen.part(bytes.saturating_mul(1000) / total);
                }
            }
            Some("image") => {
                screen.end();
                return Ok(line["image"].clone());
            }
            Some("error") => {
                screen.end();
                let message = line["message"].as_str().unwrap_or("the pull failed").to_owned();
                return Err(failure(message, line["code"].as_str().unwrap_or_default()));
            }
            _ => {}
        }
    }
    screen.end();
    Err(Failure::new("the engine ended in the middle of the pull")
        .hint("start the engine and pull again: what was fetched is kept"))
}

fn failure(message: String, code: &str) -> Failure {
    let failure = Failure::new(message);
    match code {
        "image_denied" => failure.hint(
            "log in with docker or podman, or name a file with --auth-file, or a secret with --registry-secret",
        ),
        "no_capacity" => failure.hint("bivouac image prune makes room"),
        _ => failure,
    }
}

/// Docker's file of logins.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct AuthFile {
    auths: std::collections::BTreeMap<String, Auth>,
    creds_store: Option<String>,
    cred_helpers: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase", default)]
struct Auth {
    auth: Option<String>,
    identitytoken: Option<String>,
}

/// User and password for a registry, if the caller has them.
fn find_login(file: Option<&Path>, host: &str) -> Outcome<Option<(String, Secret)>> {
    let (path, named) = match file {
        Some(path) => (path.to_owned(), true),
        None => match default_file(|name| std::env::var_os(name)) {
            Some(path) => (path, false),
            None => return Ok(None),
        },
    };
    let text = match std::fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !named => return Ok(None),
        // Somebody else's, for example root's with the caller's HOME.
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && !named => return Ok(None),
        other => {
            other.explain(|| format!("the file of logins {} cannot be read", path.display()))?
        }
    };
    of_file(&text, host)
        .map_err(|why| Failure::new(format!("the file of logins {} {why}", path.display())))
}

fn default_file(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    let full = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    full("REGISTRY_AUTH_FILE")
        .or_else(|| Some(full("DOCKER_CONFIG")?.join("config.json")))
        .or_else(|| Some(full("HOME")?.join(".docker/config.json")))
}

/// The error is a clause and repeats nothing of the file.
fn of_file(text: &[u8], host: &str) -> Result<Option<(String, Secret)>, String> {
    let file: AuthFile = serde_json::from_slice(text)
        .map_err(|e| format!("is not one that docker keeps: line {}", e.line()))?;
    let bare = |key: &str| {
        let key = key.trim_start_matches("https://").trim_start_matches("http://");
        key.split('/').next().unwrap_or_default().to_ascii_lowercase()
    };
    let Some(auth) = file.auths.iter().find(|(key, _)| bare(key) == host).map(|(_, auth)| auth)
    else {
        // A helper that knows only other registries has nothing to say of this one.
        return match file.cred_helpers.get(host) {
            Some(helper) => Err(helped(helper, host)),
            None => Ok(None),
        };
    };
    let Some(pair) = auth.auth.as_deref().filter(|pair| !pair.is_empty()) else {
        if let Some(helper) = file.cred_helpers.get(host).or(file.creds_store.as_ref()) {
            return Err(helped(helper, host));
        }
        return match auth.identitytoken {
            Some(_) => Err(format!(
                "has an identity token for {host}, which is not supported: log in with a password or access token"
            )),
            None => Ok(None),
        };
    };
    let wrong = || format!("has a login for {host} that cannot be read");
    let pair = STANDARD.decode(pair).ok().and_then(|pair| String::from_utf8(pair).ok());
    let pair = Secret::new(pair.ok_or_else(wrong)?);
    let (user, password) = pair.expose().split_once(':').ok_or_else(wrong)?;
    Ok(Some((user.to_owned(), Secret::new(password.trim_end_matches('\0').to_owned()))))
}

fn helped(helper: &str, host: &str) -> String {
    let helper: String =
        helper.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    format!(
        "leaves the login for {host} to the program docker-credential-{helper}, which is not asked: give a secret with --registry-secret, or a file with --auth-file"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_are_found_by_host() {
        let pair = STANDARD.encode("me:pa:ss");
        let text = json!({ "auths": {
            "https://example.com/v1/": { "auth": pair },
            "localhost:5000": { "auth": pair },
            "helped.example.com": {},
        }, "credHelpers": { "other.example.com": "pass" }, "credsStore": "desktop" })
        .to_string();
        let find = |host: &str| of_file(text.as_bytes(), host);
        for host in ["example.com", "localhost:5000"] {
            let (user, password) = find(host).unwrap().unwrap();
            assert_eq!((user.as_str(), password.expose()), ("me", "pa:ss"), "{host}");
        }
        assert!(find("none.example.com").unwrap().is_none());
        assert!(find("other.example.com").unwrap_err().contains("docker-credential-pass"));
        assert!(find("helped.example.com").unwrap_err().contains("docker-credential-desktop"));
        assert!(of_file(b"{", "x").is_err());
        let odd = json!({ "auths": { "x.y": { "auth": "?" } } }).to_string();
        assert!(!of_file(odd.as_bytes(), "x.y").unwrap_err().contains('?'));
    }

    #[test]
    fn the_file_is_the_one_that_other_tools_take() {
        let of = |set: &[(&str, &str)]| {
            default_file(|name| set.iter().find(|(key, _)| *key == name).map(|(_, v)| (*v).into()))
        };
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.docker/config.json".into()));
        assert_eq!(of(&[("HOME", "/h"), ("DOCKER_CONFIG", "/d")]), Some("/d/config.json".into()));
        assert_eq!(of(&[("DOCKER_CONFIG", "/d"), ("REGISTRY_AUTH_FILE", "/r")]), Some("/r".into()));
        assert_eq!(of(&[("HOME", "")]), None);
    }
}
