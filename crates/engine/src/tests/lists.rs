//! Lists of sandboxes: order, pages, filters.

use std::collections::BTreeMap;

use super::{Bed, me, named, ns};
use crate::{CreateSandbox, ErrorKind, ListChildren, ListSandboxes, SortBy};

async fn all(bed: &Bed, query: ListSandboxes) -> Vec<String> {
    let (mut names, mut query) = (Vec::new(), query);
    loop {
        let page = bed.engine.list(me(), ns(), query.clone()).await.unwrap();
        assert!(page.items.len() <= query.limit.unwrap_or(20) as usize);
        names.extend(page.items.into_iter().map(|s| s.name));
        match page.next {
            Some(next) => query.cursor = Some(next),
            None => return names,
        }
    }
}

#[tokio::test]
async fn pages_are_complete_in_every_order_also_within_a_millisecond() {
    let bed = Bed::new().await;
    // The clock stands still: all are of the same time, and the order is that of the creation.
    for name in ["b", "d", "a", "e", "c"] {
        bed.create(name).await;
    }
    let query = |sort_by, ascending| ListSandboxes {
        limit: Some(2),
        sort_by,
        ascending,
        ..ListSandboxes::default()
    };
    assert_eq!(all(&bed, query(SortBy::CreatedAt, false)).await, ["c", "e", "a", "d", "b"]);
    assert_eq!(all(&bed, query(SortBy::CreatedAt, true)).await, ["b", "d", "a", "e", "c"]);
    assert_eq!(all(&bed, query(SortBy::Name, true)).await, ["a", "b", "c", "d", "e"]);
    let session = bed.get("a").await.unwrap().session.id;
    bed.clock.advance(5);
    bed.engine.stop(me(), "team", &session).await.unwrap();
    assert_eq!(all(&bed, query(SortBy::StatusUpdatedAt, false)).await[0], "a");
    assert_eq!(all(&bed, query(SortBy::CurrentSnapshotId, false)).await[0], "a");
    assert_eq!(all(&bed, query(SortBy::CurrentSnapshotId, true)).await.len(), 5);
}

#[tokio::test]
async fn filters_and_namespaces() {
    let bed = Bed::new().await;
    let tagged = |name: &str, value: &str| CreateSandbox {
        tags: BTreeMap::from([("env".to_owned(), value.to_owned())]),
        ..named(name)
    };
    bed.engine.create(me(), ns(), tagged("ab_1", "x")).await.unwrap();
    bed.engine.create(me(), ns(), tagged("ab-2", "y")).await.unwrap();
    bed.create("abx").await;
    let other = bivouac_types::name::Namespace { project: "other".to_owned(), ..ns().clone() };
    bed.engine.create(me(), &other, tagged("ab_1", "x")).await.unwrap();

    let prefix = |p: &str| ListSandboxes {
        sort_by: SortBy::Name,
        ascending: true,
        name_prefix: Some(p.to_owned()),
        ..ListSandboxes::default()
    };
    assert_eq!(all(&bed, prefix("ab")).await.len(), 3);
    // '_' is a letter here, not a pattern.
    assert_eq!(all(&bed, prefix("ab_")).await, ["ab_1"]);
    let tag = |v: &str| ListSandboxes {
        tag: Some(("env".to_owned(), v.to_owned())),
        ..ListSandboxes::default()
    };
    assert_eq!(all(&bed, tag("x")).await, ["ab_1"]);
    assert!(all(&bed, tag("z")).await.is_empty());
    let everywhere = ListSandboxes { all_namespaces: true, ..ListSandboxes::default() };
    assert_eq!(all(&bed, everywhere).await.len(), 4);
}

#[tokio::test]
async fn bad_lists_are_refused() {
    let bed = Bed::new().await;
    for name in ["a", "b", "c"] {
        bed.create(name).await;
    }
    let by_time = ListSandboxes { limit: Some(1), ..ListSandboxes::default() };
    let cursor = bed.engine.list(me(), ns(), by_time).await.unwrap().next;
    let bad = [
        ListSandboxes { limit: Some(0), ..ListSandboxes::default() },
        ListSandboxes { limit: Some(51), ..ListSandboxes::default() },
        ListSandboxes { cursor: Some("zzz".to_owned()), ..ListSandboxes::default() },
        ListSandboxes { cursor: cursor.clone(), sort_by: SortBy::Name, ..ListSandboxes::default() },
        ListSandboxes { cursor: cursor.clone(), ascending: true, ..ListSandboxes::default() },
        ListSandboxes { name_prefix: Some("a".to_owned()), ..ListSandboxes::default() },
    ];
    for query in bad {
        let shown = format!("{query:?}");
        let error = bed.engine.list(me(), ns(), query).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{shown}");
    }
    let children = ListChildren { cursor, ..ListChildren::default() };
    assert_eq!(
        bed.engine.sessions(me(), ns(), children).await.unwrap_err().kind,
        ErrorKind::Invalid
    );
    let since = ListChildren { since: Some(super::START + 1), ..ListChildren::default() };
    assert!(bed.engine.sessions(me(), ns(), since).await.unwrap().items.is_empty());
    let until = ListChildren { until: Some(super::START + 1), ..ListChildren::default() };
    assert_eq!(bed.engine.sessions(me(), ns(), until).await.unwrap().items.len(), 3);
}
