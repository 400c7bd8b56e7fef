//! Output, byte for byte: binary, huge, cut in the middle of a character, read slowly, read twice.

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bivouac_testkit::{LONG, Lines, SHORT, TestSandbox, eventually};
use reqwest::Method;
use serde_json::{Value, json};

use crate::sandbox;

/// The data of a stream record of the base64 form.
fn data(line: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(line["data"].as_str().unwrap()).unwrap()
}

/// Opens a blocking command as the official client does: text, not base64.
async fn open_text(sandbox: &TestSandbox, argv: &[&str]) -> Lines {
    let body =
        json!({ "command": argv[0], "args": &argv[1..], "env": {}, "wait": true, "logs": true });
    let request = sandbox.client.request(Method::POST, &sandbox.path("/cmd")).json(&body);
    sandbox.client.stream(request).await.unwrap()
}

/// Everything on standard output as the official client puts it together.
async fn text(sandbox: &TestSandbox, argv: &[&str]) -> String {
    let mut lines = open_text(sandbox, argv).await;
    let mut out = String::new();
    while let Some(line) = lines.next(LONG).await.unwrap() {
        if line["stream"] == "stdout" {
            assert!(line.get("encoding").is_none(), "{line}");
            out.push_str(line["data"].as_str().unwrap());
        }
    }
    out
}

#[tokio::test]
async fn streams_are_separate_and_in_order() {
    let (_server, sandbox) = sandbox("streams").await;
    let ran = sandbox.sh("for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done").await;
    assert_eq!(ran.out(), "o1\no2\no3\no4\no5");
    assert_eq!(ran.err(), "e1\ne2\ne3\ne4\ne5\n");
}

#[tokio::test]
async fn bytes_are_exact() {
    let (_server, sandbox) = sandbox("bytes").await;
    let all = r#"print map { chr } (0..255); print "\r" x 5; print "no newline at the end""#;
    let mut expected: Vec<u8> = (0..=255).collect();
    expected.extend(b"\r\r\r\r\rno newline at the end");
    assert_eq!(sandbox.run(&["perl", "-e", all]).await.stdout, expected);
    let _ = sandbox.sh("head -c 5000000 /dev/urandom > random").await.good();
    let file = sandbox.read("/vercel/sandbox/random").await;
    assert_eq!(file.status, 200, "{file}");
    let ran = sandbox.sh("cat random; cat random >&2").await;
    assert!(ran.stdout == file.bytes, "stdout differs from the file");
    assert!(ran.stderr == file.bytes, "stderr differs from the file");
    assert_eq!(sandbox.run(&["true"]).await.stdout, b"");
    assert_eq!(sandbox.run(&["printf", "\\r\\r"]).await.stdout, b"\r\r");
}

#[tokio::test]
async fn two_hundred_megabytes() {
    let (_server, sandbox) = sandbox("huge").await;
    let mut lines = sandbox
        .open(&["sh", "-c", "yes 0123456789abcde | head -c 200000000"], json!({}))
        .await
        .unwrap();
    let (mut seen, mut exit) = (0usize, None);
    while let Some(line) = lines.next(LONG).await.unwrap() {
        if line["stream"] == "stdout" {
            for byte in data(&line) {
                assert_eq!(byte, b"0123456789abcde\n"[seen % 16], "at {seen}");
                seen += 1;
            }
        } else if line["command"].is_object() {
            exit = line["command"]["exitCode"].as_i64();
        } else {
            panic!("{line}");
        }
    }
    assert_eq!((seen, exit), (200_000_000, Some(0)));
}

#[tokio::test]
async fn characters_cut_in_the_middle_come_out_whole() {
    let (_server, sandbox) = sandbox("characters").await;
    // Every byte is written alone, so that every character is cut at every place.
    let script = r#"$| = 1; for my $b (split //, "a\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80z") {
        syswrite STDOUT, $b; select undef, undef, undef, 0.03 }"#;
    assert_eq!(text(&sandbox, &["perl", "-e", script]).await, "aé漢😀z");
    let script = r#"my $s = "\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80" x 120000; my $i = 0;
        while ($i < length $s) { my $n = 1 + ($i * 7) % 8191; syswrite STDOUT, substr($s, $i, $n); $i += $n }"#;
    assert!(text(&sandbox, &["perl", "-e", script]).await == "é漢😀".repeat(120_000));
    // What is not text is replaced, and does not spoil its neighbours.
    let odd = text(&sandbox, &["printf", "a\\xffb\\xc3(c\\xe2\\x82"]).await;
    assert!(odd.starts_with("a\u{fffd}b\u{fffd}(c\u{fffd}"), "{odd:?}");
    // Both streams keep their own half character.
    let script = r#"$| = 1; syswrite STDOUT, "\xc3"; select undef, undef, undef, 0.05;
        syswrite STDERR, "\xc3"; select undef, undef, undef, 0.05; syswrite STDOUT, "\xa9";
        select undef, undef, undef, 0.05; syswrite STDERR, "\xbc""#;
    let mut lines = open_text(&sandbox, &["perl", "-e", script]).await;
    let (mut out, mut err) = (String::new(), String::new());
    while let Some(line) = lines.next(SHORT).await.unwrap() {
        match line["stream"].as_str() {
            Some("stdout") => out.push_str(line["data"].as_str().unwrap()),
            Some("stderr") => err.push_str(line["data"].as_str().unwrap()),
            _ => {}
        }
    }
    assert_eq!((out.as_str(), err.as_str()), ("é", "ü"));
}

