//! Routes: which name leads to which port of which sandbox.
//!
//! Invariant: a name leads to one port; a route that stays when its sandbox's ports are written keeps whether
//! it is open, and its epoch. Port 0 stands for every port that has no route of its own: that row's name is the
//! label of the sandbox.

use bivouac_types::id::SandboxId;
use sqlx::any::AnyRow;

use crate::db::{Db, Tx};
use crate::error::StoreError;
use crate::row::Reader;

/// A route as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteRow {
    /// Whose.
    pub sandbox_id: SandboxId,
    /// Where to; 0 is every port without a route of its own.
    pub port: u16,
    /// DNS label, unique.
    pub subdomain: String,
    /// Open to everybody.
    pub public: bool,
    /// Grows when links and cookies are revoked.
    pub epoch: i64,
}

const COLUMNS: &str = "subdomain, sandbox_id, port, public, epoch";

fn read(row: &AnyRow) -> Result<RouteRow, StoreError> {
    let r = Reader { row, table: "routes" };
    let port = u16::try_from(r.int("port")?)
        .map_err(|e| StoreError::Corrupt { table: "routes", why: format!("port: {e}") })?;
    Ok(RouteRow {
        sandbox_id: r.parsed("sandbox_id", SandboxId::parse)?,
        port,
        subdomain: r.text("subdomain")?,
        public: r.flag("public")?,
        epoch: r.int("epoch")?,
    })
}

impl Db {
    /// Ports and subdomains of a sandbox, by port.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn routes(&self, id: &SandboxId) -> Result<Vec<(u16, String)>, StoreError> {
        let rows = self.route_rows(id).await?;
        Ok(rows.into_iter().filter(|r| r.port > 0).map(|r| (r.port, r.subdomain)).collect())
    }

    /// All routes of a sandbox, its label (port 0) first if it has one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn route_rows(&self, id: &SandboxId) -> Result<Vec<RouteRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM routes WHERE sandbox_id = $1 ORDER BY port");
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str().to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("read routes", e))?;
        rows.iter().map(read).collect()
    }

    /// The route of a name.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn route(&self, subdomain: &str) -> Result<Option<RouteRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM routes WHERE subdomain = $1");
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(subdomain.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a route", e))?;
        row.as_ref().map(read).transpose()
    }
}

impl Tx<'_> {
    /// Makes these the routes of a sandbox. Those that stay are left as they are, and so is its label.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for a subdomain in use.
    pub async fn write_routes(
        &mut self,
        id: &SandboxId,
        routes: &[(u16, String)],
    ) -> Result<(), StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM routes WHERE sandbox_id = $1 AND port > 0");
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(id.as_str().to_owned())
            .fetch_all(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("read routes", e))?;
        let old = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let stays =
            |row: &&RouteRow| routes.iter().any(|(p, s)| *p == row.port && *s == row.subdomain);
        for row in old.iter().filter(|row| !stays(row)) {
            sqlx::query("DELETE FROM routes WHERE sandbox_id = $1 AND port = $2")
                .bind(id.as_str().to_owned())
                .bind(i64::from(row.port))
                .execute(&mut *self.inner)
                .await
                .map_err(|e| StoreError::sql("write routes", e))?;
        }
        let there =
            |port: u16, name: &str| old.iter().any(|r| r.port == port && r.subdomain == name);
        for (port, subdomain) in routes.iter().filter(|(port, name)| !there(*port, name)) {
            sqlx::query("INSERT INTO routes (subdomain, sandbox_id, port) VALUES ($1, $2, $3)")
                .bind(subdomain.clone())
                .bind(id.as_str().to_owned())
                .bind(i64::from(*port))
                .execute(&mut *self.inner)
                .await
                .map_err(|e| StoreError::sql("write routes", e))?;
        }
        Ok(())
    }

    /// Gives a sandbox its label, unless it has one.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for a label in use.
    pub async fn add_label(&mut self, id: &SandboxId, label: &str) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO routes (subdomain, sandbox_id, port) VALUES ($1, $2, 0) \
             ON CONFLICT (sandbox_id, port) DO NOTHING",
        )
        .bind(label.to_owned())
        .bind(id.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a label", e))?;
        Ok(())
    }

    /// Opens a route to everybody, or closes it again. `false`: there is none for that port.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn publish_route(
        &mut self,
        id: &SandboxId,
        port: u16,
        public: bool,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE routes SET public = $3 WHERE sandbox_id = $1 AND port = $2 AND port > 0",
        )
        .bind(id.as_str().to_owned())
        .bind(i64::from(port))
        .bind(i64::from(public))
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("change a route", e))?;
        Ok(done.rows_affected() > 0)
    }

    /// Makes every link and cookie of a route worthless; of all routes of the sandbox when no port is told.
    /// Answers of how many routes.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn revoke_routes(
        &mut self,
        id: &SandboxId,
        port: Option<u16>,
    ) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "UPDATE routes SET epoch = epoch + 1 WHERE sandbox_id = $1 AND (port = $2 OR $2 < 0)",
        )
        .bind(id.as_str().to_owned())
        .bind(port.map_or(-1, i64::from))
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("revoke routes", e))?;
        Ok(done.rows_affected())
    }
}
