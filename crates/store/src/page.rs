//! Pages: where one ends and the next begins, and the conditions of a list.

use sqlx::Arguments;
use sqlx::any::AnyArguments;

use crate::error::StoreError;

/// The value that a list is sorted by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SortKey {
    /// A time.
    Int(i64),
    /// A name or id.
    Text(String),
}

/// The last row of a page. Rows are ordered by (key, id), so ties have an order too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// Its sort value.
    pub key: SortKey,
    /// Its id.
    pub id: String,
}

/// Conditions with their values, numbered as they are added.
pub(crate) struct Where {
    sql: String,
    pub(crate) arguments: AnyArguments,
}

impl Where {
    pub(crate) fn new() -> Self {
        Self { sql: String::new(), arguments: AnyArguments::default() }
    }

    /// Adds a value and answers its number, for conditions that use several.
    pub(crate) fn push<'q, T>(&mut self, value: T) -> Result<String, StoreError>
    where
        T: sqlx::Encode<'q, sqlx::Any> + sqlx::Type<sqlx::Any>,
    {
        self.arguments.add(value).map_err(|e| StoreError::Sql {
            what: "bind a value",
            source: sqlx::Error::Encode(e),
        })?;
        Ok(format!("${}", self.arguments.len()))
    }

    /// Adds `condition`, in which each `?` stands for the value.
    pub(crate) fn and<'q, T>(&mut self, condition: &str, value: T) -> Result<(), StoreError>
    where
        T: sqlx::Encode<'q, sqlx::Any> + sqlx::Type<sqlx::Any>,
    {
        let number = self.push(value)?;
        self.and_plain(&condition.replace('?', &number));
        Ok(())
    }

    /// Adds a condition without a value.
    pub(crate) fn and_plain(&mut self, condition: &str) {
        self.sql.push_str(if self.sql.is_empty() { " WHERE " } else { " AND " });
        self.sql.push_str(condition);
    }

    /// Starts behind `after`; `column` is the sort column.
    pub(crate) fn after(
        &mut self,
        column: &str,
        after: Option<&Position>,
        ascending: bool,
    ) -> Result<(), StoreError> {
        let Some(position) = after else { return Ok(()) };
        let key = match &position.key {
            SortKey::Int(value) => self.push(*value)?,
            SortKey::Text(value) => self.push(value.clone())?,
        };
        let id = self.push(position.id.clone())?;
        let sign = if ascending { '>' } else { '<' };
        self.and_plain(&format!("({column}, id) {sign} ({key}, {id})"));
        Ok(())
    }

    /// The conditions, the order and the limit.
    pub(crate) fn finish(
        mut self,
        column: &str,
        ascending: bool,
        limit: i64,
    ) -> Result<(String, AnyArguments), StoreError> {
        let limit = self.push(limit)?;
        let way = if ascending { "ASC" } else { "DESC" };
        let tail = format!(" ORDER BY {column} {way}, id {way} LIMIT {limit}");
        Ok((self.sql + &tail, self.arguments))
    }
}
