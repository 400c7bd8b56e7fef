//! What each kind of credential is made of.
//!
//! Invariant: a rule is for one host, for the paths and methods that its purpose needs, and (where a dummy
//! is given to the sandbox) for requests that carry the dummy in exactly the header that is replaced.

use std::collections::BTreeMap;

use bivouac_types::policy::{Action, AwsSign, EntryMatch, HeaderSet, MAX_REGEX, Match, TextMatch};

use super::{Act, CredentialSpec};
use crate::template::check_name;

/// Rules and dummies of a credential.
#[derive(Default)]
pub(super) struct Preset {
    pub(super) rules: Vec<Wanted>,
    pub(super) env: BTreeMap<String, String>,
}

/// A rule that is wanted: its value is a template, sealed later.
pub(super) struct Wanted {
    pub(super) host: String,
    pub(super) port: Option<u16>,
    pub(super) matcher: Match,
    pub(super) value: String,
    pub(super) action: Act,
}

/// Expands a credential. The error is a sentence about it that names what its kind takes.
pub(super) fn expand(spec: &CredentialSpec) -> Result<Preset, String> {
    let mut options = Options::new(spec);
    let preset = match spec.kind.as_str() {
        "github" => github(&mut options),
        "npm" => npm(&mut options),
        "anthropic" => anthropic(&mut options),
        "openai" => openai(&mut options),
        "aws" => aws(&mut options),
        "basic" => basic(&mut options),
        "bearer" => bearer(&mut options),
        _ => Err("there are github, npm, anthropic, openai, aws, basic and bearer".to_owned()),
    }?;
    options.finish()?;
    Ok(preset)
}

/// What was given, and which of it has been looked at.
struct Options<'a> {
    spec: &'a CredentialSpec,
    known: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn new(spec: &'a CredentialSpec) -> Self {
        Self { spec, known: Vec::new() }
    }

    fn text(&mut self, name: &'static str) -> Option<&'a str> {
        self.known.push(name);
        self.spec.options.get(name).map(String::as_str)
    }

    /// A switch: `push`, or `push=true`.
    fn flag(&mut self, name: &'static str) -> Result<bool, String> {
        match self.text(name) {
            None | Some("false") => Ok(false),
            Some("" | "true") => Ok(true),
            Some(_) => Err(format!("'{name}' is true or false")),
        }
    }

    fn secret(&self, default: &str) -> Result<String, String> {
        let name = self.spec.secret.as_deref().unwrap_or(default);
        check_name(name)?;
        Ok(name.to_owned())
    }

    fn needed_secret(&self) -> Result<String, String> {
        let name = self.spec.secret.as_deref();
        let name = name.ok_or("it needs the name of a secret: KIND=SECRET,host=HOST")?;
        check_name(name)?;
        Ok(name.to_owned())
    }

    /// `host=NAME[:PORT]`.
    fn host(&mut self, default: Option<&'static str>) -> Result<(String, Option<u16>), String> {
        let text = self.text("host").or(default).ok_or("it needs a host: host=api.example.com")?;
        split(text)
    }

    /// A path as a prefix.
    fn path(&mut self, default: Option<&'static str>) -> Result<Option<TextMatch>, String> {
        match self.text("path").or(default) {
            None => Ok(None),
            Some(path) if path.starts_with('/') => Ok(Some(TextMatch::StartsWith(path.to_owned()))),
            Some(_) => Err("'path' begins with '/'".to_owned()),
        }
    }

    /// `methods=GET+HEAD`; none is all.
    fn methods(&mut self) -> Vec<String> {
        let text = self.text("methods").unwrap_or_default();
        text.split('+').filter(|m| !m.is_empty()).map(str::to_ascii_uppercase).collect()
    }

    /// An option that nobody looked at would look as if it were in force.
    fn finish(self) -> Result<(), String> {
        let unknown = self.spec.options.keys().find(|name| !self.known.contains(&name.as_str()));
        let Some(unknown) = unknown else { return Ok(()) };
        let unknown: String = unknown.chars().take(40).collect();
        Err(match self.known.as_slice() {
            [] => format!("it takes no '{unknown}'"),
            known => format!("it takes no '{unknown}', but: {}", known.join(", ")),
        })
    }
}

