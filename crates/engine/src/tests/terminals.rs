//! Terminals: names, clients, scrollback, what goes with its last client and what stays.

use std::time::Duration;

use bivouac_types::terminal::TtySize;

use super::{Bed, eventually, me, ns};
use crate::{Attached, Cursor, ErrorKind, NewTerminal, Output, Principal, Since, Terminal};

fn shell(name: Option<&str>, program: &[&str]) -> NewTerminal {
    NewTerminal {
        name: name.map(str::to_owned),
        program: program[0].to_owned(),
        args: program[1..].iter().map(|arg| (*arg).to_owned()).collect(),
        ..NewTerminal::default()
    }
}

impl Bed {
    async fn terminal(&self, name: Option<&str>, program: &[&str]) -> Terminal {
        self.engine.open_terminal(me(), ns(), "box", shell(name, program)).await.unwrap()
    }

    async fn names(&self) -> Vec<String> {
        let all = self.engine.terminals(me(), ns(), "box").await.unwrap();
        all.into_iter().map(|terminal| terminal.name).collect()
    }

    async fn again(&self, terminal: &Terminal, since: Since) -> Result<Attached, crate::Error> {
        let (session, command) = (&terminal.session, &terminal.command.id);
        self.engine.attach_again(me(), ns(), session, command, since).await
    }
}

async fn drain(mut attached: Attached) -> (String, Option<i32>) {
    let mut text = String::new();
    while let Some(piece) = attached.next().await {
        match piece.unwrap() {
            Output::Data { bytes, .. } => text.push_str(std::str::from_utf8(&bytes).unwrap()),
            Output::Cut => text.push_str("<cut>"),
            Output::End(command) => return (text, command.end.and_then(|end| end.exit_code)),
        }
    }
    panic!("no end");
}

#[tokio::test]
async fn names_are_generated_or_taken_once() {
    let bed = Bed::new().await;
    bed.create("box").await;
    assert_eq!(bed.terminal(None, &["sleep"]).await.name, "t1");
    assert_eq!(bed.terminal(Some("main"), &["sleep"]).await.name, "main");
    assert_eq!(bed.terminal(None, &["sleep"]).await.name, "t2");
    let open = async |new| bed.engine.open_terminal(me(), ns(), "box", new).await.unwrap_err();
    let twice = open(shell(Some("main"), &["sleep"])).await;
    assert_eq!((twice.kind, twice.code), (ErrorKind::Conflict, "terminal_exists"));
    for bad in ["t3", "", "a b"] {
        let error = open(shell(Some(bad), &["sleep"])).await;
        assert_eq!(error.kind, ErrorKind::Invalid, "{bad}");
    }
    let mut big = shell(None, &["sleep"]);
    big.size = TtySize { cols: 0, rows: 24 };
    assert_eq!(open(big).await.kind, ErrorKind::Invalid);
    assert_eq!(bed.names().await, ["t1", "main", "t2"]);
    let nobody = Principal {
        grant: bivouac_types::access::Grant { namespaces: [].into(), verbs: [].into() },
        ..me().clone()
    };
    assert_eq!(
        bed.engine.terminals(&nobody, ns(), "box").await.unwrap_err().kind,
        ErrorKind::NotFound
    );
    // Of a sandbox that has stopped none runs, and its names are free again.
    bed.engine.stop(me(), "team", &bed.get("box").await.unwrap().session.id).await.unwrap();
    assert!(bed.names().await.is_empty());
    assert_eq!(bed.terminal(Some("main"), &["sleep"]).await.name, "main");
    bed.check().await;
}

#[tokio::test]
async fn what_was_written_is_seen_again_from_anywhere() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let words = "one two three four five six seven eight nine ten";
    let terminal = bed.terminal(Some("main"), &["echo", words]).await;
    let all = format!("{words}\n");
    for cut in 0..=all.len() as u64 {
        let since = Since::Cursor(Cursor { at: 0, skip: cut });
        let seen = drain(bed.again(&terminal, since).await.unwrap()).await;
        assert_eq!(seen, (all[cut as usize..].to_owned(), Some(0)));
        let seen = drain(bed.again(&terminal, Since::Last(cut)).await.unwrap()).await;
        assert_eq!(seen.0, all[all.len() - cut as usize..]);
    }
    // The places that it tells lead on without a gap.
    let mut first = bed.again(&terminal, Since::Last(1000)).await.unwrap();
    let Some(Ok(Output::Data { bytes, .. })) = first.next().await else { panic!("no output") };
    let rest = drain(bed.again(&terminal, Since::Cursor(first.cursor())).await.unwrap()).await.0;
    assert_eq!(format!("{}{rest}", std::str::from_utf8(&bytes).unwrap()), all);
    let beyond = Since::Cursor(Cursor { at: 1 << 40, skip: 0 });
    assert_eq!(bed.again(&terminal, beyond).await.unwrap_err().kind, ErrorKind::Invalid);
    // It has ended: nobody sits down at it by its name any more.
    let gone = bed.engine.attach_terminal(me(), ns(), "box", "main", 10).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn without_a_name_it_goes_with_its_last_client() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let mut named = bed.terminal(Some("main"), &["sleep"]).await;
    let lonely = bed.terminal(None, &["sleep"]).await;
    let sat = bed.terminal(None, &["sleep"]).await;
    let attach =
        async |name: &str| bed.engine.attach_terminal(me(), ns(), "box", name, 0).await.unwrap();
    let (first, mut second) = (attach(&sat.name).await, attach(&sat.name).await);
    drop(attach("main").await);
    let seen = bed.engine.terminals(me(), ns(), "box").await.unwrap();
    let attached: Vec<u32> = seen.iter().map(|terminal| terminal.attached).collect();
    assert_eq!(attached, [0, 0, 2]);
    // Nobody ever came to the lonely one.
    let ended = bed.wait(&lonely.command).await.unwrap();
    assert_eq!(ended.end.unwrap().exit_code, Some(129));
    assert_eq!(bed.names().await, ["main", "t2"]);
    drop(first);
    second.linger(Duration::from_secs(1));
    drop(second);
    // Another one comes back in time, and leaves later.
    let mut third = attach(&sat.name).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bed.names().await, ["main", "t2"]);
    third.linger(Duration::ZERO);
    drop(third);
    bed.wait(&sat.command).await.unwrap();
    assert_eq!(bed.names().await, ["main"]);
    // By hand.
    named = bed.engine.hang_up(me(), ns(), "box", &named.name).await.unwrap();
    assert_eq!(bed.wait(&named.command).await.unwrap().end.unwrap().exit_code, Some(129));
    eventually("the name is free", async || bed.names().await.is_empty().then_some(())).await;
}

#[tokio::test]
async fn another_engine_finds_them_again() {
    let bed = Bed::new().await;
    bed.create("box").await;
    bed.terminal(Some("main"), &["sleep"]).await;
    let lonely = bed.terminal(None, &["sleep"]).await;
    let bed = bed.restart().await;
    assert_eq!(bed.names().await, ["main", "t1"]);
    drop(bed.engine.attach_terminal(me(), ns(), "box", "main", 0).await.unwrap());
    let mut back = bed.engine.attach_terminal(me(), ns(), "box", "t1", 0).await.unwrap();
    back.linger(Duration::from_millis(1));
    drop(back);
    // Nobody came back to this one for long.
    bed.wait(&lonely.command).await.unwrap();
    assert_eq!(bed.names().await, ["main"]);
    bed.check().await;
}
