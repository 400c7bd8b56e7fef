//! Commands on terminals, and with standard input and output of the caller's.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bivouac_runtime::{
    ExecSpec, FileErrorKind, LogRecord, Runtime, RuntimeError, TTY_LOG, TtySize,
};
use bivouac_types::command::ExecFailure;

use crate::{Session, TERMINAL, kind, within};

crate::tests![
    it_is_a_terminal_of_the_users,
    what_is_typed_arrives,
    it_is_told_its_size,
    the_last_words_come_before_the_end,
    children_that_stay_do_not_hold_the_end_back,
    signals_reach_the_foreground,
    a_hang_up_ends_a_shell,
    a_program_that_is_not_there_leaves_nothing,
    it_goes_on_behind_another_serve,
    only_the_latest_output_is_kept,
    nobody_reads_and_nothing_stops,
    other_programs_make_terminals,
    terminals_have_a_bound,
    a_flood_costs_no_memory,
    passed_streams_are_the_callers,
    a_passed_program_that_is_not_there,
];

async fn start(session: &Session, spec: ExecSpec) -> ExecSpec {
    session.handle.exec(&spec).await.unwrap();
    spec
}

async fn it_is_a_terminal_of_the_users(session: Arc<Session>) {
    let script = "tty; stty size; stat -c '%a %u %G' $(tty); ps -o tty= -p $$; echo to-tty > /dev/tty; \
                  test -t 0 && test -t 1 && test -t 2 && ls /proc/self/fd | tr '\n' ' '";
    let spec = start(&session, session.on_terminal(script)).await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(0));
    let text = session.text(&spec.command).await;
    // `ls` has the folder that it lists.
    let wanted = "/dev/pts/0\r\n31 101\r\n620 1000 tty\r\npts/0\r\nto-tty\r\n0 1 2 3 ";
    assert_eq!(text.replace("pts/0   ", "pts/0"), wanted);
    let root = ExecSpec { root: true, ..session.on_terminal("stat -c '%a %u %G' $(tty)") };
    let root = start(&session, root).await;
    session.end(&root.command).await;
    assert_eq!(session.text(&root.command).await, "620 0 tty\r\n");
    // The first one is gone: its number is free again.
    let (again, _) = session.sh("ls /dev/pts").await;
    assert_eq!(again, "ptmx\n");
}

async fn what_is_typed_arrives(session: Arc<Session>) {
    let spec =
        start(&session, session.on_terminal("read line; echo \"<$line>\"; cat; echo over")).await;
    let command = &spec.command;
    session.typed(command, "one ").await;
    session.typed(command, "two\n").await;
    session.until(command, "<one two>").await;
    // Closing is no end of a terminal's input; what is typed is.
    session.handle.stdin(command, None, bytes::Bytes::new(), true).await.unwrap();
    session.typed(command, "three\n\x04").await;
    assert_eq!(session.end(command).await.exit_code, Some(0));
    let text = session.text(command).await;
    assert_eq!(text, "one two\r\n<one two>\r\nthree\r\nthree\r\nover\r\n");
    let late = session.handle.stdin(command, None, "x".into(), false).await;
    assert!(matches!(late, Err(RuntimeError::Stdin { .. })), "{late:?}");
    // The terminal's own keys are signals.
    let spec = start(&session, session.on_terminal("echo ready; sleep 100")).await;
    session.until(&spec.command, "ready").await;
    session.typed(&spec.command, "\x03").await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(130));
}

async fn it_is_told_its_size(session: Arc<Session>) {
    let script = "trap 'stty size' WINCH; echo ready; while :; do read -t 0.1 x; done";
    let spec = start(&session, session.on_terminal(script)).await;
    session.until(&spec.command, "ready").await;
    let size = TtySize { cols: 77, rows: 55 };
    session.handle.resize(&spec.command, size).await.unwrap();
    session.until(&spec.command, "55 77").await;
    session.handle.signal(&spec.command, libc::SIGKILL).await.unwrap();
    session.end(&spec.command).await;
    session.handle.resize(&spec.command, size).await.unwrap();
    let pipes = start(&session, session.command(&["sleep", "100"])).await;
    let refused = session.handle.resize(&pipes.command, size).await.unwrap_err();
    assert_eq!(kind(&refused), FileErrorKind::Invalid);
    let nobody = session.command(&["true"]);
    let refused = session.handle.resize(&nobody.command, size).await;
    assert!(matches!(refused, Err(RuntimeError::NoCommand(_))));
}

