//! First files that are fetched: a git repository with its submodules, a tar (plain, gzip, xz, zstd).
//!
//! Invariant: they are fetched inside of the sandbox, through its broker, before its first session counts
//! as running: a fetch that fails, or an engine that ends in the middle, leaves nothing. Meanwhile the
//! source's host is allowed, and a login for it is a rule of the broker; when the session runs, its own
//! policy is in force and the login was never inside. Called by `resolve` and `lifecycle`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bivouac_runtime::{ExecSpec, Handle, LogRecord, RuntimeError};
use bivouac_store::SessionRow;
use bivouac_types::command::Stream;
use bivouac_types::policy::{Action, Cidr, CustomPolicy, Domain, HeaderSet, NetworkPolicy, Rule};
use bivouac_types::sandbox::Source;
use bivouac_types::secret::Secret;
use bivouac_types::session::SessionStatus;

use crate::commands::environment;
use crate::egress::edit::{Target, everything};
use crate::error::{Error, ErrorKind};
use crate::inner::Inner;
use crate::resolve::unsealed;
use bivouac_types::name::Namespace;

/// How long a fetch may take, ms.
const TIMEOUT_MS: u64 = 10 * 60_000;
/// How often a fetch looks whether somebody wants the sandbox stopped.
const LOOK: Duration = Duration::from_secs(1);
/// How much of what the tool said is told.
const TOLD: usize = 600;

/// `$1` the URL, `$2` the depth or nothing, `$3` the revision or nothing. A commit that the server does
/// not hand out by its id is looked for in all that it has. Submodules come along, those of the same host
/// also where they are written as SSH addresses: the login is for that host alone. Pointers of LFS stay
/// pointers.
const GIT: &str = r#"set -e
depth=${2:+--depth=$2}
if [ -z "$3" ]; then
  git clone --quiet $depth -- "$1" .
else
  git init --quiet .
  git remote add origin "$1"
  if git fetch --quiet $depth origin "$3" 2>/dev/null; then
    git checkout --quiet FETCH_HEAD
  else
    git fetch --quiet origin '+refs/heads/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*'
    git checkout --quiet "$3" --
  fi
