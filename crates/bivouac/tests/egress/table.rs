//! `docs/egress-tests.md`: every case of the catalogue has a line, and every test that a line names exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How many cases the catalogue has.
const CASES: u32 = 136;
/// The only one without a test: it says so itself.
const UNTESTABLE: u32 = 136;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The prefixes of the document's first table, and the folders that they stand for.
fn folders(text: &str) -> Vec<(String, PathBuf)> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
    let pair = |row: &str| {
        let (prefix, rest) = row.split_once("` | `")?;
        Some((prefix.to_owned(), root().join(rest.split_once('`')?.0)))
    };
    rows.filter_map(pair).collect()
}

/// The tests that a cell names: `prefix/file.rs::test`.
fn named(cell: &str) -> impl Iterator<Item = (&str, &str)> {
    cell.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::"))
}

#[test]
fn every_case_has_its_line_and_every_named_test_exists() {
    let text = std::fs::read_to_string(root().join("docs/egress-tests.md")).unwrap();
    let folders = folders(&text);
    assert_eq!(folders.len(), 5, "{folders:?}");
    let (mut found, mut wrong) = (BTreeSet::new(), Vec::new());
    for line in text.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let mut tests = 0;
        for (file, test) in named(line) {
            tests += 1;
            let place = folders.iter().find_map(|(prefix, folder)| {
                Some(folder.join(file.strip_prefix(prefix.as_str())?.strip_prefix('/')?))
            });
            let source = place.and_then(|path| std::fs::read_to_string(path).ok());
            let source = source.unwrap_or_default();
            let at = source.find(&format!("fn {test}("));
            // The attribute stands above it, perhaps inside of `proptest!`.
            let before = at.map(|at| source[..at].lines().rev().take(6).collect::<String>());
            let is_test = |before: String| before.contains("test]") || before.contains("test(");
            if !before.is_some_and(is_test) {
                wrong.push(format!("{file}::{test} does not exist"));
            }
        }
        let Ok(number) = cells[0].parse::<u32>() else { continue };
        if !found.insert(number) {
            wrong.push(format!("case {number} has two lines"));
        }
        if (tests == 0) != (number == UNTESTABLE) || cells.len() != 4 || cells[2].len() < 2 {
            wrong.push(format!("case {number}: a case, a result and its tests are needed: {line}"));
        }
    }
    let missing: Vec<u32> = (1..=CASES).filter(|number| !found.contains(number)).collect();
    assert_eq!(missing, Vec::<u32>::new(), "cases without a line");
    assert_eq!(found.len(), usize::try_from(CASES).unwrap(), "more cases than there are");
    assert_eq!(wrong, Vec::<String>::new());
}
