//! The command line: people, agents, scripts and CI.
//!
//! Owns: parsing, the verbs (one file each), what they print and the codes they exit with.
//! Invariant: a verb talks to the engine over its public API only, so it can do nothing that
//! another client cannot. Called by `main`.

mod archive;
pub(crate) mod args;
mod attach;
mod autostart;
mod beside;
mod busy;
mod client;
mod clock;
mod complete;
mod completions;
mod cp;
mod create;
mod credential;
mod doctor;
mod drive;
mod env;
mod examples;
mod exec;
mod failure;
mod fork;
mod forward;
mod gc;
mod help;
mod hints;
mod image;
mod inspect;
mod keep_alive;
mod kill;
mod life;
mod logs;
mod ls;
mod ndjson;
pub(crate) mod output;
mod parse;
mod pause;
mod policy;
mod pool;
mod ports;
mod ps;
mod resume;
mod resize;
mod rm;
mod rollback;
mod run;
mod sandbox;
mod schemas;
mod screen;
mod secret;
mod selftest;
mod serve;
pub(crate) mod signals;
mod snapshot;
mod start;
mod stdin;
mod stop;
mod stream;
mod terminal;
mod token;
mod table;
mod top;
mod tunnel;
mod version;
mod wait;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::FromArgMatches as _;
use clap::error::ErrorKind;
use clap::parser::ValueSource;

use args::{Cli, Verb};
use failure::{ExitStatus, Explain as _, Outcome};

/// Parses the command line, does what it says, and answers the code to exit with.
#[must_use]
pub fn main() -> ExitCode {
    if completions::answer(std::env::args_os().collect()) {
        return ExitCode::SUCCESS;
    }
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(status) => return status.into(),
    };
    let status = match dispatch(cli) {
        Ok(status) => status,
        // `bivouac ls | head -1` is no error of ours.
        Err(failure) if failure.is::<output::Closed>() => ExitStatus::of_signal(13),
        Err(failure) => match failure.cause::<busy::Interrupted>() {
            // Whoever interrupts knows why.
            Some(ask) => ExitStatus::of_signal(ask.0.number()),
            None => failure.report(),
        },
    };
    status.into()
}

/// Reads the command line. What clap has to say is printed here: help to stdout, mistakes to stderr.
fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitStatus> {
    let read = examples::command().try_get_matches_from(counts(words.into_iter().collect()));
    let named = |mut matches: &clap::ArgMatches| loop {
        if matches.value_source("namespace") == Some(ValueSource::CommandLine) {
            return true;
        }
        let Some((_, below)) = matches.subcommand() else { return false };
        matches = below;
    };
    let cli = read.and_then(|matches| {
        let mut cli = Cli::from_arg_matches(&matches)?;
        cli.global.unnamed = !named(&matches);
        Ok(cli)
    });
    cli.map_err(|error| {
        let _ = error.print();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitStatus::Success,
            _ => ExitStatus::Usage,
        }
    })
}

/// `fork -n 5` is five copies, and `-n team/project` a namespace there as everywhere: a number is never one,
/// so of the first the long form is made.
fn counts(mut words: Vec<OsString>) -> Vec<OsString> {
    let number = |word: &OsString| {
        word.to_str().is_some_and(|w| !w.is_empty() && w.bytes().all(|b| b.is_ascii_digit()))
    };
    // The verb is the first word that is neither a flag nor a flag's value.
    let mut at = 1;
    while words.get(at).is_some_and(|word| word.to_string_lossy().starts_with('-')) {
        let with_value = ["-n", "--namespace", "--url", "--data-dir"];
        at += 1 + usize::from(with_value.iter().any(|flag| words[at] == *flag));
    }
    if words.get(at).is_some_and(|verb| verb == "token") {
        return several(words, at + 1);
    }
    if words.get(at).is_none_or(|verb| verb != "fork") {
        return words;
    }
    for index in at + 1..words.len() {
        if words[index] == "-n" && words.get(index + 1).is_some_and(number) {
            words[index] = "--count".into();
        } else if let Some(glued) = words[index].to_str().and_then(|word| word.strip_prefix("-n"))
            && number(&glued.into())
        {
            words[index] = format!("--count={glued}").into();
        }
    }
    words
}

