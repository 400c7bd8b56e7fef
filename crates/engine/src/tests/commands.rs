//! Commands: output, ends, signals, standard input, keys.

use bivouac_types::command::{CommandSpec, EndReason, Stream};
use bytes::Bytes;

use super::{Bed, eventually, me, program};
use crate::{ErrorKind, Follow, Output};

async fn drain(mut follow: Follow) -> (String, Option<bivouac_types::command::CommandEnd>) {
    let (mut text, mut end) = (String::new(), None);
    while let Some(piece) = follow.next().await {
        match piece.unwrap() {
            Output::Data { stream, bytes } => {
                assert_eq!(stream, Stream::Stdout);
                text.push_str(std::str::from_utf8(&bytes).unwrap());
            }
            Output::Cut => text.push_str("<cut>"),
            Output::End(command) => end = command.end,
        }
    }
    assert!(follow.next().await.is_none());
    (text, end)
}

#[tokio::test]
async fn output_is_replayed_from_the_start_as_often_as_asked() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let command = bed.start(&session, &["echo", "a long line of words"]).await.unwrap();
    assert_eq!(command.cwd, "/vercel/sandbox");
    for _ in 0..2 {
        let follow = bed.engine.follow(me(), "team", &session, &command.id).await.unwrap();
        let (text, end) = drain(follow).await;
        assert_eq!(text, "a long line of words\n");
        assert_eq!(end.unwrap().exit_code, Some(0));
    }
    bed.engine.stop(me(), "team", &session).await.unwrap();
    // Also of a session that has ended.
    let follow = bed.engine.follow(me(), "team", &session, &command.id).await.unwrap();
    assert_eq!(drain(follow).await.0, "a long line of words\n");
    let known = bed.engine.command(me(), "team", &session, &command.id).await.unwrap();
    assert_eq!(known.end.unwrap().exit_code, Some(0));
    assert_eq!(bed.engine.commands(me(), "team", &session).await.unwrap().len(), 1);
}

#[tokio::test]
async fn followers_and_waiters_hear_of_a_signal_and_of_a_stop() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let (first, second) = (
        bed.start(&session, &["sleep"]).await.unwrap(),
        bed.start(&session, &["sleep"]).await.unwrap(),
    );
    let follow = bed.engine.follow(me(), "team", &session, &first.id).await.unwrap();
    let (followed, signalled) =
        tokio::join!(drain(follow), bed.engine.kill_command(me(), "team", &session, &first.id, 9));
    signalled.unwrap();
    assert_eq!(followed.1.unwrap().exit_code, Some(137));
    // Ended: left alone, and still found.
    let again = bed.engine.kill_command(me(), "team", &session, &first.id, 15).await.unwrap();
    assert_eq!(again.end.unwrap().exit_code, Some(137));

    let follow = bed.engine.follow(me(), "team", &session, &second.id).await.unwrap();
    let (followed, waited, stopped) =
        tokio::join!(drain(follow), bed.wait(&second), bed.engine.stop(me(), "team", &session));
    stopped.unwrap();
    assert_eq!(followed.1.unwrap().reason, Some(EndReason::SandboxStopped));
    assert_eq!(waited.unwrap().end.unwrap().reason, Some(EndReason::SandboxStopped));
    bed.check().await;
}

#[tokio::test]
async fn followers_hear_of_a_loss_and_of_a_deletion() {
    for delete in [false, true] {
        let bed = Bed::new().await;
        let session = bed.create("box").await.session.id;
        let command = bed.start(&session, &["sleep"]).await.unwrap();
        let follow = bed.engine.follow(me(), "team", &session, &command.id).await.unwrap();
        let follower = tokio::spawn(drain(follow));
        tokio::task::yield_now().await;
        if delete {
            bed.delete("box").await.unwrap();
        } else {
            bed.sim.crash_session(&session);
        }
        let end = follower.await.unwrap().1.unwrap();
        let reason = if delete { EndReason::SandboxStopped } else { EndReason::Lost };
        assert_eq!(end.reason, Some(reason));
    }
}

#[tokio::test]
async fn a_program_that_cannot_start_leaves_no_record() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let error = bed.start(&session, &["echo hi"]).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "executable_not_found"));
    assert!(error.message.contains("not found"), "{}", error.message);
    let bad = [
        CommandSpec { program: String::new(), ..program(&["x"]) },
        CommandSpec { timeout_ms: Some(99), ..program(&["true"]) },
        CommandSpec { cwd: Some("a\0".to_owned()), ..program(&["true"]) },
        CommandSpec { args: vec!["a\0".to_owned()], ..program(&["true"]) },
    ];
    for spec in bad {
        let error = bed.engine.start_command(me(), "team", &session, spec, None).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{}", error.message);
    }
    assert!(bed.engine.commands(me(), "team", &session).await.unwrap().is_empty());
    let nobody = bivouac_types::id::CommandId::new(1, [0; 10]);
    let error = bed.engine.command(me(), "team", &session, &nobody).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    let error = bed.engine.kill_command(me(), "team", &session, &nobody, 0).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
}

