//! The command line's way to the engine: where it is, and calls of its API.
//!
//! Invariant: the token goes only to the address that the user or the engine's own record named,
//! in a header, never into a message. Every verb but `serve`, `doctor`, `help` and `version` uses
//! [`Client`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use bivouac_types::name::Namespace;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::Value;

use super::args::Global;
use super::failure::{Explain as _, Failure, Outcome};
use crate::config::default_data_dir;
use crate::http::VERSION_HEADER;
use crate::serve::record::{EngineRecord, read_token};

/// Version of this command.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A way to one engine.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
    namespace: Namespace,
    /// Where it was found, to find it again after a restart.
    global: Global,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("base", &self.base).finish_non_exhaustive()
    }
}

/// Why a call gave no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The engine answered with an error.
    #[error("{}", .0.message)]
    Api(ApiError),
    /// The engine could not be reached, or the connection broke.
    #[error("could not talk to the engine at {base}")]
    Transport {
        /// The engine's address.
        base: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// The answer is not what this API answers.
    #[error("the answer of {base} is not the API's: {reason}")]
    Foreign {
        /// The engine's address.
        base: String,
        /// Its version, if it is an engine.
        engine: Option<String>,
        /// What is wrong with it.
        reason: String,
    },
}

/// An error that the engine answered.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    /// HTTP status.
    pub(crate) status: StatusCode,
    /// Stable word.
    pub(crate) code: String,
    /// Sentence for the user.
    pub(crate) message: String,
    /// More fields of the error.
    pub(crate) body: Value,
    /// Version of the engine that answered.
    pub(crate) engine: Option<String>,
}

impl CallError {
    /// The engine's error, if it answered one.
    pub(crate) fn api(&self) -> Option<&ApiError> {
        match self {
            Self::Api(error) => Some(error),
            _ => None,
        }
    }

    /// Whether the engine answered `status`.
    pub(crate) fn is(&self, status: StatusCode) -> bool {
        self.api().is_some_and(|error| error.status == status)
    }

    /// Nothing was sent: there is nobody at the address.
    pub(crate) fn is_connect(&self) -> bool {
        matches!(self, Self::Transport { source, .. } if source.is_connect())
    }

    /// No answer came: asking again may help.
    pub(crate) fn is_transport(&self) -> bool {
        matches!(self, Self::Transport { .. })
    }
}

impl CallError {
    /// What the user can do about it.
    pub(crate) fn hints(&self) -> Vec<String> {
        let (own, engine) = match self {
            Self::Api(error) => (error.hint(), error.engine.as_deref()),
            Self::Transport { source, .. } if source.is_connect() => {
                (Some("is it running? Start it with: bivouac serve".to_owned()), None)
            }
            Self::Transport { .. } => {
                (Some("the engine may have ended: bivouac doctor tells".to_owned()), None)
            }
            Self::Foreign { engine: None, .. } => {
                (Some("is the address that of a Bivouac engine?".to_owned()), None)
            }
            Self::Foreign { engine, .. } => (None, engine.as_deref()),
        };
        own.into_iter().chain(engine.and_then(|engine| skew(engine, VERSION))).collect()
    }
}

/// What to say of an engine of another version than this command.
fn skew(engine: &str, own: &str) -> Option<String> {
    (engine != own).then(|| {
        let engine = super::output::printable(engine);
        format!(
            "this command is of version {own} and the engine of {engine}: end it and start it again \
             with this bivouac; its sandboxes go on"
        )
    })
}

