//! Installation tokens of a GitHub App.
//!
//! Invariant: the App's private key signs requests for tokens here and goes nowhere else; a token is used
//! for at most four fifths of its life.

use std::collections::BTreeMap;

use bivouac_types::Millis;
use bivouac_types::secret::Secret;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::outcalls::{Call, Outcalls};
use super::{Fetched, rfc3339};
use crate::jwt;

/// Where tokens are asked for.
const API: &str = "https://api.github.com";
/// How long an assertion is good, s. At most ten minutes; the clocks may differ by one.
const ASSERTION_S: i64 = 540;
const SKEW_S: i64 = 60;
/// The life of a token whose answer does not tell it.
const LIFE_MS: Millis = 3_600_000;

/// An App in one installation.
#[derive(Serialize, Deserialize)]
pub(crate) struct App {
    app: String,
    installation: u64,
    api: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    repositories: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    permissions: BTreeMap<String, String>,
    /// PEM.
    key: String,
}

impl App {
    /// `APP/INSTALLATION`, perhaps with `?repositories=a,b&permissions=contents:read&api=URL`.
    pub(super) fn new(text: &str, key: &Secret) -> Result<Self, String> {
        let wrong =
            "github-app: needs the App's id and the installation's: github-app:12345/678901";
        let (ids, options) = text.split_once('?').unwrap_or((text, ""));
        let (app, installation) = ids.split_once('/').ok_or(wrong)?;
        let plain = |text: &str| {
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.')
        };
        if !plain(app) {
            return Err(wrong.to_owned());
        }
        let installation = installation.parse().map_err(|_| wrong.to_owned())?;
        jwt::Key::from_pem(key).map_err(|why| format!("the App's private key {why}"))?;
        let mut made = Self {
            app: app.to_owned(),
            installation,
            api: API.to_owned(),
            repositories: Vec::new(),
            permissions: BTreeMap::new(),
            key: key.expose().to_owned(),
        };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("repositories", names)) => {
                    made.repositories = names.split(',').map(str::to_owned).collect();
                }
                Some(("permissions", list)) => {
                    for item in list.split(',') {
                        let (name, level) = item.split_once(':').ok_or(
                            "permissions are written as name:level: permissions=contents:read",
                        )?;
                        made.permissions.insert(name.to_owned(), level.to_owned());
                    }
                }
                Some(("api", url)) => url.trim_end_matches('/').clone_into(&mut made.api),
                _ => {
                    return Err("github-app: knows repositories=, permissions= and api=".to_owned());
                }
            }
        }
        // With a query, what is appended would be part of it and the rest of the address free to choose.
        if made.api.contains(['?', '#']) {
            return Err("api= must have no query and no fragment".to_owned());
        }
        Call::get(&made.api).check().map_err(|why| format!("api= {why}"))?;
        Ok(made)
    }

    /// Whether the engine is to call another place than GitHub's own: from its host, past every firewall.
    pub(super) fn calls_elsewhere(&self) -> bool {
        self.api != API
    }

    /// A fresh token.
    pub(super) async fn token(&self, out: &Outcalls, now: Millis) -> Result<Fetched, String> {
        let key = jwt::Key::from_pem(&Secret::new(self.key.clone()))
            .map_err(|why| format!("the App's private key {why}"))?;
        let seconds = now / 1000;
        let claims = json!({
            "iss": self.app,
            "iat": seconds - SKEW_S,
            "exp": seconds + ASSERTION_S,
        });
        let assertion = key.sign(None, &claims)?;
        let mut wanted = json!({});
        if !self.repositories.is_empty() {
            wanted["repositories"] = json!(self.repositories);
        }
        if !self.permissions.is_empty() {
            wanted["permissions"] = json!(self.permissions);
        }
        let url = format!("{}/app/installations/{}/access_tokens", self.api, self.installation);
        let bearer = Secret::new(format!("Bearer {}", assertion.expose()));
        let call = Call::post(&url, &wanted)
            .with("authorization", bearer)
            .with("accept", Secret::new("application/vnd.github+json".to_owned()));
        let (status, answer) = out.json(call).await?;
        if status != 201 && status != 200 {
            let app = &self.app;
            return Err(match status {
                401 => format!("GitHub does not take the key of App {app}"),
                404 => format!("App {app} has no installation {}", self.installation),
                422 => "GitHub refuses the repositories or permissions that it names".to_owned(),
                _ => format!("GitHub answered {status}"),
            });
        }
        let token = answer.get("token").and_then(Value::as_str).ok_or("GitHub gave no token")?;
        let end = answer.get("expires_at").and_then(Value::as_str).and_then(rfc3339);
        let life = end.map_or(LIFE_MS, |end| end - now).max(0);
        let until = Some(now.saturating_add(life / 5 * 4));
        Ok(Fetched { text: Secret::new(token.to_owned()), until })
    }
}