#[tokio::test]
async fn a_key_makes_a_start_happen_once() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let start = |argv: &'static [&'static str]| {
        let key = Some("k".to_owned());
        bed.engine.start_command(me(), "team", &session, program(argv), key)
    };
    // A start that failed does not use up its key.
    start(&["no such program"]).await.unwrap_err();
    let who = me();
    let (a, b) = {
        let key = || Some("k".to_owned());
        tokio::join!(
            bed.engine.start_command(who, "team", &session, program(&["sleep"]), key()),
            bed.engine.start_command(who, "team", &session, program(&["sleep"]), key()),
        )
    };
    assert_eq!(a.unwrap().id, b.unwrap().id);
    assert_eq!(bed.engine.commands(me(), "team", &session).await.unwrap().len(), 1);
}

#[tokio::test]
async fn standard_input_follows_the_offsets() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let spec = CommandSpec { attach_stdin: true, ..program(&["sleep"]) };
    let command = bed.engine.start_command(me(), "team", &session, spec, None).await.unwrap();
    let write = async |offset, text: &'static str, close| {
        let data = Bytes::from_static(text.as_bytes());
        bed.engine
            .write_stdin(me(), "team", &session, &command.id, offset, data, close)
            .await
            .map(|(_, n)| n)
    };
    assert_eq!(write(None, "", false).await.unwrap(), 0);
    assert_eq!(write(Some(0), "hello", false).await.unwrap(), 5);
    assert_eq!(write(Some(3), "lo!", false).await.unwrap(), 6);
    assert_eq!(write(Some(9), "x", false).await.unwrap_err().kind, ErrorKind::Conflict);
    assert_eq!(write(None, "", true).await.unwrap(), 6);
    assert_eq!(write(None, "x", false).await.unwrap_err().kind, ErrorKind::NotFound);
    let closed = bed.start(&session, &["sleep"]).await.unwrap();
    let error = bed
        .engine
        .write_stdin(me(), "team", &session, &closed.id, None, Bytes::new(), false)
        .await
        .unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "command_stdin_unavailable"));
}

#[tokio::test]
async fn an_end_is_seen_at_once_and_recorded_soon() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    for code in ["0", "7"] {
        let command = bed.start(&session, &["exit", code]).await.unwrap();
        bed.wait(&command).await.unwrap();
        let seen = bed.engine.command(me(), "team", &session, &command.id).await.unwrap();
        assert_eq!(seen.end.unwrap().exit_code, code.parse().ok());
        let all = bed.engine.commands(me(), "team", &session).await.unwrap();
        assert!(all[0].id == command.id && all[0].end.is_some());
        eventually("the end is recorded", || async {
            bed.db.command(&session, &command.id).await.unwrap()?.command.end
        })
        .await;
    }
}

#[tokio::test]
async fn folders_are_made_below_the_working_folder() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let mkdir = async |path: &'static str, cwd, recursive| {
        bed.engine.mkdir(me(), "team", &session, path, cwd, recursive).await
    };
    mkdir("a", None, false).await.unwrap();
    let error = mkdir("/vercel/sandbox/./a", None, false).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "bad_request"));
    assert!(error.message.contains("already exists"));
    mkdir("../a", Some("x"), true).await.unwrap();
    mkdir("a", Some("/tmp"), false).await.unwrap();
    assert_eq!(mkdir("", None, false).await.unwrap_err().kind, ErrorKind::Invalid);
    let missing = bed.engine.read_file(me(), "team", &session, "nope", None).await.unwrap_err();
    assert_eq!((missing.kind, missing.code), (ErrorKind::NotFound, "not_found"));
}

#[tokio::test]
async fn the_command_line_learns_why_a_program_did_not_start() {
    let bed = Bed::new().await;
    let session = bed.create("box").await.session.id;
    let error = bed.start(&session, &["nope"]).await.unwrap_err();
    assert_eq!(error.detail["failure"], "not_found");
    assert_eq!(error.code, "executable_not_found");
}

/// The shim's last frame may not arrive; its log says how a command ended.
#[tokio::test]
async fn an_end_that_is_only_in_the_log_of_a_lost_session_is_found() {
    for follow_it in [false, true] {
        let bed = Bed::new().await;
        let session = bed.create("box").await.session.id;
        let done = bed.start(&session, &["sleep"]).await.unwrap();
        let open = bed.start(&session, &["sleep"]).await.unwrap();
        let follow = bed.engine.follow(me(), "team", &session, &done.id).await.unwrap();
        let waiter = async {
            if follow_it {
                drain(follow).await.1.unwrap()
            } else {
                bed.wait(&done).await.unwrap().end.unwrap()
            }
        };
        let (end, lost, ()) = tokio::join!(waiter, bed.wait(&open), async {
            tokio::task::yield_now().await;
            bed.sim.crash_after(&session, Some((&done.id, 5)));
        });
        assert_eq!((end.exit_code, end.reason), (Some(5), None));
        let lost = lost.unwrap().end.unwrap();
        assert_eq!((lost.exit_code, lost.reason), (None, Some(EndReason::Lost)));
        bed.until("box", bivouac_types::session::SessionStatus::Aborted).await;
        bed.check().await;
    }
}
