//! `bivouac shell`, `terminals`, `attach`, `hangup`, and the `-t` of `exec` and `run`.
//!
//! Invariant: a terminal with a name is opened at most once, and attached to when it runs already; one without
//! a name is hung up when this process leaves it.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Attach, Global, Hangup, Process, ShellIn, User};
use super::attach::{Finish, Target};
use super::client::{CallError, Client};
use super::exec::start_status;
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::EnvVar;
use super::signals::Signals;
use super::{attach, clock, output, sandbox, screen};

/// Bytes of earlier output that are shown of a terminal that runs already.
const SCROLLBACK: u64 = 64 << 10;
/// How often a terminal may come and go between two looks.
const TRIES: u32 = 5;

/// Whether the engine gave the name: such a terminal goes with its last client.
fn is_generated(name: &str) -> bool {
    let number = name.strip_prefix('t').unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn path(sandbox: &str) -> String {
    format!("/bivouac/v1/sandboxes/{sandbox}/terminals")
}

/// What is to run, for the call that opens a terminal.
pub(crate) fn body(
    command: &[String],
    env: &[EnvVar],
    workdir: Option<&str>,
    user: User,
) -> Outcome<Value> {
    let mut env = sandbox::environment(env)?;
    if let Ok(term) = std::env::var("TERM")
        && !term.is_empty()
    {
        env.entry("TERM".to_owned()).or_insert(term);
    }
    let (cols, rows) = screen::size();
    let mut body = json!({ "env": env, "sudo": user == User::Root, "cols": cols, "rows": rows });
    if let Some((program, args)) = command.split_first() {
        body["command"] = program.as_str().into();
        body["args"] = json!(args);
    }
    if let Some(folder) = workdir {
        body["cwd"] = folder.into();
    }
    Ok(body)
}

/// Body of `exec -t` and `run -t`.
pub(crate) fn process_body(command: &[String], process: &Process) -> Outcome<Value> {
    screen::check()?;
    if process.timeout.is_some() {
        return Err(Failure::usage("--timeout does not go with -t: a terminal has no time limit"));
    }
    if command.first().is_none_or(String::is_empty) {
        return Err(Failure::usage("no command to run"));
    }
    body(command, &process.env, process.workdir.as_deref(), process.user)
}

/// Opens a terminal without a name and shows it to its end.
pub(crate) async fn session(
    client: &Client,
    sandbox: &str,
    body: &Value,
    signals: &mut Signals,
) -> Outcome<Finish> {
    let opened = client.post(&path(sandbox), &client.scope(), body).await;
    let opened = opened.map_err(|error| start_status(error.into()))?;
    attach::run(client, Target::new(&opened["terminal"], None)?, signals).await
}

/// `exec -t`
pub(crate) async fn exec(
    global: &Global,
    name: &str,
    command: &[String],
    process: &Process,
    detach: bool,
) -> Outcome {
    if global.json || detach {
        let other = if detach { "-d" } else { "--json" };
        return Err(Failure::usage(format!("{other} does not go with -t"))
            .hint(format!("bivouac shell {name} --terminal NAME -- CMD opens one that stays")));
    }
    let body = process_body(command, process)?;
    let client = Client::find(global)?;
    let mut signals = Signals::new()?;
    let finish = session(&client, name, &body, &mut signals).await?;
    if matches!(finish, Finish::Left) {
        output::progress("left; the program has been hung up");
    }
    finish.status()
}

/// `shell`
pub(crate) async fn shell(global: &Global, args: ShellIn) -> Outcome {
    if !global.json {
        screen::check()?;
    }
    let client = Client::find(global)?;
    let by_user = if args.user == User::Root { "root" } else { "main" };
    let wanted = match &args.terminal {
        Some(name) => Some(name.as_str()),
        None if args.new => None,
        None => Some(by_user),
    };
    let mut body = body(&args.command, &args.env, args.workdir.as_deref(), args.user)?;
    if let Some(wanted) = wanted {
        body["name"] = wanted.into();
    }
    let (terminal, fresh) = open_or_find(&client, &args.name, wanted, &body).await?;
    if !fresh && !args.command.is_empty() {
        let wanted = wanted.unwrap_or_default();
        let failure = Failure::new(format!("terminal {wanted} runs already in {}", args.name));
        return Err(failure
            .hint("without CMD this attaches to it; --terminal OTHER -- CMD opens another one"));
    }
    if global.json {
        output::json(&terminal)?;
        return Ok(ExitStatus::Success);
    }
    let scrollback = (!fresh).then_some(SCROLLBACK);
    show(&client, &args.name, &terminal, scrollback).await
}

async fn show(
    client: &Client,
    sandbox: &str,
    terminal: &Value,
    scrollback: Option<u64>,
) -> Outcome {
    let mut signals = Signals::new()?;
    let finish = attach::run(client, Target::new(terminal, scrollback)?, &mut signals).await?;
    if matches!(finish, Finish::Left) {
        let name = terminal["name"].as_str().unwrap_or_default();
        if is_generated(name) {
            output::progress(&format!("left terminal {name} of {sandbox}"));
        } else {
            output::progress(&format!("left terminal {name} of {sandbox}; it goes on"));
            output::hint(&format!("bivouac attach {sandbox} {name}"));
        }
    }
    finish.status()
}

/// Opens a terminal, or finds the one of that name. Answers whether it was opened.
async fn open_or_find(
    client: &Client,
    sandbox: &str,
    wanted: Option<&str>,
    body: &Value,
) -> Outcome<(Value, bool)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let error = match client.post(&path(sandbox), &client.scope(), body).await {
            Ok(mut answer) => return Ok((answer["terminal"].take(), true)),
            Err(error) => error,
        };
        let exists = error.api().is_some_and(|api| api.code == "terminal_exists");
        let Some(wanted) = wanted.filter(|_| exists && tries <= TRIES) else {
            return Err(start_status(error.into()));
        };
        if let Some(found) = find(client, sandbox, wanted).await? {
            return Ok((found, false));
        }
    }
}

