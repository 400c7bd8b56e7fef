//! `bivouac policy`: what a sandbox may reach, what was decided, and what a run needs.
//!
//! Invariant: a change is made by the engine on the policy that it has, so values that nobody reads
//! back survive it; a session that was opened to learn is closed again however this process ends.

use std::io::Read as _;

use serde_json::{Map, Value, json};

use super::args::{Global, Learn, Policy, PolicyArg};
use super::client::Client;
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::ndjson::Lines;
use super::signals::Signals;
use super::stream::{self, Job};
use super::{clock, exec, output, sandbox};

/// Largest policy that is read from a file or a pipe, bytes.
const MAX_FILE: u64 = 4 << 20;

/// Does what the verb below `policy` says.
pub(crate) async fn run(global: &Global, args: Policy) -> Outcome {
    let client = Client::find(global)?;
    match args {
        Policy::Show { name } => {
            let answer = client.get(&path(&name), &client.scope()).await?;
            show(global, &answer)
        }
        Policy::Set { name, policy } => {
            let body = policy.read()?;
            let answer = client.put(&path(&name), &client.scope(), &body).await?;
            changed(global, &answer)
        }
        Policy::Allow { name, targets } => {
            edit(global, &client, &name, json!({ "allow": targets })).await
        }
        Policy::Deny { name, targets } => {
            edit(global, &client, &name, json!({ "deny": targets })).await
        }
        Policy::Log { name, follow, session, since } => {
            let mut query = client.scope();
            if let Some(session) = &session {
                query = query.with("session", session);
            }
            if let Some(since) = since {
                query = query.with("since", &since.to_string());
            }
            if follow {
                query = query.with("follow", "true");
            }
            log(global, &client, &name, &query).await
        }
        Policy::Explain { name, request, method } => {
            let body = json!({ "url": request, "method": method });
            let path = format!("{}/explain", path(&name));
            let answer = client.post(&path, &client.scope(), &body).await?;
            explain(global, &name, &answer)
        }
        Policy::Learn(args) => learn(global, &client, args).await,
    }
}

fn path(name: &str) -> String {
    format!("/bivouac/v1/sandboxes/{name}/policy")
}

async fn edit(global: &Global, client: &Client, name: &str, body: Value) -> Outcome {
    let answer = client.patch(&path(name), &client.scope(), &body).await?;
    changed(global, &answer)
}

fn show(global: &Global, answer: &Value) -> Outcome {
    if global.json {
        output::json(answer)?;
        return Ok(ExitStatus::Success);
    }
    output::text(&format!("{:#}\n", answer["policy"]))?;
    let session = answer["session"].as_str();
    output::hint(&match (session, answer["learning"] == true) {
        (_, true) => "the session is open: somebody learns what it needs".to_owned(),
        (Some(session), false) => format!("in force in {session}"),
        (None, false) => "in force when it is started".to_owned(),
    });
    if !answer["next"].is_null() {
        output::hint(&format!("its next session starts with: {}", answer["next"]));
    }
    Ok(ExitStatus::Success)
}

fn changed(global: &Global, answer: &Value) -> Outcome {
    if global.json {
        output::json(answer)?;
        return Ok(ExitStatus::Success);
    }
    let name = answer["sandbox"].as_str().unwrap_or_default();
    let mode = answer["mode"].as_str().unwrap_or_default();
    if answer["changed"] != true {
        output::progress(&format!(
            "{name}: nothing to change, its policy ({mode}) says so already"
        ));
        return Ok(ExitStatus::Success);
    }
    let force = if answer["session"].is_string() { "in force" } else { "for its next session" };
    let cut = match answer["cut"].as_u64().unwrap_or(0) {
        0 => String::new(),
        1 => ", 1 connection cut".to_owned(),
        cut => format!(", {cut} connections cut"),
    };
    output::progress(&format!("{name}: {mode}, {force}{cut}"));
    Ok(ExitStatus::Success)
}

fn explain(global: &Global, name: &str, answer: &Value) -> Outcome {
    if global.json {
        output::json(answer)?;
        return Ok(ExitStatus::Success);
    }
    let text = |key: &str| answer[key].as_str().map(output::printable);
    let word = if answer["allowed"] == true { "allowed" } else { "denied" };
    let mut facts = vec![("verdict", format!("{word} ({})", text("reason").unwrap_or_default()))];
    facts.extend(text("entry").map(|entry| ("entry", entry)));
    facts.extend(answer["rule"].as_u64().map(|rule| ("rule", rule.to_string())));
    facts.extend(text("handling").map(|handling| ("handling", handling)));
    output::facts(&facts)?;
    if let Some(target) = text("hint").as_deref().and_then(|hint| hint.rsplit(' ').next()) {
        output::hint(&format!("bivouac policy allow {name} {target}"));
    }
    Ok(ExitStatus::Success)
}

