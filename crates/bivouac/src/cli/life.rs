//! `bivouac set`: the rules of a sandbox's life; and how those are written and shown.

use serde_json::{Map, Value, json};

use super::args::{Global, Idle, LifeArgs, RestartArg, Set};
use super::client::Client;
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::millis;
use super::{clock, output, sandbox};

/// Changes what is named; the rest stays as it is.
pub(crate) async fn set(global: &Global, args: &Set) -> Outcome {
    let life = body(&args.life);
    if life.is_empty() {
        return Err(Failure::usage("nothing to set").hint("bivouac set --help lists what there is"));
    }
    let client = Client::find(global)?;
    let change = json!({ "life": life });
    let answer = client.patch(&sandbox::path(&args.name), &client.scope(), &change).await?;
    if global.json {
        output::json(&answer)?;
    } else {
        output::facts(&facts(&answer["sandbox"]["life"]))?;
    }
    Ok(ExitStatus::Success)
}

/// The rules as the API takes them; what was not given is not in it.
pub(crate) fn body(args: &LifeArgs) -> Map<String, Value> {
    let mut body = Map::new();
    let mut put = |key: &str, value: Value| body.insert(key.to_owned(), value);
    match args.idle_stop {
        Some(Idle::Off) => drop(put("idleStopMs", Value::Null)),
        Some(Idle::After(time)) => drop(put("idleStopMs", millis(time).into())),
        None => {}
    }
    if let Some(pause) = args.idle_pause {
        put("idlePause", pause.into());
    }
    if let Some(restart) = args.restart {
        let word = match restart {
            RestartArg::No => "no",
            RestartArg::UnlessStopped => "unless-stopped",
        };
        put("restart", word.into());
    }
    if let Some(wake) = args.wake {
        put("wake", wake.into());
    }
    if let Some(command) = &args.pre_stop {
        let mut hook = json!({ "command": command });
        if let Some(time) = args.pre_stop_timeout {
            hook["timeoutMs"] = millis(time).into();
        }
        put("preStop", if command.is_empty() { Value::Null } else { hook });
    }
    body
}

/// The rules in words.
pub(crate) fn facts(life: &Value) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Some(ms) = life["idleStopMs"].as_i64() {
        let what = if life["idlePause"] == true { "paused" } else { "stopped" };
        facts.push(("idle", format!("{what} after {}", clock::span(ms))));
    }
    if life["restart"] == "unless-stopped" {
        facts.push(("restart", "unless-stopped".to_owned()));
    }
    if life["wake"] == true {
        facts.push(("wake", "on a request".to_owned()));
    }
    if let Some(command) = life.pointer("/preStop/command").and_then(Value::as_str) {
        let limit = life.pointer("/preStop/timeoutMs").and_then(Value::as_i64).unwrap_or(0);
        facts.push(("pre-stop", format!("{command} (at most {})", clock::span(limit))));
    }
    facts
}

/// What the restart policy has done, in words.
pub(crate) fn restarts(restarts: &Value, now: i64) -> Option<String> {
    let mut text = restarts["total"].as_u64()?.to_string();
    if let Some(at) = restarts["lastAt"].as_i64() {
        text.push_str(&format!(", the last {} ago", clock::span(now - at)));
    }
    if restarts["gaveUp"] == true {
        text.push_str("; too many in a row: bivouac start begins anew");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_what_was_given_is_sent() {
        assert!(body(&LifeArgs::default()).is_empty());
        let args = LifeArgs {
            idle_stop: Some(Idle::After(Duration::from_secs(1800))),
            idle_pause: Some(true),
            restart: Some(RestartArg::UnlessStopped),
            wake: Some(false),
            pre_stop: Some("sync".to_owned()),
            pre_stop_timeout: Some(Duration::from_secs(5)),
        };
        let wanted = json!({ "idleStopMs": 1_800_000, "idlePause": true, "restart": "unless-stopped",
            "wake": false, "preStop": { "command": "sync", "timeoutMs": 5_000 } });
        assert_eq!(Value::Object(body(&args)), wanted);
        let words: Vec<String> =
            facts(&wanted).into_iter().map(|(name, text)| format!("{name}: {text}")).collect();
        assert_eq!(
            words,
            ["idle: paused after 30m", "restart: unless-stopped", "pre-stop: sync (at most 5s)"]
        );
        let off = LifeArgs {
            idle_stop: Some(Idle::Off),
            pre_stop: Some(String::new()),
            ..LifeArgs::default()
        };
        assert_eq!(Value::Object(body(&off)), json!({ "idleStopMs": null, "preStop": null }));
    }

    #[test]
    fn restarts_are_told() {
        assert_eq!(restarts(&json!({}), 0), None);
        let done = json!({ "total": 3, "inARow": 1, "lastAt": 0, "gaveUp": false });
        assert_eq!(restarts(&done, 300_000).as_deref(), Some("3, the last 5m ago"));
    }
}