fn split(text: &str) -> Result<(String, Option<u16>), String> {
    match text.rsplit_once(':') {
        None => Ok((text.to_owned(), None)),
        Some((host, port)) => match port.parse() {
            Ok(port) if port > 0 => Ok((host.to_owned(), (port != 443).then_some(port))),
            _ => Err(format!("'{text}' has a port that is not 1 to 65535")),
        },
    }
}

/// Replaces one header.
fn sets(header: &str) -> Act {
    let name = header.to_owned();
    Box::new(move |value| Action::Transform {
        headers: vec![HeaderSet { name, value, secrets: Vec::new() }],
    })
}

/// Requests with a header of exactly this value.
fn with_header(name: &str, value: TextMatch) -> Vec<EntryMatch> {
    vec![EntryMatch { key: Some(TextMatch::Exact(name.to_owned())), value: Some(value) }]
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Variables of the dummies that AWS's clients demand.
pub(super) const AWS_ID: &str = "AWS_ACCESS_KEY_ID";
pub(super) const AWS_KEY: &str = "AWS_SECRET_ACCESS_KEY";
/// In every dummy but AWS's id, which has a form of its own.
const MARK: &str = "bivouac-placeholder-";

/// Whether a text can be a dummy of this module.
pub(super) fn is_dummy(text: &str) -> bool {
    let id = |tail: &str| tail.len() == 16 && tail.bytes().all(|byte| UPPER.contains(&byte));
    text.contains(MARK) || text.strip_prefix("AKIA").is_some_and(id)
}

/// A dummy that nobody can take for a key, and that differs from sandbox to sandbox.
fn dummy(prefix: &str, alphabet: &[u8], length: usize) -> Result<String, String> {
    let mut random = vec![0; length];
    getrandom::fill(&mut random).map_err(|_| "the host gave no random numbers")?;
    let tail = random.iter().map(|byte| char::from(alphabet[usize::from(*byte) % alphabet.len()]));
    Ok(prefix.chars().chain(tail).collect())
}

const LOWER: &[u8] = b"abcdefghijklmnopqrstuvwxyz234567";
const UPPER: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

/// `OWNER/NAME+OWNER/NAME` as an expression; none is any repository.
fn repositories(list: Option<&str>) -> Result<String, String> {
    let Some(list) = list else { return Ok("[^/]+/[^/]+".to_owned()) };
    let mut names = Vec::new();
    for name in list.split('+') {
        let good = |part: &str| {
            let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
            !part.is_empty() && part.bytes().all(plain)
        };
        match name.trim_end_matches(".git").split_once('/') {
            Some((owner, "*")) if good(owner) => {
                names.push(format!("{}/[^/]+", owner.replace('.', "\\.")));
            }
            Some((owner, repo)) if good(owner) && good(repo) => {
                names.push(format!("{owner}/{repo}").replace('.', "\\."));
            }
            _ => {
                return Err("'repos' is OWNER/NAME, OWNER/* or several of them with '+'".to_owned());
            }
        }
    }
    let list = format!("(?:{})", names.join("|"));
    if list.len() > MAX_REGEX - 200 {
        return Err("'repos' names too many repositories".to_owned());
    }
    Ok(list)
}

fn github(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.secret("GITHUB_TOKEN")?;
    let repos = options.text("repos");
    let repo = repositories(repos)?;
    let (push, write) = (options.flag("push")?, options.flag("write")?);
    let path = |tail: &str| Some(TextMatch::Regex(format!("^/(?i:{repo})(?:\\.git)?{tail}$")));
    let service = |name: &str| {
        vec![EntryMatch {
            key: Some(TextMatch::Exact("service".to_owned())),
            value: Some(TextMatch::Exact(name.to_owned())),
        }]
    };
    let mut preset = Preset::default();
    let basic = format!("Basic ${{basic:x-access-token:{secret}}}");
    let mut git = |matcher: Match| {
        preset.rules.push(Wanted {
            host: "github.com".to_owned(),
            port: None,
            matcher,
            value: basic.clone(),
            action: sets("authorization"),
        });
    };
    let mut services = vec!["git-upload-pack"];
    if push {
        services.push("git-receive-pack");
    }
    for name in services {
        git(Match {
            method: owned(&["GET"]),
            path: path("/info/refs"),
            query_string: service(name),
            ..Match::default()
        });
        git(Match {
            method: owned(&["POST"]),
            path: path(&format!("/{name}")),
            ..Match::default()
        });
    }
    if push {
        git(Match { path: path("/info/lfs/.*"), ..Match::default() });
    }
    // Of the API: what the repositories' names are in, or everything when none is named.
    let methods = if write { Vec::new() } else { owned(&["GET", "HEAD"]) };
    let bearer = format!("Bearer ${{secret:{secret}}}");
    let mut api = |host: &str, path: Option<TextMatch>, methods: Vec<String>| {
        preset.rules.push(Wanted {
            host: host.to_owned(),
            port: None,
            matcher: Match { path, method: methods, ..Match::default() },
            value: bearer.clone(),
            action: sets("authorization"),
        });
    };
    let below = |prefix: &str| {
        let named = TextMatch::Regex(format!("^/{prefix}(?i:{repo})(?:/|$)"));
        repos.map(|_| named)
    };
    api("api.github.com", below("repos/"), methods.clone());
    api("raw.githubusercontent.com", below(""), owned(&["GET", "HEAD"]));
    api("codeload.github.com", below(""), owned(&["GET", "HEAD"]));
    if write {
        api("uploads.github.com", below("repos/"), methods);
    }
    // Tools of GitHub's ask for a token before they ask for anything else.
    let token = dummy("bivouac-placeholder-", LOWER, 24)?;
    preset.env.insert("GH_TOKEN".to_owned(), token.clone());
    preset.env.insert("GITHUB_TOKEN".to_owned(), token);
    Ok(preset)
}

fn npm(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.secret("NPM_TOKEN")?;
    let needed = "it needs the registry's address: registry=https://…; the command line takes it from \
                  npm's own configuration";
    let registry = options.text("registry").ok_or(needed)?;
    let rest = registry.strip_prefix("https://").ok_or(
        "'registry' must be an https:// address: a credential is never sent in clear text",
    )?;
    let publish = options.flag("publish")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.contains('@') || path.contains(['?', '#']) {
        return Err("'registry' is https://HOST[:PORT][/PATH] and no more".to_owned());
    }
    let (host, port) = split(authority)?;
    let path = path.trim_end_matches('/');
    let prefix = (!path.is_empty()).then(|| TextMatch::StartsWith(format!("/{path}/")));
    let method = if publish { Vec::new() } else { owned(&["GET", "HEAD"]) };
    let token = dummy("bivouac-placeholder-", LOWER, 24)?;
    let env = [
        ("NPM_CONFIG_REGISTRY".to_owned(), registry.to_owned()),
        ("NPM_TOKEN".to_owned(), token.clone()),
        ("NODE_AUTH_TOKEN".to_owned(), token),
    ];
    let scoped = options.flag("scoped")?;
    let rules = vec![Wanted {
        host,
        port,
        matcher: Match { path: prefix, method, ..Match::default() },
        value: format!("Bearer ${{secret:{secret}}}"),
        action: sets("authorization"),
    }];
    // A scope's registry is named in the project's own .npmrc; the others stay where they are.
    let env = env.into_iter().skip(usize::from(scoped)).collect();
    Ok(Preset { rules, env })
}

fn anthropic(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.secret("ANTHROPIC_API_KEY")?;
    let (host, port) = options.host(Some("api.anthropic.com"))?;
    let path = options.path(Some("/v1/"))?;
    let key = dummy("sk-ant-api03-bivouac-placeholder-", LOWER, 24)?;
    let rules = vec![Wanted {
        host,
        port,
        matcher: Match {
            path,
            headers: with_header("x-api-key", TextMatch::Exact(key.clone())),
            ..Match::default()
        },
        value: format!("${{secret:{secret}}}"),
        action: sets("x-api-key"),
    }];
    Ok(Preset { rules, env: BTreeMap::from([("ANTHROPIC_API_KEY".to_owned(), key)]) })
}

fn openai(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.secret("OPENAI_API_KEY")?;
    let (host, port) = options.host(Some("api.openai.com"))?;
    let path = options.path(Some("/v1/"))?;
    let key = dummy("sk-bivouac-placeholder-", LOWER, 24)?;
    let rules = vec![Wanted {
        host,
        port,
        matcher: Match {
            path,
            headers: with_header("authorization", TextMatch::Exact(format!("Bearer {key}"))),
            ..Match::default()
        },
        value: format!("Bearer ${{secret:{secret}}}"),
        action: sets("authorization"),
    }];
    Ok(Preset { rules, env: BTreeMap::from([("OPENAI_API_KEY".to_owned(), key)]) })
}

fn aws(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.secret("AWS_CREDENTIALS")?;
    let service = options.text("service").map(str::to_owned);
    let region = options.text("region").map(str::to_owned);
    let word = |text: &String| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !text.is_empty() && text.bytes().all(plain)
    };
    if ![&service, &region].into_iter().flatten().all(word) {
        return Err("'service' and 'region' are written as in s3 and eu-central-1".to_owned());
    }
    let hosts = match (options.text("host"), &service, &region) {
        (Some(host), _, _) => vec![host.to_owned()],
        (None, Some(service), Some(region)) => vec![
            format!("{service}.{region}.amazonaws.com"),
            format!("*.{service}.{region}.amazonaws.com"),
        ],
        (None, None, _) | (None, Some(_), None) => vec!["*.amazonaws.com".to_owned()],
    };
    // The dummy key's id is in every signature that is made with it.
    let id = dummy("AKIA", UPPER, 16)?;
    let key = dummy("bivouac-placeholder-", LOWER, 20)?;
    let signed = TextMatch::Regex(format!("Credential={id}/"));
    let mut preset = Preset::default();
    for host in hosts {
        let (host, port) = split(&host)?;
        let (service, region) = (service.clone(), region.clone());
        preset.rules.push(Wanted {
            host,
            port,
            matcher: Match {
                headers: with_header("authorization", signed.clone()),
                ..Match::default()
            },
            value: format!("${{aws:{secret}}}"),
            action: Box::new(move |value| {
                Action::Sign(AwsSign { value, secrets: Vec::new(), service, region })
            }),
        });
    }
    preset.env.insert(AWS_ID.to_owned(), id);
    preset.env.insert(AWS_KEY.to_owned(), key);
    if let Some(region) = region {
        preset.env.insert("AWS_REGION".to_owned(), region.clone());
        preset.env.insert("AWS_DEFAULT_REGION".to_owned(), region);
    }
    Ok(preset)
}

