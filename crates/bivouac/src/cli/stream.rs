//! A command in a sandbox as if it ran here: its output, its input, its signals, its code.
//!
//! Invariant: bytes pass exactly and in order, each stream for itself; a broken connection (the
//! engine restarts) is taken up again where it broke, because output is replayed from its start and
//! input carries offsets. Used by `run`, `exec` and `logs`.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::{CallError, Client, random_word};
use super::failure::{ExitStatus, Failure, Outcome};
use super::ndjson::{Record, Records, Stream, StreamError, Text};
use super::output;
use super::signals::{Ask, Signals};
use super::stdin;

/// How long an engine may be gone before a stream gives up.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How long a command may take to end after SIGTERM or SIGHUP was passed on.
const GRACE: Duration = Duration::from_secs(5);
/// What a program gets that writes to a reader that is gone.
const SIGPIPE: i32 = 13;

/// What to run, and how it is joined to this process.
#[derive(Debug)]
pub(crate) struct Job {
    /// The session.
    pub(crate) session: String,
    /// Body of the `cmd` call.
    pub(crate) request: Value,
    /// Pass this process's standard input.
    pub(crate) stdin: bool,
    /// Records as JSON lines on stdout instead of the bytes themselves.
    pub(crate) json: bool,
}

/// How a job came to its end here.
#[derive(Debug)]
pub(crate) enum Finish {
    /// The command's last record.
    Ended(Value),
    /// This process was asked to end, and the command did not in time.
    Left(Ask),
    /// Nobody reads this process's standard output.
    Closed,
}

impl Finish {
    /// The status to end with. Says on stderr why, when the program did not end by itself.
    pub(crate) fn status(&self) -> Outcome {
        match self {
            Self::Ended(command) => ended(command),
            Self::Left(ask) => Ok(ExitStatus::of_signal(ask.number())),
            Self::Closed => Ok(ExitStatus::of_signal(13)),
        }
    }
}

/// The status of a command that has ended.
pub(crate) fn ended(command: &Value) -> Outcome {
    let why = reason(command);
    match (command["exitCode"].as_i64(), why) {
        (Some(code), why) => {
            if let Some(why) = why {
                output::hint(&why);
            }
            Ok(ExitStatus::of_command(code))
        }
        (None, Some(why)) => Err(Failure::new(why)),
        (None, None) => Err(Failure::new("how the command ended is not known")),
    }
}

/// Why a command ended, when it was not by itself.
fn reason(command: &Value) -> Option<String> {
    if let Some(text) = command["reasonText"].as_str() {
        return Some(text.to_owned());
    }
    let text = match command["reason"].as_str()? {
        "timeout" => "the command was killed when its --timeout passed",
        "out_of_memory" => "a process was killed at the sandbox's memory limit: more with --vcpus",
        "process_limit" => "the sandbox's process limit was reached",
        "sandbox_stopped" => "the sandbox was stopped while the command ran",
        "lost" => "the sandbox was lost: how the command ended cannot be known",
        other => return Some(format!("the command ended because of {other}")),
    };
    Some(text.to_owned())
}

/// Runs a job to its end. SIGINT is passed on, the second one kills, the third one leaves; SIGTERM
/// and SIGHUP are passed on and leave after a moment.
pub(crate) async fn run(client: &Client, job: &Job, signals: &mut Signals) -> Outcome<Finish> {
    let (id, mut seen) = watch::channel(None);
    let mut pump = Pump::new(client.clone(), job.session.clone(), job.json, id);
    let pumping = pump.start(job);
    tokio::pin!(pumping);
    let mut interrupts = 0;
    // A signal that waits for the command to have an id.
    let mut waiting: Option<i32> = None;
    let mut leave: Option<(Instant, Ask)> = None;
    loop {
        let leave_at = leave.map_or_else(Instant::now, |(at, _)| at);
        tokio::select! {
            ended = &mut pumping => return finish(client, job, &seen, ended).await,
            ask = signals.next() => {
                waiting = Some(match ask {
                    Ask::Interrupt => {
                        interrupts += 1;
                        match interrupts { 1 => 2, 2 => 9, _ => return Ok(Finish::Left(ask)) }
                    }
                    Ask::Terminate | Ask::Hangup => {
                        leave = Some((Instant::now() + GRACE, ask));
                        i32::from(ask.number())
                    }
                });
                if interrupts == 1 {
                    output::progress("interrupting the command; Ctrl-C again kills it");
                }
            }
            id = command_id(&mut seen), if waiting.is_some() => {
                if let Some(signal) = waiting.take() {
                    kill(client, &job.session, &id, signal).await;
                }
            }
            () = sleep_until(leave_at), if leave.is_some() => {
                if let Some((_, ask)) = leave {
                    return Ok(Finish::Left(ask));
                }
            }
        }
    }
}

