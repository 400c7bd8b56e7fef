//! Waiting for something to become true. No test sleeps and hopes: it asks again until a deadline.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// For what should take milliseconds: past this it is a hang, not a slow machine.
pub const SHORT: Duration = Duration::from_secs(30);
/// For what moves a lot of data or starts hundreds of things.
pub const LONG: Duration = Duration::from_secs(240);

/// Asks `probe` until it answers `Ok`, every 20 ms.
///
/// # Panics
/// When the deadline passes; the message holds what was waited for and the last `Err`.
pub async fn eventually<T, E: Debug>(
    what: &str,
    deadline: Duration,
    mut probe: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let start = Instant::now();
    loop {
        match probe().await {
            Ok(value) => return value,
            Err(last) => assert!(
                start.elapsed() < deadline,
                "gave up after {deadline:?} waiting for {what}; last seen: {last:?}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