fi
[ -e .gitmodules ] || exit 0
rest=${1#*://}
host=${rest%%/*}
base=${1%%://*}://$host/
git -c "url.$base.insteadOf=git@$host:" -c "url.$base.insteadOf=ssh://git@$host/" \
  submodule --quiet update --init --recursive
"#;
/// `$1` the URL. What a file is packed with, tar finds out by looking at it.
const TARBALL: &str = r#"set -e
file=$(mktemp)
trap 'rm -f "$file"' EXIT
curl --fail --silent --show-error --location --output "$file" -- "$1"
tar --extract --file "$file"
"#;
/// How git is to behave: it asks nobody, leaves large files where they are, and goes nowhere but to the web.
const GIT_ENV: [(&str, &str); 3] = [
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_LFS_SKIP_SMUDGE", "1"),
    ("GIT_ALLOW_PROTOCOL", "http:https"),
];

/// What is to be fetched, and under which policy.
#[derive(Debug, Clone)]
pub(crate) struct Fetch {
    source: Source,
    /// In force while it is fetched.
    pub(crate) policy: NetworkPolicy,
}

/// Host and port of a URL that was checked to be `http://` or `https://`.
fn target(url: &str) -> Result<(Target, bool), Error> {
    let wrong = |why: String| Error::invalid(format!("Invalid source.url: {why}"));
    let plain = url.starts_with("http://");
    let authority = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = authority.split(['/', '?', '#']).next().unwrap_or("");
    if let Ok(at) = authority.parse::<SocketAddr>() {
        let range = Cidr::parse(&at.ip().to_string()).map_err(wrong)?;
        return Ok((Target::Range(range), plain));
    }
    Target::parse(authority).map(|target| (target, plain)).map_err(wrong)
}

/// The policy under which a source is fetched: its host is allowed besides.
fn open_for(
    policy: &NetworkPolicy,
    target: Target,
    plain: bool,
    login: Option<Rule>,
) -> Result<NetworkPolicy, Error> {
    let mut open = match policy {
        NetworkPolicy::AllowAll if login.is_none() => return Ok(NetworkPolicy::AllowAll),
        NetworkPolicy::AllowAll => everything()?,
        NetworkPolicy::DenyAll => CustomPolicy::default(),
        NetworkPolicy::Custom(custom) => custom.clone(),
    };
    open.plain_http |= plain;
    let (host, port) = match target {
        Target::Range(range) => {
            open.allow_cidrs.push(range);
            return Ok(NetworkPolicy::Custom(open));
        }
        Target::Host(host, port) => (host, port.filter(|port| *port != 443 && *port != 80)),
    };
    let known = open.domains.iter_mut().find(|known| known.host == host && known.port == port);
    match known {
        Some(known) => known.rules.splice(0..0, login).for_each(drop),
        None => open.domains.push(Domain { host, port, rules: login.into_iter().collect() }),
    }
    Ok(NetworkPolicy::Custom(open))
}

impl Inner {
    /// What a create has to fetch, checked; the login is sealed.
    pub(crate) async fn plan_fetch(
        &self,
        ns: &Namespace,
        policy: &NetworkPolicy,
        source: Source,
        login: Option<Secret>,
    ) -> Result<Option<Fetch>, Error> {
        let (Source::Git { url, .. } | Source::Tarball { url }) = &source else { return Ok(None) };
        let (target, plain) = target(url)?;
        let Some(login) = login else {
            let policy = open_for(policy, target, plain, None)?;
            return Ok(Some(Fetch { source, policy }));
        };
        if plain || matches!(target, Target::Range(_)) {
            let why = "a login needs an https:// URL with a host name";
            return Err(Error::invalid(format!("Invalid source.password: {why}")));
        }
        let value = self.ids.value(self.now())?;
        let set = HeaderSet {
            name: "authorization".to_owned(),
            value: value.clone(),
            secrets: Vec::new(),
        };
        let mut rule = Rule::new(None, Action::Transform { headers: vec![set] });
        rule.credential = Some("source".to_owned());
        let mut draft = unsealed(open_for(policy, target, plain, Some(rule))?);
        draft.values.insert(value, login);
        let policy = self.keep_values(ns, draft).await?;
        Ok(Some(Fetch { source, policy }))
    }

    /// Fetches into the working folder of a session that is launched and does not count as running yet.
    pub(crate) async fn fetch(
        &self,
        row: &SessionRow,
        handle: &Arc<dyn Handle>,
        fetch: &Fetch,
    ) -> Result<(), Error> {
        let session = &row.session;
        let (what, url, argv) = match &fetch.source {
            Source::Git { url, depth, revision } => {
                let depth = depth.map(|depth| depth.to_string()).unwrap_or_default();
                let revision = revision.clone().unwrap_or_default();
                ("git", url, vec![GIT.to_owned(), "source".into(), url.clone(), depth, revision])
            }
            Source::Tarball { url } => {
                ("tarball", url, vec![TARBALL.to_owned(), "source".into(), url.clone()])
            }
            Source::Snapshot { .. } => return Ok(()),
        };
        let path = bivouac_types::image::path(&session.image, &session.runtime);
        let image = self.image_config(&session.image).await;
        let mut env =
            environment(&image, &path, &session.env, &std::collections::BTreeMap::new(), false);
        env.extend(GIT_ENV.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let spec = ExecSpec {
            command: self.ids.command(self.now())?,
            argv: ["sh", "-c"].into_iter().map(str::to_owned).chain(argv).collect(),
            env,
            cwd: session.cwd.clone(),
            root: false,
            timeout_ms: Some(TIMEOUT_MS),
            attach_stdin: false,
            tty: None,
            request: crate::request::current(),
        };
        let failed = |why: &str| {
            let message = format!("The {what} source {url} could not be fetched: {why}");
            Error::new(ErrorKind::Invalid, "source_unavailable", message)
        };
        match handle.exec(&spec).await {
            Ok(()) => {}
            Err(error @ RuntimeError::Exec { .. }) => {
                return Err(failed("the image has no shell").because(error));
            }
            Err(error) => return Err(error.into()),
        }
        let Some(mut progress) = handle.progress(&spec.command) else {
            return Err(failed("the session is gone"));
        };
        let mut look = tokio::time::interval(LOOK);
        let (end, log_bytes) = loop {
            let ended = async {
                let seen = progress.wait_for(|seen| seen.end.is_some()).await.ok()?;
                Some((seen.end.clone(), seen.log_bytes))
            };
            tokio::select! {
                seen = ended => match seen {
                    Some(seen) => break seen,
                    None => return Err(failed("the session is gone")),
                },
                _ = look.tick() => {
                    let now = self.known_session(&session.id).await?.session;
                    if now.status != SessionStatus::Pending {
                        // The launch sees that as well, and ends the session in order.
                        return Ok(());
                    }
                }
            }
        };
        match end.and_then(|end| end.exit_code) {
            Some(0) => Ok(()),
            Some(127) => Err(failed("the image has not the program for it (git, curl)")),
            _ => {
                let read = self.runtime.read_log(&session.id, &spec.command, 0, log_bytes).await;
                Err(failed(&last_words(&read.map(|(records, _)| records).unwrap_or_default())))
            }
        }
    }
}

/// The end of what a program wrote on stderr, on one line.
fn last_words(records: &[LogRecord]) -> String {
    let mut said = Vec::new();
    for record in records {
        if let LogRecord::Data { stream: Stream::Stderr, bytes } = record {
            said.extend_from_slice(bytes);
        }
    }
    let text = String::from_utf8_lossy(&said);
    let words: Vec<&str> = text.split_whitespace().collect();
    let line: String = words.join(" ").chars().filter(|c| !c.is_control()).collect();
    let from = line.char_indices().rev().nth(TOLD).map_or(0, |(at, _)| at);
    match &line[from..] {
        "" => "it said nothing".to_owned(),
        end => end.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use bivouac_types::policy::HostPattern;

    use super::*;

    fn open(policy: &NetworkPolicy, url: &str) -> NetworkPolicy {
        let (target, plain) = target(url).unwrap();
        open_for(policy, target, plain, None).unwrap()
    }

    #[test]
    fn the_source_s_host_is_allowed_besides() {
        assert_eq!(open(&NetworkPolicy::AllowAll, "https://a.test/x"), NetworkPolicy::AllowAll);
        let shown = |url: &str| open(&NetworkPolicy::DenyAll, url).request_form().to_string();
        assert_eq!(shown("https://a.test/x?y"), r#"{"allow":["a.test"]}"#);
        assert_eq!(shown("https://a.test:8443/x"), r#"{"allow":["a.test:8443"]}"#);
        assert_eq!(shown("http://a.test"), r#"{"allow":["a.test"],"plainHttp":true}"#);
        assert_eq!(
            shown("https://192.0.2.1:8443/x"),
            r#"{"allow":[],"subnets":{"allow":["192.0.2.1/32"]}}"#
        );
        assert!(target("https:///x").is_err());
    }

    #[test]
    fn a_login_comes_before_the_host_s_own_rules() {
        let forward = || Rule::new(None, Action::Forward { url: "https://p.test".to_owned() });
        let host = HostPattern::parse("a.test").unwrap();
        let domains = vec![Domain { host, port: None, rules: vec![forward()] }];
        let policy = NetworkPolicy::Custom(CustomPolicy { domains, ..CustomPolicy::default() });
        let (target, plain) = target("https://a.test/x").unwrap();
        let mut login = forward();
        login.credential = Some("source".to_owned());
        let NetworkPolicy::Custom(open) = open_for(&policy, target, plain, Some(login)).unwrap()
        else {
            panic!("not custom")
        };
        let names: Vec<_> = open.domains[0].rules.iter().map(|r| r.credential.as_deref()).collect();
        assert_eq!(names, [Some("source"), None]);
    }

    #[test]
    fn only_the_end_of_a_long_complaint_is_told() {
        let data = |text: &str| LogRecord::Data {
            stream: Stream::Stderr,
            bytes: bytes::Bytes::copy_from_slice(text.as_bytes()),
        };
        assert_eq!(last_words(&[data("fatal:\n"), data("é no")]), "fatal: é no");
        assert_eq!(last_words(&[]), "it said nothing");
        let long = last_words(&[data(&"é".repeat(3 * TOLD))]);
        assert!(long.chars().count() <= TOLD + 1);
    }
}