/// `token create -n a/b -n c/d` names several namespaces, which `-n` cannot elsewhere: of these the long form is made.
fn several(mut words: Vec<OsString>, at: usize) -> Vec<OsString> {
    if words.get(at).is_none_or(|verb| verb != "create") {
        return words;
    }
    for word in words.iter_mut().skip(at + 1) {
        let Some(text) = word.to_str() else { continue };
        if text == "-n" || text == "--namespace" {
            *word = "--in".into();
        } else if let Some(value) = text.strip_prefix("--namespace=") {
            *word = format!("--in={value}").into();
        } else if let Some(value) = text.strip_prefix("-n").filter(|_| !text.starts_with("--")) {
            *word = format!("--in={value}").into();
        }
    }
    words
}

fn dispatch(cli: Cli) -> Outcome {
    let global = cli.global;
    if global.no_trunc {
        table::show_whole();
    }
    match cli.verb {
        // The server builds a runtime of its own: many threads, and roles before any of them.
        Verb::Serve(args) => serve::run(&global, &args),
        Verb::Help(args) => help::run(&args),
        Verb::Version => version::run(&global),
        Verb::Completions(args) => completions::run(&global, &args),
        Verb::Selftest(what) => selftest::run(what),
        // A build starts a process of its own, from one that has no threads.
        Verb::Image(args) => image::run(&global, args),
        Verb::Pool(args) => pool::run(&global, &args),
        verb => client_runtime(async move {
            let mut global = global;
            client::go_home(&mut global).await;
            let outcome = match verb {
                Verb::Env(args) => env::run(&global, &args).await,
                Verb::Run(args) => run::run(&global, args).await,
                Verb::Create(args) => create::run(&global, args).await,
                Verb::Ls(args) => ls::run(&global, args).await,
                Verb::Inspect(args) => inspect::run(&global, &args.name).await,
                Verb::Exec(args) => exec::run(&global, args).await,
                Verb::Shell(args) => terminal::shell(&global, args).await,
                Verb::Terminals(args) => terminal::list(&global, &args.name).await,
                Verb::Attach(args) => terminal::attach(&global, args).await,
                Verb::Hangup(args) => terminal::hang_up(&global, &args).await,
                Verb::Logs(args) => logs::run(&global, args).await,
                Verb::Cp(args) => cp::run(&global, args).await,
                Verb::Ps(args) => ps::run(&global, &args.name).await,
                Verb::Kill(args) => kill::run(&global, args).await,
                Verb::Wait(args) => wait::run(&global, args).await,
                Verb::Stop(args) => stop::run(&global, &args).await,
                Verb::Pause(args) => pause::run(&global, &args).await,
                Verb::Resume(args) => resume::run(&global, &args.names).await,
                Verb::KeepAlive(args) => keep_alive::run(&global, &args).await,
                Verb::Set(args) => life::set(&global, &args).await,
                Verb::Start(args) => start::run(&global, &args.names).await,
                Verb::Resize(args) => resize::run(&global, args).await,
                Verb::Rm(args) => rm::run(&global, &args).await,
                Verb::Gc(args) => gc::run(&global, &args).await,
                Verb::Snapshot(args) => snapshot::take(&global, args).await,
                Verb::Snapshots(args) => snapshot::run(&global, args).await,
                Verb::Policy(args) => policy::run(&global, args).await,
                Verb::Secret(args) => secret::run(&global, args).await,
                Verb::Credential(args) => credential::run(&global, args).await,
                Verb::Token(args) => token::run(&global, args).await,
                Verb::Drive(args) => drive::run(&global, args).await,
                Verb::Fork(args) => fork::run(&global, args).await,
                Verb::Rollback(args) => rollback::run(&global, args).await,
                Verb::Ports(args) => ports::run(&global, args).await,
                Verb::Open(args) => ports::open(&global, args).await,
                Verb::Forward(args) => forward::run(&global, args).await,
                Verb::Doctor => doctor::run(&global).await,
                Verb::Top(args) => top::run(&global, &args).await,
                Verb::Serve(_)
                | Verb::Help(_)
                | Verb::Version
                | Verb::Selftest(_)
                | Verb::Completions(_)
                | Verb::Image(_)
                | Verb::Pool(_) => Ok(ExitStatus::Usage),
            };
            match outcome {
                Err(failure) => Err(hints::look_up(&global, failure).await),
                done => done,
            }
        }),
    }
}

/// Does one thing to each of several named things, in order. One that fails does not hold up the
/// rest; the answers are one JSON array with `--json`.
async fn each(
    global: &args::Global,
    names: &[String],
    mut act: impl AsyncFnMut(&str) -> Outcome<serde_json::Value>,
) -> Outcome {
    let mut answers = Vec::new();
    let mut worst = ExitStatus::Success;
    let busy = busy::Busy::things(global, "", names.len());
    let all = async {
        for name in names {
            busy.say(name);
            match act(name).await {
                Ok(answer) => answers.push(answer),
                Err(failure) => worst = hints::look_up(global, failure).await.report(),
            }
            busy.add(1);
        }
        Ok(())
    };
    busy::guarded(all).await?;
    drop(busy);
    if global.json {
        output::json(&answers.into())?;
    }
    Ok(worst)
}

