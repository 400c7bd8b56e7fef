//! The strict parser of policies that clients send: the request form of
//! reference/vercel-api.md §2.10 and the older form of its §2.12.
//!
//! Invariant: an error names the field and never repeats a header value or a body; the value of a
//! `transform` header leaves this module only as a [`Secret`] beside the policy.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value};

use super::{
    Action, AwsSign, Cidr, CustomPolicy, Domain, Draft, EntryMatch, HeaderSet, HostPattern,
    MAX_CIDRS, MAX_DOMAINS, MAX_REGEX, MAX_RESPONSE_BODY, MAX_RULE_ENTRIES, MAX_RULES, MAX_TEXT,
    Match, NetworkPolicy, Response, Rule, TextMatch,
};
use crate::id::ValueId;
use crate::name::Invalid;
use crate::secret::{self, Part, Secret};

/// Headers that frame a message: neither rules nor ready answers may set them.
const FRAMING_HEADERS: [&str; 3] = ["connection", "content-length", "transfer-encoding"];
/// Longest label, bytes.
const MAX_LABEL: usize = 256;
/// Statuses that have no body.
const BODYLESS: [u16; 3] = [204, 205, 304];

impl NetworkPolicy {
    /// Reads what a client sent. `field` is how errors call it, for example `networkPolicy`; `mint`
    /// makes the ids of header values.
    ///
    /// # Errors
    /// [`Invalid`] with the path of the field and what is accepted there.
    pub fn parse(
        field: &str,
        value: &Value,
        mint: &mut dyn FnMut() -> ValueId,
    ) -> Result<Draft, Invalid> {
        let values = Values { mint: RefCell::new(mint), taken: RefCell::default() };
        let policy = Self::read(field, value, &values)?;
        Ok(Draft { policy, values: values.taken.into_inner() })
    }

    fn read(field: &str, value: &Value, values: &Values<'_>) -> Result<Self, Invalid> {
        let at = At { field: field.to_owned(), value };
        let object = at.object()?;
        let Some(mode) = object.get("mode") else {
            return Ok(Self::Custom(request_form(&at, values)?));
        };
        match mode.as_str() {
            Some("allow-all") => at.only(&["mode"]).map(|()| Self::AllowAll),
            Some("deny-all") => at.only(&["mode"]).map(|()| Self::DenyAll),
            Some("custom") if REQUEST_FIELDS.iter().any(|name| object.contains_key(*name)) => {
                Ok(Self::Custom(request_form(&at, values)?))
            }
            Some("custom") => Ok(Self::Custom(older_form(&at, values)?)),
            _ => Err(at.child("mode", mode).fail("must be 'allow-all', 'deny-all' or 'custom'")),
        }
    }
}

/// Fields that only the request form has; `plainHttp` and `dns` are additions of ours.
const REQUEST_FIELDS: [&str; 4] = ["allow", "subnets", "plainHttp", "dns"];

