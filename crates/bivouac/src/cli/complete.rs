//! Which values can follow: names and ids of what is there now, from the running engine.
//!
//! One function a kind of value. An argument gets its kind by the beginning of its help ([`KINDS`]: whatever takes
//! "The sandbox …" completes names of sandboxes, also in verbs that come later), or by being named ([`NAMED`]).
//!
//! Invariant: a completion starts nothing, changes nothing and says nothing: without an engine there are no
//! candidates, and what one has not told in time is left out. Called through `completions`.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Command, CommandFactory as _};
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _,
};
use serde_json::Value;

use super::args::{Cli, Global};
use super::client::{Client, Query};
use super::{parse, sandbox};

/// How long somebody who pressed Tab is kept waiting.
const PATIENCE: Duration = Duration::from_millis(300);
/// Words of a line that may be the sandbox that it is about.
const TRIED: usize = 8;

/// Answers the candidates for a word that is begun.
type Kind = fn(&OsStr) -> Vec<CompletionCandidate>;

/// Kinds by how the help of an argument begins. The first that fits counts.
const KINDS: [(&str, Kind); 8] = [
    ("The sandbox", sandboxes),
    ("The snapshot", snapshots),
    ("The command's id", commands),
    ("The drive", drives),
    ("The secret", secrets),
    ("The credential", credentials),
    ("The image", images),
    ("The port", ports),
];

/// Kinds of arguments whose help begins otherwise, by verb and name.
const NAMED: [(&str, &str, Kind); 19] = [
    ("token revoke", "names", tokens),
    ("token log", "token", tokens),
    ("ls", "prefix", sandboxes),
    ("snapshots ls", "name", sandboxes),
    ("run", "snapshot", snapshots),
    ("create", "snapshot", snapshots),
    ("fork", "snapshot", snapshots),
    ("rollback", "snapshot", snapshots),
    ("run", "image", images),
    ("create", "image", images),
    ("snapshots import", "onto", images),
    ("secret set", "name", secrets),
    ("cp", "source", places),
    ("cp", "target", places),
    ("drive ls", "place", in_drives),
    ("drive cat", "place", in_drives),
    ("drive cp", "source", in_drives_or_here),
    ("drive cp", "target", in_drives_or_here),
    ("drive ls", "prefix", drives),
];

/// The command line, knowing where its values come from.
pub(crate) fn command() -> Command {
    with_kinds(Cli::command(), "")
}

/// Gives the arguments of a verb and of those below it their kinds.
fn with_kinds(command: Command, above: &str) -> Command {
    let path =
        |name: &str| if above.is_empty() { name.to_owned() } else { format!("{above} {name}") };
    let below: Vec<String> =
        command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    // In place: `mut_arg` would put it behind the others, and the order of words is their meaning.
    let command = command.mut_args(|arg| match kind_of(above, &arg) {
        Some(kind) => arg.add(ArgValueCompleter::new(kind)),
        None => arg,
    });
    below.into_iter().fold(command, |command, name| {
        let path = path(&name);
        command.mut_subcommand(name, |verb| with_kinds(verb, &path))
    })
}

fn kind_of(verb: &str, arg: &clap::Arg) -> Option<Kind> {
    let named = NAMED.iter().find(|(of, name, _)| *of == verb && arg.get_id() == *name);
    if let Some((_, _, kind)) = named {
        return Some(*kind);
    }
    let help = arg.get_help()?.to_string();
    let begun = KINDS.iter().find(|(beginning, _)| help.starts_with(beginning));
    begun.filter(|_| arg.get_action().takes_values()).map(|(_, kind)| *kind)
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
        no_trunc: false,
        unnamed: namespace.is_none(),
        namespace: namespace.unwrap_or_else(local),
        url: flag("--url", None).or_else(|| variable("BIVOUAC_URL")),
        data_dir: flag("--data-dir", None)
            .or_else(|| variable("BIVOUAC_DATA_DIR"))
            .map(PathBuf::from),
    }
}

/// Asks the engine, and answers what it has told in time.
fn ask(
    question: impl AsyncFnOnce(&Client, &[String], &RefCell<Vec<Value>>) -> Option<()>,
) -> Vec<Value> {
    let words = typed();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return Vec::new() };
    let found = RefCell::default();
    let asking = async {
        let mut global = global(&words);
        super::client::go_home(&mut global).await;
        let client = Client::find(&global).ok()?;
        question(&client, &words, &found).await
    };
    let _ = runtime.block_on(async { tokio::time::timeout(PATIENCE, asking).await });
    runtime.shutdown_background();
    found.into_inner()
}

