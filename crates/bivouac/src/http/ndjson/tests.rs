//! Streams: exact for any output in any pieces, and never in the way of a client's traps.

use bivouac_types::command::CommandEnd;
use bivouac_types::id::{CommandId, SessionId};
use http_body_util::BodyExt as _;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn command(exit_code: Option<i32>, reason: Option<EndReason>) -> Command {
    Command {
        id: CommandId::new(1, [1; 10]),
        session_id: SessionId::new(1, [2; 10]),
        name: "écho".to_owned(),
        args: vec!["漢".to_owned()],
        cwd: "/vercel/sandbox".to_owned(),
        attach_stdin: false,
        tty: false,
        terminal: None,
        started_at: 5,
        end: Some(CommandEnd { exit_code, duration_ms: 7, reason }),
    }
}

fn pieces(list: Vec<Result<Output, Error>>) -> Source {
    Box::pin(stream::iter(list))
}

fn data(which: Which, bytes: &[u8]) -> Result<Output, Error> {
    Ok(Output::Data { stream: which, bytes: Bytes::copy_from_slice(bytes) })
}

fn done() -> Result<Output, Error> {
    Ok(Output::End(Box::new(command(Some(0), None))))
}

/// The whole answer as text, and its records.
fn read(list: Vec<Result<Output, Error>>, run: bool, encoding: Encoding) -> (String, Vec<Value>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let frame = if run {
        Frame::Run { begun: Box::new(CommandView::begun(&command(None, None))), v1: false }
    } else {
        Frame::Log
    };
    let bytes = runtime.block_on(async {
        let response = respond(pieces(list), frame, encoding);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/x-ndjson");
        response.into_body().collect().await.unwrap().to_bytes()
    });
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let records = text.lines().filter(|l| !l.is_empty()).map(|l| serde_json::from_str(l).unwrap());
    let records = records.collect();
    (text, records)
}

fn joined(records: &[Value], which: &str) -> String {
    let wanted = records.iter().filter(|r| r["stream"] == which);
    wanted.map(|r| r["data"].as_str().unwrap()).collect()
}

#[test]
fn a_run_is_framed_by_two_records_of_its_command() {
    let list = vec![data(Which::Stdout, b"x\n"), data(Which::Stderr, b"w"), done()];
    let (text, records) = read(list, true, Encoding::Text);
    assert!(text.is_ascii() && text.ends_with('\n'));
    let begin = json!({"id": "cmd_00000000080g40g20g40g20g40", "name": "écho"});
    assert_eq!(records[0]["command"]["name"], begin["name"]);
    assert_eq!(records[0]["command"]["exitCode"], Value::Null);
    assert!(records[0]["command"].get("durationMs").is_none());
    assert_eq!(records[1], json!({"stream": "stdout", "data": "x\n"}));
    assert_eq!(records[2], json!({"stream": "stderr", "data": "w"}));
    assert_eq!(records[3]["command"]["exitCode"], 0);
    assert_eq!(records[3]["command"]["durationMs"], 7);
    assert_eq!(records[3]["command"]["id"], records[0]["command"]["id"]);
    assert_eq!(records.len(), 4);
}

#[test]
fn a_log_has_output_alone() {
    let (_, records) = read(vec![data(Which::Stdout, b"x"), done()], false, Encoding::Text);
    assert_eq!(records, [json!({"stream": "stdout", "data": "x"})]);
    assert_eq!(read(vec![done()], false, Encoding::Text).0, "");
}

#[test]
fn an_end_that_is_not_the_programs_is_an_error_record() {
    let end = |code, reason| Ok(Output::End(Box::new(command(code, reason))));
    for (item, code) in [
        (Some(end(Some(137), Some(EndReason::SandboxStopped))), "sandbox_stopped"),
        (Some(end(None, Some(EndReason::Lost))), "sandbox_stream_closed"),
        (Some(Err(Error::invalid("the message"))), "bad_request"),
        (None, "sandbox_stream_closed"),
    ] {
        let list = vec![data(Which::Stdout, b"half \xe6\xbc")].into_iter().chain(item).collect();
        let (_, records) = read(list, true, Encoding::Text);
        let [_, first, second, last] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!(first["data"], "half ");
        assert_eq!(second["data"], "\u{fffd}");
        assert_eq!(last["stream"], "error");
        assert_eq!(last["data"]["code"], code);
        assert!(last["data"]["message"].as_str().is_some_and(|m| !m.is_empty()));
    }
    let timeout = end(Some(137), Some(EndReason::Timeout));
    let (_, records) = read(vec![timeout], true, Encoding::Text);
    assert_eq!(records[1]["command"]["exitCode"], 137);
    assert_eq!(records[1]["command"]["reason"], "timeout");
    assert!(records[1]["command"]["reasonText"].is_string());
}

