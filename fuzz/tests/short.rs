//! A short run of each fuzz target, the same each time: a number of inputs, not a time.

use bivouac_fuzz::mutate::Mutator;
use bivouac_fuzz::run;
use bivouac_fuzz::targets::TARGETS;

/// Inputs of each target: a few seconds in all.
const INPUTS: u64 = 20_000;

fn short(name: &str) {
    let target = TARGETS.iter().find(|t| t.name == name).expect(name);
    assert!(target.corpus().len() >= 5, "{name} has no corpus");
    match run(target, 1, |number| number < INPUTS) {
        Ok(inputs) => assert_eq!(inputs, INPUTS),
        Err(finding) => panic!("{name}: {finding}"),
    }
}

#[test]
fn hosts() {
    short("host");
}

#[test]
fn authorities() {
    short("authority");
}

#[test]
fn paths() {
    short("path");
}

#[test]
fn policies() {
    short("policy");
}

#[test]
fn values_with_secrets() {
    short("secret");
}

#[test]
fn first_bytes_of_connections() {
    short("hello");
}

#[test]
fn dns_messages() {
    short("dns");
}

#[test]
fn archives() {
    short("archive");
}

/// The runner itself: it finds what is there to be found, and finds it again.
#[test]
fn a_planted_fault_is_found_twice() {
    let mut target = TARGETS[0];
    target.run = |bytes| assert!(!bytes.windows(2).any(|w| w == b"9]"), "planted");
    let found = run(&target, 7, |number| number < 200_000).expect_err("nothing found");
    assert_eq!(found.message, "planted");
    assert!(usize::try_from(found.number).unwrap() >= target.corpus().len(), "{found}");
    assert_eq!(run(&target, 7, |number| number < 200_000), Err(found));
}

/// Mutations reach the accepting side of parsers too, or the promises would be empty.
#[test]
fn many_inputs_are_valid() {
    let target = TARGETS.iter().find(|t| t.name == "policy").unwrap();
    let corpus = target.corpus();
    let mut mutator = Mutator::new(1, &corpus, target.words);
    let valid = (0..5_000)
        .filter(|_| {
            let Ok(value) = serde_json::from_slice(&mutator.input()) else { return false };
            let mut mint = || bivouac_types::id::ValueId::new(0, [0; 10]);
            bivouac_types::policy::NetworkPolicy::parse("p", &value, &mut mint).is_ok()
        })
        .count();
    assert!(valid > 150, "{valid} of 5000");
}