impl ApiError {
    fn hint(&self) -> Option<String> {
        let hint = match (self.status, self.code.as_str()) {
            (StatusCode::UNAUTHORIZED, _) if env_token().is_some() => {
                "BIVOUAC_TOKEN is not a token of this engine, or has ended: correct it, or unset it to use \
                 the one in the engine's data folder"
            }
            (StatusCode::UNAUTHORIZED, _) => {
                "the token is not this engine's: check BIVOUAC_TOKEN and BIVOUAC_DATA_DIR"
            }
            (StatusCode::FORBIDDEN, _) => return self.right_hint(),
            (StatusCode::NOT_FOUND, "not_found") if !self.is_about_a_route() => {
                return self.missing_hint();
            }
            (StatusCode::GONE, "snapshot_not_found") => {
                "list the snapshots with: bivouac snapshots ls"
            }
            (StatusCode::GONE, "sandbox_stopped") => {
                "start it again with: bivouac start NAME; an ephemeral one cannot be: bivouac create"
            }
            (StatusCode::BAD_REQUEST, _) if self.message.contains("already exists") => {
                "choose another name, go on with it (bivouac start NAME) or make room (bivouac rm NAME)"
            }
            (StatusCode::TOO_MANY_REQUESTS, "no_capacity") => {
                "see what runs with bivouac ls -A and what is kept with bivouac snapshots ls; remove \
                 what is not needed"
            }
            (StatusCode::TOO_MANY_REQUESTS, "busy") => "others are at it: try again in a moment",
            (_, "disk_full") => {
                "remove files in it (bivouac exec NAME -- du -xh / shows where they are), or give it more from \
                 its next start on: bivouac resize NAME --disk SIZE"
            }
            (StatusCode::GATEWAY_TIMEOUT, _) => {
                "see what it is busy with: bivouac top, bivouac ps NAME; bivouac stop NAME ends it"
            }
            (StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST | StatusCode::CONFLICT, _)
                if self.is_about_a_route() =>
            {
                "ports get a route when a sandbox is made: bivouac create -p PORT; bivouac inspect NAME shows them"
            }
            (StatusCode::SERVICE_UNAVAILABLE, _) => {
                "try again in a moment; an engine that ended is started with: bivouac serve"
            }
            (status, _) if status.is_server_error() => {
                "the engine's log has the cause; bivouac doctor looks at the machine"
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }

    /// Which right is missing, and how to get it.
    fn right_hint(&self) -> Option<String> {
        let right = self.body["right"].as_str()?;
        Some(format!(
            "your token lacks the right {}: bivouac token whoami shows what it may; who has the right makes \
             another with: bivouac token create NAME --allow {}",
            right.replace(',', " or "),
            right.split(',').next().unwrap_or(right)
        ))
    }

    /// Whether a port was asked for that has no route.
    fn is_about_a_route(&self) -> bool {
        let said = self.message.to_ascii_lowercase();
        said.contains("port") && said.contains("no route") && !said.contains("bivouac ")
    }

    /// What to do about something that is not there, by what it is.
    fn missing_hint(&self) -> Option<String> {
        let said = self.message.to_ascii_lowercase();
        let hint = match () {
            // The engine's own sentence names the command.
            () if said.contains("bivouac ") => return None,
            () if said.starts_with("sandbox") => {
                "list the sandboxes with: bivouac ls (all namespaces: bivouac ls -A)"
            }
            () if said.starts_with("namespace ") => {
                "your token sees other namespaces: bivouac token whoami shows them, -n names one"
            }
            () if said.starts_with("snapshot ") => "list the snapshots with: bivouac snapshots ls",
            () if said.starts_with("drive ") => "list the drives with: bivouac drive ls",
            () if said.starts_with("secret ") => "list the secrets with: bivouac secret ls",
            () if said.starts_with("command ") => "list the commands with: bivouac ps NAME",
            () if said.starts_with("there is no path ") => {
                "the engine does not know this call: it may be of an earlier version"
            }
            () if ["there is no image", "the image", "there is no runtime", "the runtime"]
                .iter()
                .any(|start| said.starts_with(start)) =>
            {
                "bivouac image ls shows what is built; bivouac image build makes 'universal'"
            }
            () => return None,
        };
        Some(hint.to_owned())
    }
}

/// Where an engine is and what opens it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// `http://127.0.0.1:7070`
    pub(crate) url: String,
    /// The bearer token.
    pub(crate) token: String,
}

/// Takes the first namespace of a token that is not the engine's own, when nobody named one. What goes wrong is for
/// the verb itself to find out.
pub(crate) async fn go_home(global: &mut Global) {
    if !global.unnamed || !env_token().is_some_and(|token| token.starts_with("bvt_")) {
        return;
    }
    let Ok(client) = Client::find(global) else { return };
    let Ok(who) = client.get("/bivouac/v1/whoami", &Query::default()).await else { return };
    if let (Some(team), Some(project)) = (who["team"].as_str(), who["project"].as_str()) {
        global.namespace = Namespace { team: team.to_owned(), project: project.to_owned() };
    }
}

/// The folder that the global flags name.
pub(crate) fn data_dir(global: &Global) -> PathBuf {
    global.data_dir.clone().unwrap_or_else(default_data_dir)
}

/// A token from the environment.
fn env_token() -> Option<String> {
    std::env::var("BIVOUAC_TOKEN").ok().filter(|token| !token.is_empty())
}

/// Finds the engine: `--url` or `BIVOUAC_URL` with `BIVOUAC_TOKEN`, else what the running engine
/// left in its data folder. Nothing is asked over the network yet.
pub(crate) fn find(global: &Global) -> Outcome<Endpoint> {
    let folder = data_dir(global);
    let Some(url) = global.url.as_deref().filter(|url| !url.is_empty()) else {
        let record = live_record(&folder)?;
        let token = env_token().map_or_else(|| folder_token(&folder), Ok)?;
        return Ok(Endpoint { url: format!("http://{}", reachable(&record.address)), token });
    };
    let url = check_url(url)?;
    if let Some(token) = env_token() {
        return Ok(Endpoint { url, token });
    }
    // The folder's token belongs to the folder's engine: it is not shown to any other address.
    let own = EngineRecord::read(&folder).ok().flatten();
    if own.is_some_and(|record| url == format!("http://{}", reachable(&record.address))) {
        return Ok(Endpoint { url, token: folder_token(&folder)? });
    }
    Err(Failure::new(format!("no token for {url}"))
        .hint("set BIVOUAC_TOKEN to the engine's token (the file 'token' in its data folder)"))
}

fn check_url(url: &str) -> Outcome<String> {
    if url.starts_with("https://") {
        return Err(Failure::usage(format!(
            "{url}: TLS to an engine arrives with a later release"
        ))
        .hint("use http:// over loopback, a private network or an SSH tunnel"));
    }
    let host = url.strip_prefix("http://").unwrap_or("").trim_end_matches('/');
    let host = host.strip_suffix("/api").unwrap_or(host);
    if host.is_empty() || host.contains(['/', '?', '#', '@', ' ']) {
        return Err(Failure::usage(format!("'{url}' is no engine's address"))
            .hint("write http://HOST:PORT"));
    }
    Ok(format!("http://{host}"))
}

/// An engine that listens on every address is reached over loopback.
fn reachable(address: &str) -> String {
    let address = address.strip_prefix("http://").unwrap_or(address);
    match address.parse::<std::net::SocketAddr>() {
        Ok(std::net::SocketAddr::V4(at)) if at.ip().is_unspecified() => {
            format!("127.0.0.1:{}", at.port())
        }
        Ok(std::net::SocketAddr::V6(at)) if at.ip().is_unspecified() => {
            format!("[::1]:{}", at.port())
        }
        _ => address.to_owned(),
    }
}

/// The record of an engine that is alive.
fn live_record(folder: &Path) -> Outcome<EngineRecord> {
    let record = EngineRecord::read(folder)
        .explain(|| format!("could not read the engine's record in {}", folder.display()))
        .map_err(|failure| permission_hint(failure, folder))?;
    let start = "start one with: bivouac serve (or name another: --url, --data-dir)";
    match record {
        None => {
            Err(Failure::new(format!("no engine is running on {}", folder.display())).hint(start))
        }
        Some(record) if !record.is_alive() => Err(Failure::new(format!(
            "the engine of {} is gone: its process {} ended without a word",
            folder.display(),
            record.pid
        ))
        .hint("start it again with: bivouac serve; sandboxes that still run are adopted")),
        Some(record) => Ok(record),
    }
}

fn folder_token(folder: &Path) -> Outcome<String> {
    let token = read_token(folder)
        .explain(|| format!("could not read the token in {}", folder.display()))
        .map_err(|failure| permission_hint(failure, folder))?;
    token.ok_or_else(|| {
        Failure::new(format!("there is no token in {}", folder.display()))
            .hint("the engine was started with BIVOUAC_TOKEN: set the same for this command")
    })
}

fn permission_hint(failure: Failure, folder: &Path) -> Failure {
    if rustix::process::geteuid().is_root() {
        failure
    } else {
        let folder = folder.display();
        failure.hint(format!(
            "{folder} belongs to another user: use sudo, or set BIVOUAC_URL and BIVOUAC_TOKEN"
        ))
    }
}

/// A query for a call: percent-encoded as it grows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(String);

impl Query {
    /// Adds a parameter.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.0.push(if self.0.is_empty() { '?' } else { '&' });
        self.0.push_str(name);
        self.0.push('=');
        self.0.push_str(&percent(value));
        self
    }
}

