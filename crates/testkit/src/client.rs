//! An HTTP client with the API's habits: bearer token, team and project in the query, JSON both
//! ways, NDJSON streams read line by line.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::{Method, header};
use serde_json::Value;

/// A client of one engine in one namespace. Cheap to make; make one per test, since connections
/// belong to the test's own async runtime.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
    team: String,
    project: String,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Headers.
    pub headers: header::HeaderMap,
    /// The exact bytes.
    pub bytes: Vec<u8>,
    /// The body as JSON, `null` when it is not.
    pub json: Value,
    /// Method and path, for messages.
    pub request: String,
}

impl Answer {
    /// The JSON of a success.
    ///
    /// # Panics
    /// When the status is not 2xx.
    #[track_caller]
    #[must_use]
    pub fn ok(self) -> Value {
        assert!((200..300).contains(&self.status), "{self}");
        self.json
    }

    /// Asserts a refusal: this status, this `error.code` (when not empty), and a message for people.
    ///
    /// # Panics
    /// When it is anything else.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) -> &Self {
        let error = &self.json["error"];
        assert_eq!(self.status, status, "{self}");
        assert!(error["message"].as_str().is_some_and(|m| m.len() > 5), "no message: {self}");
        assert!(error["code"].is_string(), "no code: {self}");
        if !code.is_empty() {
            assert_eq!(error["code"], code, "{self}");
        }
        self
    }

    /// The message of a refusal.
    #[must_use]
    pub fn message(&self) -> &str {
        self.json["error"]["message"].as_str().unwrap_or_default()
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = String::from_utf8_lossy(&self.bytes[..self.bytes.len().min(2000)]);
        write!(f, "{} answered {}: {text}", self.request, self.status)
    }
}

/// A stream of JSON lines, read as they come.
#[derive(Debug)]
pub struct Lines {
    response: reqwest::Response,
    rest: Vec<u8>,
    ended: bool,
}

impl Lines {
    /// The next line, `None` at the end of the stream. Blank lines (keep-alives) are skipped.
    ///
    /// # Errors
    /// When the connection breaks, the line is not JSON or nothing comes within `deadline`.
    pub async fn next(&mut self, deadline: Duration) -> Result<Option<Value>> {
        tokio::time::timeout(deadline, self.read()).await.context("no line within the deadline")?
    }

    async fn read(&mut self) -> Result<Option<Value>> {
        loop {
            if let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                if !line.is_ascii() {
                    bail!("a line is not ASCII: {}", String::from_utf8_lossy(&line));
                }
                return Ok(Some(
                    serde_json::from_slice(&line)
                        .with_context(|| format!("not JSON: {}", String::from_utf8_lossy(&line)))?,
                ));
            }
            if self.ended {
                return if self.rest.trim_ascii().is_empty() {
                    Ok(None)
                } else {
                    bail!("the last line has no end: {}", String::from_utf8_lossy(&self.rest))
                };
            }
            match self.response.chunk().await? {
                Some(chunk) => self.rest.extend_from_slice(&chunk),
                None => self.ended = true,
            }
        }
    }
}

impl Client {
    /// A client of the engine at `url` (no trailing slash).
    ///
    /// # Errors
    /// When the HTTP library cannot be set up.
    pub fn new(url: &str, token: &str, team: &str, project: &str) -> Result<Self> {
        Ok(Self {
            http: reqwest::Client::builder().no_proxy().build()?,
            base: url.to_owned(),
            token: token.to_owned(),
            team: team.to_owned(),
            project: project.to_owned(),
        })
    }

    /// The same engine with another token.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: token.to_owned(), ..self.clone() }
    }

    /// The same engine, another team.
    #[must_use]
    pub fn with_team(&self, team: &str) -> Self {
        Self { team: team.to_owned(), ..self.clone() }
    }

    /// The address of the engine.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The project of every call.
    #[must_use]
    pub fn project(&self) -> &str {
        &self.project
    }

    /// The request, with the token and the query that every call carries. `path` starts with a
    /// slash; what starts with `/v` is below `/api`.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let api = if path.starts_with("/v") { "/api" } else { "" };
        let joiner = if path.contains('?') { '&' } else { '?' };
        let Self { base, team, project, .. } = self;
        let url =
            format!("{base}{api}{path}{joiner}teamId={team}&projectId={project}&project={project}");
        self.http.request(method, url).bearer_auth(&self.token)
    }

    /// Sends and reads the whole answer.
    ///
    /// # Panics
    /// When there is no answer at all within two minutes.
    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        self.try_send(request).await.expect("the engine answers")
    }

    /// As [`Client::send`]; an engine that is not there is an error, not a panic.
    ///
    /// # Errors
    /// When the connection fails or breaks.
    pub async fn try_send(&self, request: reqwest::RequestBuilder) -> Result<Answer> {
        let request = request.timeout(Duration::from_secs(120)).build()?;
        let shown = format!("{} {}", request.method(), request.url().path());
        let response = self.http.execute(request).await.context(shown.clone())?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.bytes().await.context(shown.clone())?.to_vec();
        let json = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Ok(Answer { status, headers, bytes, json, request: shown })
    }

    /// GET.
    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    /// DELETE.
    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    /// POST with a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    /// PUT with a JSON body.
    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::PUT, path).json(body)).await
    }

    /// PATCH with a JSON body.
    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::PATCH, path).json(body)).await
    }

    /// Opens an NDJSON stream; a refusal comes back as the answer.
    ///
    /// # Errors
    /// The answer when the status is not 200.
    ///
    /// # Panics
    /// When the engine is not there or the content type is not exactly the one that the official
    /// client compares with.
    pub async fn stream(&self, request: reqwest::RequestBuilder) -> Result<Lines, Answer> {
        let request = request.build().expect("a request");
        let shown = format!("{} {}", request.method(), request.url().path());
        let wait = self.http.execute(request);
        let response = tokio::time::timeout(Duration::from_secs(60), wait)
            .await
            .expect("headers of a stream come at once")
            .expect("the engine answers");
        if response.status().as_u16() == 200 {
            let kind = response.headers().get(header::CONTENT_TYPE).map(|v| v.as_bytes().to_vec());
            assert_eq!(kind.as_deref(), Some(b"application/x-ndjson".as_slice()), "{shown}");
            return Ok(Lines { response, rest: Vec::new(), ended: false });
        }
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.bytes().await.expect("an error's body").to_vec();
        let json = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Err(Answer { status, headers, bytes, json, request: shown })
    }
}
