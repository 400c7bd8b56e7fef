//! Hints that only the engine can give: where a sandbox is that was not found, and what it may have
//! been meant to be.
//!
//! Invariant: a look-up never changes the error, takes a limited time, and says nothing when it finds
//! nothing; the plain hint of the error stays then. Called by `cli::main` for every failed verb.

use std::time::Duration;

use serde_json::Value;

use super::args::Global;
use super::client::{CallError, Client};
use super::failure::Failure;

/// How long somebody who mistyped a name is kept waiting.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most names that are suggested.
const MOST: usize = 3;

/// Adds what the engine knows about a sandbox or a drive that was not found.
pub(crate) async fn look_up(global: &Global, failure: Failure) -> Failure {
    let Some((kind, name)) = failure.call().and_then(missing) else { return failure };
    let (kind, name) = (kind, name.to_owned());
    let Ok(client) = Client::find(global) else { return failure };
    let asking = async {
        match kind {
            Missing::Sandbox => {
                let query = client.list_scope().with("limit", "50").with("all", "true");
                let all = client.pages("/bivouac/v1/sandboxes", &query, "sandboxes").await?;
                let own = &global.namespace;
                Ok::<_, CallError>(found(&name, (&own.team, &own.project), &all))
            }
            Missing::Drive => {
                let query = client.list_scope().with("limit", "50");
                let all = client.pages("/v2/sandboxes/drives", &query, "drives").await?;
                let names = all.iter().filter_map(|of| of["name"].as_str().map(str::to_owned));
                let names: Vec<String> = names.collect();
                let alike = alike(&name, &names);
                Ok(match alike.is_empty() {
                    true => Vec::new(),
                    false => vec![
                        format!("did you mean: {}?", alike.join(", ")),
                        "all of them: bivouac drive ls".to_owned(),
                    ],
                })
            }
        }
    };
    let Ok(Ok(hints)) = tokio::time::timeout(PATIENCE, asking).await else { return failure };
    if hints.is_empty() { failure } else { failure.instead(hints) }
}

/// What is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Sandbox,
    Drive,
}

/// The kind and the name of what a 404 says is not there.
fn missing(error: &CallError) -> Option<(Missing, &str)> {
    let api = error.api().filter(|api| api.status == reqwest::StatusCode::NOT_FOUND)?;
    let kinds = [("Sandbox '", Missing::Sandbox), ("Drive '", Missing::Drive)];
    kinds.into_iter().find_map(|(start, kind)| {
        let rest = api.message.strip_prefix(start)?;
        Some((kind, rest.split_once("' was not found")?.0))
    })
}

fn found(name: &str, own: (&str, &str), all: &[Value]) -> Vec<String> {
    let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
    let mut hints = Vec::new();
    let elsewhere: Vec<String> = all
        .iter()
        .filter(|of| of["name"] == name)
        .map(|of| format!("{}/{}", text(of, "team"), text(of, "project")))
        .filter(|namespace| *namespace != format!("{}/{}", own.0, own.1))
        .collect();
    match elsewhere.as_slice() {
        [] => {}
        [one] => {
            hints.push(format!("there is one in the namespace {one}: name it with -n {one}"));
        }
        several => {
            let several = several.join(", ");
            hints.push(format!("there are some in other namespaces ({several}): name one with -n"));
        }
    }
    let here = all.iter().filter(|of| of["team"] == own.0 && of["project"] == own.1);
    let names: Vec<String> = here.map(|of| text(of, "name")).collect();
    let alike = alike(name, &names);
    if !alike.is_empty() {
        hints.push(format!("did you mean: {}?", alike.join(", ")));
    }
    if !elsewhere.is_empty() {
        hints.push("all namespaces: bivouac ls -A".to_owned());
    } else if !alike.is_empty() {
        hints.push("all of them: bivouac ls".to_owned());
    }
    hints
}

/// Names that may have been meant, the nearest first.
fn alike<'a>(name: &str, names: &'a [String]) -> Vec<&'a str> {
    let near = (name.chars().count() / 3).max(1);
    let mut found: Vec<(usize, &str)> = names
        .iter()
        .filter_map(|known| {
            let distance = distance(name, known);
            let part =
                name.len() > 2 && (known.starts_with(name) || name.starts_with(known.as_str()));
            // A beginning counts as near as one slip.
            if distance <= near {
                Some((distance, known.as_str()))
            } else {
                part.then_some((1, known))
            }
        })
        .collect();
    found.sort_unstable();
    found.into_iter().take(MOST).map(|(_, known)| known).collect()
}

/// How many slips of the fingers lie between two words: a letter too many, missing, wrong, or two in
/// the wrong order (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1; b.len() + 1];
        for (j, y) in b.iter().enumerate() {
            let changed = last[j] + usize::from(x != y);
            row[j + 1] = changed.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slips_are_counted() {
        for (a, b, slips) in [
            ("", "", 0),
            ("", "ab", 2),
            ("web", "web", 0),
            ("wbe", "web", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), slips, "{a} {b}");
            assert_eq!(distance(b, a), slips, "{b} {a}");
        }
    }

    #[test]
    fn what_was_meant_is_suggested() {
        let names = ["web", "web-2", "worker", "db"].map(str::to_owned);
        assert_eq!(alike("wbe", &names), ["web"]);
        assert_eq!(alike("web-3", &names), ["web", "web-2"]);
        assert_eq!(alike("work", &names), ["worker"]);
        assert!(alike("zzz", &names).is_empty());
    }

    #[test]
    fn another_namespace_is_named() {
        let of = |team: &str, name: &str| json!({ "team": team, "project": "p", "name": name });
        let all = [of("a", "web"), of("b", "box"), of("c", "box")];
        let hints = found("web", ("b", "p"), &all);
        assert!(hints[0].contains("-n a/p"), "{hints:?}");
        assert!(hints.iter().any(|hint| hint.contains("bivouac ls -A")), "{hints:?}");
        let hints = found("box", ("a", "p"), &all);
        assert!(hints[0].contains("b/p, c/p"), "{hints:?}");
        let hints = found("bxo", ("b", "p"), &all);
        assert!(hints[0].contains("did you mean: box"), "{hints:?}");
        assert!(found("zzz", ("a", "p"), &all).is_empty());
    }
}