/// Percent-encodes everything but the unreserved characters.
pub(crate) fn percent(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

impl Client {
    /// A client of the engine that the global flags name.
    pub(crate) fn find(global: &Global) -> Outcome<Self> {
        Self::at(find(global)?, global)
    }

    /// A client of a known engine.
    pub(crate) fn at(endpoint: Endpoint, global: &Global) -> Outcome<Self> {
        let http = http_client()?;
        Ok(Self {
            http,
            base: endpoint.url,
            token: endpoint.token,
            namespace: global.namespace.clone(),
            global: global.clone(),
        })
    }

    /// What the flags of every verb say.
    pub(crate) fn global(&self) -> &Global {
        &self.global
    }

    /// Looks again where the engine is: a restarted one may listen elsewhere.
    pub(crate) fn find_again(&self) -> Outcome<Self> {
        let endpoint = find(&self.global)?;
        Ok(Self { base: endpoint.url, token: endpoint.token, ..self.clone() })
    }

    /// The namespace as the calls on one thing take it.
    pub(crate) fn scope(&self) -> Query {
        Query::default()
            .with("teamId", &self.namespace.team)
            .with("projectId", &self.namespace.project)
    }

    /// The namespace as the lists take it.
    pub(crate) fn list_scope(&self) -> Query {
        Query::default()
            .with("teamId", &self.namespace.team)
            .with("project", &self.namespace.project)
    }

    /// The project alone, for bodies.
    pub(crate) fn project(&self) -> &str {
        &self.namespace.project
    }

    fn request(&self, method: Method, path: &str, query: &Query) -> RequestBuilder {
        self.http
            .request(method, format!("{}/api{path}{}", self.base, query.0))
            .bearer_auth(&self.token)
    }

    /// A call that may be sent twice without being done twice.
    fn keyed(builder: RequestBuilder, key: &str) -> RequestBuilder {
        builder.header("idempotency-key", key)
    }

    /// Asks for a JSON answer.
    pub(crate) async fn get(&self, path: &str, query: &Query) -> Result<Value, CallError> {
        self.json(self.request(Method::GET, path, query)).await
    }

    /// Posts a JSON body, takes a JSON answer.
    pub(crate) async fn post(
        &self,
        path: &str,
        query: &Query,
        body: &Value,
    ) -> Result<Value, CallError> {
        self.json(self.request(Method::POST, path, query).json(body)).await
    }

    /// As [`Self::post`]; the engine does it once however often it gets this key.
    pub(crate) async fn post_once(
        &self,
        path: &str,
        query: &Query,
        body: &Value,
        key: &str,
    ) -> Result<Value, CallError> {
        self.json(Self::keyed(self.request(Method::POST, path, query).json(body), key)).await
    }

    /// Replaces.
    pub(crate) async fn put(
        &self,
        path: &str,
        query: &Query,
        body: &Value,
    ) -> Result<Value, CallError> {
        self.json(self.request(Method::PUT, path, query).json(body)).await
    }

    /// Changes.
    pub(crate) async fn patch(
        &self,
        path: &str,
        query: &Query,
        body: &Value,
    ) -> Result<Value, CallError> {
        self.json(self.request(Method::PATCH, path, query).json(body)).await
    }

    /// Deletes.
    pub(crate) async fn delete(&self, path: &str, query: &Query) -> Result<Value, CallError> {
        self.json(self.request(Method::DELETE, path, query)).await
    }

    /// Posts a JSON body, hands the answer back as it comes.
    pub(crate) async fn post_stream(
        &self,
        path: &str,
        query: &Query,
        body: &Value,
        key: Option<&str>,
    ) -> Result<Response, CallError> {
        let builder = self.request(Method::POST, path, query).json(body);
        self.send(match key {
            Some(key) => Self::keyed(builder, key),
            None => builder,
        })
        .await
    }

    /// Asks, hands the answer back as it comes.
    pub(crate) async fn get_stream(
        &self,
        path: &str,
        query: &Query,
    ) -> Result<Response, CallError> {
        self.send(self.request(Method::GET, path, query)).await
    }

    /// Posts a body that is made while it is sent.
    pub(crate) async fn post_body(
        &self,
        path: &str,
        query: &Query,
        headers: [(&'static str, String); 2],
        body: reqwest::Body,
    ) -> Result<Value, CallError> {
        let mut builder = self.request(Method::POST, path, query).body(body);
        for (name, value) in headers {
            builder = builder.header(name, value);
        }
        self.json(builder).await
    }

    /// Puts a body of a known size, which is made while it is sent.
    pub(crate) async fn put_body(
        &self,
        path: &str,
        query: &Query,
        body: reqwest::Body,
        size: u64,
    ) -> Result<Value, CallError> {
        let builder = self.request(Method::PUT, path, query).body(body);
        self.json(builder.header(reqwest::header::CONTENT_LENGTH, size)).await
    }

    /// Has a connection to the engine changed to another protocol. The path may have a query.
    pub(crate) async fn upgrade(
        &self,
        path: &str,
        protocol: &str,
    ) -> Result<reqwest::Upgraded, CallError> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let mut scope = self.scope();
        if !query.is_empty() {
            scope.0.push('&');
            scope.0.push_str(query);
        }
        let response = self
            .send(
                self.request(Method::GET, path, &scope)
                    .header(reqwest::header::CONNECTION, "upgrade")
                    .header(reqwest::header::UPGRADE, protocol),
            )
            .await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let reason = format!("status {} where a tunnel was asked for", response.status());
            return Err(self.foreign(reason, version_of(&response)));
        }
        response.upgrade().await.map_err(|source| self.transport(source))
    }

    /// Opens a WebSocket. The path may have a query.
    pub(crate) async fn websocket(&self, path: &str) -> Result<reqwest::Upgraded, CallError> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let mut scope = self.scope();
        if !query.is_empty() {
            scope.0.push('&');
            scope.0.push_str(query);
        }
        let key = tokio_tungstenite::tungstenite::handshake::client::generate_key();
        let proof = tokio_tungstenite::tungstenite::handshake::derive_accept_key(key.as_bytes());
        let response = self
            .send(
                self.request(Method::GET, path, &scope)
                    .header(reqwest::header::CONNECTION, "upgrade")
                    .header(reqwest::header::UPGRADE, "websocket")
                    .header(reqwest::header::SEC_WEBSOCKET_VERSION, "13")
                    .header(reqwest::header::SEC_WEBSOCKET_KEY, key),
            )
            .await?;
        let accepted = response.headers().get(reqwest::header::SEC_WEBSOCKET_ACCEPT);
        if accepted.is_none_or(|accepted| accepted.as_bytes() != proof.as_bytes()) {
            let reason = format!("status {} where a WebSocket was asked for", response.status());
            return Err(self.foreign(reason, version_of(&response)));
        }
        response.upgrade().await.map_err(|source| self.transport(source))
    }

    /// Every page of a list, as one array. `field` is the list's name in the answer.
    pub(crate) async fn pages(
        &self,
        path: &str,
        query: &Query,
        field: &str,
    ) -> Result<Vec<Value>, CallError> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let query = match &cursor {
                Some(cursor) => query.clone().with("cursor", cursor),
                None => query.clone(),
            };
            let mut page = self.get(path, &query).await?;
            match page.get_mut(field).map(Value::take) {
                Some(Value::Array(items)) => all.extend(items),
                _ => return Err(self.foreign(format!("no list '{field}'"), None)),
            }
            let next = page.pointer("/pagination/next").and_then(Value::as_str);
            match next {
                // A cursor that does not move would be asked for ever.
                Some(next) if cursor.as_deref() != Some(next) => cursor = Some(next.to_owned()),
                _ => return Ok(all),
            }
        }
    }

    async fn json(&self, builder: RequestBuilder) -> Result<Value, CallError> {
        let response = self.send(builder).await?;
        let engine = version_of(&response);
        let bytes = response.bytes().await.map_err(|source| self.transport(source))?;
        serde_json::from_slice(&bytes).map_err(|error| self.foreign(error.to_string(), engine))
    }

    async fn send(&self, builder: RequestBuilder) -> Result<Response, CallError> {
        let response = builder.send().await.map_err(|source| self.transport(source))?;
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response);
        }
        let engine = version_of(&response);
        let bytes = response.bytes().await.map_err(|source| self.transport(source))?;
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let error = &body["error"];
        let Some(message) = error["message"].as_str() else {
            let reason = format!("status {status} without the API's error body");
            return Err(self.foreign(reason, engine));
        };
        Err(CallError::Api(ApiError {
            status,
            code: error["code"].as_str().unwrap_or_default().to_owned(),
            message: message.to_owned(),
            body: error.clone(),
            engine,
        }))
    }

    fn transport(&self, source: reqwest::Error) -> CallError {
        // The URL holds names only, yet the base says enough.
        CallError::Transport { base: self.base.clone(), source: source.without_url() }
    }

    fn foreign(&self, reason: String, engine: Option<String>) -> CallError {
        CallError::Foreign { base: self.base.clone(), engine, reason }
    }
}

