//! `bivouac run`: one command in a sandbox of its own, and nothing left of it.
//!
//! Invariant: from the moment that a create call may have been sent, every way out of here (the
//! command's end, an error, SIGINT, SIGTERM, SIGHUP) goes through the deletion. The name is chosen
//! here, so a create whose answer was lost is deleted as well. What SIGKILL of this process leaves
//! the engine deletes: it notices that nobody holds the sandbox any more. If it cannot (it was killed
//! as well), the session ends by itself: it lives on a lease that only this process renews.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::args::{Global, Run};
use super::client::{CallError, Client, random_word};
use super::exec::start_status;
use super::failure::{ExitStatus, Failure, Outcome};
use super::signals::{Ask, Signals};
use super::stream::{self, Finish, Job};
use super::{autostart, image, output, sandbox, stdin, terminal};

/// How long the session outlives its last renewal, ms.
const LEASE_MS: u64 = 600_000;
/// How often it is renewed, ms.
const RENEWAL_MS: u64 = 240_000;
/// How long a create that is in flight is waited for when this process is asked to end.
const CREATE_GRACE: Duration = Duration::from_secs(30);
/// How often a create is sent again to an engine that went away.
const TRIES: u32 = 3;

/// Runs the command and ends with its code.
pub(crate) async fn run(global: &Global, args: Run) -> Outcome {
    let input = args.process.interactive || stdin::is_piped();
    let request = if args.process.tty {
        if global.json {
            return Err(Failure::usage("--json does not go with -t"));
        }
        terminal::process_body(&args.command, &args.process)?
    } else {
        sandbox::command_body(&args.command, &args.process, input)?
    };
    let mut signals = Signals::new()?;
    let client = tokio::select! {
        client = autostart::engine(global) => client?,
        ask = signals.next() => return Ok(ExitStatus::of_signal(ask.number())),
    };
    let (image, registry) = (args.sandbox.image.as_deref(), &args.sandbox.registry);
    tokio::select! {
        pulled = image::pull::before_create(&client, image, registry) => pulled?,
        // The engine goes on with it, for the next who asks.
        ask = signals.next() => return Ok(ExitStatus::of_signal(ask.number())),
    }
    let mut worker = Worker { client, name: format!("run-{}", random_word()?) };
    let outcome = match worker.create(global, &args, &mut signals).await {
        Ok(Created::Session(session)) if args.process.tty => {
            let finish = tokio::select! {
                finish = terminal::session(&worker.client, &worker.name, &request, &mut signals) => finish,
                never = renew(&worker.client, &session) => match never {},
                never = hold(&worker.client, &worker.name) => match never {},
            };
            finish.and_then(|finish| finish.status())
        }
        Ok(Created::Session(session)) => {
            let job = Job { session, request, stdin: input, json: global.json };
            let finish = tokio::select! {
                finish = stream::run(&worker.client, &job, &mut signals) => finish,
                never = renew(&worker.client, &job.session) => match never {},
                never = hold(&worker.client, &worker.name) => match never {},
            };
            finish.map_err(start_status).and_then(|finish: Finish| finish.status())
        }
        Ok(Created::Asked(ask)) => Ok(ExitStatus::of_signal(ask.number())),
        // The engine refused: there is nothing to delete.
        Err(failure) if refused(&failure) => return Err(failure),
        Err(failure) => Err(failure),
    };
    worker.delete(&mut signals).await;
    outcome
}

/// The engine said no before it made anything.
fn refused(failure: &Failure) -> bool {
    let api = failure.call().and_then(CallError::api);
    api.is_some_and(|api| api.status.is_client_error())
}

enum Created {
    Session(String),
    /// This process was asked to end meanwhile.
    Asked(Ask),
}

struct Worker {
    client: Client,
    name: String,
}

impl Worker {
    /// Creates the sandbox. A signal is obeyed once the answer is there: only then is it certain
    /// what has to be deleted.
    async fn create(
        &mut self,
        global: &Global,
        args: &Run,
        signals: &mut Signals,
    ) -> Outcome<Created> {
        let mut body = sandbox::new_body(&self.client, &args.sandbox)?;
        body.insert("name".to_owned(), self.name.as_str().into());
        body.insert("persistent".to_owned(), false.into());
        body.insert("timeout".to_owned(), LEASE_MS.into());
        let body = Value::from(body);
        let creating = self.create_sent(global, sandbox::create_path(&args.sandbox), &body);
        tokio::pin!(creating);
        let mut asked: Option<(Instant, Ask)> = None;
        loop {
            let give_up = asked.map_or_else(Instant::now, |(at, _)| at + CREATE_GRACE);
            tokio::select! {
                answer = &mut creating => {
                    let session = sandbox::session_id(&answer?)?;
                    return Ok(match asked {
                        Some((_, ask)) => Created::Asked(ask),
                        None => Created::Session(session),
                    });
                }
                ask = signals.next(), if asked.is_none() => asked = Some((Instant::now(), ask)),
                () = sleep_until(give_up), if asked.is_some() => {
                    if let Some((_, ask)) = asked {
                        return Ok(Created::Asked(ask));
                    }
                }
            }
        }
    }