async fn the_last_words_come_before_the_end(session: Arc<Session>) {
    for round in 0..20 {
        let script = format!("seq 1 {}; printf last", 1 + round * 97);
        let spec = start(&session, session.on_terminal(&script)).await;
        session.end(&spec.command).await;
        let (records, _) = session.records(&spec.command).await;
        assert!(matches!(records.last(), Some(LogRecord::End(_))));
        let text = session.text(&spec.command).await;
        assert_eq!(text.lines().count(), 2 + round * 97);
        assert!(text.ends_with("last"));
        assert!(
            records
                .iter()
                .all(|r| !matches!(r, LogRecord::Data { stream, .. } if *stream != TERMINAL))
        );
    }
}

async fn children_that_stay_do_not_hold_the_end_back(session: Arc<Session>) {
    let script = "trap '' HUP; (while :; do echo noise; done) & echo first";
    let spec = start(&session, session.on_terminal(script)).await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(0));
    assert!(session.text(&spec.command).await.contains("first"));
    let before = session.records(&spec.command).await.1.log_bytes;
    // It is read, or it would stand still; and dropped.
    let _ = session.sh("sleep 0.3").await;
    assert_eq!(session.records(&spec.command).await.1.log_bytes, before);
    assert_eq!(session.sh("pgrep -f nois[e]").await.1, 0, "it runs");
}

async fn signals_reach_the_foreground(session: Arc<Session>) {
    // A shell with job control has its children in groups of their own.
    let script = "set -m; trap 'echo shell got it' TERM; bash -c 'trap \"echo child got it; exit 3\" TERM; \
                  echo ready; while :; do sleep 0.1; done'; echo code $?";
    let spec = start(&session, session.on_terminal(script)).await;
    session.until(&spec.command, "ready").await;
    session.handle.signal(&spec.command, libc::SIGTERM).await.unwrap();
    session.end(&spec.command).await;
    let text = session.text(&spec.command).await;
    assert!(text.contains("child got it") && text.contains("shell got it"), "{text}");
    assert!(text.contains("code 3"), "{text}");
    let spec = start(&session, session.on_terminal("set -m; sleep 4711")).await;
    within(async { while session.sh("pgrep -f 'sleep 471[1]'").await.1 != 0 {} }).await;
    session.handle.signal(&spec.command, libc::SIGKILL).await.unwrap();
    assert_eq!(session.end(&spec.command).await.exit_code, Some(137));
    within(async { while session.sh("pgrep -f 'sleep 471[1]'").await.1 == 0 {} }).await;
}

async fn a_hang_up_ends_a_shell(session: Arc<Session>) {
    let tty = Some(TtySize::default());
    let spec = ExecSpec { tty, ..session.command(&["bash", "--norc", "-i"]) };
    let spec = start(&session, spec).await;
    session.typed(&spec.command, "sleep 4712\n").await;
    within(async { while session.sh("pgrep -f 'sleep 471[2]'").await.1 != 0 {} }).await;
    // Stopped, as by its key: a hang-up has to wake it.
    session.typed(&spec.command, "\x1a").await;
    session.until(&spec.command, "Stopped").await;
    session.handle.signal(&spec.command, libc::SIGHUP).await.unwrap();
    assert_eq!(session.end(&spec.command).await.exit_code, Some(128 + libc::SIGHUP));
    within(async { while session.sh("pgrep -f 'sleep 471[2]'").await.1 == 0 {} }).await;
}

