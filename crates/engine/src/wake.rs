//! A sandbox that takes work, by name: what every door other than the API's sessions goes through.
//!
//! Invariant: one that stands still is let go on before anything is asked of it; one that does not run is
//! started only when the caller says so. Called by terminals, ports and SSH.

use std::sync::Arc;

use bivouac_store::SessionRow;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;

use crate::error::Error;
use crate::inner::{Inner, Live};

impl Inner {
    /// The session of a sandbox, running; with `wake` it is started if need be.
    ///
    /// # Errors
    /// 404; without `wake` what is said of a session that does not run; what a resume says.
    pub(crate) async fn awake(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        wake: bool,
    ) -> Result<(Arc<Live>, SessionRow), Error> {
        self.check_open()?;
        let row = self.named(ns, name).await?;
        let mut session = row.sandbox.current_session_id.clone();
        if wake && row.sandbox.status != SessionStatus::Running {
            let (inner, ns, name) = (Arc::clone(self), ns.clone(), name.to_owned());
            let view = self.run(async move { inner.resume(&ns, &name).await }).await?;
            session = view.session.id;
        }
        let found = self.working(&ns.team, &session).await?;
        self.activity.touch(&row.sandbox.id);
        Ok(found)
    }
}
