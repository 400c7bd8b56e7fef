//! Names of images, versions of them, and who keeps them from being removed.

use bivouac_types::image::{RUNTIMES, managed_names};

use bivouac_types::sandbox::Source;

use super::*;
use crate::error::ErrorKind;

/// An engine that was told no image, as `serve` without `--image`.
async fn without_image() -> (Bed, Arc<Engine>) {
    let bed = Bed::new().await;
    let mut config = EngineConfig::new("node-b", "universal", "http://127.0.0.1:7070");
    config.host_until_built = true;
    let runtime = Arc::new(bed.sim.clone());
    let clock = Arc::clone(&bed.clock) as _;
    let engine = Engine::open(config, bed.db.clone(), runtime, clock).await.unwrap();
    (bed, engine)
}

fn image(name: &str) -> CreateSandbox {
    CreateSandbox { image: Some(name.to_owned()), ..CreateSandbox::default() }
}

fn runtime(name: &str) -> CreateSandbox {
    CreateSandbox { runtime: Some(name.to_owned()), ..CreateSandbox::default() }
}

async fn stop(engine: &Engine, name: &str) {
    let view = engine.get(me(), ns(), name, false).await.unwrap();
    engine.stop(me(), "team", &view.session.id).await.unwrap();
}

#[tokio::test]
async fn each_create_looks_whether_the_universal_image_is_built() {
    let (bed, engine) = without_image().await;
    assert_eq!(engine.default_image().await, "host");
    for spec in [CreateSandbox::default(), runtime("node22")] {
        let made = engine.create(me(), ns(), spec).await.unwrap();
        assert_eq!(made.session.image, "host");
    }
    let error = engine.create(me(), ns(), image("vercel/sandbox/node:22")).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::NotFound, "not_found"));

    bed.sim.build_universal();
    assert_eq!(engine.default_image().await, "universal");
    assert!(engine.images().await.unwrap().contains(&"universal".to_owned()));
    let made = engine.create(me(), ns(), CreateSandbox::default()).await.unwrap();
    assert_eq!(made.session.image, "universal@sim:1");
    assert_eq!(made.session.runtime, "node24");
    for name in RUNTIMES {
        let made = engine.create(me(), ns(), runtime(name)).await.unwrap();
        assert_eq!(
            (made.session.image.as_str(), &*made.session.runtime),
            ("universal@sim:1", name)
        );
    }
    for name in managed_names() {
        let made = engine.create(me(), ns(), image(&name)).await.unwrap();
        assert_eq!(made.session.image, "universal@sim:1", "{name}");
    }
}

#[tokio::test]
async fn an_unknown_image_is_answered_with_what_there_is() {
    let (bed, engine) = without_image().await;
    let refused = async |spec: CreateSandbox| engine.create(me(), ns(), spec).await.unwrap_err();
    let error = refused(image("vercel/sandbox/python:3.14")).await;
    assert_eq!(error.kind, ErrorKind::NotFound);
    let message = &error.message;
    assert!(message.contains("'vercel/sandbox/python:3.14'"), "{message}");
    assert!(message.contains("There are: host, other"), "{message}");
    assert!(message.contains("bivouac image build universal"), "{message}");
    bed.sim.build_universal();
    for spec in [image("vercel/sandbox/arch"), image("nope"), runtime("cobol")] {
        let error = refused(spec).await;
        assert_eq!(error.kind, ErrorKind::NotFound);
        for there in ["host", "universal", "vercel/sandbox/python:3.13", "node26"] {
            assert!(error.message.contains(there), "{}", error.message);
        }
        assert!(!error.message.contains("image build"), "{}", error.message);
    }
    assert_eq!(bed.sim.launches(), 0);
}

#[tokio::test]
async fn a_newer_version_changes_no_sandbox() {
    let (bed, engine) = without_image().await;
    bed.sim.build_universal();
    let spec = CreateSandbox { name: Some("box".to_owned()), ..runtime("node22") };
    engine.create(me(), ns(), spec).await.unwrap();
    bed.sim.build_universal();
    stop(&engine, "box").await;
    let again = engine.get(me(), ns(), "box", true).await.unwrap().session;
    assert_eq!((again.image.as_str(), again.runtime.as_str()), ("universal@sim:1", "node22"));
    // What is made now is new; a name that means the snapshot's own image is no other image.
    let made = engine.create(me(), ns(), CreateSandbox::default()).await.unwrap();
    assert_eq!(made.session.image, "universal@sim:2");
    let kept =
        engine.get(me(), ns(), "box", false).await.unwrap().sandbox.current_snapshot_id.unwrap();
    let source = Source::Snapshot { snapshot_id: kept.to_string() };
    let spec = CreateSandbox { source: Some(source), ..image("vercel/sandbox/node:26") };
    let made = engine.create(me(), ns(), spec).await.unwrap();
    assert_eq!(made.session.image, "universal@sim:1");
    assert_eq!(made.session.runtime, "vercel/sandbox/node:26");
}

#[tokio::test]
async fn an_image_is_kept_exactly_while_something_lies_on_it() {
    let (bed, engine) = without_image().await;
    bed.sim.build_universal();
    let kept = || bed.sim.kept();
    let spec = CreateSandbox { name: Some("box".to_owned()), ..CreateSandbox::default() };
    engine.create(me(), ns(), spec).await.unwrap();
    let run = CreateSandbox { ephemeral: true, ..named("run") };
    engine.create(me(), ns(), run).await.unwrap();
    engine.inner.release_images(0).await.unwrap();
    assert_eq!(kept(), ["universal@sim:1"]);
    // Stopped is still on it, by its snapshot; an ephemeral one is over.
    stop(&engine, "run").await;
    stop(&engine, "box").await;
    engine.inner.release_images(0).await.unwrap();
    assert_eq!(kept(), ["universal@sim:1"]);
    let snapshot =
        engine.get(me(), ns(), "box", false).await.unwrap().sandbox.current_snapshot_id.unwrap();
    engine.delete(me(), ns(), "box", false).await.unwrap();
    engine.inner.release_images(0).await.unwrap();
    assert_eq!(kept(), ["universal@sim:1"], "its snapshot is there");
    engine.delete_snapshot(me(), "team", &snapshot).await.unwrap();
    engine.inner.release_images(0).await.unwrap();
    assert!(kept().is_empty(), "{:?}", kept());
}

#[tokio::test]
async fn an_image_of_a_registry_needs_a_runtime_that_makes_images() {
    let (_bed, engine) = without_image().await;
    let error = engine.create(me(), ns(), image("docker://example.com/a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("makes no images"), "{error}");
    for bad in ["docker://nohost", "docker://example.com/A", "docker://user@example.com/a"] {
        let error = engine.create(me(), ns(), image(bad)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{bad}");
        assert!(error.message.contains(bad), "{error}");
    }
}