/// Adds page after page of a list, so that the first ones are there when the time is over.
async fn list(
    client: &Client,
    (path, field): (&str, &str),
    query: &Query,
    found: &RefCell<Vec<Value>>,
) -> Option<()> {
    let mut cursor: Option<String> = None;
    loop {
        let query = match &cursor {
            Some(cursor) => query.clone().with("cursor", cursor),
            None => query.clone(),
        };
        let mut page = client.get(path, &query).await.ok()?;
        if let Some(Value::Array(items)) = page.get_mut(field).map(Value::take) {
            found.borrow_mut().extend(items);
        }
        let next = page.pointer("/pagination/next").and_then(Value::as_str);
        match next {
            Some(next) if cursor.as_deref() != Some(next) => cursor = Some(next.to_owned()),
            _ => return Some(()),
        }
    }
}

/// The sandbox that the line is about: the first of its words that is one.
async fn meant(client: &Client, words: &[String]) -> Option<Value> {
    let names = words.iter().skip(1).filter(|word| parse::sandbox_name(word).is_ok());
    for name in names.filter(|word| !word.starts_with('-')).take(TRIED) {
        if let Ok(found) = sandbox::get(client, name).await {
            return Some(found);
        }
    }
    None
}

/// Candidates of the values that begin with what is typed; `about` says more of each where the shell shows it.
fn candidates(
    found: &[Value],
    key: &str,
    begun: &OsStr,
    about: impl Fn(&Value) -> Option<String>,
) -> Vec<CompletionCandidate> {
    let begun = begun.to_string_lossy();
    let fitting = found.iter().filter_map(|value| {
        let text = value[key].as_str().filter(|text| text.starts_with(begun.as_ref()))?;
        Some(CompletionCandidate::new(text).help(about(value).map(Into::into)))
    });
    fitting.collect()
}

fn word(key: &'static str) -> impl Fn(&Value) -> Option<String> {
    move |value| value[key].as_str().map(str::to_owned)
}

fn by_name(client: &Client, begun: &OsStr) -> Query {
    let query = client.list_scope().with("limit", "50");
    let query = query.with("sortBy", "name").with("sortOrder", "asc");
    match begun.to_str() {
        Some(begun) if !begun.is_empty() => query.with("namePrefix", begun),
        _ => query,
    }
}

/// Names of sandboxes.
fn sandboxes(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, _, found| {
        list(client, ("/v2/sandboxes", "sandboxes"), &by_name(client, begun), found).await
    });
    candidates(&found, "name", begun, word("status"))
}

/// Ids of snapshots.
fn snapshots(begun: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = ask(async |client, _, found| {
        let query = client.list_scope().with("limit", "50");
        list(client, ("/v2/sandboxes/snapshots", "snapshots"), &query, found).await
    });
    found.retain(|snapshot| snapshot["status"] == "created");
    let about = |of: &Value| of["sourceSandboxName"].as_str().map(|name| format!("of {name}"));
    candidates(&found, "id", begun, about)
}

/// Ids of commands of the sandbox that the line is about.
fn commands(begun: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = ask(async |client, words, found| {
        let session = sandbox::session_id(&meant(client, words).await?).ok()?;
        *found.borrow_mut() = sandbox::commands(client, &session).await.ok()?;
        Some(())
    });
    found.retain(|command| !sandbox::is_helper(command));
    candidates(&found, "id", begun, |command| Some(sandbox::command_line(command)))
}

/// Names of drives.
fn drives(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, _, found| {
        list(client, ("/v2/sandboxes/drives", "drives"), &by_name(client, begun), found).await
    });
    candidates(&found, "name", begun, word("currentSandboxName"))
}

/// Names of secrets.
fn secrets(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, _, found| {
        list(client, ("/v2/secrets", "secrets"), &client.scope(), found).await
    });
    candidates(&found, "name", begun, word("kind"))
}

/// Names of tokens that still count.
fn tokens(begun: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = ask(async |client, _, found| {
        list(client, ("/bivouac/v1/tokens", "tokens"), &Query::default(), found).await
    });
    found.retain(|token| !token["revokedAt"].is_i64());
    candidates(&found, "name", begun, |_| None)
}

