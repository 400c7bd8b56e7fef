//! Which values can follow: names of sandboxes, ids of snapshots and commands, from the running engine.
//!
//! Invariant: a completion starts nothing, changes nothing and says nothing: without an engine, or with
//! one that does not answer at once, there are no candidates. Called through `completions`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Command, CommandFactory as _};
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _,
};
use serde_json::Value;

use super::args::{Cli, Global};
use super::client::Client;
use super::{parse, sandbox};

/// How long somebody who pressed Tab is kept waiting.
const PATIENCE: Duration = Duration::from_millis(800);

/// Arguments that take the name of a sandbox.
const NAMES: [(&str, &str); 38] = [
    ("drive attach", "sandbox"),
    ("drive detach", "sandbox"),
    ("credential ls", "name"),
    ("credential add", "name"),
    ("credential rm", "name"),
    ("policy show", "name"),
    ("policy set", "name"),
    ("policy allow", "name"),
    ("policy deny", "name"),
    ("policy log", "name"),
    ("policy explain", "name"),
    ("policy learn", "name"),
    ("inspect", "name"),
    ("exec", "name"),
    ("shell", "name"),
    ("ssh", "name"),
    ("terminals", "name"),
    ("attach", "name"),
    ("hangup", "name"),
    ("logs", "name"),
    ("ps", "name"),
    ("kill", "name"),
    ("wait", "name"),
    ("snapshot", "name"),
    ("stop", "names"),
    ("start", "names"),
    ("rm", "names"),
    ("fork", "source"),
    ("rollback", "name"),
    ("ports", "name"),
    ("ports publish", "name"),
    ("ports unpublish", "name"),
    ("ports link", "name"),
    ("ports revoke", "name"),
    ("open", "name"),
    ("forward", "name"),
    ("snapshots ls", "name"),
    ("ls", "prefix"),
];
/// Arguments that take the id of a command.
const COMMANDS: [(&str, &str); 3] = [("logs", "command"), ("kill", "command"), ("wait", "command")];
/// Arguments that take the id of a snapshot.
const SNAPSHOTS: [(&str, &str); 9] = [
    ("run", "snapshot"),
    ("create", "snapshot"),
    ("fork", "snapshot"),
    ("rollback", "snapshot"),
    ("snapshots get", "id"),
    ("snapshots tree", "id"),
    ("snapshots label", "id"),
    ("snapshots export", "id"),
    ("snapshots rm", "ids"),
];
/// Arguments that take the name of a token.
const TOKENS: [(&str, &str); 2] = [("token revoke", "names"), ("token log", "token")];
/// Arguments that take a path here or in a sandbox.
const PLACES: [(&str, &str); 2] = [("cp", "source"), ("cp", "target")];

/// The command line, knowing where its values come from.
pub(crate) fn command() -> Command {
    let mut command = Cli::command();
    for (verb, arg) in NAMES {
        command = with(command, verb, arg, |arg| arg.add(ArgValueCandidates::new(names)));
    }
    for (verb, arg) in COMMANDS {
        command = with(command, verb, arg, |arg| arg.add(ArgValueCandidates::new(commands)));
    }
    for (verb, arg) in SNAPSHOTS {
        command = with(command, verb, arg, |arg| arg.add(ArgValueCandidates::new(snapshots)));
    }
    for (verb, arg) in TOKENS {
        command = with(command, verb, arg, |arg| arg.add(ArgValueCandidates::new(tokens)));
    }
    for (verb, arg) in PLACES {
        command = with(command, verb, arg, |arg| arg.add(ArgValueCompleter::new(places)));
    }
    command
}

fn with(
    command: Command,
    verb: &str,
    arg: &'static str,
    change: impl Fn(clap::Arg) -> clap::Arg,
) -> Command {
    match verb.split_once(' ') {
        Some((verb, below)) => {
            let below = below.to_owned();
            command.mut_subcommand(verb, |verb| with(verb, &below, arg, change))
        }
        // In place: `mut_arg` would put it behind the others, and the order of words is their meaning.
        None => command.mut_subcommand(verb, |verb| {
            verb.mut_args(|known| if known.get_id() == arg { change(known) } else { known })
        }),
    }
}

/// The words of the line that is being typed.
fn typed() -> Vec<String> {
    let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    words.filter_map(|word| word.into_string().ok()).collect()
}

/// What the line says of the engine and the namespace; else what the environment says.
fn global(words: &[String]) -> Global {
    let flag = |long: &str, short: Option<&str>| {
        words.iter().enumerate().find_map(|(index, word)| {
            let joined = word.strip_prefix(long).and_then(|rest| rest.strip_prefix('='));
            let apart = word == long || short.is_some_and(|short| word == short);
            joined.map(str::to_owned).or_else(|| words.get(index + 1).filter(|_| apart).cloned())
        })
    };
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let namespace = flag("--namespace", Some("-n")).and_then(|text| parse::namespace(&text).ok());
    let local = || bivouac_types::name::Namespace { team: "local".into(), project: "local".into() };
    Global {
        json: false,
        unnamed: namespace.is_none(),
        namespace: namespace.unwrap_or_else(local),
        url: flag("--url", None).or_else(|| variable("BIVOUAC_URL")),
        data_dir: flag("--data-dir", None)
            .or_else(|| variable("BIVOUAC_DATA_DIR"))
            .map(PathBuf::from),
    }
}