async fn a_program_that_is_not_there_leaves_nothing(session: Arc<Session>) {
    let spec = ExecSpec { tty: Some(TtySize::default()), ..session.command(&["not-there"]) };
    let refused = session.handle.exec(&spec).await.unwrap_err();
    assert!(
        matches!(refused, RuntimeError::Exec { failure: ExecFailure::NotFound, .. }),
        "{refused}"
    );
    assert!(session.handle.progress(&spec.command).is_none());
    let told = session.runtime.log_progress(&session.spec.session, &spec.command).await.unwrap();
    assert_eq!(told, bivouac_runtime::Progress::default());
    assert_eq!(session.sh("ls /dev/pts").await.0, "ptmx\n");
}

async fn it_goes_on_behind_another_serve(session: Arc<Session>) {
    let spec = start(&session, session.on_terminal("while read x; do echo \"<$x>\"; done")).await;
    session.typed(&spec.command, "one\n").await;
    let text = session.until(&spec.command, "<one>").await;
    let other = session.runtime.adopt(&session.spec.session).await.unwrap().unwrap();
    let known = other.progress(&spec.command).unwrap().borrow().clone();
    assert!(known.end.is_none() && known.log_bytes as usize >= text.len());
    other.stdin(&spec.command, None, "two\n".into(), false).await.unwrap();
    session.until(&spec.command, "<two>").await;
    other.resize(&spec.command, TtySize { cols: 50, rows: 9 }).await.unwrap();
    other.signal(&spec.command, libc::SIGHUP).await.unwrap();
    session.end(&spec.command).await;
}

async fn only_the_latest_output_is_kept(session: Arc<Session>) {
    let script = "head -c 20000000 /dev/zero | tr '\\0' x | fold -w 99; echo; echo the end";
    let spec = start(&session, session.on_terminal(script)).await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(0));
    let (records, progress) = session.records(&spec.command).await;
    let kept = progress.log_bytes - progress.log_start;
    assert!((TTY_LOG..2 * TTY_LOG + (128 << 10)).contains(&kept), "{kept}");
    assert!(progress.log_start > 10 << 20, "{progress:?}");
    assert!(matches!(records.last(), Some(LogRecord::End(_))));
    assert!(session.text(&spec.command).await.ends_with("the end\r\n"));
    // Who asks for what is gone gets what is there.
    let read =
        session.runtime.read_log(&session.spec.session, &spec.command, 0, progress.log_bytes);
    let (records, next) = read.await.unwrap();
    assert!(!records.is_empty() && next > progress.log_start);
    // The file alone tells the same.
    let told = session.runtime.log_progress(&session.spec.session, &spec.command).await.unwrap();
    assert_eq!(told, progress);
}

async fn nobody_reads_and_nothing_stops(session: Arc<Session>) {
    // It never reads: the line is full after 4 KiB, and the session goes on as before.
    let spec = start(&session, session.on_terminal("stty -echo raw; echo ready; sleep 100")).await;
    session.until(&spec.command, "ready").await;
    let (handle, command) = (session.handle.clone(), spec.command.clone());
    let full = tokio::spawn(async move {
        let bytes = vec![b'x'; 256 << 10];
        handle.stdin(&command, None, bytes.into(), false).await
    });
    for _ in 0..5 {
        assert_eq!(session.sh("echo alive").await.0, "alive\n");
    }
    assert!(!full.is_finished());
    session.handle.signal(&spec.command, libc::SIGKILL).await.unwrap();
    session.end(&spec.command).await;
    let refused = within(full).await.unwrap();
    assert!(matches!(refused, Err(RuntimeError::Stdin { .. })), "{refused:?}");
}

async fn other_programs_make_terminals(session: Arc<Session>) {
    let inner = "script -qec 'tty; stty size' /dev/null";
    let spec = start(&session, session.on_terminal(inner)).await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(0));
    let text = session.text(&spec.command).await;
    assert!(text.contains("/dev/pts/1") && text.contains("31 101"), "{text}");
    // Without one as well.
    let (text, code) = session.sh(&format!("{inner} < /dev/null")).await;
    assert!(code == 0 && text.contains("/dev/pts/0"), "{code} {text}");
}