async fn log(
    global: &Global,
    client: &Client,
    name: &str,
    query: &super::client::Query,
) -> Outcome {
    let path = format!("/bivouac/v1/sandboxes/{name}/egress-log");
    let mut lines = Lines::new(client.get_stream(&path, query).await?);
    while let Some(line) = lines.next().await? {
        if let Some(message) = line["error"]["message"].as_str() {
            return Err(Failure::new(message.to_owned()));
        }
        if global.json {
            output::line(&line.to_string())?;
        } else {
            output::line(&output::printable(&one_line(&line)))?;
        }
    }
    Ok(ExitStatus::Success)
}

/// An audit line for people.
fn one_line(line: &Value) -> String {
    let text = |key: &str| line[key].as_str().unwrap_or_default();
    let at = line["at"].as_i64().map(clock::time_of_day).unwrap_or_default();
    let kind = text("kind");
    if let Some(lost) = line["lostBytes"].as_u64() {
        return format!("-         dropped  {lost} bytes of older lines made room for newer ones");
    }
    let mut out = format!("{at}  {kind:7}  {:5}  {:20}", text("verdict"), text("reason"));
    let place = match (text("host"), text("asked")) {
        ("", asked) => asked.to_owned(),
        (host, "") => host.to_owned(),
        (host, asked) => format!("{host} ({asked})"),
    };
    let mut add = |part: String| {
        if !part.is_empty() {
            out.push(' ');
            out.push_str(&part);
        }
    };
    add(format!("{} {}", text("method"), text("path")).trim().to_owned());
    add(place);
    add(line["status"].as_u64().map(|status| format!("-> {status}")).unwrap_or_default());
    add(match text("entry") {
        "" => String::new(),
        entry => format!("[{entry}]"),
    });
    add(match text("credential") {
        "" => String::new(),
        name => format!("credential {name}"),
    });
    if let (Some(up), Some(down)) = (line["bytes_up"].as_u64(), line["bytes_down"].as_u64()) {
        add(format!("{up} B up, {down} B down"));
    }
    add(text("error").to_owned());
    out
}

/// Runs a command in a session that is open meanwhile.
async fn learn(global: &Global, client: &Client, args: Learn) -> Outcome {
    let request = sandbox::command_body(&args.command, &args.process, args.process.interactive)?;
    let name = &args.name;
    let mut signals = Signals::new()?;
    let session = sandbox::session_id(&sandbox::resume(client, name).await?)?;
    let place = format!("{}/learn", path(name));
    // The engine closes the session again when this answer is left, also by SIGKILL.
    let mut open = Lines::new(client.post_stream(&place, &client.scope(), &json!({}), None).await?);
    let since = match open.next().await? {
        Some(first) => first["since"].as_u64().unwrap_or(0),
        None => return Err(Failure::new("the engine did not open the session")),
    };
    let job = Job { session, request, stdin: args.process.interactive, json: global.json };
    let finish = tokio::select! {
        finish = stream::run(client, &job, &mut signals) => finish,
        gone = until_gone(&mut open) => Err(gone),
    };
    let query = client.scope().with("since", &since.to_string());
    let learned = client.delete(&place, &query).await;
    drop(open);
    let status = finish.map_err(exec::start_status)?.status()?;
    told(global, name, &learned?)?;
    Ok(status)
}

/// The stream of an open session ends only when the engine does.
async fn until_gone(open: &mut Lines) -> Failure {
    loop {
        match open.next().await {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(_) => break,
        }
    }
    Failure::new("the engine ended; the session has its policy back when it is up again")
}

fn told(global: &Global, name: &str, learned: &Value) -> Outcome<()> {
    if global.json {
        return output::line(&json!({ "learned": learned }).to_string());
    }
    output::progress(&format!("{name} has its own policy back; the smallest one for this run:"));
    output::text(&format!("{:#}\n", learned["policy"]))?;
    for note in learned["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        output::hint(note);
    }
    output::hint(&format!("bivouac policy set {name} FILE puts it in force"));
    Ok(())
}

impl PolicyArg {
    /// The policy as the API takes it.
    pub(crate) fn read(&self) -> Outcome<Value> {
        match self {
            Self::Mode(mode) => Ok(json!({ "mode": mode })),
            Self::Inline(policy) => Ok(policy.clone()),
            Self::File(file) => {
                let shown = file.display();
                let open =
                    std::fs::File::open(file).explain(|| format!("could not open {shown}"))?;
                read_json(open, &shown.to_string())
            }
            Self::Stdin => read_json(std::io::stdin().lock(), "standard input"),
        }
    }
}