/// The version that an engine puts into each of its answers.
fn version_of(response: &Response) -> Option<String> {
    response.headers().get(VERSION_HEADER)?.to_str().ok().map(str::to_owned)
}

/// No proxy: the engine is on loopback or a private network, whatever `HTTP_PROXY` says for the
/// rest. No time limit on answers: a stop with a snapshot, or a wait, takes as long as it takes.
fn http_client() -> Outcome<reqwest::Client> {
    reqwest::Client::builder()
        .no_proxy()
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .user_agent(concat!("bivouac/", env!("CARGO_PKG_VERSION")))
        .build()
        .explain(|| "could not set up HTTP".to_owned())
}

/// Whether an engine answers at `url`.
pub(crate) async fn is_healthy(url: &str) -> bool {
    let Ok(http) = http_client() else { return false };
    let call = http.get(format!("{url}/health")).timeout(Duration::from_secs(2));
    call.send().await.is_ok_and(|response| response.status() == StatusCode::OK)
}

/// The engine of a data folder, if one is alive and answers. Never fails: every reason for no is
/// the same to a caller that would start one.
pub(crate) async fn healthy_engine(folder: &Path) -> Option<EngineRecord> {
    let record = EngineRecord::read(folder).ok().flatten().filter(EngineRecord::is_alive)?;
    is_healthy(&format!("http://{}", reachable(&record.address))).await.then_some(record)
}

