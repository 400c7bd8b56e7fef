//! Logins at registries: what a 401 asks for, and what is given to whom.
//!
//! Invariants: a password goes to the registry itself, or to the place of tokens that it names, over https (or
//! to loopback); a token is asked for pulling from the one repository that is wanted, whatever the registry says
//! it needs; no error repeats a login or a token. Called by `registry`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_types::secret::Secret;
use serde::Deserialize;

use super::wire::{Ask, Reach, Url, Wire, WireError};

/// Longest answer with a token.
const MAX_TOKEN: usize = 64 << 10;

/// A user and a password.
#[derive(Debug, Clone)]
pub struct Login {
    /// User.
    pub username: String,
    /// Password, or a token that stands for one.
    pub password: Secret,
}

impl Login {
    /// Of a text `USER:PASSWORD`.
    pub(crate) fn of_pair(text: &Secret) -> Option<Self> {
        let (username, password) = text.expose().trim_end_matches(['\r', '\n']).split_once(':')?;
        Some(Self { username: username.to_owned(), password: Secret::new(password.to_owned()) })
    }

    /// As a header says it.
    fn basic(&self) -> Secret {
        let pair = Secret::new(format!("{}:{}", self.username, self.password.expose()));
        Secret::new(format!("Basic {}", STANDARD.encode(pair.expose())))
    }
}

/// What a 401 asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

/// Reads the values of `WWW-Authenticate`. A token is taken before a password.
pub(crate) fn challenge<'a>(values: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for value in values {
        let (scheme, rest) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
        if scheme.eq_ignore_ascii_case("bearer") {
            let fields = fields(rest);
            let field =
                |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, v)| v.clone());
            if let Some(realm) = field("realm") {
                return Some(Challenge::Bearer { realm, service: field("service") });
            }
        } else if scheme.eq_ignore_ascii_case("basic") {
            basic = Some(Challenge::Basic);
        }
    }
    basic
}

/// `name="value"` and `name=value`, parted by commas.
fn fields(mut text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    loop {
        text = text.trim_start_matches([',', ' ', '\t']);
        let Some((name, rest)) = text.split_once('=') else { return found };
        let name = name.trim().to_ascii_lowercase();
        let mut value = String::new();
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut chars = quoted.char_indices();
            let mut end = quoted.len();
            while let Some((at, c)) = chars.next() {
                match c {
                    '"' => {
                        end = at + 1;
                        break;
                    }
                    '\\' => value.extend(chars.next().map(|(_, c)| c)),
                    c => value.push(c),
                }
            }
            text = &quoted[end..];
        } else {
            let end = rest.find(',').unwrap_or(rest.len());
            value.push_str(rest[..end].trim());
            text = &rest[end..];
        }
        found.push((name, value));
    }
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

/// Why there is no login that would do.
pub(crate) enum AuthError {
    /// The registry wants another login, or one at all. A clause after the place.
    Denied(String),
    Wire(WireError),
}

/// The value of `Authorization` that answers a challenge.
pub(crate) async fn answer(
    wire: &Wire,
    challenge: &Challenge,
    login: Option<&Login>,
    repository: &str,
    most: Reach,
    insecure: bool,
) -> Result<Secret, AuthError> {
    let (realm, service) = match challenge {
        Challenge::Basic => {
            let wanted = || AuthError::Denied("wants a login".to_owned());
            return login.map(Login::basic).ok_or_else(wanted);
        }
        Challenge::Bearer { realm, service } => (realm, service),
    };
    let refused = |why: String| AuthError::Wire(WireError::Refused(why));
    let mut url =
        Url::parse(realm).map_err(|why| refused(format!("names a place of tokens that {why}")))?;
    if !url.origin.tls && !url.origin.is_loopback() && !insecure {
        return Err(refused(format!("wants its login sent to {} over plain http", url.origin)));
    }
    let mut query = vec![("scope", format!("repository:{repository}:pull"))];
    query.extend(service.iter().map(|service| ("service", service.clone())));
    for (name, value) in query {
        url.path.push(if url.path.contains('?') { '&' } else { '?' });
        url.path.push_str(&format!("{name}={}", escaped(&value)));
    }
    let basic = login.map(Login::basic);
    let place = url.origin.to_string();
    let ask = Ask {
        url: &url,
        headers: vec![(hyper::header::ACCEPT, "application/json".to_owned())],
        authorization: basic.as_ref(),
        most: Some(most),
        follow: false,
        insecure,
    };
    let named = |why: WireError| match why {
        WireError::Broken(why) => {
            WireError::Broken(format!("gives tokens at {place}, which {why}"))
        }
        WireError::Refused(why) => {
            WireError::Refused(format!("gives tokens at {place}, which {why}"))
        }
        WireError::NoTls => {
            WireError::Refused(format!("gives tokens at {place}, which speaks no TLS"))
        }
    };
    let (answer, _) = wire.get(ask).await.map_err(|e| AuthError::Wire(named(e)))?;
    match answer.status {
        200 => {}
        401 | 403 if login.is_some() => {
            return Err(AuthError::Denied("refuses this login".to_owned()));
        }
        401 | 403 => return Err(AuthError::Denied("wants a login".to_owned())),
        status => return Err(refused(format!("gives tokens at {place}, which answers {status}"))),
    }
    let text = answer.whole(MAX_TOKEN).await.map_err(|e| AuthError::Wire(named(e)))?;
    let token: Option<TokenAnswer> = serde_json::from_slice(&text).ok();
    let token = token.and_then(|answer| answer.token.or(answer.access_token));
    match token.filter(|token| !token.is_empty()) {
        Some(token) => Ok(Secret::new(format!("Bearer {token}"))),
        None => Err(refused(format!("gives tokens at {place}, whose answer holds none"))),
    }
}

fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, b| {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'/' => {
                out.push(b.into());
            }
            _ => out.push_str(&format!("%{b:02X}")),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) })
        };
        let read = |values: &[&str]| challenge(values.iter().copied());
        assert_eq!(
            read(&[
                r#"Bearer realm="https://auth.example.com/token",service="a, b",scope="repository:x:pull,push""#
            ]),
            bearer("https://auth.example.com/token", Some("a, b"))
        );
        assert_eq!(read(&["bearer service=s, realm=https://x/"]), bearer("https://x/", Some("s")));
        assert_eq!(read(&[r#"Bearer realm="a\"b""#]), bearer("a\"b", None));
        assert_eq!(
            read(&[r#"Basic realm="x""#, r#"Bearer realm="https://x/""#]),
            bearer("https://x/", None)
        );
        assert_eq!(read(&[r#"Basic realm="Registry""#]), Some(Challenge::Basic));
        assert_eq!(read(&["Digest x", "Bearer scope=y"]), None);
        assert_eq!(read(&[r#"Bearer realm="unended"#]), bearer("unended", None));
    }

    #[test]
    fn a_pair_keeps_all_behind_the_first_colon() {
        let login = Login::of_pair(&Secret::new("me:pa:ss\n".to_owned())).unwrap();
        assert_eq!((login.username.as_str(), login.password.expose()), ("me", "pa:ss"));
        assert_eq!(login.basic().expose(), "Basic bWU6cGE6c3M=");
        assert!(Login::of_pair(&Secret::new("token".to_owned())).is_none());
        assert!(!format!("{login:?}").contains("pa:ss"));
        assert_eq!(escaped("repository:a/b:pull x&y"), "repository:a/b:pull%20x%26y");
    }
}
