//! Which requests a rule is for (reference/egress.md §1.4).
//!
//! Invariant: all given dimensions have to agree, methods are alternatives, and the key and the value
//! of an entry are found in the same header or query pair. Time is linear in the request, whatever the
//! expressions are.

use std::borrow::Cow;
use std::collections::HashMap;

use bivouac_types::policy::{EntryMatch, Match, TextMatch};
use regex::bytes::{Regex, RegexBuilder};

use super::PolicyError;

/// Most different regular expressions of one policy.
pub const MAX_REGEXES: usize = 500;
/// Largest compiled expression, bytes; what is larger is made of nested repetitions.
const REGEX_SIZE: usize = 128 << 10;
/// Cache of one running expression, bytes.
const REGEX_CACHE: usize = 128 << 10;

/// What rules see of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestView<'a> {
    /// The method, case-sensitive.
    pub method: &'a str,
    /// The canonical path ([`crate::canonical::path`]), without the query.
    pub path: &'a str,
    /// The query, without its question mark.
    pub query: Option<&'a str>,
    /// The headers as the guest sent them.
    pub headers: &'a http::HeaderMap,
}

/// A compiled [`Match`].
#[derive(Debug)]
pub(super) struct Matcher {
    path: Option<Text>,
    method: Vec<String>,
    query: Vec<Entry>,
    headers: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: Option<Text>,
    value: Option<Text>,
}

#[derive(Debug)]
enum Text {
    Exact(Box<[u8]>),
    StartsWith(Box<[u8]>),
    Regex(Regex),
}

impl Text {
    fn fits(&self, text: &[u8]) -> bool {
        match self {
            Self::Exact(want) => **want == *text,
            Self::StartsWith(want) => text.starts_with(want),
            Self::Regex(regex) => regex.is_match(text),
        }
    }
}

impl Entry {
    fn fits(&self, key: &[u8], value: &[u8]) -> bool {
        self.key.as_ref().is_none_or(|k| k.fits(key))
            && self.value.as_ref().is_none_or(|v| v.fits(value))
    }
}

impl Matcher {
    pub(super) fn looks_at_path(&self) -> bool {
        self.path.is_some()
    }

    pub(super) fn matches(&self, request: &RequestView<'_>) -> bool {
        (self.method.is_empty() || self.method.iter().any(|m| m == request.method))
            && self.path_fits(request.path)
            && self.headers_fit(request.headers)
            && self.query_fits(request.query)
    }

    pub(super) fn path_fits(&self, path: &str) -> bool {
        self.path.as_ref().is_none_or(|p| p.fits(path.as_bytes()))
    }

    fn headers_fit(&self, headers: &http::HeaderMap) -> bool {
        self.headers.iter().all(|entry| {
            headers
                .iter()
                .any(|(name, value)| entry.fits(name.as_str().as_bytes(), value.as_bytes()))
        })
    }

    fn query_fits(&self, query: Option<&str>) -> bool {
        if self.query.is_empty() {
            return true;
        }
        let pairs: Vec<(Cow<'_, str>, Cow<'_, str>)> =
            form_urlencoded::parse(query.unwrap_or("").as_bytes()).collect();
        self.query
            .iter()
            .all(|entry| pairs.iter().any(|(k, v)| entry.fits(k.as_bytes(), v.as_bytes())))
    }
}

/// Compiles matchers; equal expressions once.
#[derive(Debug, Default)]
pub(super) struct Compiler {
    regexes: HashMap<(String, bool), Regex>,
}

/// How names are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    /// To the letter.
    Exact,
    /// Header names: any case is the same.
    Any,
}

impl Compiler {
    /// Fields of its errors are relative to the matcher: `path.regex`.
    pub(super) fn matcher(&mut self, matcher: &Match) -> Result<Matcher, PolicyError> {
        let path = matcher.path.as_ref().map(|p| self.text(p, Case::Exact, "path")).transpose()?;
        Ok(Matcher {
            path,
            method: matcher.method.clone(),
            query: self.entries(&matcher.query_string, Case::Exact, "queryString")?,
            headers: self.entries(&matcher.headers, Case::Any, "headers")?,
        })
    }

    fn entries(
        &mut self,
        list: &[EntryMatch],
        keys: Case,
        field: &str,
    ) -> Result<Vec<Entry>, PolicyError> {
        let mut half = |half: &Option<TextMatch>, case, field: String| {
            half.as_ref().map(|m| self.text(m, case, &field)).transpose()
        };
        let mut out = Vec::with_capacity(list.len());
        for (i, entry) in list.iter().enumerate() {
            out.push(Entry {
                key: half(&entry.key, keys, format!("{field}[{i}].key"))?,
                value: half(&entry.value, Case::Exact, format!("{field}[{i}].value"))?,
            });
        }
        Ok(out)
    }

    fn text(&mut self, text: &TextMatch, case: Case, field: &str) -> Result<Text, PolicyError> {
        let bytes = |text: &str| match case {
            Case::Exact => text.as_bytes().into(),
            Case::Any => text.to_ascii_lowercase().into_bytes().into(),
        };
        Ok(match text {
            TextMatch::Exact(text) => Text::Exact(bytes(text)),
            TextMatch::StartsWith(text) => Text::StartsWith(bytes(text)),
            TextMatch::Regex(pattern) => {
                Text::Regex(self.regex(pattern, case).map_err(|message| PolicyError {
                    field: Some(format!("{field}.regex")),
                    message,
                })?)
            }
        })
    }

    fn regex(&mut self, pattern: &str, case: Case) -> Result<Regex, String> {
        let key = (pattern.to_owned(), case == Case::Any);
        if let Some(known) = self.regexes.get(&key) {
            return Ok(known.clone());
        }
        if self.regexes.len() >= MAX_REGEXES {
            return Err(format!("is one too many: at most {MAX_REGEXES} different ones"));
        }
        let regex = RegexBuilder::new(&ascii_classes(pattern))
            .case_insensitive(case == Case::Any)
            .size_limit(REGEX_SIZE)
            .dfa_size_limit(REGEX_CACHE)
            .build()
            .map_err(|error| explain(&error))?;
        self.regexes.insert(key, regex.clone());
        Ok(regex)
    }
}

/// `\d`, `\w`, `\s`, `\b` mean ASCII, as in RE2, for which policies are written. What they stand for
/// may stand inside brackets as well.
fn ascii_classes(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some('s') => out.push_str("[\\t\\n\\f\\r ]"),
            Some('S') => out.push_str("[^\\t\\n\\f\\r ]"),
            Some('b') => out.push_str("(?-u:\\b)"),
            Some('B') => out.push_str("(?-u:\\B)"),
            Some(other) => out.extend(['\\', other]),
            None => out.push('\\'),
        }
    }
    out
}

fn explain(error: &regex::Error) -> String {
    match error {
        regex::Error::CompiledTooBig(limit) => {
            format!("is too large when it is compiled: at most {limit} bytes")
        }
        other => {
            // The library's text is a drawing of several lines; the last says what is wrong.
            let text = other.to_string();
            let last = text.lines().last().unwrap_or_default();
            format!("is not a regular expression: {}", last.trim_start_matches("error: "))
        }
    }
}
