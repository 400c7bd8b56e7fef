//! Page cursors: opaque to clients, checked when they come back.
//!
//! A cursor is base64url of a JSON list: version, list, direction, sort value, id. One of another
//! list or direction is refused rather than answered with a wrong page.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_store::{Position, SortKey};

use crate::error::Error;

const VERSION: u8 = 1;
/// Longest cursor that is looked at.
const LONGEST: usize = 1024;
const DEFAULT_LIMIT: u32 = 20;
const MAX_LIMIT: u32 = 50;

/// Writes the cursor behind a row.
pub(crate) fn write(list: &str, ascending: bool, position: &Position) -> String {
    let key = match &position.key {
        SortKey::Int(value) => serde_json::Value::from(*value),
        SortKey::Text(value) => serde_json::Value::from(value.as_str()),
    };
    let text = serde_json::json!([VERSION, list, ascending, key, position.id]).to_string();
    URL_SAFE_NO_PAD.encode(text)
}

/// Reads a cursor that came from a client.
pub(crate) fn read(list: &str, ascending: bool, text: &str) -> Result<Position, Error> {
    let bad = || {
        Error::invalid(
            "Invalid cursor: use the `next` of a page of this list, with the same sorting",
        )
    };
    if text.len() > LONGEST {
        return Err(bad());
    }
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| bad())?;
    let (version, of, way, key, id): (u8, String, bool, serde_json::Value, String) =
        serde_json::from_slice(&bytes).map_err(|_| bad())?;
    if version != VERSION || of != list || way != ascending {
        return Err(bad());
    }
    let key = match key {
        serde_json::Value::Number(n) => SortKey::Int(n.as_i64().ok_or_else(bad)?),
        serde_json::Value::String(s) => SortKey::Text(s),
        _ => return Err(bad()),
    };
    Ok(Position { key, id })
}

/// Reads an optional cursor.
pub(crate) fn read_opt(
    list: &str,
    ascending: bool,
    text: Option<&str>,
) -> Result<Option<Position>, Error> {
    text.map(|t| read(list, ascending, t)).transpose()
}

/// Checks a page's size.
pub(crate) fn limit(asked: Option<u32>) -> Result<usize, Error> {
    match asked.unwrap_or(DEFAULT_LIMIT) {
        good @ 1..=MAX_LIMIT => Ok(good as usize),
        bad => Err(Error::invalid(format!("Invalid limit: must be 1 to {MAX_LIMIT}, got {bad}"))),
    }
}

/// Cuts a list that was read one row too long, and writes the cursor if there is more.
pub(crate) fn page<T>(
    mut rows: Vec<T>,
    limit: usize,
    list: &str,
    ascending: bool,
    position: impl Fn(&T) -> Position,
) -> (Vec<T>, Option<String>) {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|row| write(list, ascending, &position(row)));
    (rows, next)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cursors_read_back(number in any::<i64>(), text in ".{0,40}", id in "[a-z0-9_]{1,30}",
                             ascending in any::<bool>(), is_text in any::<bool>()) {
            let key = if is_text { SortKey::Text(text) } else { SortKey::Int(number) };
            let position = Position { key, id };
            let cursor = write("x", ascending, &position);
            prop_assert!(cursor.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
            prop_assert_eq!(read("x", ascending, &cursor).unwrap(), position);
            prop_assert!(read("y", ascending, &cursor).is_err());
            prop_assert!(read("x", !ascending, &cursor).is_err());
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            if let Err(e) = read("x", true, &text) {
                prop_assert_eq!(e.code, "bad_request");
            }
        }
    }

    #[test]
    fn limits() {
        assert_eq!(limit(None).unwrap(), 20);
        assert_eq!(limit(Some(50)).unwrap(), 50);
        assert!(limit(Some(0)).is_err());
        assert!(limit(Some(51)).is_err());
    }
}