fn read_json(from: impl std::io::Read, shown: &str) -> Outcome<Value> {
    let mut text = String::new();
    let mut limited = from.take(MAX_FILE + 1);
    limited.read_to_string(&mut text).explain(|| format!("could not read {shown}"))?;
    if text.len() as u64 > MAX_FILE {
        return Err(Failure::usage(format!("{shown} is larger than any policy: 4 MiB at most")));
    }
    serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{shown} is no JSON: {error}"))
            .hint("write a policy as in docs/egress.md, or the word allow-all or deny-all")
    })
}

/// What `--network-policy` and `--allow` say together; `None`: the engine's default.
pub(crate) fn of_create(policy: Option<&PolicyArg>, allow: &[String]) -> Outcome<Option<Value>> {
    let Some(policy) = policy.map(PolicyArg::read).transpose()? else {
        return Ok((!allow.is_empty()).then(|| with(Map::new(), allow)));
    };
    if allow.is_empty() {
        return Ok(Some(policy));
    }
    match policy {
        Value::Object(of) if of.get("mode").is_some_and(|mode| mode == "allow-all") => {
            Err(Failure::usage("--allow: the policy allow-all allows everything already"))
        }
        Value::Object(of) if of.get("mode").is_some_and(|mode| mode == "deny-all") => {
            Ok(Some(with(Map::new(), allow)))
        }
        Value::Object(of) => Ok(Some(with(of, allow))),
        // The engine says what is wrong with it.
        other => Ok(Some(other)),
    }
}

/// Adds hosts and ranges to a policy in the form of a request.
fn with(mut policy: Map<String, Value>, targets: &[String]) -> Value {
    let (ranges, hosts): (Vec<_>, Vec<_>) = targets.iter().partition(|text| is_range(text));
    match policy.entry("allow").or_insert_with(|| json!([])) {
        Value::Array(list) => {
            for host in hosts {
                if !list.iter().any(|known| known == host) {
                    list.push(json!(host));
                }
            }
        }
        Value::Object(record) => {
            for host in hosts {
                record.entry(host.clone()).or_insert_with(|| json!([]));
            }
        }
        _ => {}
    }
    if !ranges.is_empty()
        && let Value::Object(subnets) = policy.entry("subnets").or_insert_with(|| json!({}))
        && let Value::Array(list) = subnets.entry("allow").or_insert_with(|| json!([]))
    {
        list.extend(ranges.into_iter().map(|range| json!(range)));
    }
    policy.into()
}

fn is_range(text: &str) -> bool {
    text.contains('/') || text.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allow(policy: Option<Value>, hosts: &[&str]) -> Value {
        let policy = policy.map(PolicyArg::Inline);
        let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
        of_create(policy.as_ref(), &hosts).unwrap().unwrap_or(Value::Null)
    }

    #[test]
    fn allowed_hosts_join_the_policy() {
        assert_eq!(allow(None, &[]), Value::Null);
        let alone = allow(None, &["a.test", "192.0.2.0/24", "2001:db8::1"]);
        let wanted = json!({ "allow": ["a.test"],
            "subnets": { "allow": ["192.0.2.0/24", "2001:db8::1"] } });
        assert_eq!(alone, wanted);
        assert_eq!(
            allow(Some(json!({ "mode": "deny-all" })), &["a.test"]),
            json!({ "allow": ["a.test"] })
        );
        let record = json!({ "allow": { "b.test": [{ "forwardURL": "https://p.test" }] } });
        let both = allow(Some(record), &["a.test", "b.test"]);
        assert_eq!(both["allow"]["a.test"], json!([]));
        assert_eq!(both["allow"]["b.test"][0]["forwardURL"], "https://p.test");
        assert_eq!(
            allow(Some(json!({ "allow": ["a.test"] })), &["a.test"])["allow"],
            json!(["a.test"])
        );
        let open = PolicyArg::Mode("allow-all");
        assert!(of_create(Some(&open), &["a.test".to_owned()]).is_err());
    }

    #[test]
    fn a_line_says_who_where_and_why() {
        let line = json!({ "at": 0, "kind": "http", "verdict": "allow", "reason": "rule_transform",
            "host": "api.test", "method": "GET", "path": "/v1", "status": 200, "entry": "api.test",
            "credential": "github" });
        let shown = one_line(&line);
        for part in ["http", "allow", "rule_transform", "GET /v1", "api.test", "-> 200", "github"] {
            assert!(shown.contains(part), "{shown}");
        }
        assert!(one_line(&json!({ "kind": "dropped", "lostBytes": 7 })).contains("7 bytes"));
    }

    #[test]
    fn a_policy_that_is_no_json_is_a_mistake_of_the_caller() {
        assert_eq!(read_json(&b"{"[..], "x").unwrap_err().report(), ExitStatus::Usage);
        assert_eq!(read_json(&b"{\"allow\":[]}"[..], "x").unwrap(), json!({ "allow": [] }));
        let long = vec![b' '; usize::try_from(MAX_FILE).unwrap() + 2];
        assert!(read_json(&long[..], "x").is_err());
    }
}