/// `{allow, subnets}`.
fn request_form(at: &At<'_>, values: &Values<'_>) -> Result<CustomPolicy, Invalid> {
    at.only(&["mode", "allow", "subnets", "plainHttp", "dns"])?;
    let mut domains = Domains::default();
    if let Some(allow) = at.get("allow")? {
        match allow.value {
            Value::Array(_) => {
                for item in allow.items(MAX_DOMAINS)? {
                    domains.add_once(item.entry()?);
                }
            }
            Value::Object(record) => {
                allow.at_most(record.len(), MAX_DOMAINS)?;
                for (key, rules) in record {
                    let item = allow.quoted(key, rules);
                    let name = entry(key).map_err(|why| item.fail(&why))?;
                    let rules = item.items(MAX_RULES)?;
                    let rules = rules.iter().map(|r| rule(r, values)).collect::<Result<_, _>>()?;
                    domains.add_new(name, rules).map_err(|why| item.fail(&why))?;
                }
            }
            _ => return Err(allow.fail("must be a list of hosts or a map of hosts to rules")),
        }
    }
    let (mut allow_cidrs, mut deny_cidrs) = (Vec::new(), Vec::new());
    if let Some(subnets) = at.get("subnets")? {
        subnets.only(&["allow", "deny"])?;
        allow_cidrs = subnets.cidrs("allow")?;
        deny_cidrs = subnets.cidrs("deny")?;
    }
    let plain_http = match at.get("plainHttp")? {
        None => false,
        Some(flag) => flag.value.as_bool().ok_or_else(|| flag.fail("must be true or false"))?,
    };
    let open_dns = match at.get("dns")? {
        None => false,
        Some(word) => match word.value.as_str() {
            Some("open") => true,
            Some("filtered") => false,
            _ => return Err(word.fail("must be 'filtered' or 'open'")),
        },
    };
    Ok(CustomPolicy { domains: domains.list, allow_cidrs, deny_cidrs, plain_http, open_dns })
}

/// `HOST` or `HOST:PORT`; the port is an addition of ours.
type Entry = (HostPattern, Option<u16>);

fn entry(text: &str) -> Result<Entry, String> {
    let split = text.rsplit_once(':').filter(|(host, port)| {
        // More colons are an IPv6 address, other text is a URL: the host's own error says more.
        !host.contains(':') && port.bytes().all(|b| b.is_ascii_digit())
    });
    let Some((host, digits)) = split else { return Ok((HostPattern::parse(text)?, None)) };
    let port = digits.parse().ok().filter(|port| *port > 0 && !digits.starts_with('0'));
    let port = port.ok_or("has a port that is not 1 to 65535")?;
    Ok((HostPattern::parse(host)?, Some(port)))
}

/// `{mode: "custom", allowedDomains, injectionRules, allowedCIDRs, deniedCIDRs}`, as `/v1` clients
/// send it. An injection rule counts for the domain that it names, which it also allows: that is
/// how those clients read a policy back.
fn older_form(at: &At<'_>, values: &Values<'_>) -> Result<CustomPolicy, Invalid> {
    at.only(&["mode", "allowedDomains", "injectionRules", "allowedCIDRs", "deniedCIDRs"])?;
    let mut domains = Domains::default();
    if let Some(list) = at.get("allowedDomains")? {
        for item in list.items(MAX_DOMAINS)? {
            domains.add_once(item.entry()?);
        }
    }
    if let Some(list) = at.get("injectionRules")? {
        for item in list.items(MAX_DOMAINS)? {
            item.only(&["domain", "headers", "match"])?;
            let name = item.required("domain")?.entry()?;
            let matcher = item.get("match")?.map(|m| matcher(&m)).transpose()?;
            let mut set = Headers::default();
            if let Some(headers) = item.get("headers")? {
                set.read(&headers, values)?;
            }
            let action = Action::Transform { headers: set.0 };
            let domain = domains.add_once(name);
            if domain.rules.len() >= MAX_RULES {
                return Err(item.fail(&format!("at most {MAX_RULES} rules for one domain")));
            }
            domain.rules.push(Rule::new(matcher, action));
        }
    }
    Ok(CustomPolicy {
        domains: domains.list,
        allow_cidrs: at.cidrs("allowedCIDRs")?,
        deny_cidrs: at.cidrs("deniedCIDRs")?,
        ..CustomPolicy::default()
    })
}

