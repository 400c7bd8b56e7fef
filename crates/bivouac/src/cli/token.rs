//! `bivouac token`: principals, and who used what.
//!
//! Invariant: a token is printed once, on standard output, by the call that makes it. Called by `cli::main`.

use serde_json::{Value, json};

use super::args::{Global, Token};
use super::client::{CallError, Client, Query};
use super::clock::{now_ms, span, time_of_day};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::{each, output};

const PATH: &str = "/bivouac/v1/tokens";

pub(crate) async fn run(global: &Global, verb: Token) -> Outcome {
    let client = Client::find(global)?;
    match verb {
        Token::Create { name, namespaces, all_namespaces, allow, expires } => {
            let own = &global.namespace;
            let namespaces = match (all_namespaces, namespaces.is_empty()) {
                (true, _) => vec!["*".to_owned()],
                (false, true) => vec![format!("{}/{}", own.team, own.project)],
                (false, false) => namespaces,
            };
            let mut body = json!({ "name": name, "namespaces": namespaces, "verbs": allow });
            if let Some(expires) = expires {
                let ms = i64::try_from(expires.as_millis()).unwrap_or(i64::MAX);
                body["expiresAt"] = now_ms().saturating_add(ms).into();
            }
            let answer = client.post(PATH, &Query::default(), &body).await?;
            created(global, &answer)
        }
        Token::Ls { all } => list(global, &client, all).await,
        Token::Revoke { names } => {
            let revoke = async |name: &str| {
                // A name may hold the name of its maker and a slash.
                let path = format!("{PATH}/{}", super::client::percent(name));
                let answer = client.delete(&path, &Query::default()).await?;
                let gone = answer["tokens"].as_array().map_or(0, Vec::len);
                output::progress(&match gone {
                    0 | 1 => format!("revoked {name}"),
                    more => format!("revoked {name} and {} that it made", more - 1),
                });
                Ok(answer)
            };
            each(global, &names, revoke).await
        }
        Token::Whoami => whoami(global, &client).await,
        Token::Log { follow, token, lines } => {
            let mut query = Query::default().with("limit", &lines.to_string());
            if let Some(token) = &token {
                query = query.with("token", token);
            }
            if follow {
                query = query.with("follow", "true");
            }
            log(global, &client, &query).await
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("-").to_owned()
}

fn joined(value: &Value) -> String {
    let words = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    words.collect::<Vec<_>>().join(",")
}

fn created(global: &Global, answer: &Value) -> Outcome {
    if global.json {
        output::json(answer)?;
        return Ok(ExitStatus::Success);
    }
    let token = &answer["token"];
    output::progress(&format!(
        "{} may {} in {}, {}",
        text(&token["name"]),
        joined(&token["verbs"]),
        joined(&token["namespaces"]),
        left(token, now_ms())
    ));
    let Some(secret) = answer["secret"].as_str() else {
        return Err(Failure::new("the engine's answer has no token in it"));
    };
    output::line(secret)?;
    output::hint(
        "it is not shown again; use it as BIVOUAC_TOKEN, take it back with: bivouac token revoke",
    );
    Ok(ExitStatus::Success)
}

/// How long it counts.
fn left(token: &Value, now: i64) -> String {
    match (token["revokedAt"].as_i64(), token["expiresAt"].as_i64()) {
        (Some(at), _) => format!("revoked {} ago", span(now - at)),
        (None, Some(at)) if at <= now => format!("expired {} ago", span(now - at)),
        (None, Some(at)) => format!("for {}", span(at - now)),
        (None, None) => "until it is revoked".to_owned(),
    }
}

async fn list(global: &Global, client: &Client, all: bool) -> Outcome {
    let mut answer = client.get(PATH, &Query::default()).await?;
    let mut tokens = match answer.get_mut("tokens").map(Value::take) {
        Some(Value::Array(tokens)) => tokens,
        _ => Vec::new(),
    };
    let now = now_ms();
    tokens.retain(|token| {
        let ended = token["expiresAt"].as_i64().is_some_and(|at| at <= now);
        all || !(ended || token["revokedAt"].is_i64())
    });
    if global.json {
        output::json(&tokens.into())?;
        return Ok(ExitStatus::Success);
    }
    let row = |token: &Value| {
        let used = match token["lastUsedAt"].as_i64() {
            Some(at) => format!("{} ago", span(now - at)),
            None => "never".to_owned(),
        };
        vec![
            text(&token["name"]),
            text(&token["id"]),
            joined(&token["namespaces"]),
            joined(&token["verbs"]),
            left(token, now),
            used,
        ]
    };
    let rows = tokens.iter().map(row).collect();
    output::table(&["NAME", "ID", "NAMESPACES", "MAY", "COUNTS", "USED"], rows)?;
    Ok(ExitStatus::Success)
}

async fn whoami(global: &Global, client: &Client) -> Outcome {
    let who = client.get("/bivouac/v1/whoami", &Query::default()).await?;
    if global.json {
        output::json(&who)?;
        return Ok(ExitStatus::Success);
    }
    let id = who["token"].as_str().unwrap_or("the engine's own").to_owned();
    output::facts(&[
        ("name", text(&who["name"])),
        ("token", id),
        ("may", joined(&who["verbs"])),
        ("in", joined(&who["namespaces"])),
        ("namespace", format!("{}/{}", text(&who["team"]), text(&who["project"]))),
        ("counts", left(&who, now_ms())),
    ])?;
    Ok(ExitStatus::Success)
}

async fn log(global: &Global, client: &Client, query: &Query) -> Outcome {
    let mut response = client.get_stream("/bivouac/v1/access-log", query).await?;
    let mut rest: Vec<u8> = Vec::new();
    let broken = || "the log of uses broke off".to_owned();
    while let Some(chunk) = response.chunk().await.explain(broken)? {
        rest.extend_from_slice(&chunk);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let read: Value = serde_json::from_slice(line).map_err(|error| CallError::Foreign {
                base: "the engine".to_owned(),
                engine: None,
                reason: error.to_string(),
            })?;
            output::line(&if global.json { read.to_string() } else { shown(&read) })?;
        }
    }
    Ok(ExitStatus::Success)
}

/// A use as people read it.
fn shown(one: &Value) -> String {
    if let Some(count) = one["dropped"].as_u64() {
        return format!("{count} uses are missing here");
    }
    let mut words = vec![
        time_of_day(one["at"].as_i64().unwrap_or(0)),
        one["principal"].as_str().unwrap_or("(nobody)").to_owned(),
        text(&one["door"]),
        one["outcome"].to_string(),
        text(&one["what"]),
    ];
    words.extend(one["object"].as_str().map(str::to_owned));
    let named =
        [("in", "namespace"), ("right", "verb"), ("from", "address"), ("request", "request")];
    for (word, field) in named {
        words.extend(one[field].as_str().map(|value| format!("{word}={value}")));
    }
    output::printable(&words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_one_line() {
        let one = json!({"at": 3_661_000, "principal": "ci", "token": "0a", "door": "http",
            "what": "GET /x", "verb": "read", "namespace": "t/p", "object": "bo\nx", "outcome": 200});
        let line = shown(&one);
        assert!(line.starts_with("01:01:01 ci http 200 GET /x bo"), "{line}");
        assert!(line.ends_with("in=t/p right=read") && !line.contains('\n'), "{line}");
        assert_eq!(shown(&json!({"dropped": 3})), "3 uses are missing here");
    }

    #[test]
    fn how_long_it_counts() {
        assert_eq!(left(&json!({}), 0), "until it is revoked");
        assert_eq!(left(&json!({"expiresAt": 60_000}), 0), "for 60s");
        assert_eq!(left(&json!({"expiresAt": 60_000}), 61_000), "expired 1s ago");
        assert_eq!(left(&json!({"expiresAt": 9, "revokedAt": 0}), 5_000), "revoked 5s ago");
    }
}