fn basic(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.needed_secret()?;
    let (host, port) = options.host(None)?;
    let value = match options.text("user") {
        Some(user) if user.contains(['}', ':']) => {
            return Err("'user' holds no ':' and no '}'".to_owned());
        }
        Some(user) => format!("Basic ${{basic:{user}:{secret}}}"),
        None => format!("Basic ${{base64:{secret}}}"),
    };
    let matcher =
        Match { path: options.path(None)?, method: options.methods(), ..Match::default() };
    let rules = vec![Wanted { host, port, matcher, value, action: sets("authorization") }];
    Ok(Preset { rules, env: BTreeMap::new() })
}

fn bearer(options: &mut Options<'_>) -> Result<Preset, String> {
    let secret = options.needed_secret()?;
    let (host, port) = options.host(None)?;
    let header = options.text("header").unwrap_or("authorization").to_ascii_lowercase();
    let token = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if header.is_empty() || !header.bytes().all(token) || header == "host" {
        return Err("'header' is the name of a header".to_owned());
    }
    let scheme = if header == "authorization" { "Bearer " } else { "" };
    let mut matcher =
        Match { path: options.path(None)?, method: options.methods(), ..Match::default() };
    let mut env = BTreeMap::new();
    if let Some(name) = options.text("env") {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if name.is_empty() || !name.bytes().all(good) || name.as_bytes()[0].is_ascii_digit() {
            return Err("'env' is the name of a variable".to_owned());
        }
        let key = dummy("bivouac-placeholder-", LOWER, 24)?;
        matcher.headers = with_header(&header, TextMatch::Exact(format!("{scheme}{key}")));
        env.insert(name.to_owned(), key);
    }
    let value = format!("{scheme}${{secret:{secret}}}");
    let rules = vec![Wanted { host, port, matcher, value, action: sets(&header) }];
    Ok(Preset { rules, env })
}