    /// Sends the create. An engine that ended meanwhile (it was idle) is started anew; the key makes
    /// sure that nothing is made twice.
    async fn create_sent(&mut self, global: &Global, path: &str, body: &Value) -> Outcome<Value> {
        let key = random_word()?;
        let mut tries = 0;
        loop {
            tries += 1;
            match self.client.post_once(path, &self.client.scope(), body, &key).await {
                Err(error) if error.is_transport() && tries < TRIES => {
                    self.client = autostart::engine(global).await?;
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// Deletes the sandbox. Says so when it cannot.
    async fn delete(&mut self, signals: &mut Signals) {
        let (client, name) = (self.client.clone(), self.name.clone());
        let mut asked = 0;
        let deleting = delete(client, &name);
        tokio::pin!(deleting);
        let error = loop {
            tokio::select! {
                done = &mut deleting => match done {
                    Ok(()) => return,
                    Err(error) => break error.to_string(),
                },
                _ = signals.next() => {
                    asked += 1;
                    if asked == 1 {
                        output::progress("deleting the sandbox; again leaves it behind");
                    } else {
                        break "interrupted".to_owned();
                    }
                }
            }
        };
        output::warning(&format!("the sandbox {name} could not be deleted: {error}"));
        output::hint(&format!("bivouac rm -f {name}"));
    }
}

/// Deletes, across a restart of the engine.
async fn delete(mut client: Client, name: &str) -> Result<(), CallError> {
    let give_up = Instant::now() + stream::PATIENCE;
    loop {
        match client.delete(&sandbox::path(name), &client.scope()).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is(StatusCode::NOT_FOUND) => return Ok(()),
            Err(error) if worth_repeating(&error) && Instant::now() < give_up => {}
            Err(error) => return Err(error),
        }
        sleep(Duration::from_millis(250)).await;
        if let Ok(again) = client.find_again() {
            client = again;
        }
    }
}

fn worth_repeating(error: &CallError) -> bool {
    error.is_transport()
        || error.is(StatusCode::SERVICE_UNAVAILABLE)
        || error.is(StatusCode::UNPROCESSABLE_ENTITY)
}

/// Keeps the session alive for as long as this process lives.
async fn renew(client: &Client, session: &str) -> std::convert::Infallible {
    let path = format!("/v2/sandboxes/sessions/{session}/extend-timeout");
    let mut client = client.clone();
    loop {
        sleep(Duration::from_millis(RENEWAL_MS)).await;
        if let Ok(again) = client.find_again() {
            client = again;
        }
        // The lease outlives a failed renewal: the next one comes in time.
        let _ = client.post(&path, &client.scope(), &json!({ "duration": RENEWAL_MS })).await;
    }
}

/// Holds the sandbox over a connection that ends with this process, however it ends: the engine then
/// deletes it in a few seconds, and does not wait for the lease.
async fn hold(client: &Client, name: &str) -> std::convert::Infallible {
    let path = format!("/bivouac/v1/sandboxes/{name}/hold");
    let mut client = client.clone();
    loop {
        match client.post_stream(&path, &client.scope(), &json!({}), None).await {
            Ok(mut held) => while let Ok(Some(_)) = held.chunk().await {},
            // Gone, or an engine of before: the lease is what is left.
            Err(error) if error.is(StatusCode::NOT_FOUND) => std::future::pending().await,
            Err(_) => {}
        }
        sleep(Duration::from_millis(250)).await;
        if let Ok(again) = client.find_again() {
            client = again;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_may_fail_once() {
        const { assert!(LEASE_MS > 2 * RENEWAL_MS) }
    }

    #[test]
    fn only_a_refusal_needs_no_deletion() {
        use crate::cli::client::ApiError;
        let failure = |status: u16| {
            Failure::from(CallError::Api(ApiError {
                status: StatusCode::from_u16(status).unwrap(),
                code: String::new(),
                message: String::new(),
                body: Value::Null,
                engine: None,
            }))
        };
        assert!(refused(&failure(404)) && refused(&failure(429)));
        assert!(!refused(&failure(500)) && !refused(&Failure::new("x")));
    }
}
