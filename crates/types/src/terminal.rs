//! Terminals: their size and their names.
//!
//! Invariant: a size that got past [`TtySize::new`] is one that the kernel and every program take.

use serde::{Deserialize, Serialize};

use crate::name::Invalid;

/// Columns and rows of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtySize {
    /// Characters in a line.
    pub cols: u16,
    /// Lines.
    pub rows: u16,
}

impl Default for TtySize {
    fn default() -> Self {
        Self { cols: 80, rows: 24 }
    }
}

impl TtySize {
    /// Most columns or rows.
    pub const MAX: u16 = 4096;

    /// Checks what a client asked for.
    ///
    /// # Errors
    /// [`Invalid`] for none, or for more than [`Self::MAX`].
    pub fn new(cols: i64, rows: i64) -> Result<Self, Invalid> {
        let check = |field: &'static str, value: i64| match u16::try_from(value) {
            Ok(value @ 1..=Self::MAX) => Ok(value),
            _ => Err(Invalid::new(field, format!("must be 1 to {}, got {value}", Self::MAX))),
        };
        Ok(Self { cols: check("cols", cols)?, rows: check("rows", rows)? })
    }
}

/// Checks the name of a terminal session: 1 to 63 of `a-z A-Z 0-9 . _ -`, beginning with a letter or digit.
///
/// # Errors
/// [`Invalid`].
pub fn check_terminal_name(name: &str) -> Result<(), Invalid> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let good = (1..=63).contains(&name.len())
        && name.bytes().all(plain)
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if good {
        return Ok(());
    }
    let reason = "must have 1 to 63 of a-z A-Z 0-9 . _ - and begin with a letter or a digit";
    Err(Invalid::new("terminal", reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        assert_eq!(TtySize::new(120, 40), Ok(TtySize { cols: 120, rows: 40 }));
        for (cols, rows) in [(0, 24), (80, 0), (-1, 24), (4097, 24), (80, 70_000)] {
            assert!(TtySize::new(cols, rows).is_err(), "{cols} {rows}");
        }
    }

    #[test]
    fn names_are_plain() {
        for good in ["main", "a", "0.x_y-z", &"x".repeat(63)] {
            assert!(check_terminal_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".a", "a b", "a/b", "ä", &"x".repeat(64)] {
            assert!(check_terminal_name(bad).is_err(), "{bad}");
        }
    }
}
