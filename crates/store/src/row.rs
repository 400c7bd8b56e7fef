//! Reading typed values out of rows.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row;
use sqlx::any::AnyRow;

use crate::error::StoreError;

/// A row and the table that it is of, for messages.
pub(crate) struct Reader<'a> {
    pub(crate) row: &'a AnyRow,
    pub(crate) table: &'static str,
}

impl Reader<'_> {
    fn corrupt(&self, column: &str, why: impl std::fmt::Display) -> StoreError {
        StoreError::Corrupt { table: self.table, why: format!("{column}: {why}") }
    }

    pub(crate) fn text(&self, column: &str) -> Result<String, StoreError> {
        self.row.try_get::<String, _>(column).map_err(|e| self.corrupt(column, e))
    }

    pub(crate) fn text_opt(&self, column: &str) -> Result<Option<String>, StoreError> {
        self.row.try_get::<Option<String>, _>(column).map_err(|e| self.corrupt(column, e))
    }

    pub(crate) fn int(&self, column: &str) -> Result<i64, StoreError> {
        self.row.try_get::<i64, _>(column).map_err(|e| self.corrupt(column, e))
    }

    pub(crate) fn int_opt(&self, column: &str) -> Result<Option<i64>, StoreError> {
        self.row.try_get::<Option<i64>, _>(column).map_err(|e| self.corrupt(column, e))
    }

    pub(crate) fn flag(&self, column: &str) -> Result<bool, StoreError> {
        Ok(self.int(column)? != 0)
    }

    /// Checks a text with `parse`, for ids and words.
    pub(crate) fn parsed<T, E: std::fmt::Display>(
        &self,
        column: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, StoreError> {
        parse(&self.text(column)?).map_err(|e| self.corrupt(column, e))
    }

    pub(crate) fn parsed_opt<T, E: std::fmt::Display>(
        &self,
        column: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, StoreError> {
        let text = self.text_opt(column)?;
        text.map(|t| parse(&t).map_err(|e| self.corrupt(column, e))).transpose()
    }

    /// Reads a JSON text. The error names line and column, never the content.
    pub(crate) fn json<T: DeserializeOwned>(&self, column: &str) -> Result<T, StoreError> {
        serde_json::from_str(&self.text(column)?).map_err(|e| {
            let (line, at) = (e.line(), e.column());
            self.corrupt(column, format!("{:?} error at {line}:{at}", e.classify()))
        })
    }
}

/// Writes a value as JSON text.
pub(crate) fn to_json<T: Serialize>(table: &'static str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value)
        .map_err(|e| StoreError::Corrupt { table, why: format!("cannot be written as JSON: {e}") })
}

/// A word that only this crate writes: a reader for enums with `as_str`-like words.
pub(crate) fn word<T>(found: Option<T>, text: &str) -> Result<T, String> {
    found.ok_or_else(|| format!("unknown word '{text}'"))
}