/// Runs a client verb. One thread is enough; threads that are still reading a terminal when the
/// verb is done are left behind.
fn client_runtime<T>(verb: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .explain(|| "could not start the asynchronous runtime".to_owned())?;
    let outcome = runtime.block_on(verb);
    runtime.shutdown_background();
    outcome
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn status(line: &[&str]) -> Option<ExitStatus> {
        let words = std::iter::once("bivouac").chain(line.iter().copied()).map(OsString::from);
        parse(words).err()
    }

    #[test]
    fn mistakes_exit_2_and_help_exits_0() {
        let wrong: &[&[&str]] = &[
            &[],
            &["nonsense"],
            &["run"],
            &["run", "--"],
            &["run", "--nonsense", "true"],
            &["exec", "box"],
            &["exec", "bo/x", "true"],
            &["exec", "box", "-i", "-d", "--", "true"],
            &["exec", "box", "-u", "nobody", "--", "true"],
            &["exec", "box", "-e", "=x", "--", "true"],
            &["exec", "box", "--timeout", "soon", "--", "true"],
            &["shell"],
            &["shell", "box", "--terminal", "a/b"],
            &["shell", "box", "--terminal", "a", "--new"],
            &["attach", "box"],
            &["attach", "box", "main", "--scrollback", "much"],
            &["hangup", "box"],
            &["create", "a", "b"],
            &["create", "a.b"],
            &["create", "--vcpus", "many"],
            &["create", "-p", "70000"],
            &["create", "--tag", "x"],
            &["create", "--snapshot", "../x"],
            &["create", "--image", "a", "--runtime", "b"],
            &["create", "--network-policy", "some"],
            &["-n", "team", "ls"],
            &["rm"],
            &["stop"],
            &["pause"],
            &["resume"],
            &["keep-alive"],
            &["keep-alive", "box", "soon"],
            &["set"],
            &["set", "box", "--idle-stop", "soon"],
            &["set", "box", "--restart", "always"],
            &["create", "--pre-stop-timeout", "5s"],
            &["kill", "box"],
            &["kill", "box", "cmd_1", "--signal", "NOPE"],
            &["logs", "box", "snap_1"],
            &["cp", "a"],
            &["cp", "", "box:"],
            &["snapshots", "rm"],
            &["snapshot", "box", "--keep", "--expires", "1d"],
            &["snapshot", "box", "--label", "x"],
            &["snapshots", "label", "snap_1"],
            &["snapshots", "label", "snap_1", "x"],
            &["fork", "box", "-n", "0"],
            &["fork", "box", "-n", "1001"],
            &["fork", "box", "--snapshot", "snap_1", "--last"],
            &["ls", "-n", "5"],
            &["rollback"],
            &["rollback", "box", "box"],
            &["ports"],
            &["ports", "publish", "box"],
            &["ports", "link", "box", "0"],
            &["open", "box", "x"],
            &["forward", "box"],
            &["forward", "box", "80:0"],
            &["secret"],
            &["secret", "set"],
            &["secret", "set", "a b"],
            &["secret", "rm"],
            &["credential", "add", "box"],
            &["credential", "add", "box", "=x"],
            &["create", "--credential", ""],
            &["serve", "--listen", "nowhere"],
            &["serve", "--stop-sandboxes=perhaps"],
        ];
        for line in wrong {
            assert_eq!(status(line), Some(ExitStatus::Usage), "{line:?}");
        }
        for line in
            [&["--help"][..], &["run", "--help"], &["--version"], &["snapshots", "ls", "-h"]]
        {
            assert_eq!(status(line), Some(ExitStatus::Success), "{line:?}");
        }
    }

    fn words(line: &[&str]) -> Cli {
        Cli::try_parse_from(std::iter::once(&"bivouac").chain(line)).unwrap()
    }

    #[test]
    fn what_follows_the_command_is_the_command_s() {
        for line in [
            &["run", "-i", "--", "sh", "-c", "exit 42", "--json"][..],
            &["run", "-i", "sh", "-c", "exit 42", "--json"],
        ] {
            let cli = words(line);
            assert!(!cli.global.json);
            let Verb::Run(run) = cli.verb else { panic!("not run") };
            assert!(run.process.interactive);
            assert_eq!(run.command, ["sh", "-c", "exit 42", "--json"], "{line:?}");
        }
        for line in [
            &["exec", "-w", "/tmp", "box", "-e", "A=1", "--", "ls", "-la", "--", "-n"][..],
            &["exec", "box", "-w", "/tmp", "-e", "A=1", "ls", "-la", "--", "-n"],
        ] {
            let Verb::Exec(exec) = words(line).verb else { panic!("not exec") };
            assert_eq!(exec.command, ["ls", "-la", "--", "-n"], "{line:?}");
            assert_eq!(exec.process.workdir.as_deref(), Some("/tmp"));
            assert_eq!(exec.process.env.len(), 1);
        }
    }

    #[test]
    fn global_flags_go_anywhere() {
        for line in [&["--json", "-n", "a/b", "ls"][..], &["ls", "--json", "-n", "a/b"]] {
            let cli = words(line);
            assert!(cli.global.json);
            assert_eq!(cli.global.namespace.team, "a");
        }
        assert_eq!(words(&["ls"]).global.namespace.project, "local");
    }

    #[test]
    fn a_number_behind_fork_s_n_is_a_count() {
        let read = |line: &[&str]| {
            let words = std::iter::once("bivouac").chain(line.iter().copied()).map(OsString::from);
            let cli = parse(words).unwrap();
            let Verb::Fork(fork) = cli.verb else { panic!("not fork") };
            (fork.count, cli.global.namespace.team)
        };
        assert_eq!(read(&["fork", "box"]), (1, "local".to_owned()));
        assert_eq!(read(&["fork", "box", "new", "-n", "20"]), (20, "local".to_owned()));
        assert_eq!(read(&["--json", "fork", "-n20", "box"]), (20, "local".to_owned()));
        assert_eq!(read(&["-n", "a/b", "fork", "box", "-n", "3"]), (3, "a".to_owned()));
        assert_eq!(read(&["fork", "-n", "a/b", "box", "--count", "3"]), (3, "a".to_owned()));
        // Somebody else's -n stays what it is.
        let line = ["exec", "fork", "head", "-n", "5"];
        let Verb::Exec(exec) = words(&line).verb else { panic!("not exec") };
        assert_eq!(exec.command, ["head", "-n", "5"]);
        let all = ["bivouac", "exec", "fork", "head", "-n", "5"].map(OsString::from).to_vec();
        assert_eq!(counts(all.clone()), all);
    }

    #[test]
    fn a_token_is_for_several_namespaces() {
        let read = |line: &[&str]| {
            let words = std::iter::once("bivouac").chain(line.iter().copied()).map(OsString::from);
            let cli = parse(words).unwrap();
            let Verb::Token(args::Token::Create { namespaces, .. }) = cli.verb else {
                panic!("not token create")
            };
            (namespaces.join(" "), cli.global.unnamed)
        };
        let line =
            ["token", "create", "ci", "-n", "a/b", "-nc/d", "--namespace=e/f", "--in", "g/*"];
        assert_eq!(read(&line), ("a/b c/d e/f g/*".to_owned(), true));
        assert_eq!(read(&["-n", "a/b", "token", "create", "ci"]), (String::new(), false));
        assert_eq!(status(&["token", "create", "ci", "-n", "a"]), Some(ExitStatus::Usage));
        assert_eq!(status(&["token", "create", "ci", "-A", "-n", "a/b"]), Some(ExitStatus::Usage));
        assert_eq!(status(&["token", "create", "ci", "--allow", "fly"]), Some(ExitStatus::Usage));
        let unnamed = |line: &[&str]| {
            let words = std::iter::once("bivouac").chain(line.iter().copied()).map(OsString::from);
            parse(words).unwrap().global.unnamed
        };
        assert!(
            unnamed(&["ls"]) && !unnamed(&["ls", "-n", "a/b"]) && !unnamed(&["-n", "a/b", "ls"])
        );
    }

    #[test]
    fn a_switch_is_a_switch() {
        let stop = |line: &[&str]| match words(line).verb {
            Verb::Serve(serve) => serve.stop_sandboxes,
            _ => panic!("not serve"),
        };
        assert!(!stop(&["serve"]));
        assert!(stop(&["serve", "--stop-sandboxes"]));
        assert!(stop(&["serve", "--stop-sandboxes", "--listen", "127.0.0.1:0"]));
    }

    #[test]
    fn the_shape_of_the_command_line_is_sound() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }
}