/// Asks the engine, in time.
fn ask<T: Default>(question: impl AsyncFnOnce(&Client, &[String]) -> Option<T>) -> T {
    let words = typed();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return T::default() };
    let asking = async {
        let mut global = global(&words);
        super::client::go_home(&mut global).await;
        let client = Client::find(&global).ok()?;
        question(&client, &words).await
    };
    let answer = runtime.block_on(async { tokio::time::timeout(PATIENCE, asking).await });
    runtime.shutdown_background();
    answer.ok().flatten().unwrap_or_default()
}

async fn sandboxes(client: &Client) -> Option<Vec<Value>> {
    let query = client.list_scope().with("limit", "50");
    client.pages("/v2/sandboxes", &query, "sandboxes").await.ok()
}

fn candidate(value: &Value, id: &str, about: Option<String>) -> Option<CompletionCandidate> {
    let text = value[id].as_str()?;
    Some(CompletionCandidate::new(text).help(about.map(Into::into)))
}

fn names() -> Vec<CompletionCandidate> {
    let found: Vec<Value> = ask(async |client, _| sandboxes(client).await);
    let about = |sandbox: &Value| sandbox["status"].as_str().map(str::to_owned);
    found.iter().filter_map(|sandbox| candidate(sandbox, "name", about(sandbox))).collect()
}

fn snapshots() -> Vec<CompletionCandidate> {
    let found: Vec<Value> = ask(async |client, _| {
        let query = client.list_scope().with("limit", "50");
        client.pages("/v2/sandboxes/snapshots", &query, "snapshots").await.ok()
    });
    let about = |of: &Value| of["sourceSandboxName"].as_str().map(|name| format!("of {name}"));
    let kept = found.iter().filter(|snapshot| snapshot["status"] == "created");
    kept.filter_map(|snapshot| candidate(snapshot, "id", about(snapshot))).collect()
}

fn tokens() -> Vec<CompletionCandidate> {
    let found: Vec<Value> = ask(async |client, _| {
        let answer = client.get("/bivouac/v1/tokens", &super::client::Query::default()).await;
        answer.ok()?["tokens"].as_array().cloned()
    });
    let counting = found.iter().filter(|token| !token["revokedAt"].is_i64());
    counting.filter_map(|token| candidate(token, "name", None)).collect()
}

/// Commands of the sandbox that the line names.
fn commands() -> Vec<CompletionCandidate> {
    let found: Vec<Value> = ask(async |client, words| {
        let known = sandboxes(client).await?;
        let named = known.iter().find(|sandbox| {
            sandbox["name"].as_str().is_some_and(|name| words.iter().any(|word| word == name))
        })?;
        let session = named["currentSessionId"].as_str()?;
        sandbox::commands(client, session).await.ok()
    });
    let own = found.iter().filter(|command| !sandbox::is_helper(command));
    own.filter_map(|command| candidate(command, "id", Some(sandbox::command_line(command))))
        .collect()
}

/// Paths here, and `NAME:` for paths in a sandbox.
fn places(current: &OsStr) -> Vec<CompletionCandidate> {
    let mut all = PathCompleter::any().complete(current);
    let begun = current.to_string_lossy();
    if !begun.contains([':', '/']) {
        let found = names().into_iter().filter_map(|name| {
            let name = name.get_value().to_str()?.to_owned();
            name.starts_with(begun.as_ref())
                .then(|| CompletionCandidate::new(OsString::from(format!("{name}:"))))
        });
        all.extend(found);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_named_exists() {
        let command = command();
        command.clone().debug_assert();
        for (verb, arg) in [&NAMES[..], &COMMANDS, &SNAPSHOTS, &TOKENS, &PLACES].concat() {
            let mut found = &command;
            for word in verb.split(' ') {
                found = found.find_subcommand(word).unwrap();
            }
            assert!(found.get_arguments().any(|known| known.get_id() == arg), "{verb} {arg}");
        }
    }

    #[test]
    fn the_line_says_where_to_look() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let found = global(&words("bivouac -n a/b --url=http://h:1 exec --data-dir /d "));
        assert_eq!((found.namespace.team.as_str(), found.namespace.project.as_str()), ("a", "b"));
        assert_eq!(found.url.as_deref(), Some("http://h:1"));
        assert_eq!(found.data_dir, Some(PathBuf::from("/d")));
        assert_eq!(global(&words("bivouac ls")).namespace.team, "local");
    }
}