async fn terminals_have_a_bound(session: Arc<Session>) {
    let script = "$| = 1; while (open(my $t, '+<', '/dev/ptmx')) { push @all, $t } print scalar(@all), \"\\n\"; sleep 100";
    let greedy = start(&session, session.command(&["perl", "-e", script])).await;
    session.until(&greedy.command, "256\n").await;
    let refused = session.handle.exec(&session.on_terminal("true")).await.unwrap_err();
    assert!(refused.to_string().starts_with("the sandbox has no terminal left"), "{refused}");
    assert_eq!(session.sh("echo alive").await.0, "alive\n");
    session.handle.signal(&greedy.command, libc::SIGKILL).await.unwrap();
    session.end(&greedy.command).await;
    let spec = start(&session, session.on_terminal("true")).await;
    assert_eq!(session.end(&spec.command).await.exit_code, Some(0));
}

async fn a_flood_costs_no_memory(session: Arc<Session>) {
    let shim = session.own_process("bivouac-shim");
    let resident = || {
        let text = std::fs::read_to_string(format!("/proc/{shim}/status")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let before = resident();
    let floods =
        [session.on_terminal("yes"), session.on_terminal("yes"), session.on_terminal("yes")];
    for spec in &floods {
        start(&session, spec.clone()).await;
    }
    for spec in &floods {
        let mut progress = session.handle.progress(&spec.command).unwrap();
        // Until it has gone round once.
        within(progress.wait_for(|progress| progress.log_start > 0)).await.unwrap();
        session.handle.signal(&spec.command, libc::SIGKILL).await.unwrap();
        session.end(&spec.command).await;
    }
    let more = resident().saturating_sub(before);
    assert!(more < 8 << 10, "{more} KiB");
    assert_eq!(session.sh("echo alive").await.0, "alive\n");
}

fn pair() -> (UnixStream, OwnedFd) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours, theirs.into())
}

async fn passed_streams_are_the_callers(session: Arc<Session>) {
    let script = "read x; echo \"out $x\"; echo err >&2; cat /dev/stdin; exit 7";
    let spec = session.command(&["sh", "-c", script]);
    let (stdin, mut type_in) = std::io::pipe().unwrap();
    let (mut out, stdout) = pair();
    let (mut err, stderr) = pair();
    session.handle.exec_passed(&spec, [stdin.into(), stdout, stderr]).await.unwrap();
    type_in.write_all(b"hello\nmore").unwrap();
    drop(type_in);
    let (mut text, mut other) = (String::new(), String::new());
    out.read_to_string(&mut text).unwrap();
    err.read_to_string(&mut other).unwrap();
    assert_eq!((text.as_str(), other.as_str()), ("out hello\nmore", "err\n"));
    assert_eq!(session.end(&spec.command).await.exit_code, Some(7));
    let (records, _) = session.records(&spec.command).await;
    assert!(
        matches!(&records[..], [LogRecord::End(end)] if end.exit_code == Some(7)),
        "{records:?}"
    );
    // Another serve knows of one that runs, and can end it.
    let spec = session.command(&["sleep", "100"]);
    let (_keep, stdin) = pair();
    session.handle.exec_passed(&spec, [stdin, pair().1, pair().1]).await.unwrap();
    let other = session.runtime.adopt(&session.spec.session).await.unwrap().unwrap();
    assert!(other.progress(&spec.command).unwrap().borrow().end.is_none());
    other.signal(&spec.command, libc::SIGTERM).await.unwrap();
    assert_eq!(session.end(&spec.command).await.exit_code, Some(143));
}

async fn a_passed_program_that_is_not_there(session: Arc<Session>) {
    let spec = session.command(&["not-there"]);
    let (mut out, stdout) = pair();
    let refused =
        session.handle.exec_passed(&spec, [pair().1, stdout, pair().1]).await.unwrap_err();
    assert!(
        matches!(refused, RuntimeError::Exec { failure: ExecFailure::NotFound, .. }),
        "{refused}"
    );
    // Nobody has kept the other end.
    assert_eq!(
        within(tokio::task::spawn_blocking(move || out.read(&mut [0; 9]))).await.unwrap().unwrap(),
        0
    );
    let file = || std::fs::File::open("/dev/null").unwrap().into();
    let spec = session.command(&["true"]);
    assert!(session.handle.exec_passed(&spec, [file(), file(), file()]).await.is_err());
}