/// Names of the credentials of the sandbox that the line is about.
fn credentials(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, words, found| {
        let name = sandbox::text(&meant(client, words).await?, "/sandbox/name").ok()?;
        let path = super::credential::path(&name);
        list(client, (&path, "credentials"), &client.scope(), found).await
    });
    candidates(&found, "name", begun, |_| None)
}

/// Names of images that the engine can start from.
fn images(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, _, found| {
        let engine = client.get("/bivouac/v1/engine", &client.scope()).await.ok()?;
        let names = engine["images"].as_array()?.iter();
        let named = names.map(|name| serde_json::json!({ "name": name }));
        found.borrow_mut().extend(named);
        Some(())
    });
    candidates(&found, "name", begun, |_| None)
}

/// Ports with a route of the sandbox that the line is about.
fn ports(begun: &OsStr) -> Vec<CompletionCandidate> {
    let found = ask(async |client, words, found| {
        let view = meant(client, words).await?;
        let routes = view["routes"].as_array()?.iter();
        let named = routes.map(
            |route| serde_json::json!({ "port": route["port"].to_string(), "url": route["url"] }),
        );
        found.borrow_mut().extend(named);
        Some(())
    });
    candidates(&found, "port", begun, word("url"))
}

/// `DRIVE:`, for paths in a drive.
fn in_drives(begun: &OsStr) -> Vec<CompletionCandidate> {
    followed_by_colon(begun, drives)
}

/// Paths here, and `DRIVE:`.
fn in_drives_or_here(begun: &OsStr) -> Vec<CompletionCandidate> {
    let mut all = PathCompleter::any().complete(begun);
    all.extend(in_drives(begun));
    all
}

fn followed_by_colon(begun: &OsStr, names: Kind) -> Vec<CompletionCandidate> {
    if begun.to_string_lossy().contains([':', '/']) {
        return Vec::new();
    }
    let named = names(begun).into_iter().filter_map(|name| {
        let name = name.get_value().to_str()?;
        Some(CompletionCandidate::new(OsString::from(format!("{name}:"))))
    });
    named.collect()
}

/// Paths here, and `NAME:` for paths in a sandbox.
fn places(begun: &OsStr) -> Vec<CompletionCandidate> {
    let mut all = PathCompleter::any().complete(begun);
    all.extend(followed_by_colon(begun, sandboxes));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arguments that have candidates, as `VERB ARGUMENT`.
    fn completed(command: &Command, above: &str) -> Vec<String> {
        let mut found: Vec<String> = command
            .get_arguments()
            .filter(|arg| arg.get::<ArgValueCompleter>().is_some())
            .map(|arg| format!("{above} {}", arg.get_id()).trim_start().to_owned())
            .collect();
        for verb in command.get_subcommands() {
            let path = format!("{above} {}", verb.get_name());
            found.extend(completed(verb, path.trim_start()));
        }
        found
    }

    #[test]
    fn arguments_have_their_kinds() {
        let command = command();
        command.clone().debug_assert();
        let found = completed(&command, "");
        for (verb, arg, _) in NAMED {
            assert!(found.contains(&format!("{verb} {arg}")), "{verb} {arg}: {found:?}");
        }
        let more = [
            "exec name",
            "inspect name",
            "logs name",
            "ps name",
            "kill name",
            "wait name",
            "stop names",
            "start names",
            "rm names",
            "snapshot name",
            "fork source",
            "rollback name",
            "resize name",
            "policy show name",
            "policy learn name",
            "credential add name",
            "drive attach sandbox",
            "drive detach sandbox",
            "logs command",
            "kill command",
            "wait command",
            "snapshots get id",
            "snapshots rm ids",
            "snapshots export id",
            "drive show name",
            "drive rm names",
            "drive fork source",
            "drive detach drive",
            "secret rm names",
            "credential rm credentials",
            "image inspect name",
            "image rm names",
        ];
        for one in more {
            assert!(found.iter().any(|known| known == one), "{one}: {found:?}");
        }
        // Names that are new, and what is a command of somebody else's.
        for one in ["create name", "fork name", "drive create name", "exec command", "run command"]
        {
            assert!(!found.iter().any(|known| known == one), "{one}");
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
