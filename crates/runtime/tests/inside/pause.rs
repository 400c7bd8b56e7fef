//! Sessions that stand still.

use std::sync::Arc;
use std::time::Duration;

use bivouac_runtime::{ExecSpec, FileErrorKind, TtySize};

use crate::{Session, kind, within};

crate::tests![
    what_ran_goes_on_where_it_was,
    a_session_that_stands_still_can_be_ended,
    requests_to_one_do_not_hang,
    without_swap_it_is_said,
];

async fn what_ran_goes_on_where_it_was(session: Arc<Session>) {
    let spec = ExecSpec {
        tty: Some(TtySize::default()),
        ..session.command(&[
            "bash",
            "--norc",
            "-c",
            "stty -echo; i=0; while :; do i=$((i+1)); echo $i; read -t 0.01 x; done",
        ])
    };
    session.handle.exec(&spec).await.unwrap();
    session.until(&spec.command, "\n5\r").await;
    session.handle.freeze().await.unwrap();
    // What was under way in the terminal arrives; then there is silence.
    within(async {
        loop {
            let before = session.records(&spec.command).await.1.log_bytes;
            tokio::time::sleep(Duration::from_millis(200)).await;
            if session.records(&spec.command).await.1.log_bytes == before {
                break;
            }
        }
    })
    .await;
    let text = session.text(&spec.command).await;
    let count = text.lines().count();
    // Typed meanwhile: kept by the terminal.
    session.typed(&spec.command, "x").await;
    session.handle.thaw().await.unwrap();
    let text = session.until(&spec.command, &format!("\n{}\r", count + 5)).await;
    let numbers: Vec<_> =
        text.lines().filter_map(|line| line.trim().parse::<usize>().ok()).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

async fn a_session_that_stands_still_can_be_ended(session: Arc<Session>) {
    let spec = session.on_terminal("sleep 100");
    session.handle.exec(&spec).await.unwrap();
    session.handle.freeze().await.unwrap();
    within(session.handle.kill()).await.unwrap();
    let told = bivouac_runtime::Runtime::log_progress(
        &*session.runtime,
        &session.spec.session,
        &spec.command,
    )
    .await
    .unwrap();
    assert_eq!(told.end.unwrap().exit_code, Some(137));
}

async fn requests_to_one_do_not_hang(session: Arc<Session>) {
    session.handle.freeze().await.unwrap();
    let spec = session.command(&["touch", "/tmp/started"]);
    let (exec, mkdir) = within(async {
        tokio::join!(session.handle.exec(&spec), session.handle.mkdir("/tmp/x", false))
    })
    .await;
    assert_eq!(kind(&exec.unwrap_err()), FileErrorKind::Busy);
    assert_eq!(kind(&mkdir.unwrap_err()), FileErrorKind::Busy);
    session.handle.thaw().await.unwrap();
    assert_eq!(session.sh("echo alive").await.0, "alive\n");
}

async fn without_swap_it_is_said(session: Arc<Session>) {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    session.handle.freeze().await.unwrap();
    let done = session.handle.page_out().await;
    session.handle.thaw().await.unwrap();
    if swaps.lines().count() > 1 {
        done.unwrap();
    } else {
        let refused = done.unwrap_err();
        assert_eq!(kind(&refused), FileErrorKind::Invalid);
        assert!(refused.to_string().contains("no swap"), "{refused}");
    }
    assert_eq!(session.sh("echo alive").await.0, "alive\n");
}