/// One rule: an optional `match` and exactly one action. `sign`, `credential`, `actor` and `expiresAt`
/// are additions of ours.
fn rule(at: &At<'_>, values: &Values<'_>) -> Result<Rule, Invalid> {
    const ACTIONS: [&str; 4] = ["transform", "forwardURL", "response", "sign"];
    at.only(&[
        "match",
        "credential",
        "actor",
        "expiresAt",
        ACTIONS[0],
        ACTIONS[1],
        ACTIONS[2],
        ACTIONS[3],
    ])?;
    let matcher = at.get("match")?.map(|m| matcher(&m)).transpose()?;
    let mut given = Vec::new();
    for name in ACTIONS {
        given.extend(at.get(name)?.map(|item| (name, item)));
    }
    let [(name, item)] = given.as_slice() else {
        return Err(
            at.fail("needs exactly one of 'transform', 'forwardURL', 'response' and 'sign'")
        );
    };
    let action = match *name {
        "transform" => {
            let mut set = Headers::default();
            for item in item.items(MAX_RULE_ENTRIES)? {
                item.only(&["headers"])?;
                if let Some(headers) = item.get("headers")? {
                    set.read(&headers, values)?;
                }
            }
            Action::Transform { headers: set.0 }
        }
        "forwardURL" => Action::Forward { url: forward_url(item)? },
        "response" => Action::Respond(response(item)?),
        _ => Action::Sign(sign(item, values)?),
    };
    let expires_at = match at.get("expiresAt")? {
        None => None,
        Some(end) => Some(
            end.value
                .as_u64()
                .ok_or_else(|| end.fail("must be a time in milliseconds since 1970"))?,
        ),
    };
    let credential = at.label("credential")?;
    Ok(Rule { matcher, action, credential, actor: at.label("actor")?, expires_at })
}

/// `{aws: {…}}`: the keys as one JSON text that a secret holds, or one by one.
fn sign(at: &At<'_>, values: &Values<'_>) -> Result<AwsSign, Invalid> {
    const KEYS: [&str; 3] = ["accessKeyId", "secretAccessKey", "sessionToken"];
    at.only(&["aws"])?;
    let aws = at.required("aws")?;
    aws.only(&["credentials", "service", "region", KEYS[0], KEYS[1], KEYS[2]])?;
    let mut secrets = Vec::new();
    let text = match aws.get("credentials")? {
        Some(whole) => {
            if let Some(name) =
                KEYS.iter().find(|name| aws.object().is_ok_and(|o| o.contains_key(**name)))
            {
                return Err(aws
                    .child(name, whole.value)
                    .fail("is not allowed beside 'credentials'"));
            }
            whole.secret_text(&mut secrets)?.to_owned()
        }
        None => {
            let mut keys = Map::new();
            for (i, name) in KEYS.iter().enumerate() {
                // A session token is there only for temporary keys.
                let item = if i < 2 { Some(aws.required(name)?) } else { aws.get(name)? };
                if let Some(item) = item {
                    keys.insert((*name).to_owned(), item.secret_text(&mut secrets)?.into());
                }
            }
            Value::Object(keys).to_string()
        }
    };
    let (service, region) = (aws.label("service")?, aws.label("region")?);
    Ok(AwsSign { value: values.take(&text), secrets, service, region })
}

fn matcher(at: &At<'_>) -> Result<Match, Invalid> {
    at.only(&["path", "method", "queryString", "headers"])?;
    let mut method = Vec::new();
    if let Some(list) = at.get("method")? {
        for item in list.items(MAX_RULE_ENTRIES)? {
            let text = item.text(MAX_TEXT)?;
            if !is_token(text) {
                return Err(item.fail("is not an HTTP method"));
            }
            method.push(text.to_owned());
        }
        if method.is_empty() {
            return Err(list.fail("must not be empty; leave it out to match every method"));
        }
    }
    Ok(Match {
        path: at.get("path")?.map(|p| text_match(&p)).transpose()?,
        method,
        query_string: entries(at, "queryString")?,
        headers: entries(at, "headers")?,
    })
}