async fn finish(
    client: &Client,
    job: &Job,
    seen: &watch::Receiver<Option<String>>,
    ended: Outcome<Value>,
) -> Outcome<Finish> {
    match ended {
        Ok(command) => Ok(Finish::Ended(command)),
        Err(failure) if failure.is::<output::Closed>() => {
            let id = seen.borrow().clone();
            if let Some(id) = id {
                kill(client, &job.session, &id, SIGPIPE).await;
            }
            Ok(Finish::Closed)
        }
        Err(failure) => Err(failure),
    }
}

async fn command_id(seen: &mut watch::Receiver<Option<String>>) -> String {
    match seen.wait_for(Option::is_some).await {
        Ok(id) => id.clone().unwrap_or_default(),
        Err(_) => std::future::pending().await,
    }
}

/// Passes a signal on. A command that has ended meanwhile needs none.
async fn kill(client: &Client, session: &str, command: &str, signal: i32) {
    let path = format!("/v2/sandboxes/sessions/{session}/cmd/{command}/kill");
    if let Err(error) = client.post(&path, &client.scope(), &json!({ "signal": signal })).await
        && !error.is(StatusCode::NOT_FOUND)
        && !error.is(StatusCode::GONE)
    {
        output::warning(&format!("could not signal the command: {error}"));
    }
}

/// Follows a command that exists already; answers its last record.
pub(crate) async fn follow(
    client: &Client,
    session: &str,
    command: &str,
    json: bool,
) -> Outcome<Value> {
    let (id, _seen) = watch::channel(None);
    let mut pump = Pump::new(client.clone(), session.to_owned(), json, id);
    pump.follow(command).await
}

/// Carries output from the engine to stdout and stderr.
struct Pump {
    client: Client,
    session: String,
    json: bool,
    id: watch::Sender<Option<String>>,
    out: Side,
    err: Side,
    cut: bool,
}

/// One of the two streams.
#[derive(Debug, Default)]
struct Side {
    /// Bytes written so far.
    written: u64,
    /// Bytes of the replay that were written before.
    skip: u64,
    text: Text,
}

impl Side {
    /// What of this piece was not written yet.
    fn fresh(&mut self, mut bytes: Bytes) -> Bytes {
        let old = usize::try_from(self.skip).unwrap_or(usize::MAX).min(bytes.len());
        self.skip -= old as u64;
        let fresh = bytes.split_off(old);
        self.written += fresh.len() as u64;
        fresh
    }

    /// The stream begins again.
    fn rewind(&mut self) {
        self.skip = self.written;
    }
}

/// How one answer's records ended.
enum Ending {
    /// The command's last record.
    Command(Value),
    /// In order, without one (a log).
    Quiet,
    /// The connection is gone, the command perhaps not.
    Broken(StreamError),
    /// The engine closed it while the command goes on.
    Closed,
}

impl Pump {
    fn new(client: Client, session: String, json: bool, id: watch::Sender<Option<String>>) -> Self {
        Self { client, session, json, id, out: Side::default(), err: Side::default(), cut: false }
    }

    fn path(&self, tail: &str) -> String {
        format!("/v2/sandboxes/sessions/{}/cmd{tail}", self.session)
    }

    /// Starts the job's command and carries it to its end.
    async fn start(&mut self, job: &Job) -> Outcome<Value> {
        let (id, mut records) = self.begin(job).await?;
        let input = job.stdin.then(|| {
            let path = self.path(&format!("/{id}/stdin"));
            Input(tokio::spawn(stdin::feed(self.client.clone(), path)))
        });
        let command = match self.carry(&mut records).await? {
            Ending::Command(command) => command,
            Ending::Quiet | Ending::Closed => self.reattach(&id, None).await?,
            Ending::Broken(error) => self.reattach(&id, Some(error)).await?,
        };
        drop(input);
        self.close(&command).await?;
        Ok(command)
    }