async fn all(client: &Client, sandbox: &str) -> Result<Vec<Value>, CallError> {
    let mut answer = client.get(&path(sandbox), &client.scope()).await?;
    match answer["terminals"].take() {
        Value::Array(all) => Ok(all),
        _ => Ok(Vec::new()),
    }
}

async fn find(client: &Client, sandbox: &str, name: &str) -> Outcome<Option<Value>> {
    let all = all(client, sandbox).await?;
    Ok(all.into_iter().find(|terminal| terminal["name"] == name))
}

/// `terminals`
pub(crate) async fn list(global: &Global, name: &str) -> Outcome {
    let client = Client::find(global)?;
    let all = all(&client, name).await?;
    if global.json {
        output::json(&all.into())?;
        return Ok(ExitStatus::Success);
    }
    let now = clock::now_ms();
    let row = |terminal: &Value| {
        let command = &terminal["command"];
        let started = command["startedAt"].as_i64();
        vec![
            terminal["name"].as_str().unwrap_or("-").to_owned(),
            terminal["attached"].as_u64().unwrap_or(0).to_string(),
            started.map(|at| format!("{} ago", clock::span(now - at))).unwrap_or_default(),
            command["id"].as_str().unwrap_or("-").to_owned(),
            sandbox::command_line(command),
        ]
    };
    let rows = all.iter().map(row).collect();
    output::table(&["TERMINAL", "ATTACHED", "STARTED", "ID", "COMMAND"], rows)?;
    Ok(ExitStatus::Success)
}

/// `attach`
pub(crate) async fn attach(global: &Global, args: Attach) -> Outcome {
    if !global.json {
        screen::check()?;
    }
    let client = Client::find(global)?;
    let Some(terminal) = find(&client, &args.name, &args.terminal).await? else {
        let (name, terminal) = (&args.name, &args.terminal);
        return Err(Failure::new(format!("terminal {terminal} does not run in {name}"))
            .hint(format!("list them with: bivouac terminals {name}"))
            .hint(format!("open it with: bivouac shell {name} --terminal {terminal}")));
    };
    if global.json {
        output::json(&terminal)?;
        return Ok(ExitStatus::Success);
    }
    show(&client, &args.name, &terminal, Some(args.scrollback)).await
}

/// `hangup`
pub(crate) async fn hang_up(global: &Global, args: &Hangup) -> Outcome {
    let client = Client::find(global)?;
    let base = path(&args.name);
    super::each(global, &args.terminals, async |terminal| {
        let path = format!("{base}/{terminal}");
        let mut answer = match client.delete(&path, &client.scope()).await {
            Err(error) if error.is(StatusCode::NOT_FOUND) => {
                let failure = Failure::from(error);
                return Err(
                    failure.hint(format!("list them with: bivouac terminals {}", args.name))
                );
            }
            answer => answer?,
        };
        if !global.json {
            output::progress(&format!("hung up {terminal}"));
        }
        Ok(answer["terminal"].take())
    })
    .await
}
