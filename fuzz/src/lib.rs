//! Fuzz targets for what strangers send to the egress broker and in archives, and what runs them.
//!
//! Owns: a function `fn(&[u8])` per parser ([`targets::TARGETS`]) that panics when a promise is broken, a
//! corpus to start from, and a runner that mutates it. Invariant: a run is a pure function of target,
//! seed and number, so what it finds can be found again. `cargo test` makes a short run of each target;
//! `cargo run -p bivouac-fuzz -- --seconds 600` a long one. The functions are what cargo-fuzz expects, should
//! a toolchain with coverage be there one day (docs/decisions/0005-fuzzing.md).
#![forbid(unsafe_code)]

pub mod mutate;
pub mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::mutate::Mutator;
use crate::targets::Target;

/// An input that breaks a promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its number in the run.
    pub number: u64,
    /// The input.
    pub input: Vec<u8>,
    /// What the target said.
    pub message: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, input, message } = self;
        write!(f, "input {number} (\"{}\"): {message}", input.escape_ascii())
    }
}

/// Gives the corpus and then mutations of it to a target, as long as `more` says so; answers the number
/// of inputs.
///
/// # Errors
/// The first input that makes the target panic.
pub fn run(target: &Target, seed: u64, mut more: impl FnMut(u64) -> bool) -> Result<u64, Finding> {
    let corpus = target.corpus();
    let mut mutator = Mutator::new(seed, &corpus, target.words);
    let mut number = 0;
    while more(number) {
        let place = usize::try_from(number).unwrap_or(usize::MAX);
        let input = match corpus.get(place) {
            Some(input) => input.clone(),
            None => mutator.input(),
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let message = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
            return Err(Finding { number, input, message: message.to_owned() });
        }
        number += 1;
    }
    Ok(number)
}
