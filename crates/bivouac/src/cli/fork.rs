//! `bivouac fork`: sandboxes that begin where another one is, one or hundreds by one call.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::args::{Fork, Global};
use super::busy::working;
use super::client::{Client, random_word};
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::millis;
use super::{output, sandbox};

/// Forks and prints the copies' names, one a line. The source goes on.
pub(crate) async fn run(global: &Global, args: Fork) -> Outcome {
    let client = Client::find(global)?;
    // A disk alone leaves the CPUs as they are.
    let present = match (args.disk, args.vcpus) {
        (Some(_), None) => sandbox::vcpus(&sandbox::get(&client, &args.source).await?)?,
        _ => 0,
    };
    let mut body = json!({ "count": args.count, "overrides": overrides(&args, present)? });
    if let Some(name) = &args.name {
        body["name"] = name.as_str().into();
    }
    if let Some(snapshot) = &args.snapshot {
        body["snapshotId"] = snapshot.as_str().into();
    }
    if args.last {
        body["live"] = false.into();
    }
    let path = format!("/bivouac/v1/sandboxes/{}/forks", args.source);
    let key = random_word()?;
    let doing = match args.count {
        1 => format!("copying {}", args.source),
        count => format!("making {count} copies of {}", args.source),
    };
    let query = client.scope();
    let made = async { Ok(client.post_once(&path, &query, &body, &key).await?) };
    let answer = working(global, &doing, made).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let Some(made) = answer["sandboxes"].as_array() else {
        return Err(Failure::new("the engine's answer has no sandboxes"));
    };
    for view in made {
        output::line(&sandbox::text(view, "/sandbox/name")?)?;
    }
    if let Some(stall) = answer.pointer("/snapshot/stallUs").and_then(Value::as_u64) {
        let source = &args.source;
        output::progress(&format!("{source} goes on; it stood still for {}", stood_still(stall)));
    }
    for name in answer["needsAuth"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        output::hint(&format!(
            "the credential {name} is bound to somebody else: bivouac credential add gives a copy its own"
        ));
    }
    Ok(ExitStatus::Success)
}

/// How long a sandbox stood still, as people read it.
pub(crate) fn stood_still(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

fn overrides(args: &Fork, present: i64) -> Outcome<Map<String, Value>> {
    let mut overrides = Map::new();
    let mut put = |key: &str, value: Value| overrides.insert(key.to_owned(), value);
    if !args.env.is_empty() {
        put("env", json!(sandbox::environment(&args.env)?));
    }
    if !args.tags.is_empty() {
        put("tags", json!(args.tags.iter().cloned().collect::<BTreeMap<_, _>>()));
    }
    if let Some(timeout) = args.timeout {
        put("timeout", millis(timeout).into());
    }
    if let Some(resources) = sandbox::resources(args.vcpus, args.disk, present) {
        put("resources", resources);
    }
    if args.ephemeral {
        put("persistent", false.into());
    }
    Ok(overrides)
}

#[cfg(test)]
mod tests {
    use super::stood_still;

    #[test]
    fn a_stall_is_told_in_milliseconds() {
        assert_eq!(stood_still(950), "0.9 ms");
        assert_eq!(stood_still(12_345), "12.3 ms");
    }
}