fn entries(at: &At<'_>, name: &str) -> Result<Vec<EntryMatch>, Invalid> {
    let Some(list) = at.get(name)? else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for item in list.items(MAX_RULE_ENTRIES)? {
        item.only(&["key", "value"])?;
        let entry = EntryMatch {
            key: item.get("key")?.map(|m| text_match(&m)).transpose()?,
            value: item.get("value")?.map(|m| text_match(&m)).transpose()?,
        };
        if entry.key.is_none() && entry.value.is_none() {
            return Err(item.fail("needs 'key', 'value' or both"));
        }
        out.push(entry);
    }
    Ok(out)
}

fn text_match(at: &At<'_>) -> Result<TextMatch, Invalid> {
    at.only(&["exact", "startsWith", "regex"])?;
    match (at.get("exact")?, at.get("startsWith")?, at.get("regex")?) {
        (Some(text), None, None) => Ok(TextMatch::Exact(text.text(MAX_TEXT)?.to_owned())),
        (None, Some(text), None) => Ok(TextMatch::StartsWith(text.text(MAX_TEXT)?.to_owned())),
        (None, None, Some(text)) => Ok(TextMatch::Regex(text.text(MAX_REGEX)?.to_owned())),
        _ => Err(at.fail("needs exactly one of 'exact', 'startsWith' and 'regex'")),
    }
}

/// `https`, a host, no user, no query, no fragment.
fn forward_url(at: &At<'_>) -> Result<String, Invalid> {
    let text = at.text(MAX_TEXT)?;
    let Some(rest) = text.strip_prefix("https://") else {
        return Err(at.fail("must be an https:// URL"));
    };
    if rest.contains(['?', '#']) {
        return Err(at.fail("must not have a query or a fragment"));
    }
    if rest.bytes().any(|b| !b.is_ascii_graphic() || b == b'\\') {
        return Err(at.fail("must be an ASCII URL without spaces"));
    }
    let authority = rest.split('/').next().unwrap_or("");
    if authority.contains('@') {
        return Err(at.fail("must not hold a user name or password"));
    }
    let (host, port) = split_port(authority);
    if port.is_some_and(|p| p.parse::<u16>().map_or(true, |n| n == 0)) {
        return Err(at.fail("has a port that is not 1 to 65535"));
    }
    let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let address = match bracketed {
        Some(inside) => inside.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.parse::<std::net::Ipv4Addr>().is_ok(),
    };
    let named = !host.contains('*') && HostPattern::parse(host).is_ok();
    if address || named { Ok(text.to_owned()) } else { Err(at.fail("has no valid host")) }
}

fn split_port(authority: &str) -> (&str, Option<&str>) {
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (authority, None),
    }
}

fn response(at: &At<'_>) -> Result<Response, Invalid> {
    at.only(&["statusCode", "headers", "body", "contentType"])?;
    let status = at.required("statusCode")?;
    let number = status.value.as_u64().filter(|n| (200..=599).contains(n));
    let Some(status_code) = number.and_then(|n| u16::try_from(n).ok()) else {
        return Err(status.fail("must be a whole number from 200 to 599"));
    };
    let mut headers = BTreeMap::new();
    if let Some(map) = at.get("headers")? {
        for (name, value) in header_map(&map)? {
            headers.insert(name.to_owned(), value.to_owned());
        }
    }
    let body = at.get("body")?;
    let content_type = at.get("contentType")?;
    if let Some(body) = &body {
        body.text(MAX_RESPONSE_BODY)?;
        if content_type.is_none() {
            return Err(at.fail("needs 'contentType' because it has a 'body'"));
        }
        if BODYLESS.contains(&status_code) {
            return Err(body.fail("is not allowed with status 204, 205 or 304"));
        }
    }
    if let Some(content_type) = &content_type
        && !is_header_value(content_type.text(MAX_TEXT)?)
    {
        return Err(content_type.fail("holds a character that no header may hold"));
    }
    let owned = |at: At<'_>| at.value.as_str().map(ToOwned::to_owned);
    Ok(Response {
        status_code,
        headers,
        body: body.and_then(owned),
        content_type: content_type.and_then(owned),
    })
}