#[test]
fn a_cut_is_told_in_both_encodings() {
    let (_, records) = read(vec![Ok(Output::Cut), done()], false, Encoding::Base64);
    assert_eq!(records, [json!({"stream": "cut"})]);
    let (_, records) = read(vec![Ok(Output::Cut), done()], false, Encoding::Text);
    assert_eq!(records[0]["stream"], "stderr");
    assert!(records[0]["data"].as_str().unwrap().contains("output is missing"));
}

#[test]
fn base64_is_exact() {
    let bytes: Vec<u8> = (0..=255).collect();
    let list = vec![data(Which::Stdout, &bytes), done()];
    let (_, records) = read(list, false, Encoding::Base64);
    assert_eq!(records[0]["encoding"], "base64");
    let back = STANDARD.decode(records[0]["data"].as_str().unwrap()).unwrap();
    assert_eq!(back, bytes);
}

#[tokio::test(start_paused = true)]
async fn a_silent_command_sends_blank_lines_and_loses_nothing() {
    let slow = stream::once(async {
        tokio::time::sleep(Duration::from_secs(40)).await;
        data(Which::Stdout, b"late")
    });
    let source: Source = Box::pin(slow.chain(stream::iter([done()])));
    let lines: Vec<_> = records(source, Frame::Log, Encoding::Text, KEEP_ALIVE)
        .map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap())
        .collect()
        .await;
    assert_eq!(lines, ["\n", "\n", "{\"stream\":\"stdout\",\"data\":\"late\"}\n"]);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_starts_at_once() {
    let answer = async {
        tokio::time::sleep(Duration::from_secs(40)).await;
        Ok(json!({"a": "é"}))
    };
    let mut body = std::pin::pin!(late(answer, KEEP_ALIVE));
    let start = tokio::time::Instant::now();
    assert_eq!(body.next().await.unwrap().unwrap(), " ");
    assert_eq!(start.elapsed(), Duration::ZERO);
    let rest: Vec<_> = body.map(Result::unwrap).collect().await;
    assert_eq!(rest.concat(), b"  {\"a\":\"\\u00e9\"}");
}

#[tokio::test]
async fn a_late_failure_is_told_in_the_body() {
    let answer = async { Err::<Value, _>(Error::not_found("gone meanwhile")) };
    let body = late_json(answer).into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body, json!({"error": {"code": "not_found", "message": "gone meanwhile"}}));
}

#[tokio::test]
async fn dropping_the_answer_drops_the_source() {
    struct Guard(tokio::sync::mpsc::Sender<()>);
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let guard = Guard(sender);
    let silent = stream::once(async move {
        let guard = guard;
        std::future::pending::<()>().await;
        drop(guard.0);
        done()
    });
    let mut response = respond(Box::pin(silent), Frame::Log, Encoding::Text);
    let frame = response.body_mut().frame();
    assert!(tokio::time::timeout(Duration::from_millis(20), frame).await.is_err());
    drop(response);
    assert_eq!(receiver.recv().await, None, "the source is gone");
}

/// Bytes that are text, broken text and no text at all, near to each other.
fn output() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        "[a-zé漢😀\u{0}\u{7f}\"\\\\\n]{0,6}".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..6),
        proptest::collection::vec(0x80u8..=0xff, 0..6),
        proptest::sample::select(vec![
            b"\xf0\x9f\x98".to_vec(),
            b"\xed\xa0\x80".to_vec(),
            b"\xe6\xbc".to_vec(),
            b"\xf4\x90\x80\x80".to_vec(),
        ]),
    ];
    proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    /// However the output is cut, together it is the lossy text of the whole.
    #[test]
    fn any_bytes_in_any_pieces(bytes in output(), cuts in proptest::collection::vec(1usize..5, 1..20)) {
        let mut list = Vec::new();
        let (mut rest, mut cuts) = (bytes.as_slice(), cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
            list.push(data(Which::Stdout, piece));
            // The other stream in between must not disturb.
            list.push(data(Which::Stderr, piece));
            rest = after;
        }
        list.push(done());
        let (text, records) = read(list, true, Encoding::Text);
        let whole = String::from_utf8_lossy(&bytes);
        prop_assert_eq!(joined(&records, "stdout"), whole.as_ref());
        prop_assert_eq!(joined(&records, "stderr"), whole.as_ref());
        prop_assert!(text.is_ascii());
        prop_assert!(records.iter().all(|r| r["data"] != ""), "no empty record");
    }

    /// A half of a surrogate pair alone in a record would be no valid JSON text.
    #[test]
    fn every_record_is_json_by_itself(text in "\\PC{0,40}") {
        let mut line = Vec::new();
        write_ascii(&mut line, &text);
        prop_assert!(line.is_ascii());
        prop_assert_eq!(serde_json::from_slice::<String>(&line).unwrap(), text);
    }
}
