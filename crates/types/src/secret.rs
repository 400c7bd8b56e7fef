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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new("hunter2".to_owned());
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "<redacted> Some(<redacted>)");
        assert_eq!(secret.expose(), "hunter2");
    }
}