/// Header values that were taken out of the request.
struct Values<'a> {
    mint: RefCell<&'a mut dyn FnMut() -> ValueId>,
    taken: RefCell<BTreeMap<ValueId, Secret>>,
}

impl Values<'_> {
    fn take(&self, text: &str) -> ValueId {
        let id = (self.mint.borrow_mut())();
        self.taken.borrow_mut().insert(id.clone(), Secret::new(text.to_owned()));
        id
    }

    fn forget(&self, id: &ValueId) {
        self.taken.borrow_mut().remove(id);
    }
}

/// Headers that one rule sets, each once: of two items that set the same one the later counts.
#[derive(Default)]
struct Headers(Vec<HeaderSet>);

impl Headers {
    /// Checks a map of headers and takes its names and values.
    fn read(&mut self, at: &At<'_>, values: &Values<'_>) -> Result<(), Invalid> {
        for (name, text) in header_map(at)? {
            let item = at.quoted(name, at.value);
            let mut secrets = Vec::new();
            named_secrets(text, &mut secrets).map_err(|why| item.fail(why))?;
            let set = HeaderSet { name: name.to_owned(), value: values.take(text), secrets };
            match self.0.iter_mut().find(|old| old.name.eq_ignore_ascii_case(name)) {
                Some(old) => {
                    values.forget(&old.value);
                    // The spelling that came first stays: it is what clients read back.
                    *old = HeaderSet { name: std::mem::take(&mut old.name), ..set };
                }
                None => self.0.push(set),
            }
        }
        Ok(())
    }
}

/// Checks a map of headers; answers names and values.
fn header_map<'a>(at: &At<'a>) -> Result<Vec<(&'a str, &'a str)>, Invalid> {
    let map = at.object()?;
    at.at_most(map.len(), MAX_RULE_ENTRIES)?;
    let (mut seen, mut out) = (BTreeSet::new(), Vec::new());
    for (name, value) in map {
        let item = at.quoted(name, value);
        let lower = name.to_ascii_lowercase();
        if !is_token(name) {
            return Err(item.fail("is not a header name"));
        }
        if FRAMING_HEADERS.contains(&lower.as_str()) {
            return Err(item.fail("frames the message and cannot be set"));
        }
        if !seen.insert(lower) {
            return Err(item.fail("is there twice; header names are not case-sensitive"));
        }
        let text = item.text(MAX_TEXT)?;
        if !is_header_value(text) {
            return Err(item.fail("holds a character that no header may hold"));
        }
        out.push((name.as_str(), text));
    }
    Ok(out)
}

/// Adds the secrets that a value names, each once.
fn named_secrets(text: &str, secrets: &mut Vec<String>) -> Result<(), &'static str> {
    for part in secret::parts(text)? {
        if let Part::Named(name) = part
            && !secrets.iter().any(|known| known == name)
        {
            secrets.push(name.to_owned());
        }
    }
    Ok(())
}

/// Allowed domains, each once.
#[derive(Default)]
struct Domains {
    list: Vec<Domain>,
    places: HashMap<Entry, usize>,
}

impl Domains {
    fn add_once(&mut self, entry: Entry) -> &mut Domain {
        let place = *self.places.entry(entry).or_insert_with_key(|(host, port)| {
            self.list.push(Domain { host: host.clone(), port: *port, rules: Vec::new() });
            self.list.len() - 1
        });
        &mut self.list[place]
    }

    /// Two keys of a record that mean the same name would leave open whose rules count.
    fn add_new(&mut self, entry: Entry, rules: Vec<Rule>) -> Result<(), String> {
        if self.places.contains_key(&entry) {
            return Err(format!("names {} a second time", entry.0));
        }
        self.add_once(entry).rules = rules;
        Ok(())
    }
}

/// A token of RFC 9110: header names and methods.
fn is_token(text: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.len() <= 256 && text.bytes().all(good)
}

