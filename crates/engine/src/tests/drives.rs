//! Drives: one writer, who lets go only when nothing of it can write; private copies; records that hold.

use std::collections::BTreeSet;

use bivouac_types::drive::{DriveMode, Mount, Mounts};
use bivouac_types::session::SessionStatus;

use super::{Bed, eventually, me, named, ns};
use crate::{
    Attachment, CreateSandbox, DriveView, Engine, Error, ErrorKind, ForkSandbox, ListDrives,
    NewDrive, SortDrives, UpdateSandbox,
};

pub(super) async fn make(engine: &Engine, name: &str) -> Result<DriveView, Error> {
    let made = engine.get_or_create_drive(me(), ns(), name, NewDrive::default()).await?;
    Ok(made.0)
}

fn mount(drive: &str, mode: DriveMode) -> Mount {
    Mount { drive: drive.to_owned(), mode }
}

pub(super) async fn attach(
    engine: &Engine,
    sandbox: &str,
    drive: &str,
) -> Result<Attachment, Error> {
    let mount = mount(drive, DriveMode::ReadWrite);
    engine.attach_drive(me(), ns(), sandbox, "/data", mount).await
}

fn with(name: &str, drive: &str, mode: DriveMode) -> CreateSandbox {
    let mounts = Mounts::from([("/data".to_owned(), mount(drive, mode))]);
    CreateSandbox { mounts, ..named(name) }
}

fn files(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test]
async fn a_writer_keeps_the_others_out_until_it_is_settled() {
    let bed = Bed::new().await;
    let drive = make(&bed.engine, "d").await.unwrap().drive;
    let write = DriveMode::ReadWrite;
    let a = bed.engine.create(me(), ns(), with("a", "d", write)).await.unwrap();
    bed.run(&a.session.id, &["touch", "/data/f"]).await;
    let refused = bed.engine.create(me(), ns(), with("b", "d", write)).await.unwrap_err();
    assert_eq!((refused.kind, refused.code), (ErrorKind::Conflict, "conflict"));
    assert_eq!(refused.detail["sandbox"], "a", "{refused}");
    assert!(bed.get("b").await.is_err(), "half a sandbox is left");
    assert_eq!(
        bed.engine.delete_drive(me(), ns(), "d").await.unwrap_err().kind,
        ErrorKind::Conflict
    );
    bed.check().await;
    // Its processes are gone; what is left of it cannot be removed yet.
    bed.sim.fail_removes(1);
    bed.sim.crash_session(&a.session.id);
    eventually("the loss is noticed", || async {
        let view = bed.get("a").await.ok()?;
        (view.session.status == SessionStatus::Aborted).then_some(())
    })
    .await;
    let refused = bed.engine.create(me(), ns(), with("b", "d", write)).await.unwrap_err();
    assert_eq!(refused.detail["sandbox"], "a", "{refused}");
    let bed = bed.restart().await;
    // The failure may have been met by either of the engines: then a later look settles it.
    let b = eventually("the drive to be free", || async {
        bed.clock.advance(31_000);
        bed.engine.create(me(), ns(), with("b", "d", write)).await.ok()
    })
    .await;
    assert_eq!(bed.run(&b.session.id, &["test", "/data/f"]).await, Some(0));
    let again = bed.engine.drive(me(), ns(), "d").await.unwrap();
    assert_eq!((again.writer.as_deref(), again.drive.fence), (Some("b"), drive.fence + 2));
    // The first one comes back when the second has stopped, and not before.
    assert_eq!(bed.resume("a").await.unwrap_err().detail["sandbox"], "b");
    bed.engine.stop(me(), "team", &b.session.id).await.unwrap();
    bed.resume("a").await.unwrap();
    bed.check().await;
}

