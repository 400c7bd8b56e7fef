//! `/v1`: sandboxes of one run each, found by the run's id. The same engine, older words:
//! reference/vercel-api.md §2.12.
//!
//! What `/v1` calls a sandbox is a session here, and its id is the session's id.

mod commands;
mod sandboxes;
mod snapshots;

use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;

use super::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(sandboxes::routes())
        .merge(commands::routes())
        .merge(snapshots::routes())
}

/// Most items of a page: one less than the engine's most, because one more is asked for.
const MAX_LIMIT: i64 = 49;
/// Items of a page that was asked for without a number.
const DEFAULT_LIMIT: i64 = 20;

/// Where a list goes on: points in time instead of a cursor. Both are always there.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
struct TimePagination {
    count: usize,
    /// Handed back as `until`; null on the last page.
    next: Option<i64>,
    /// Always null: pages are only walked forward.
    prev: Option<i64>,
}

/// Reads the query of a list: how many items are wanted, and the question for one more than that.
fn page_query(
    call: &super::scope::Call,
) -> Result<(usize, bivouac_engine::ListChildren), super::error::ApiError> {
    // Older clients ask for more than a page holds; they go on with `next` in any case.
    let limit = call.number("limit")?.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT);
    let query = bivouac_engine::ListChildren {
        sandbox_name: None,
        limit: u32::try_from(limit + 1).ok(),
        cursor: None,
        ascending: false,
        since: call.number("since")?,
        until: call.number("until")?,
        label: None,
    };
    Ok((usize::try_from(limit).unwrap_or(1), query))
}

/// Cuts a page, newest first, where the time changes: `until` is exclusive, so a page that ended
/// between two items of one millisecond would lose the second. A page of one single millisecond
/// cannot be cut.
fn paginate<T>(items: &mut Vec<T>, limit: usize, created: impl Fn(&T) -> i64) -> TimePagination {
    let after = items.get(limit).map(&created);
    items.truncate(limit);
    let mut next = None;
    if let Some(after) = after {
        if items.first().is_some_and(|first| created(first) != after) {
            items.retain(|item| created(item) != after);
        }
        next = items.last().map(&created);
    }
    TimePagination { count: items.len(), next, prev: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_end_where_the_time_changes() {
        for (times, limit, kept, next) in [
            (vec![5, 4, 3], 2, vec![5, 4], Some(4)),
            (vec![5, 4, 4], 2, vec![5], Some(5)),
            (vec![4, 4, 4], 2, vec![4, 4], Some(4)),
            (vec![5, 4], 2, vec![5, 4], None),
            (vec![4, 4], 2, vec![4, 4], None),
            (vec![], 2, vec![], None),
        ] {
            let mut items = times.clone();
            let page = paginate(&mut items, limit, |t| *t);
            let count = kept.len();
            assert_eq!((items, page), (kept, TimePagination { count, next, prev: None }));
        }
    }

    proptest::proptest! {
        /// Walking through pages shows every item once, as long as no page is one millisecond.
        #[test]
        fn nothing_is_lost_or_repeated(mut times in proptest::collection::vec(0i64..40, 0..60)) {
            times.sort_unstable_by(|a, b| b.cmp(a));
            let most = 60;
            for limit in [7usize, 13, most] {
                let crowded = times.chunk_by(|a, b| a == b).any(|run| run.len() >= limit);
                proptest::prop_assume!(!crowded || limit == most);
                let (mut seen, mut until) = (Vec::new(), i64::MAX);
                loop {
                    let rest: Vec<i64> = times.iter().copied().filter(|t| *t < until).collect();
                    let mut page: Vec<i64> = rest.iter().copied().take(limit + 1).collect();
                    let pagination = paginate(&mut page, limit, |t| *t);
                    seen.extend(page);
                    match pagination.next {
                        Some(next) => until = next,
                        None => break,
                    }
                }
                assert_eq!(seen, times);
            }
        }
    }
}