fn is_header_value(text: &str) -> bool {
    text.chars().all(|c| c == '\t' || !c.is_control())
}

/// A value and the path that leads to it.
struct At<'a> {
    field: String,
    value: &'a Value,
}

impl<'a> At<'a> {
    fn fail(&self, reason: &str) -> Invalid {
        Invalid::new(self.field.clone(), reason)
    }

    fn child(&self, name: &str, value: &'a Value) -> Self {
        Self { field: format!("{}.{name}", self.field), value }
    }

    /// A child whose name the client chose: quoted and clipped.
    fn quoted(&self, name: &str, value: &'a Value) -> Self {
        let name: String = name.chars().take(80).collect();
        Self { field: format!("{}[\"{}\"]", self.field, name.escape_debug()), value }
    }

    fn object(&self) -> Result<&'a Map<String, Value>, Invalid> {
        self.value.as_object().ok_or_else(|| self.fail("must be an object"))
    }

    /// Refuses fields that this version does not know: a rule that is not understood must not
    /// look as if it were in force.
    fn only(&self, known: &[&str]) -> Result<(), Invalid> {
        let unknown = self.object()?.iter().find(|(name, _)| !known.contains(&name.as_str()));
        match unknown {
            Some((name, value)) => Err(self.quoted(name, value).fail("is not a known field")),
            None => Ok(()),
        }
    }

    fn get(&self, name: &str) -> Result<Option<Self>, Invalid> {
        Ok(self.object()?.get(name).map(|value| self.child(name, value)))
    }

    fn required(&self, name: &str) -> Result<Self, Invalid> {
        self.get(name)?.ok_or_else(|| self.child(name, &Value::Null).fail("is missing"))
    }

    fn at_most(&self, count: usize, most: usize) -> Result<(), Invalid> {
        if count > most {
            return Err(self.fail(&format!("at most {most} entries, got {count}")));
        }
        Ok(())
    }

    fn items(&self, most: usize) -> Result<Vec<Self>, Invalid> {
        let list = self.value.as_array().ok_or_else(|| self.fail("must be a list"))?;
        self.at_most(list.len(), most)?;
        let item = |(i, value)| Self { field: format!("{}[{i}]", self.field), value };
        Ok(list.iter().enumerate().map(item).collect())
    }

    fn text(&self, most: usize) -> Result<&'a str, Invalid> {
        let text = self.value.as_str().ok_or_else(|| self.fail("must be a text"))?;
        if text.len() > most {
            return Err(self.fail(&format!("must have at most {most} bytes, got {}", text.len())));
        }
        Ok(text)
    }

    fn entry(&self) -> Result<Entry, Invalid> {
        entry(self.text(MAX_TEXT)?).map_err(|why| self.fail(&why))
    }

    /// An optional short text that people read: a name, an id.
    fn label(&self, name: &str) -> Result<Option<String>, Invalid> {
        let Some(item) = self.get(name)? else { return Ok(None) };
        let text = item.text(MAX_LABEL)?;
        if text.is_empty() || text.chars().any(char::is_control) {
            return Err(item.fail("must be a text without control characters"));
        }
        Ok(Some(text.to_owned()))
    }

    /// A text that may name secrets.
    fn secret_text(&self, secrets: &mut Vec<String>) -> Result<&'a str, Invalid> {
        let text = self.text(MAX_TEXT)?;
        named_secrets(text, secrets).map_err(|why| self.fail(why))?;
        Ok(text)
    }

    fn cidrs(&self, name: &str) -> Result<Vec<Cidr>, Invalid> {
        let Some(list) = self.get(name)? else { return Ok(Vec::new()) };
        let read = |item: &At<'_>| Cidr::parse(item.text(MAX_TEXT)?).map_err(|why| item.fail(&why));
        list.items(MAX_CIDRS)?.iter().map(read).collect()
    }
}
