//! Who a session is, for the user's own proxies: signed identity tokens and the documents that verify them.
//!
//! Invariants: the private key is in the vault and in this process's memory only; a token lives for
//! [`LIFE_S`] and is for one audience; the documents never name a key that cannot be used. Called by
//! `egress` (tokens) and HTTP (documents).
//!
//! The issuer is `--issuer`, else the engine's public address. Clients that insist on the issuer host
//! `oidc.vercel.com` expect a team below it, so an issuer without a path on that host gets `/<team>`.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_egress::message::Value as Token;
use bivouac_store::{SessionRow, short_hash};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::Engine;
use crate::error::Error;
use crate::inner::Inner;
use crate::jwt::Key;
use crate::lifecycle::chain;

/// How long a token is good, s.
const LIFE_S: i64 = 60;
/// How much the clock of a verifier may be behind ours, s.
const SKEW_S: i64 = 5;
/// Longest audience.
const MAX_AUDIENCE: usize = 8192;

/// The keys, once they are needed: the first one signs.
#[derive(Debug, Default)]
pub(crate) struct Identity(OnceCell<Arc<Vec<(String, Key)>>>);

impl Inner {
    /// The keys of the vault; the first time of all, one is made.
    async fn issuer_keys(&self) -> Result<Arc<Vec<(String, Key)>>, Error> {
        let broken = |why: String| Error::internal(format!("The key of identity tokens {why}."));
        let keys = self.identity.0.get_or_try_init(|| async {
            let mut keys = Vec::new();
            for (id, sealed) in self.db.issuer_keys().await? {
                keys.push((id, Key::from_sealed(&sealed).map_err(broken)?));
            }
            if keys.is_empty() {
                let made = tokio::task::spawn_blocking(Key::generate).await;
                let key =
                    made.unwrap_or_else(|_| Err("could not be made".to_owned())).map_err(broken)?;
                let id = short_hash(key.public_bytes());
                let sealed = key.to_sealed().map_err(broken)?;
                self.db.put_issuer_key(&id, &sealed, self.now()).await?;
                keys.push((id, key));
            }
            Ok::<_, Error>(Arc::new(keys))
        });
        keys.await.cloned()
    }

    /// What tokens of a team say of their issuer.
    fn issuer(&self, team: &str) -> String {
        let issuer = self.config.issuer.as_deref().unwrap_or(&self.config.public_url);
        let issuer = issuer.trim_end_matches('/');
        match issuer {
            "https://oidc.vercel.com" => format!("{issuer}/{team}"),
            _ => issuer.to_owned(),
        }
    }

    /// A token that says which sandbox a request comes from, for one audience.
    ///
    /// The error is a sentence for whoever made the request.
    pub(crate) async fn identity_token(
        &self,
        row: &SessionRow,
        audience: &str,
    ) -> Result<Token, String> {
        if audience.len() > MAX_AUDIENCE || !audience.starts_with("https://") {
            return Err("an identity token is for an https:// address".to_owned());
        }
        let keys = self.issuer_keys().await.map_err(|error| {
            tracing::error!(cause = %chain(&error), "cannot sign identity tokens");
            "the engine cannot sign identity tokens now; see its log".to_owned()
        })?;
        let (id, key) = keys.first().ok_or("the engine has no key for identity tokens")?;
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).map_err(|_| "the host gave no random numbers")?;
        let (session, ns) = (&row.session, &row.namespace);
        let now = self.now() / 1000;
        let claims = json!({
            "iss": self.issuer(&ns.team),
            "sub": format!("team:{}:project:{}:sandbox:{}", ns.team, ns.project, session.sandbox_name),
            "aud": audience,
            "iat": now,
            "nbf": now - SKEW_S,
            "exp": now + LIFE_S,
            "jti": URL_SAFE_NO_PAD.encode(nonce),
            "team_id": ns.team,
            "project_id": ns.project,
            // What clients call the id of a sandbox is that of its session.
            "sandbox_id": session.id,
            "sandbox_name": session.sandbox_name,
        });
        let text = key.sign(Some(id), &claims)?;
        let version = self.db.fingerprint(&text).map_err(|error| error.to_string())?;
        let expires_at = u64::try_from((now + LIFE_S) * 1000).ok();
        Ok(Token { text, version, expires_at })
    }
}

impl Engine {
    /// Makes the key of identity tokens if there is none, so that the first token does not wait for it.
    pub fn warm_identity(&self) {
        let inner = Arc::clone(&self.inner);
        self.inner.spawn(async move {
            if let Err(error) = inner.issuer_keys().await {
                tracing::error!(cause = %chain(&error), "cannot sign identity tokens yet");
            }
        });
    }

    /// The keys that verify identity tokens: a JSON Web Key Set.
    ///
    /// # Errors
    /// The vault cannot be read.
    pub async fn jwks(&self) -> Result<Value, Error> {
        let keys = self.inner.issuer_keys().await?;
        let keys: Vec<Value> = keys.iter().map(|(id, key)| key.public(id)).collect();
        Ok(json!({ "keys": keys }))
    }

    /// The discovery document of the issuer, or of the issuer of one team.
    #[must_use]
    pub fn openid_configuration(&self, team: Option<&str>) -> Value {
        let issuer = match team {
            Some(team) => self.inner.issuer(team),
            None => self
                .inner
                .config
                .issuer
                .as_deref()
                .unwrap_or(&self.inner.config.public_url)
                .trim_end_matches('/')
                .to_owned(),
        };
        json!({
            "issuer": issuer,
            "jwks_uri": format!("{issuer}/.well-known/jwks"),
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "claims_supported": [
                "iss", "sub", "aud", "iat", "nbf", "exp", "jti", "team_id", "project_id", "sandbox_id",
                "sandbox_name"
            ],
        })
    }
}
