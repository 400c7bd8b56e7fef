//! Which request an operation was asked for by: one id from the door to the shim.
//!
//! Owns the id's way through tasks. Invariant: an operation that goes on in a task of its own keeps
//! the id and the log's span of whoever asked for it. Set by the doors, read where something is
//! handed to the runtime.

use std::sync::Arc;

use tracing::Instrument as _;

tokio::task_local! {
    static REQUEST: Arc<str>;
}

/// Does `work` in the name of the request `id`, which goes into the log and to the shim.
pub async fn for_request<T>(id: &str, work: impl Future<Output = T>) -> T {
    REQUEST.scope(Arc::from(id), work).await
}

/// The request that is being worked for.
pub(crate) fn current() -> Option<String> {
    REQUEST.try_with(|id| id.to_string()).ok()
}

/// Lets `work` be done in another task and still belong to the present request.
pub(crate) fn carried<T>(
    work: impl Future<Output = T> + Send + 'static,
) -> impl Future<Output = T> + Send + 'static {
    let id = REQUEST.try_with(Arc::clone).ok();
    async move {
        match id {
            Some(id) => REQUEST.scope(id, work).await,
            None => work.await,
        }
    }
    .in_current_span()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_id_goes_with_the_work_into_another_task() {
        assert_eq!(current(), None);
        let id = for_request("req_1", async { tokio::spawn(carried(async { current() })).await });
        assert_eq!(id.await.unwrap().as_deref(), Some("req_1"));
        let plain = for_request("req_1", async { tokio::spawn(async { current() }).await });
        assert_eq!(plain.await.unwrap(), None, "positive control");
    }
}