    /// Starts the command; answers its id and the rest of the stream. When the connection breaks
    /// before the id is known it asks again: the key makes sure that it is started once. An engine
    /// that is not there at all is told at once.
    async fn begin(&mut self, job: &Job) -> Outcome<(String, Records)> {
        let key = random_word()?;
        let query = self.client.scope().with("encoding", "base64");
        let path = self.path("");
        let mut give_up: Option<Instant> = None;
        loop {
            let answer = self.client.post_stream(&path, &query, &job.request, Some(&key)).await;
            let (failure, broke): (Failure, bool) = match answer {
                Ok(answer) => {
                    let mut records = Records::new(answer);
                    match records.next().await {
                        Ok(Some(Record::Command(command))) => {
                            return Ok((self.announce(&command)?, records));
                        }
                        Ok(Some(Record::Error { message, .. })) => {
                            return Err(Failure::new(message));
                        }
                        Ok(Some(_)) => {
                            return Err(Failure::new("the engine sent output of no command"));
                        }
                        Ok(None) => (Failure::new("the engine ended the call early"), true),
                        Err(error @ StreamError::Broken(_)) => (error.into(), true),
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) if error.is_transport() => {
                    let broke = !error.is_connect();
                    (error.into(), broke)
                }
                Err(error) => return Err(error.into()),
            };
            if broke {
                give_up.get_or_insert_with(|| Instant::now() + PATIENCE);
            }
            if give_up.is_none_or(|at| Instant::now() >= at) {
                return Err(failure);
            }
            self.find_again().await;
        }
    }

    /// A moment later, wherever the engine is then.
    async fn find_again(&mut self) {
        sleep(Duration::from_millis(250)).await;
        if let Ok(client) = self.client.find_again() {
            self.client = client;
        }
    }

    /// Makes the command's id known to whoever passes signals and input on.
    fn announce(&self, command: &Value) -> Outcome<String> {
        let id = command["id"]
            .as_str()
            .ok_or_else(|| Failure::new("the engine's command has no id"))?
            .to_owned();
        if self.json {
            output::line(&json!({ "command": command }).to_string())?;
        }
        self.id.send_replace(Some(id.clone()));
        Ok(id)
    }

    /// Follows a command from the start of its output.
    async fn follow(&mut self, id: &str) -> Outcome<Value> {
        let command = self.replay(id).await?;
        self.close(&command).await?;
        Ok(command)
    }

    /// Carries records until they end. Only an error that asking again cannot mend is an `Err`.
    async fn carry(&mut self, records: &mut Records) -> Outcome<Ending> {
        loop {
            match records.next().await {
                Ok(Some(Record::Data(stream, bytes))) => self.write(stream, bytes).await?,
                Ok(Some(Record::Cut)) => self.mark_cut()?,
                Ok(Some(Record::Command(command))) => return Ok(Ending::Command(command)),
                Ok(Some(Record::Error { code, .. })) if code == "sandbox_stream_closed" => {
                    return Ok(Ending::Closed);
                }
                Ok(Some(Record::Error { message, .. })) => return Err(Failure::new(message)),
                Ok(None) => return Ok(Ending::Quiet),
                Err(error @ StreamError::Broken(_)) => return Ok(Ending::Broken(error)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The connection broke: finds the engine again and goes on where it broke.
    async fn reattach(&mut self, id: &str, broken: Option<StreamError>) -> Outcome<Value> {
        output::warning("the connection to the engine broke; taking it up again");
        match self.replay(id).await {
            Err(failure) => match broken {
                Some(broken) => Err(failure.after(&broken)),
                None => Err(failure),
            },
            done => done,
        }
    }

    /// Reads the log from its start, skips what was written, and answers the last record. A log
    /// that was read to its end counts only if the command had ended before the reading began: an
    /// engine that shuts down ends a log early.
    async fn replay(&mut self, id: &str) -> Outcome<Value> {
        let mut give_up = Instant::now() + PATIENCE;
        loop {
            match self.replay_once(id).await {
                Ok(Some(command)) => return Ok(command),
                // Progress was made: the patience starts anew.
                Ok(None) => give_up = Instant::now() + PATIENCE,
                Err(Broken::For(failure)) => return Err(failure),
                Err(Broken::Now(failure)) if Instant::now() >= give_up => return Err(failure),
                Err(Broken::Now(_)) => self.find_again().await,
            }
        }
    }

    async fn replay_once(&mut self, id: &str) -> Result<Option<Value>, Broken> {
        let query = self.client.scope();
        let path = self.path(&format!("/{id}"));
        let before = command_of(self.client.get(&path, &query).await?)?;
        let log = self
            .client
            .get_stream(&format!("{path}/logs"), &query.clone().with("encoding", "base64"))
            .await?;
        self.out.rewind();
        self.err.rewind();
        let mut records = Records::new(log);
        match self.carry(&mut records).await.map_err(Broken::For)? {
            Ending::Broken(error) => return Err(Broken::Now(error.into())),
            Ending::Closed => return Err(Broken::Now(Failure::new("the engine closed the log"))),
            Ending::Quiet | Ending::Command(_) => {}
        }
        if has_ended(&before) {
            return Ok(Some(before));
        }
        let after = self.client.get(&path, &query.with("wait", "true")).await?;
        command_of(after)?;
        Ok(None)
    }

    async fn write(&mut self, stream: Stream, bytes: Bytes) -> Outcome<()> {
        let side = match stream {
            Stream::Stdout => &mut self.out,
            Stream::Stderr => &mut self.err,
        };
        let fresh = side.fresh(bytes);
        if fresh.is_empty() {
            return Ok(());
        }
        if self.json {
            let text = side.text.push(&fresh);
            return data_line(stream, &text);
        }
        put(stream, fresh).await
    }

    fn mark_cut(&mut self) -> Outcome<()> {
        if std::mem::replace(&mut self.cut, true) {
            return Ok(());
        }
        if self.json {
            return output::line(&json!({ "stream": "cut" }).to_string());
        }
        output::warning("output is missing here: the session's space for logs is used up");
        Ok(())
    }

    /// Ends the streams.
    async fn close(&mut self, command: &Value) -> Outcome<()> {
        if !self.json {
            return Ok(());
        }
        for (stream, side) in [(Stream::Stdout, &mut self.out), (Stream::Stderr, &mut self.err)] {
            let rest = side.text.finish();
            data_line(stream, &rest)?;
        }
        output::line(&json!({ "command": command }).to_string())
    }
}

/// Whether asking again can help.
enum Broken {
    /// It can: the engine is away for now.
    Now(Failure),
    /// It cannot.
    For(Failure),
}

impl From<CallError> for Broken {
    fn from(error: CallError) -> Self {
        if error.is_transport() || error.is(StatusCode::SERVICE_UNAVAILABLE) {
            Self::Now(error.into())
        } else {
            Self::For(error.into())
        }
    }
}

fn command_of(mut answer: Value) -> Result<Value, Broken> {
    match answer.get_mut("command").map(Value::take) {
        Some(command @ Value::Object(_)) => Ok(command),
        _ => Err(Broken::For(Failure::new("the engine's answer holds no command"))),
    }
}

/// A command that was lost has no exit code, but a reason.
fn has_ended(command: &Value) -> bool {
    command["exitCode"].is_i64() || command["reason"].is_string()
}

fn data_line(stream: Stream, text: &str) -> Outcome<()> {
    if text.is_empty() {
        return Ok(());
    }
    let name = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    };
    output::line(&json!({ "stream": name, "data": text }).to_string())
}

/// Writes without holding up signals: a full pipe blocks a thread of its own.
async fn put(stream: Stream, bytes: Bytes) -> Outcome<()> {
    let written = tokio::task::spawn_blocking(move || match stream {
        Stream::Stdout => output::stdout_bytes(&bytes),
        Stream::Stderr => output::stderr_bytes(&bytes),
    })
    .await?;
    match (stream, written) {
        (_, Ok(())) | (Stream::Stderr, Err(_)) => Ok(()),
        (Stream::Stdout, Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(output::Closed.into())
        }
        (Stream::Stdout, Err(error)) => {
            Err(anyhow::Error::new(error).context("could not write to standard output").into())
        }
    }
}

/// The task that passes input on; it ends with the command.
struct Input(tokio::task::JoinHandle<()>);

impl Drop for Input {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_skips_what_was_written() {
        let mut side = Side::default();
        assert_eq!(side.fresh(Bytes::from_static(b"abc")), "abc");
        side.rewind();
        assert_eq!(side.fresh(Bytes::from_static(b"ab")), "");
        assert_eq!(side.fresh(Bytes::from_static(b"cde")), "de");
        side.rewind();
        assert_eq!(side.fresh(Bytes::from_static(b"abcdef")), "f");
        assert_eq!(side.written, 6);
    }

    #[test]
    fn ends_are_told_apart() {
        let code = |value: Value| ended(&value).map(ExitStatus::code).ok();
        assert_eq!(code(json!({ "exitCode": 42 })), Some(42));
        assert_eq!(code(json!({ "exitCode": 137, "reason": "out_of_memory" })), Some(137));
        assert_eq!(code(json!({ "exitCode": null, "reason": "lost" })), None);
        assert_eq!(code(json!({ "exitCode": null })), None);
        assert!(has_ended(&json!({ "exitCode": null, "reason": "lost" })));
        assert!(!has_ended(&json!({ "exitCode": null })));
    }
}
