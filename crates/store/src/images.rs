//! Which images are in use: what `image rm` must not remove.
//!
//! Invariant: an image counts as used while any upper on it exists or can be started again. Called by the
//! engine's reconciler of images.

use crate::db::Db;
use crate::error::StoreError;

impl Db {
    /// Whether a sandbox, a session or a snapshot lies on the image of this reference.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn image_is_used(&self, reference: &str) -> Result<bool, StoreError> {
        // A text inside of another text of the JSON has its quotes escaped, so this is the field. A
        // reference holds no wildcard of LIKE.
        let field = format!("%\"image\":\"{reference}\"%");
        let questions = [
            // An ephemeral one that has ended is only a record: nothing can be started from it.
            (
                "SELECT id FROM sandboxes WHERE config LIKE $1 AND (ephemeral = 0 OR status NOT IN \
                 ('stopped', 'failed', 'aborted')) LIMIT 1",
                field.as_str(),
            ),
            (
                "SELECT id FROM sessions WHERE settled = 0 AND config LIKE $1 LIMIT 1",
                field.as_str(),
            ),
            (
                "SELECT id FROM snapshots WHERE image = $1 AND status <> 'deleted' LIMIT 1",
                reference,
            ),
        ];
        for (sql, value) in questions {
            let row = sqlx::query(sql)
                .bind(value.to_owned())
                .fetch_optional(self.reader())
                .await
                .map_err(|e| StoreError::sql("look for users of an image", e))?;
            if row.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
