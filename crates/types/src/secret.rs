//! Text that nobody may see by accident.
//!
//! Invariant: no `Debug`, `Display` or `Serialize` of a [`Secret`] shows its text; whoever wants it says
//! [`Secret::expose`]. The memory is overwritten when it is dropped. Called by everything that carries
//! a credential between the vault and a request.

use std::fmt;

use zeroize::Zeroizing;

/// A secret text.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes a text over.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(Zeroizing::new(text))
    }

    /// The text itself: for the vault and for the one request that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<redacted>")
    }
}

/// Longest name of a secret.
const MAX_NAME: usize = 128;
const OPEN: &str = "${secret:";

/// A piece of a header value as clients write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Taken as it is.
    Text(&'a str),
    /// `${secret:NAME}`: stands for the secret of this name.
    Named(&'a str),
}

/// Cuts a value into text and names of secrets. There is no escape: text that begins like a reference
/// is one.
///
/// # Errors
/// A clause for the user; it repeats nothing of the value.
pub fn parts(value: &str) -> Result<Vec<Part<'_>>, &'static str> {
    let (mut out, mut rest) = (Vec::new(), value);
    while let Some((before, after)) = rest.split_once(OPEN) {
        let Some((name, behind)) = after.split_once('}') else {
            return Err("has '${secret:' without '}'");
        };
        check_name(name)?;
        if !before.is_empty() {
            out.push(Part::Text(before));
        }
        out.push(Part::Named(name));
        rest = behind;
    }
    if !rest.is_empty() {
        out.push(Part::Text(rest));
    }
    Ok(out)
}

/// Checks the name of a secret: as a sandbox's, 1 to 128 letters, digits, `_` and `-`.
///
/// # Errors
/// A clause for the user.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(good) {
        return Err("names a secret by something else than 1 to 128 letters, digits, '_' and '-'");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_are_cut_at_their_references() {
        use Part::{Named, Text};
        for (value, want) in [
            ("", vec![]),
            ("plain ${env} $secret:a {x}", vec![Text("plain ${env} $secret:a {x}")]),
            ("${secret:a}", vec![Named("a")]),
            ("Bearer ${secret:GH_token-1}", vec![Text("Bearer "), Named("GH_token-1")]),
            ("${secret:a}${secret:b}:}", vec![Named("a"), Named("b"), Text(":}")]),
            ("$${secret:a}", vec![Text("$"), Named("a")]),
        ] {
            assert_eq!(parts(value).as_ref(), Ok(&want), "{value}");
        }
        let long = format!("${{secret:{}}}", "a".repeat(129));
        for bad in [
            "${secret:",
            "x ${secret:a",
            "${secret:}",
            "${secret:a b}",
            "${secret:${secret:a}}",
            &long,
        ] {
            assert!(parts(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_part_is_lost(value in "(\\$\\{secret:[a-z]{0,2}\\}?|[ -~]{0,3}){0,6}") {
            if let Ok(parts) = parts(&value) {
                let joined: String = parts.iter().map(|part| match part {
                    Part::Text(text) => (*text).to_owned(),
                    Part::Named(name) => format!("${{secret:{name}}}"),
                }).collect();
                prop_assert_eq!(joined, value);
            }
        }
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new("hunter2".to_owned());
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "<redacted> Some(<redacted>)");
        assert_eq!(secret.expose(), "hunter2");
    }
}