#[tokio::test]
async fn many_ask_at_once_and_one_gets_it() {
    let bed = Bed::new().await;
    make(&bed.engine, "d").await.unwrap();
    let names: Vec<String> = (0..8).map(|n| format!("box-{n}")).collect();
    let write = |name| bed.engine.create(me(), ns(), with(name, "d", DriveMode::ReadWrite));
    let made = futures_util::future::join_all(names.iter().map(|name| write(name))).await;
    let (won, lost): (Vec<_>, Vec<_>) = made.into_iter().partition(Result::is_ok);
    assert_eq!((won.len(), lost.len()), (1, 7));
    let winner = won[0].as_ref().unwrap().sandbox.name.clone();
    for error in lost.into_iter().map(Result::unwrap_err) {
        assert_eq!(error.code, "conflict", "{error}");
        assert_eq!(error.detail["sandbox"], winner.as_str());
    }
    bed.check().await;
}

#[tokio::test]
async fn copies_are_private_and_of_one_moment() {
    let bed = Bed::new().await;
    make(&bed.engine, "d").await.unwrap();
    let view = DriveMode::Snapshot;
    let early = bed.engine.create(me(), ns(), with("early", "d", view)).await.unwrap_err();
    assert_eq!(early.code, "drive_not_initialized");
    let a = bed.engine.create(me(), ns(), with("a", "d", DriveMode::ReadWrite)).await.unwrap();
    bed.run(&a.session.id, &["touch", "/data/f"]).await;
    let b = bed.engine.create(me(), ns(), with("b", "d", view)).await.unwrap();
    bed.run(&a.session.id, &["touch", "/data/g"]).await;
    bed.run(&b.session.id, &["touch", "/data/own"]).await;
    assert_eq!(bed.run(&b.session.id, &["test", "/data/f"]).await, Some(0));
    assert_eq!(bed.run(&b.session.id, &["test", "/data/g"]).await, Some(1));
    assert_eq!(bed.run(&a.session.id, &["test", "/data/own"]).await, Some(1));
    assert_eq!(bed.sim.view_names().len(), 1);
    // A fork of a sandbox takes its mounts along: a copy is no trouble, the writer is.
    let fork = |from: &'static str| bed.engine.fork(me(), ns(), from, ForkSandbox::default());
    fork("b").await.unwrap();
    assert_eq!(fork("a").await.unwrap_err().code, "conflict");
    let without = UpdateSandbox { mounts: Some(Mounts::new()), ..UpdateSandbox::default() };
    let spec = ForkSandbox { update: without, ..ForkSandbox::default() };
    bed.engine.fork(me(), ns(), "a", spec).await.unwrap();
    bed.delete("b").await.unwrap();
    assert_eq!(bed.sim.view_names().len(), 1, "the fork's own");
    bed.check().await;
}

#[tokio::test]
async fn a_detach_cuts_off_what_still_has_the_drive_open() {
    let bed = Bed::new().await;
    let id = make(&bed.engine, "d").await.unwrap().drive.id.to_string();
    let a = bed.create("a").await.session.id;
    assert!(attach(&bed.engine, "a", "d").await.unwrap().live);
    assert!(attach(&bed.engine, "a", "d").await.unwrap().live, "again is the same");
    bed.run(&a, &["touch", "/data/f"]).await;
    bed.sim.use_mount(&a, "/data");
    let detach = |force| bed.engine.detach_drive(me(), ns(), "d", "a", None, force);
    let busy = detach(false).await.unwrap_err();
    assert_eq!((busy.kind, busy.code), (ErrorKind::Conflict, "conflict"), "{busy}");
    bed.check().await;
    assert_eq!(attach(&bed.engine, "a", "d").await.unwrap().path, "/data", "it is still there");
    detach(true).await.unwrap();
    // What was open writes on, into nothing.
    bed.run(&a, &["touch", "/data/late"]).await;
    assert_eq!(bed.sim.drive_files(&id), files(&["f"]));
    let b = bed.engine.create(me(), ns(), with("b", "d", DriveMode::ReadWrite)).await.unwrap();
    bed.run(&b.session.id, &["touch", "/data/b"]).await;
    assert_eq!(bed.sim.drive_files(&id), files(&["b", "f"]));
    assert_eq!(detach(false).await.unwrap_err().kind, ErrorKind::NotFound);
    assert!(bed.get("a").await.unwrap().sandbox.mounts.is_empty());
}

