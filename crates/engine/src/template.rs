//! Header values that name secrets: `Bearer ${secret:GH}`.
//!
//! Owns: the grammar. Invariant: a value in which a reference is misspelled is refused and never sent as it
//! stands; an error never repeats the value, only the names in it. Called by `secrets`.
//!
//! References: `${secret:NAME}`, and three that also write a secret in another way: `${base64:NAME}`,
//! `${basic:USER:NAME}` (the base64 of `USER:secret`, for `Authorization: Basic`) and `${aws:NAME}`
//! (credentials in any of the forms that AWS's tools print, as the JSON that signing takes).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_types::Millis;
use bivouac_types::secret::{self, Secret};
use serde::Deserialize;
use serde_json::json;

use crate::providers::rfc3339;

/// How a secret is written into a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Base64,
    Basic(String),
    Aws,
}

/// A piece of a value.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Part {
    Text(Secret),
    Secret(Form, String),
}

/// A value, taken apart.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Template(pub(crate) Vec<Part>);

/// Whether a text can name a secret. The error is a clause that follows "it" or "a value".
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    secret::check_name(name).map_err(str::to_owned)
}

impl Template {
    /// Takes a value apart. The error is a sentence without a subject.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((at, kind)) = next(rest) {
            if at > 0 {
                parts.push(Part::Text(Secret::new(rest[..at].to_owned())));
            }
            let inside = &rest[at + 2 + kind.len() + 1..];
            let Some((name, behind)) = inside.split_once('}') else {
                return Err(format!("has a '${{{kind}:' without its '}}'"));
            };
            let (form, name) = match kind {
                "secret" => (Form::Plain, name),
                "base64" => (Form::Base64, name),
                "aws" => (Form::Aws, name),
                _ => match name.rsplit_once(':') {
                    Some((user, name)) => (Form::Basic(user.to_owned()), name),
                    None => {
                        return Err("has a '${basic:' that is not ${basic:USER:NAME}".to_owned());
                    }
                },
            };
            check_name(name)?;
            parts.push(Part::Secret(form, name.to_owned()));
            rest = behind;
        }
        if !rest.is_empty() || parts.is_empty() {
            parts.push(Part::Text(Secret::new(rest.to_owned())));
        }
        Ok(Self(parts))
    }

    /// Names of the secrets, each once, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for part in &self.0 {
            if let Part::Secret(_, name) = part
                && !names.contains(name)
            {
                names.push(name.clone());
            }
        }
        names
    }
}

/// Where the next reference begins, and its kind.
fn next(text: &str) -> Option<(usize, &'static str)> {
    let found = |kind: &'static str| text.find(&format!("${{{kind}:")).map(|at| (at, kind));
    ["secret", "base64", "basic", "aws"].into_iter().filter_map(found).min()
}

impl Form {
    /// Writes a secret in this way; with the end of its life when the secret tells one.
    pub(crate) fn write(&self, secret: &Secret) -> Result<(Secret, Option<Millis>), String> {
        match self {
            Self::Plain => Ok((secret.clone(), None)),
            Self::Base64 => Ok((Secret::new(STANDARD.encode(secret.expose())), None)),
            Self::Basic(user) => {
                let pair = Secret::new(format!("{user}:{}", secret.expose()));
                Ok((Secret::new(STANDARD.encode(pair.expose())), None))
            }
            Self::Aws => aws(secret),
        }
    }
}

/// The JSON of credentials that AWS's own tools print, in one spelling.
fn aws(secret: &Secret) -> Result<(Secret, Option<Millis>), String> {
    #[derive(Deserialize)]
    struct Keys {
        #[serde(alias = "AccessKeyId", alias = "aws_access_key_id", rename = "accessKeyId")]
        id: String,
        #[serde(
            alias = "SecretAccessKey",
            alias = "aws_secret_access_key",
            rename = "secretAccessKey"
        )]
        key: String,
        #[serde(
            alias = "SessionToken",
            alias = "aws_session_token",
            alias = "Token",
            rename = "sessionToken",
            default
        )]
        token: Option<String>,
        #[serde(alias = "Expiration", rename = "expiration", default)]
        until: Option<String>,
    }
    #[derive(Deserialize)]
    struct Wrapped {
        #[serde(rename = "Credentials")]
        inner: Keys,
    }
    let text = secret.expose().trim();
    let read = serde_json::from_str::<Keys>(text)
        .or_else(|_| serde_json::from_str::<Wrapped>(text).map(|w| w.inner))
        .or_else(|_| serde_json::from_value(ini(text)));
    // Serde's own message could repeat a value.
    let keys = read.map_err(|_| {
        "is no set of AWS credentials: JSON with accessKeyId, secretAccessKey and perhaps sessionToken, \
         or lines aws_access_key_id = … and aws_secret_access_key = …"
            .to_owned()
    })?;
    let mut out = json!({ "accessKeyId": keys.id, "secretAccessKey": keys.key });
    if let Some(token) = keys.token.filter(|token| !token.is_empty()) {
        out["sessionToken"] = token.into();
    }
    let until = keys.until.as_deref().and_then(rfc3339);
    Ok((Secret::new(out.to_string()), until))
}

