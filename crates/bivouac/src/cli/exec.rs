//! `bivouac exec`: a command in a sandbox.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Exec, Global};
use super::client::{CallError, Client, random_word};
use super::failure::{ExitStatus, Failure, Outcome};
use super::signals::Signals;
use super::stream::{self, Job};
use super::{output, sandbox, terminal};

/// How often a session may end under our feet before we say so.
const TRIES: u32 = 3;

/// Runs the command and ends with its code.
pub(crate) async fn run(global: &Global, args: Exec) -> Outcome {
    if args.process.tty {
        let Exec { name, process, detach, command } = args;
        return terminal::exec(global, &name, &command, &process, detach).await;
    }
    let request = sandbox::command_body(&args.command, &args.process, args.process.interactive)?;
    let client = Client::find(global)?;
    if args.detach {
        return detached(&client, global, &args.name, request).await;
    }
    let mut signals = Signals::new()?;
    let mut tries = 0;
    loop {
        tries += 1;
        let session = sandbox::session_id(&sandbox::resume(&client, &args.name).await?)?;
        let job = Job {
            session,
            request: request.clone(),
            stdin: args.process.interactive,
            json: global.json,
        };
        match stream::run(&client, &job, &mut signals).await {
            Err(failure) if tries < TRIES && failure.call().is_some_and(ended_meanwhile) => {}
            finish => return finish.map_err(start_status)?.status(),
        }
    }
}

async fn detached(client: &Client, global: &Global, name: &str, mut request: Value) -> Outcome {
    if let Some(request) = request.as_object_mut() {
        request.remove("wait");
        request.remove("logs");
    }
    let key = random_word()?;
    let mut tries = 0;
    let answer = loop {
        tries += 1;
        let session = sandbox::session_id(&sandbox::resume(client, name).await?)?;
        let path = format!("/v2/sandboxes/sessions/{session}/cmd");
        match client.post_once(&path, &client.scope(), &request, &key).await {
            Err(error) if tries < TRIES && ended_meanwhile(&error) => {}
            answer => break answer.map_err(|error| start_status(error.into()))?,
        }
    };
    let id = sandbox::text(&answer, "/command/id")?;
    if global.json {
        output::json(&json!({ "command": answer["command"] }))?;
    } else {
        output::line(&id)?;
        output::hint(&format!(
            "bivouac logs {name} {id}; bivouac wait {name} {id}; bivouac kill {name} {id}"
        ));
    }
    Ok(ExitStatus::Success)
}

/// The session that we were told of is not running any more: a new one is started.
fn ended_meanwhile(error: &CallError) -> bool {
    error.api().is_some_and(|api| match api.status {
        StatusCode::GONE => api.code == "sandbox_stopped",
        StatusCode::UNPROCESSABLE_ENTITY => {
            matches!(api.code.as_str(), "sandbox_stopping" | "sandbox_snapshotting")
        }
        _ => false,
    })
}

/// A command that could not start ends as a shell would end: 127 not found, 126 not executable.
pub(crate) fn start_status(failure: Failure) -> Failure {
    let word = failure
        .call()
        .and_then(CallError::api)
        .and_then(|api| api.body["failure"].as_str())
        .unwrap_or_default();
    match word {
        "not_found" => failure
            .status(ExitStatus::External(127))
            .hint("no shell is involved: for a shell line use: sh -c 'LINE'"),
        "not_executable" | "bad_format" => failure.status(ExitStatus::External(126)),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::client::ApiError;

    fn api(status: u16, code: &str, body: Value) -> CallError {
        CallError::Api(ApiError {
            status: StatusCode::from_u16(status).unwrap(),
            code: code.to_owned(),
            message: "m".to_owned(),
            body,
            engine: None,
        })
    }

    #[test]
    fn a_session_that_ends_meanwhile_is_told_from_other_errors() {
        assert!(ended_meanwhile(&api(410, "sandbox_stopped", Value::Null)));
        assert!(ended_meanwhile(&api(422, "sandbox_stopping", Value::Null)));
        assert!(!ended_meanwhile(&api(410, "snapshot_not_found", Value::Null)));
        assert!(!ended_meanwhile(&api(400, "bad_request", Value::Null)));
    }

    #[test]
    fn a_command_that_cannot_start_ends_as_in_a_shell() {
        let code = |word: &str| {
            let error = api(400, "bad_request", json!({ "failure": word }));
            start_status(error.into()).report().code()
        };
        assert_eq!(code("not_found"), 127);
        assert_eq!(code("not_executable"), 126);
        assert_eq!(code("bad_cwd"), 1);
    }
}
