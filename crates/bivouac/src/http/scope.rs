//! The parts of a request that every handler needs: who asks, for which namespace, which options.
//!
//! Owns: query parameters and path segments. Invariant: team and project are checked before they
//! reach the engine; an unknown parameter is ignored (clients pass private ones on), a known one
//! that is wrong is a 400 that names it.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use bivouac_engine::Principal;
use bivouac_types::id::{CommandId, SessionId, SnapshotId};
use bivouac_types::name::{Namespace, check_scope};

use super::error::ApiError;

/// Longest `Idempotency-Key`.
const MAX_KEY: usize = 255;

/// What a request says besides its path and body.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) who: Principal,
    /// Header `Idempotency-Key`: a repeated create or start with it is answered by the first one.
    pub(crate) idempotency_key: Option<String>,
    query: Vec<(String, String)>,
}

impl<S: Send + Sync> FromRequestParts<S> for Call {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let who = parts.extensions.get::<Principal>().cloned().ok_or_else(|| {
            let message = "This path needs credentials.";
            ApiError::new(axum::http::StatusCode::UNAUTHORIZED, "unauthorized", message)
        })?;
        let Query(query) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)
            .map_err(|_| ApiError::invalid("The query string cannot be read."))?;
        let idempotency_key = match parts.headers.get("idempotency-key") {
            None => None,
            Some(value) => {
                let good = |k: &&str| {
                    (1..=MAX_KEY).contains(&k.len()) && k.bytes().all(|b| b.is_ascii_graphic())
                };
                let Some(key) = value.to_str().ok().filter(good) else {
                    let reason = format!("must have 1 to {MAX_KEY} ASCII characters, no space");
                    return Err(ApiError::field("Idempotency-Key", reason));
                };
                Some(key.to_owned())
            }
        };
        Ok(Self { who, idempotency_key, query })
    }
}

impl Call {
    /// A parameter, when it is there and not empty.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(key, value)| key == name && !value.is_empty());
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn owned(&self, name: &str) -> Option<String> {
        self.text(name).map(ToOwned::to_owned)
    }

    /// `true` or `false`; absent is false.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.text(name) {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(_) => Err(ApiError::field(name, "must be 'true' or 'false'")),
        }
    }

    /// A whole number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(ApiError::field(name, "must be a whole number")),
        }
    }

    /// `limit`, from 1 to `most`.
    pub(crate) fn limit(&self, most: u32) -> Result<Option<u32>, ApiError> {
        let Some(number) = self.number("limit")? else { return Ok(None) };
        match u32::try_from(number) {
            Ok(limit) if (1..=most).contains(&limit) => Ok(Some(limit)),
            _ => Err(ApiError::field("limit", format!("must be 1 to {most}, got {number}"))),
        }
    }

    /// `sortOrder`: whether it is ascending.
    pub(crate) fn ascending(&self) -> Result<bool, ApiError> {
        match self.text("sortOrder") {
            None | Some("desc") => Ok(false),
            Some("asc") => Ok(true),
            Some(_) => Err(ApiError::field("sortOrder", "must be 'asc' or 'desc'")),
        }
    }

    fn team_given(&self) -> Option<&str> {
        self.text("teamId").or_else(|| self.text("slug"))
    }

    /// The team: `teamId` or `slug`; absent is the first that the caller has rights in.
    pub(crate) fn team(&self) -> Result<String, ApiError> {
        match self.team_given() {
            Some(team) => {
                check_scope("teamId", team)?;
                Ok(team.to_owned())
            }
            None => Ok(self.who.grant.home(None).team),
        }
    }

    /// Team and project. Clients write `project` on lists and `projectId` elsewhere; a create has
    /// it in its body.
    pub(crate) fn namespace(&self, in_body: Option<&str>) -> Result<Namespace, ApiError> {
        let in_query = self.text("projectId").or_else(|| self.text("project"));
        let project = match in_query.or(in_body) {
            Some(project) => {
                check_scope("projectId", project)?;
                project.to_owned()
            }
            None => self.who.grant.home(self.team_given()).project,
        };
        Ok(Namespace { team: self.team()?, project })
    }
}

/// Path segments, decoded after routing: a name that holds `%2F` stays one segment.
#[derive(Debug)]
pub(crate) struct Seg<T>(pub(crate) T);

impl<T, S> FromRequestParts<S> for Seg<T>
where
    T: serde::de::DeserializeOwned + Send,
    S: Send + Sync,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(_) => Err(ApiError::invalid("The path holds a segment that is not UTF-8 text.")),
        }
    }
}

/// Reads a session's id. What cannot be one names nothing: 404, as for an unknown one.
pub(crate) fn session_id(text: &str) -> Result<SessionId, ApiError> {
    SessionId::parse(text).map_err(|_| unknown("Sandbox session", text))
}

/// Reads a command's id; see [`session_id`].
pub(crate) fn command_id(text: &str) -> Result<CommandId, ApiError> {
    CommandId::parse(text).map_err(|_| unknown("Command", text))
}

/// Reads a snapshot's id; see [`session_id`].
pub(crate) fn snapshot_id(text: &str) -> Result<SnapshotId, ApiError> {
    SnapshotId::parse(text).map_err(|_| unknown("Snapshot", text))
}

fn unknown(kind: &str, text: &str) -> ApiError {
    let shown: String = text.chars().take(80).collect();
    ApiError::not_found(format!("{kind} '{}' was not found.", shown.escape_debug()))
}