/// `name = value` lines, of which the first of a name counts.
fn ini(text: &str) -> serde_json::Value {
    let mut map = serde_json::Map::new();
    for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
        map.entry(name.trim().to_owned()).or_insert_with(|| value.trim().into());
    }
    map.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(text: &str) -> Result<Vec<String>, String> {
        let parts = Template::parse(text)?.0;
        Ok(parts
            .iter()
            .map(|part| match part {
                Part::Text(text) => format!("={}", text.expose()),
                Part::Secret(form, name) => format!("{form:?}:{name}"),
            })
            .collect())
    }

    #[test]
    fn references_are_found() {
        assert_eq!(shape("").unwrap(), ["="]);
        assert_eq!(shape("plain ${x} $secret:A").unwrap(), ["=plain ${x} $secret:A"]);
        assert_eq!(shape("Bearer ${secret:GH}").unwrap(), ["=Bearer ", "Plain:GH"]);
        assert_eq!(shape("${secret:A}${base64:B}!").unwrap(), ["Plain:A", "Base64:B", "=!"]);
        assert_eq!(
            shape("Basic ${basic:x-access-token:GH}").unwrap(),
            ["=Basic ", "Basic(\"x-access-token\"):GH"]
        );
        assert_eq!(
            Template::parse("${secret:A} ${aws:B} ${secret:A}").unwrap().names(),
            ["A", "B"]
        );
    }

    #[test]
    fn misspelled_references_are_refused_without_the_value() {
        for bad in [
            "hunter2 ${secret:A",
            "hunter2 ${secret:}",
            "hunter2 ${secret:a b}",
            "hunter2 ${aws:a.b}",
            "hunter2 ${basic:A}",
            "hunter2 ${secret:${secret:A}}",
        ] {
            let why = shape(bad).expect_err(bad);
            assert!(!why.contains("hunter2"), "{why}");
        }
    }

    #[test]
    fn secrets_are_written_in_their_form() {
        let write = |form: Form, text: &str| form.write(&Secret::new(text.to_owned()));
        assert_eq!(write(Form::Basic("u".to_owned()), "p").unwrap().0.expose(), "dTpw");
        assert_eq!(write(Form::Base64, "u:p").unwrap().0.expose(), "dTpw");
        for text in [
            r#"{"accessKeyId":"A","secretAccessKey":"k/="}"#,
            r#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"k/=","SessionToken":""}"#,
            r#"{"Credentials":{"AccessKeyId":"A","SecretAccessKey":"k/="}}"#,
            "[default]\naws_access_key_id = A\naws_secret_access_key=k/=\n",
        ] {
            let out = write(Form::Aws, text).unwrap().0;
            let out: serde_json::Value = serde_json::from_str(out.expose()).unwrap();
            assert_eq!(out, json!({"accessKeyId": "A", "secretAccessKey": "k/="}), "{text}");
        }
        let text = r#"{"AccessKeyId":"A","SecretAccessKey":"K","SessionToken":"T","Expiration":"1970-01-01T00:00:01Z"}"#;
        let (out, until) = write(Form::Aws, text).unwrap();
        assert!(out.expose().contains("\"sessionToken\":\"T\"") && until == Some(1000));
        let why = write(Form::Aws, "hunter2").unwrap_err();
        assert!(!why.contains("hunter2"), "{why}");
    }

    proptest::proptest! {
        #[test]
        fn taking_apart_loses_nothing(text in "[a-z${}:]{0,24}|.{0,24}") {
            if let Ok(template) = Template::parse(&text) {
                let again: String = template.0.iter().map(|part| match part {
                    Part::Text(text) => text.expose().to_owned(),
                    Part::Secret(Form::Plain, name) => format!("${{secret:{name}}}"),
                    Part::Secret(Form::Base64, name) => format!("${{base64:{name}}}"),
                    Part::Secret(Form::Basic(user), name) => format!("${{basic:{user}:{name}}}"),
                    Part::Secret(Form::Aws, name) => format!("${{aws:{name}}}"),
                }).collect();
                proptest::prop_assert_eq!(again, text);
            }
        }
    }
}
