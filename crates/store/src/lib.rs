//! The database: SQL text, migrations and rows.
#![forbid(unsafe_code)]

/// The engine's database.
#[derive(Debug, Clone)]
pub struct Db {}

/// The database did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Cannot be opened.
    #[error("{0}")]
    Open(String),
}

impl Db {
    /// Opens or makes the database that `url` names, and brings its schema up to date.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let _ = url;
        Ok(Self {})
    }
}
