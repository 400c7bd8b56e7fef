//! Paths inside of a sandbox, as text: the guest's file system is never looked at here.

use crate::error::Error;

/// The kernel's own limit, with the NUL.
const LONGEST: usize = 4095;

/// `path` as an absolute path without `.`, `..` and double slashes; a relative one is below `base`.
/// `..` at the top stays at the top.
pub(crate) fn absolute(base: &str, path: &str) -> Result<String, Error> {
    if path.contains('\0') {
        return Err(Error::invalid("A path must not hold a NUL character."));
    }
    let mut parts: Vec<&str> = Vec::new();
    let whole = if path.starts_with('/') { [path, ""] } else { [base, path] };
    for part in whole.iter().flat_map(|text| text.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    let out = format!("/{}", parts.join("/"));
    if out.len() > LONGEST {
        return Err(Error::invalid(format!("A path may have {LONGEST} bytes, got {}.", out.len())));
    }
    Ok(out)
}

/// A path to a file: not empty, and not the root.
pub(crate) fn file(base: &str, path: &str) -> Result<String, Error> {
    if path.is_empty() {
        return Err(Error::invalid("Invalid path: it must not be empty"));
    }
    absolute(base, path)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn examples() {
        let at = |path| absolute("/vercel/sandbox", path).unwrap();
        assert_eq!(at("a/b"), "/vercel/sandbox/a/b");
        assert_eq!(at(""), "/vercel/sandbox");
        assert_eq!(at("../x"), "/vercel/x");
        assert_eq!(at("../../../../x"), "/x");
        assert_eq!(at("/etc//./passwd/"), "/etc/passwd");
        assert_eq!(at("/"), "/");
        assert!(absolute("/", "a\0b").is_err());
        assert!(absolute("/", &"a".repeat(5000)).is_err());
        assert!(file("/", "").is_err());
    }

    proptest! {
        #[test]
        fn the_result_is_absolute_plain_and_stable(
            base in "(/[a-z.]{0,4}){1,4}",
            path in "[a-z./]{0,30}",
        ) {
            let out = absolute(&base, &path).unwrap();
            prop_assert!(out.starts_with('/'));
            prop_assert!(out == "/" || !out.ends_with('/'));
            prop_assert!(out.split('/').skip(1).all(|p| p != "." && p != ".."));
            prop_assert!(out == "/" || out.split('/').skip(1).all(|p| !p.is_empty()));
            prop_assert_eq!(absolute("/elsewhere", &out).unwrap(), out);
        }
    }
}
