//! Snapshots that leave and come: what becomes a record, and what a failure leaves.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;

use bivouac_types::id::SnapshotId;
use bivouac_types::sandbox::Source;
use bivouac_types::snapshot::Snapshot;

use super::{Bed, me, named, ns};
use crate::archives::MOST_ARCHIVES;
use crate::fault::FaultPoint;
use crate::{CreateSandbox, Error, ErrorKind, Format, ImportSpec};

/// A snapshot with the file `f`, and its archive.
async fn exported(bed: &Bed) -> (SnapshotId, Vec<u8>) {
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    let (snapshot, _) = bed.engine.snapshot(me(), "team", &made.session.id, Some(0)).await.unwrap();
    let archive = export(bed, &snapshot.id).await;
    (snapshot.id, archive)
}

async fn export(bed: &Bed, id: &SnapshotId) -> Vec<u8> {
    let reader = bed.engine.export_snapshot(me(), "team", id, Format::TarZst).await.unwrap();
    let mut data = std::fs::File::from(reader.data);
    let read = tokio::task::spawn_blocking(move || {
        let mut all = Vec::new();
        data.read_to_end(&mut all).map(|_| all)
    });
    let all = read.await.unwrap().unwrap();
    reader.done.wait().await.unwrap();
    all
}

async fn import(bed: &Bed, archive: &[u8], spec: ImportSpec) -> Result<Snapshot, Error> {
    let (read, mut write) = std::io::pipe().unwrap();
    let archive = archive.to_vec();
    let writing = std::thread::spawn(move || {
        // Who refuses it reads no further.
        let _ = write.write_all(&archive);
    });
    let imported = bed.engine.import_snapshot(me(), ns(), spec, OwnedFd::from(read)).await;
    writing.join().unwrap();
    imported
}

fn from(id: &SnapshotId, name: &str) -> CreateSandbox {
    let source = Some(Source::Snapshot { snapshot_id: id.to_string() });
    CreateSandbox { source, ..named(name) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_comes_back_with_an_id_of_its_own() {
    let bed = Bed::new().await;
    let (id, archive) = exported(&bed).await;
    assert_eq!(export(&bed, &id).await, archive, "the same bytes again");
    let labels = [("a".to_owned(), "b".to_owned())].into();
    let imported = import(&bed, &archive, ImportSpec { labels, ..ImportSpec::default() }).await;
    let imported = imported.unwrap();
    assert_ne!(imported.id, id);
    assert_eq!((imported.sandbox_name.as_str(), imported.image.as_str()), ("box", "host"));
    assert_eq!((imported.labels["a"].as_str(), imported.expires_at), ("b", None));
    assert_eq!(bed.sim.session_ids(), [], "its scratch is gone");
    let copy = bed.engine.create(me(), ns(), from(&imported.id, "copy")).await.unwrap();
    assert_eq!(bed.run(&copy.session.id, &["test", "f"]).await, Some(0));
    // The sandbox of that name does not own it: its deletion takes its own snapshots alone.
    bed.engine.delete(me(), ns(), "box", true).await.unwrap();
    assert!(bed.sim.snapshot_names().contains(&imported.id.to_string()));
    assert!(!bed.sim.snapshot_names().contains(&id.to_string()));
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_leaves_no_record_and_no_data() {
    let bed = Bed::new().await;
    let (id, archive) = exported(&bed).await;
    let only = [id.to_string()];
    let refused = import(&bed, &archive[..archive.len() / 2], ImportSpec::default()).await;
    assert_eq!(refused.unwrap_err().code, "archive_unreadable");
    let onto = ImportSpec { onto: Some("gone".to_owned()), ..ImportSpec::default() };
    assert_eq!(import(&bed, &archive, onto).await.unwrap_err().kind, ErrorKind::NotFound);
    let name = ImportSpec { name: Some("no name".to_owned()), ..ImportSpec::default() };
    assert_eq!(import(&bed, &archive, name).await.unwrap_err().kind, ErrorKind::Invalid);
    bed.engine.inner.faults.fail_at(FaultPoint::ImportUnpacked);
    assert!(import(&bed, &archive, ImportSpec::default()).await.is_err());
    assert!(!bed.engine.inner.faults.is_armed());
    assert_eq!((bed.sim.snapshot_names(), bed.sim.session_ids().len()), (only.to_vec(), 0));
    let other = ImportSpec { onto: Some("other".to_owned()), ..ImportSpec::default() };
    let onto = import(&bed, &archive, other).await.unwrap();
    assert_eq!(onto.image, "other");
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_an_image_that_is_not_here_says_so() {
    let bed = Bed::new().await;
    bed.sim.build_universal();
    let universal = CreateSandbox { image: Some("universal".to_owned()), ..named("box") };
    let made = bed.engine.create(me(), ns(), universal).await.unwrap();
    let (snapshot, _) = bed.engine.snapshot(me(), "team", &made.session.id, Some(0)).await.unwrap();
    let archive = export(&bed, &snapshot.id).await;
    let elsewhere = Bed::new().await;
    let error = import(&elsewhere, &archive, ImportSpec::default()).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::NotFound, "image_not_found"));
    assert!(error.message.contains("'universal' (sim:1)"), "{}", error.message);
    assert_eq!(elsewhere.sim.snapshot_names(), Vec::<String>::new());
    elsewhere.check().await;
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_so_many_go_on_at_once() {
    let bed = Bed::new().await;
    let (id, archive) = exported(&bed).await;
    let open = || bed.engine.export_snapshot(me(), "team", &id, Format::TarZst);
    let mut readers = Vec::new();
    for _ in 0..MOST_ARCHIVES {
        readers.push(open().await.unwrap());
    }
    let refused = open().await.unwrap_err();
    assert_eq!((refused.kind, refused.code), (ErrorKind::TooMany, "busy"), "{refused}");
    let refused = import(&bed, &archive, ImportSpec::default()).await.unwrap_err();
    assert_eq!(refused.code, "busy", "{refused}");
    assert_eq!(bed.sim.snapshot_names(), [id.to_string()], "nothing is left of it");
    // A reader that goes away makes room, and so does one that is done.
    drop(readers.pop());
    let _ = import(&bed, &archive, ImportSpec::default()).await.unwrap();
    drop(readers);
    assert_eq!(export(&bed, &id).await, archive);
    bed.check().await;
}
