//! `bivouac ssh`: OpenSSH's client, with nothing to set up.
//!
//! Owns: the caller's key and the hosts that it knows, in his own configuration folder, and OpenSSH's options.
//! Invariants: the private key is made here, mode 0600, and goes nowhere; a file is written whole or not at all;
//! no token is in an argument. The connection itself goes through the API (`--stdio`), so whoever can use the
//! engine can use SSH.

pub(super) mod config;
pub(super) mod files;
pub(super) mod keys;

use std::os::unix::process::CommandExt as _;

use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt as _, copy, split};

use super::args::{Global, Ssh};
use super::client::Client;
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::{output, tunnel};
use files::Folder;

/// The user inside, when none is told.
const USER: &str = "vercel-sandbox";
/// The name that the engine's host key is kept by, whatever sandbox it is.
const HOST: &str = "bivouac";

pub(crate) async fn run(global: &Global, args: Ssh) -> Outcome {
    let Ssh { terminal, stdio, name, rest } = args;
    let mut global = global.clone();
    if let Some(namespace) = name.namespace {
        global.namespace = namespace;
    }
    let client = Client::find(&global)?;
    let folder = Folder::find()?;
    ready(&client, &folder).await?;
    if stdio {
        return carry(&client, &name.sandbox).await;
    }
    let argv = command(&global, &folder, &name.sandbox, terminal.as_deref(), rest)?;
    if global.json {
        let (key, hosts) = (folder.key(), folder.known_hosts());
        output::json(&json!({
            "sandbox": name.sandbox,
            "host": format!("{}.bivouac", name.sandbox),
            "identityFile": key.display().to_string(),
            "knownHostsFile": hosts.display().to_string(),
            "command": argv,
        }))?;
        return Ok(ExitStatus::Success);
    }
    #[expect(clippy::disallowed_methods, reason = "becomes that program; nothing forks")]
    let error = std::process::Command::new(&argv[0]).args(&argv[1..]).exec();
    if error.kind() == std::io::ErrorKind::NotFound {
        return Err(Failure::new("there is no 'ssh' program on this machine")
            .hint("install OpenSSH's client (Debian: openssh-client)")
            .hint(format!("or work without it: bivouac exec {} -- CMD", name.sandbox)));
    }
    Err(error).explain(|| "could not start ssh".to_owned())
}

/// Sees to it that the caller has a key, that the engine knows it, and that the caller knows the engine.
async fn ready(client: &Client, folder: &Folder) -> Outcome<()> {
    let public = folder.ensure_key()?;
    let body = json!({ "publicKey": public, "name": files::label() });
    match client.post("/bivouac/v1/ssh-keys", &client.scope(), &body).await {
        Ok(_) => {}
        // Somebody's who is let in as well: who comes by the API has the rights of his token.
        Err(error) if error.api().is_some_and(|error| error.code == "ssh_key_taken") => {}
        Err(error) => return Err(error.into()),
    }
    let about = client.get("/bivouac/v1/ssh", &client.scope()).await?;
    let Some(host_key) = about["hostKey"].as_str().filter(|key| !key.contains('\n')) else {
        return Err(Failure::new("the engine does not tell its SSH host key"));
    };
    folder.know(&format!("{HOST} {host_key}"))
}

/// Standard input and output to the sandbox's SSH and back.
async fn carry(client: &Client, sandbox: &str) -> Outcome {
    let stream = tunnel::open(client, &format!("/bivouac/v1/sandboxes/{sandbox}/ssh")).await?;
    let (mut from, mut to) = split(stream);
    let (mut input, mut out) = (tokio::io::stdin(), tokio::io::stdout());
    let sending = async {
        let sent = copy(&mut input, &mut to).await;
        let _ = to.shutdown().await;
        // What the other side still says is waited for.
        match sent {
            Ok(_) => std::future::pending().await,
            Err(error) => Err(error),
        }
    };
    let receiving = async {
        copy(&mut from, &mut out).await?;
        out.flush().await
    };
    tokio::select! {
        done = receiving => done,
        done = sending => done,
    }
    .explain(|| "the connection to the engine broke".to_owned())?;
    Ok(ExitStatus::Success)
}

/// OpenSSH's command line.
fn command(
    global: &Global,
    folder: &Folder,
    sandbox: &str,
    terminal: Option<&str>,
    rest: Vec<String>,
) -> Outcome<Vec<String>> {
    let mut argv = vec!["ssh".to_owned()];
    let proxy = config::proxy_command(global, &format!("{sandbox}.bivouac"))?;
    let mut options = config::options(folder, &proxy);
    if !names_user(&rest) {
        options.push(("User", USER.to_owned()));
    }
    if let Some(name) = terminal {
        bivouac_types::terminal::check_terminal_name(name)
            .map_err(|error| Failure::usage(error.to_string()))?;
        options.push(("SetEnv", format!("BIVOUAC_TERMINAL={name}")));
        // A third one would take the other two back.
        let asked = |word: &String| word.starts_with("-t");
        if !rest.iter().take_while(|word| *word != "--").any(asked) {
            argv.push("-t".to_owned());
        }
    }
    for (name, value) in options {
        argv.extend(["-o".to_owned(), format!("{name}={value}")]);
    }
    argv.push(format!("{sandbox}.bivouac"));
    argv.extend(rest);
    Ok(argv)
}

/// Whether the caller's own flags say which user.
fn names_user(rest: &[String]) -> bool {
    let flags = rest.iter().take_while(|word| *word != "--");
    let mut after_o = false;
    for word in flags {
        let value = match word.strip_prefix("-o") {
            Some("") => {
                after_o = true;
                continue;
            }
            Some(value) => Some(value),
            None if after_o => Some(word.as_str()),
            None => None,
        };
        after_o = false;
        let is_user = |value: &str| {
            value.trim_start().get(..4).is_some_and(|name| name.eq_ignore_ascii_case("user"))
                && value.trim_start()[4..].starts_with(['=', ' '])
        };
        if word.starts_with("-l") || value.is_some_and(is_user) {
            return true;
        }
    }
    false
}

/// What `ssh-key ls` and others show.
fn keys_of(answer: &mut Value) -> Vec<Value> {
    match answer.get_mut("keys").map(Value::take) {
        Some(Value::Array(keys)) => keys,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_is_told_is_not_replaced() {
        let names = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            names_user(&words)
        };
        assert!(names(&["-l", "root"]) && names(&["-lroot"]) && names(&["-o", "User=root"]));
        assert!(names(&["-ouser root"]));
        assert!(!names(&[]) && !names(&["-o", "UserKnownHostsFile=x"]) && !names(&["-N"]));
        assert!(!names(&["--", "ls", "-l"]));
    }
}