/// A random word for names and idempotency keys.
pub(crate) fn random_word() -> Outcome<String> {
    let mut random = [0u8; 10];
    getrandom::fill(&mut random).explain(|| "no randomness".to_owned())?;
    Ok(crate::serve::record::hex(&random))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::failure::ExitStatus;

    #[test]
    fn addresses() {
        assert_eq!(reachable("0.0.0.0:7070"), "127.0.0.1:7070");
        assert_eq!(reachable("[::]:7070"), "[::1]:7070");
        assert_eq!(reachable("10.1.2.3:80"), "10.1.2.3:80");
        assert_eq!(reachable("http://127.0.0.1:1"), "127.0.0.1:1");
        assert_eq!(check_url("http://h:1/").unwrap(), "http://h:1");
        assert_eq!(check_url("http://h:1/api/").unwrap(), "http://h:1");
        for bad in ["h:1", "https://h", "http://", "http://u:p@h", "http://h/x", "ftp://h"] {
            let status = check_url(bad).unwrap_err().report();
            assert_eq!(status, ExitStatus::Usage, "{bad}");
        }
    }

    #[test]
    fn an_engine_of_another_version_is_named() {
        assert_eq!(skew("0.1.0", "0.1.0"), None);
        let hint = skew("0.2.0", "0.1.0").unwrap();
        assert!(hint.contains("0.2.0") && hint.contains("0.1.0"), "{hint}");
    }

    #[test]
    fn what_goes_wrong_ends_in_what_to_do_next() {
        let cases = [
            (401, "unauthorized", "Unauthorized.", "BIVOUAC_TOKEN"),
            (404, "not_found", "Sandbox 'x' was not found in this project.", "bivouac ls"),
            (404, "not_found", "Drive 'x' was not found in this project.", "bivouac drive ls"),
            (404, "not_found", "There is no image 'x' here.", "bivouac image ls"),
            (404, "not_found", "Port 3000 of 'x' has no route.", "bivouac create -p"),
            (410, "snapshot_not_found", "Snapshot snap_1 was not found.", "bivouac snapshots ls"),
            (410, "sandbox_stopped", "Sandbox session sbx_1 is stopped.", "bivouac start"),
            (400, "disk_full", "the sandbox's disk limit is reached", "bivouac resize"),
            (429, "no_capacity", "The storage is full.", "bivouac ls -A"),
            (429, "busy", "8 snapshots are being exported.", "try again"),
            (503, "shutting_down", "The engine is shutting down.", "bivouac serve"),
            (504, "timeout", "The sandbox did not take part in time.", "bivouac ps"),
            (500, "internal_error", "The host could not do this.", "log"),
        ];
        for (status, code, message, wanted) in cases {
            let error = CallError::Api(ApiError {
                status: StatusCode::from_u16(status).unwrap(),
                code: code.to_owned(),
                message: message.to_owned(),
                body: Value::Null,
                engine: None,
            });
            let hints = error.hints().join("\n");
            assert!(hints.contains(wanted), "{status} {code}: {hints}");
        }
    }

    #[test]
    fn queries_are_encoded() {
        let query = Query::default().with("a", "x y&z").with("tags", "k:é");
        assert_eq!(query.0, "?a=x%20y%26z&tags=k%3A%C3%A9");
    }
}