#[tokio::test]
async fn output_arrives_while_the_command_runs() {
    let (_server, sandbox) = sandbox("live").await;
    let script = "echo first; read line < /vercel/sandbox/gate; echo $line";
    let _ = sandbox.run(&["mkfifo", "gate"]).await.good();
    let mut lines = sandbox.open(&["sh", "-c", script], json!({})).await.unwrap();
    let _record = lines.next(SHORT).await.unwrap().unwrap();
    assert_eq!(data(&lines.next(SHORT).await.unwrap().unwrap()), b"first\n");
    let _ = sandbox.sh("echo second > gate").await.good();
    assert_eq!(data(&lines.next(SHORT).await.unwrap().unwrap()), b"second\n");
}

#[tokio::test]
async fn logs_replay_from_the_start_every_time() {
    let (_server, sandbox) = sandbox("replay").await;
    let script = "for i in $(seq 1 2000); do echo line $i; done; echo end >&2; exit 9";
    let id = sandbox.start(&["sh", "-c", script], json!({})).await;
    assert_eq!(sandbox.wait(&id).await["exitCode"], 9);
    let first = sandbox.output(&id).await;
    let expected: String = (1..=2000).map(|i| format!("line {i}\n")).collect();
    assert!(first.stdout == expected.as_bytes());
    assert_eq!(first.stderr, b"end\n");
    assert_eq!(sandbox.output(&id).await, first);
    let missing = sandbox.path("/cmd/cmd_00000000000000000000000000/logs");
    sandbox.client.get(&missing).await.refused(404, "not_found");
}

#[tokio::test]
async fn followers_share_a_running_command() {
    let (_server, sandbox) = sandbox("followers").await;
    let _ = sandbox.run(&["mkfifo", "gate"]).await.good();
    let script = "echo one; cat gate; echo three";
    let id = sandbox.start(&["sh", "-c", script], json!({})).await;
    let mut early = sandbox.logs(&id).await;
    assert_eq!(data(&early.next(SHORT).await.unwrap().unwrap()), b"one\n");
    let late = {
        let (sandbox, id) = (sandbox.clone(), id.clone());
        tokio::spawn(async move { sandbox.output(&id).await })
    };
    let quitter = sandbox.logs(&id).await;
    drop(quitter);
    let _ = sandbox.sh("echo two > gate").await.good();
    let mut rest = Vec::new();
    while let Some(line) = early.next(SHORT).await.unwrap() {
        rest.extend(data(&line));
    }
    assert_eq!(rest, b"two\nthree\n");
    assert_eq!(late.await.unwrap().out(), "one\ntwo\nthree");
}

#[tokio::test]
async fn a_slow_reader_stalls_nobody() {
    let (_server, sandbox) = sandbox("slow").await;
    let script = "head -c 50000000 /dev/zero; echo done > finished";
    let mut lines = sandbox.open(&["sh", "-c", script], json!({})).await.unwrap();
    let first = lines.next(SHORT).await.unwrap().unwrap();
    let id = first["command"]["id"].as_str().unwrap();
    // Nothing is read from `lines`; the command ends all the same.
    eventually("the command to end", LONG, async || {
        let record = sandbox.command(id).await.ok();
        if record["command"]["exitCode"] == 0 { Ok(()) } else { Err(record) }
    })
    .await;
    assert_eq!(sandbox.read("/vercel/sandbox/finished").await.bytes, b"done\n");
    let mut seen = 0;
    while let Some(line) = lines.next(Duration::from_secs(60)).await.unwrap() {
        if line["stream"] == "stdout" {
            seen += data(&line).len();
        }
    }
    assert_eq!(seen, 50_000_000);
}
