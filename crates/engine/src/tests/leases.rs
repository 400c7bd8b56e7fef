//! Sandboxes that are held: what becomes of them when nobody does any more.

use super::*;
use crate::leases::GRACE_MS;

/// Moves the clock behind the end of grace, a step at a time, for as long as `ask` has no answer.
async fn grace_passes<T, F: Future<Output = Option<T>>>(
    bed: &Bed,
    what: &str,
    ask: impl Fn() -> F,
) -> T {
    eventually(what, || {
        bed.clock.advance(GRACE_MS);
        ask()
    })
    .await
}

async fn is_gone(bed: &Bed, name: &str) -> Option<()> {
    bed.get(name).await.is_err().then_some(())
}

#[tokio::test]
async fn a_sandbox_goes_after_its_last_lease() {
    let bed = Bed::new().await;
    for name in ["held", "other"] {
        bed.create(name).await;
    }
    let first = bed.engine.hold(me(), ns(), "held").await.unwrap();
    let second = bed.engine.hold(me(), ns(), "held").await.unwrap();
    drop(first);
    bed.clock.advance(2 * GRACE_MS);
    assert!(bed.get("held").await.is_ok(), "it is still held");
    drop(second);
    grace_passes(&bed, "the sandbox goes", || is_gone(&bed, "held")).await;
    assert!(bed.get("other").await.is_ok(), "nobody ever held it");
    // It is not found from the first step of its deletion on.
    eventually("all is gone", || async { bed.problems().await.is_empty().then_some(()) }).await;
}

#[tokio::test]
async fn a_holder_that_comes_back_keeps_it() {
    let bed = Bed::new().await;
    for name in ["held", "witness"] {
        bed.create(name).await;
    }
    drop(bed.engine.hold(me(), ns(), "held").await.unwrap());
    let again = bed.engine.hold(me(), ns(), "held").await.unwrap();
    // What was dropped later is gone: so the first end of grace has been looked at.
    drop(bed.engine.hold(me(), ns(), "witness").await.unwrap());
    grace_passes(&bed, "the witness goes", || is_gone(&bed, "witness")).await;
    assert!(bed.get("held").await.is_ok());
    drop(again);
    grace_passes(&bed, "the sandbox goes", || is_gone(&bed, "held")).await;
}

#[tokio::test]
async fn the_end_of_the_engine_is_not_the_end_of_a_lease() {
    let bed = Bed::new().await;
    bed.create("held").await;
    let lease = bed.engine.hold(me(), ns(), "held").await.unwrap();
    bed.engine.shutdown(false).await.unwrap();
    drop(lease);
    bed.clock.advance(10 * GRACE_MS);
    let bed = bed.restart().await;
    assert_eq!(bed.get("held").await.unwrap().session.status, SessionStatus::Running);
}

#[tokio::test]
async fn what_is_not_there_cannot_be_held() {
    let bed = Bed::new().await;
    let error = bed.engine.hold(me(), ns(), "missing").await.unwrap_err();
    assert_eq!(error.kind, crate::ErrorKind::NotFound);
}
