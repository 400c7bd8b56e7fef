//! Standard input: offsets, repeats, gaps, the end, and commands that have none.

use bivouac_testkit::Answer;
use serde_json::json;

use crate::sandbox;

fn written(answer: Answer) -> u64 {
    let json = answer.ok();
    json["bytesWritten"].as_u64().unwrap_or_else(|| panic!("no bytesWritten in {json}"))
}

#[tokio::test]
async fn without_it_input_is_empty() {
    let (_server, sandbox) = sandbox("stdin-none").await;
    let ran = sandbox.sh("cat; echo end").await;
    assert_eq!(ran.good(), "end");
    let id = sandbox.start(&["sleep", "86010"], json!({})).await;
    sandbox.stdin(&id, None, b"x", false).await.refused(400, "command_stdin_unavailable");
}

#[tokio::test]
async fn offsets_make_repeats_harmless() {
    let (_server, sandbox) = sandbox("stdin-offsets").await;
    let id = sandbox.start(&["cat"], json!({ "attachStdin": true })).await;
    assert_eq!(written(sandbox.post(&format!("/cmd/{id}/stdin"), &json!({})).await), 0);
    assert_eq!(written(sandbox.stdin(&id, Some(0), b"hello", false).await), 5);
    // The same call again, and one that overlaps.
    assert_eq!(written(sandbox.stdin(&id, Some(0), b"hello", false).await), 5);
    assert_eq!(written(sandbox.stdin(&id, Some(3), b"lo world", false).await), 11);
    sandbox.stdin(&id, Some(100), b"x", false).await.refused(409, "");
    let _ = sandbox.stdin(&id, None, &[0, 255, 10, 13], false).await.ok();
    let _ = sandbox.stdin(&id, Some(15), b"", true).await.ok();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 0);
    assert_eq!(sandbox.output(&id).await.stdout, b"hello world\x00\xff\x0a\x0d");
    sandbox.stdin(&id, None, b"late", false).await.refused(404, "");
    sandbox
        .stdin("cmd_00000000000000000000000000", None, b"x", false)
        .await
        .refused(404, "not_found");
    let bad = sandbox.post(&format!("/cmd/{id}/stdin"), &json!({ "data": "%%%" })).await;
    bad.refused(400, "");
}

#[tokio::test]
async fn two_mebibytes_in_pieces() {
    let (_server, sandbox) = sandbox("stdin-large").await;
    let data: Vec<u8> =
        (0..2u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let id = sandbox.start(&["sh", "-c", "cat > in"], json!({ "attachStdin": true })).await;
    let mut offset = 0;
    for piece in data.chunks(512 << 10) {
        let _ = sandbox.stdin(&id, Some(offset), piece, false).await.ok();
        offset += piece.len() as u64;
    }
    let _ = sandbox.stdin(&id, Some(offset), b"", true).await.ok();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 0);
    assert!(sandbox.read("/vercel/sandbox/in").await.bytes == data);
}

#[tokio::test]
async fn a_program_that_does_not_read_is_told_apart() {
    let (_server, sandbox) = sandbox("stdin-stuck").await;
    let id = sandbox.start(&["sleep", "86011"], json!({ "attachStdin": true })).await;
    // More than a pipe holds; the engine gives up after 30 s and says how much it took.
    let answer = sandbox.stdin(&id, Some(0), &[b'x'; 500_000], false).await;
    answer.refused(504, "");
    let taken = answer.json["error"]["bytesWritten"].as_u64().unwrap_or_else(|| panic!("{answer}"));
    assert!(taken < 500_000, "{answer}");
    assert_eq!(sandbox.run(&["echo", "others go on"]).await.good(), "others go on");
}

/// The shim, which writes the input, must take a closed pipe as an answer: it once died of it.
#[tokio::test]
async fn a_program_that_stops_reading_harms_nobody() {
    let (_server, sandbox) = sandbox("stdin-closed").await;
    for script in ["head -c 3 >&2", "exec <&-; sleep 0.3", "exit 0"] {
        let id = sandbox.start(&["sh", "-c", script], json!({ "attachStdin": true })).await;
        // 404 once it has ended, else how much it took: either is an answer.
        let answer = sandbox.stdin(&id, Some(0), &[b'x'; 500_000], false).await;
        assert!(answer.status < 500, "{script}: {answer}");
        assert_eq!(sandbox.wait(&id).await["exitCode"], 0, "{script}");
        assert_eq!(sandbox.run(&["echo", "alive"]).await.good(), "alive", "{script}");
    }
}