#[tokio::test]
async fn an_attach_that_fails_is_taken_back() {
    let bed = Bed::new().await;
    make(&bed.engine, "d").await.unwrap();
    bed.create("a").await;
    bed.sim.fail_attaches(1);
    attach(&bed.engine, "a", "d").await.unwrap_err();
    bed.check().await;
    assert!(bed.engine.drive(me(), ns(), "d").await.unwrap().writer.is_none());
    assert!(bed.get("a").await.unwrap().sandbox.mounts.is_empty());
    attach(&bed.engine, "a", "d").await.unwrap();
    // On a stopped one it counts from the next start on.
    make(&bed.engine, "e").await.unwrap();
    let id = bed.get("a").await.unwrap().session.id;
    bed.engine.stop(me(), "team", &id).await.unwrap();
    let later = mount("e", DriveMode::ReadWrite);
    let told = bed.engine.attach_drive(me(), ns(), "a", "/e", later).await.unwrap();
    assert!(!told.live);
    let id = bed.resume("a").await.unwrap().session.id;
    assert_eq!(bed.sim.mounts_of(&id), ["/data", "/e"]);
    let overlapping = mount("e", DriveMode::Snapshot);
    let refused = bed.engine.attach_drive(me(), ns(), "a", "/data/x", overlapping).await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
    bed.check().await;
}

#[tokio::test]
async fn names_sizes_and_lists() {
    let bed = Bed::new().await;
    let small = NewDrive { region: None, max_bytes: Some(1 << 30) };
    let get = |name: &'static str, wanted: NewDrive| {
        bed.engine.get_or_create_drive(me(), ns(), name, wanted)
    };
    let (made, fresh) = get("b", small.clone()).await.unwrap();
    assert!(fresh);
    let (again, fresh) = get("b", NewDrive::default()).await.unwrap();
    assert!(!fresh && again.drive.id == made.drive.id);
    let larger = NewDrive { region: None, max_bytes: Some(2 << 30) };
    assert_eq!(get("b", larger).await.unwrap_err().kind, ErrorKind::Conflict);
    let elsewhere = NewDrive { region: Some("sfo1".to_owned()), max_bytes: None };
    assert_eq!(get("b", elsewhere.clone()).await.unwrap_err().kind, ErrorKind::Conflict);
    get("far", elsewhere).await.unwrap();
    let spec = with("box", "far", DriveMode::ReadWrite);
    assert_eq!(bed.engine.create(me(), ns(), spec).await.unwrap_err().kind, ErrorKind::Invalid);
    let spec = with("box", "nothing", DriveMode::ReadWrite);
    assert_eq!(bed.engine.create(me(), ns(), spec).await.unwrap_err().kind, ErrorKind::NotFound);
    let fork = bed.engine.fork_drive(me(), ns(), "b", "a").await.unwrap();
    assert_eq!(fork.drive.parent_id, Some(made.drive.id.clone()));
    assert_eq!(fork.drive.max_bytes, 1 << 30);
    let taken = bed.engine.fork_drive(me(), ns(), "b", "a").await.unwrap_err();
    assert_eq!(taken.kind, ErrorKind::Conflict);
    let mut names = Vec::new();
    let mut cursor = None;
    loop {
        let query = ListDrives {
            limit: Some(1),
            cursor,
            sort_by: SortDrives::Name,
            ascending: true,
            name_prefix: None,
        };
        let page = bed.engine.drives(me(), ns(), query).await.unwrap();
        names.extend(page.items.into_iter().map(|view| view.drive.name));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(names, ["a", "b", "far"]);
    bed.engine.delete_drive(me(), ns(), made.drive.id.as_str()).await.unwrap();
    assert_eq!(bed.engine.drive(me(), ns(), "b").await.unwrap_err().kind, ErrorKind::NotFound);
    bed.check().await;
    // Data that no record knows goes with the next start.
    bed.sim.plant_drive("drive_00000000000000000000000009");
    assert_eq!(bed.problems().await.len(), 1);
    bed.restart().await.check().await;
}
