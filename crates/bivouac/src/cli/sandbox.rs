//! Calls that several verbs share: find a sandbox, wake it, find its commands.
//!
//! Invariant: answers come as the API gave them; a missing field is an error that says which.

use std::collections::BTreeMap;

use bivouac_types::sandbox::Resources;
use serde_json::{Map, Value, json};

use super::args::{NewSandbox, Process, User};
use super::client::{CallError, Client};
use super::failure::{Failure, Outcome};
use super::parse::{EnvVar, MountArg, millis};
use super::{credential, output, policy};

/// `$0` of the scripts that `cp` runs: they are not the user's commands.
pub(crate) const HELPER: &str = "bivouac-cp";

/// The API's path of a sandbox.
pub(crate) fn path(name: &str) -> String {
    format!("/v2/sandboxes/{name}")
}

/// The sandbox as it is. A stopped one stays so.
pub(crate) async fn get(client: &Client, name: &str) -> Result<Value, CallError> {
    client.get(&path(name), &client.scope()).await
}

/// The sandbox, started if it was stopped.
pub(crate) async fn resume(client: &Client, name: &str) -> Result<Value, CallError> {
    let answer = client.get(&path(name), &client.scope().with("resume", "true")).await?;
    if answer["resumed"] == true {
        output::progress(&format!("started {name} from its last state"));
    }
    Ok(answer)
}

/// The session's id in an answer about a sandbox.
pub(crate) fn session_id(answer: &Value) -> Outcome<String> {
    text(answer, "/session/id")
}

/// The virtual CPUs of a sandbox, from its next session on.
pub(crate) fn vcpus(answer: &Value) -> Outcome<i64> {
    let found = answer.pointer("/sandbox/vcpus").and_then(Value::as_i64);
    found.ok_or_else(|| Failure::new("the engine's answer has no /sandbox/vcpus"))
}

/// A text field of an answer.
pub(crate) fn text(answer: &Value, pointer: &str) -> Outcome<String> {
    answer
        .pointer(pointer)
        .and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or_else(|| Failure::new(format!("the engine's answer has no {pointer}")))
}

/// Variables as a map. A name without a value takes the caller's.
pub(crate) fn environment(variables: &[EnvVar]) -> Outcome<BTreeMap<String, String>> {
    environment_from(variables, |name| std::env::var(name).ok())
}

fn environment_from(
    variables: &[EnvVar],
    own: impl Fn(&str) -> Option<String>,
) -> Outcome<BTreeMap<String, String>> {
    let mut map = BTreeMap::new();
    for EnvVar { name, value } in variables {
        let value = match value {
            Some(value) => value.clone(),
            None => own(name).ok_or_else(|| {
                Failure::usage(format!("-e {name}: there is no such variable here"))
                    .hint(format!("give it a value: -e {name}=VALUE"))
            })?,
        };
        map.insert(name.clone(), value);
    }
    Ok(map)
}

/// Body of a create call. Absent fields are the engine's to choose.
pub(crate) fn new_body(client: &Client, options: &NewSandbox) -> Outcome<Map<String, Value>> {
    let policy = policy::of_create(options.network_policy.as_ref(), &options.allow)?;
    let mut body = Map::new();
    let mut put = |key: &str, value: Value| body.insert(key.to_owned(), value);
    put("projectId", client.project().into());
    put("ports", json!(options.ports));
    if let Some(image) = &options.image {
        put("image", image.as_str().into());
    }
    if let Some(runtime) = &options.runtime {
        put("runtime", runtime.as_str().into());
    }
    if let Some(snapshot) = &options.snapshot {
        put("source", json!({ "type": "snapshot", "snapshotId": snapshot }));
    }
    if let Some(url) = &options.git {
        put("source", git(url));
    } else if let Some(url) = &options.tarball {
        put("source", json!({ "type": "tarball", "url": url }));
    }
    if let Some(resources) = resources(options.vcpus, options.disk, Resources::default().vcpus) {
        put("resources", resources);
    }
    if !options.tags.is_empty() {
        put("tags", json!(options.tags.iter().cloned().collect::<BTreeMap<_, _>>()));
    }
    if !options.mounts.is_empty() {
        let mount =
            |m: &MountArg| (m.path.clone(), json!({ "drive": m.drive, "mode": m.mode.as_str() }));
        put("mounts", options.mounts.iter().map(mount).collect::<Map<_, _>>().into());
    }
    if let Some(policy) = policy {
        put("networkPolicy", policy);
    }
    if !options.credentials.is_empty() {
        put("credentials", credential::bodies(&options.credentials)?.into());
    }
    Ok(body)
}

/// A git source: the address, and behind `#` what of it.
fn git(text: &str) -> Value {
    match text.split_once('#') {
        Some((url, revision)) => json!({ "type": "git", "url": url, "revision": revision }),
        None => json!({ "type": "git", "url": text }),
    }
}

/// What a call says of resources, if anything. The API always wants a number of CPUs: `present` is what stays.
pub(crate) fn resources(vcpus: Option<i64>, disk: Option<u64>, present: i64) -> Option<Value> {
    let mut resources = vcpus.or(disk.map(|_| present)).map(|vcpus| json!({ "vcpus": vcpus }))?;
    if let Some(disk) = disk {
        resources["diskBytes"] = disk.into();
    }
    Some(resources)
}

/// Path of the create call: a runtime is `/v2`'s, everything else `/v3`'s.
pub(crate) fn create_path(options: &NewSandbox) -> &'static str {
    if options.runtime.is_some() { "/v2/sandboxes" } else { "/v3/sandboxes" }
}

/// Body of a `cmd` call that streams.
pub(crate) fn command_body(command: &[String], process: &Process, stdin: bool) -> Outcome<Value> {
    if process.tty {
        return Err(Failure::usage("-t does not go with this verb")
            .hint("-i alone passes standard input without a terminal"));
    }
    let (program, args) = command
        .split_first()
        .filter(|(program, _)| !program.is_empty())
        .ok_or_else(|| Failure::usage("no command to run"))?;
    let mut body = json!({
        "command": program,
        "args": args,
        "env": environment(&process.env)?,
        "sudo": process.user == User::Root,
        "wait": true,
        "logs": true,
    });
    if let Some(folder) = &process.workdir {
        body["cwd"] = folder.as_str().into();
    }
    if let Some(timeout) = process.timeout {
        body["timeout"] = millis(timeout).into();
    }
    if stdin {
        body["attachStdin"] = true.into();
    }
    Ok(body)
}

/// The sessions of a sandbox, newest first.
pub(crate) async fn sessions(client: &Client, name: &str) -> Result<Vec<Value>, CallError> {
    let query = client.list_scope().with("name", name).with("limit", "50");
    client.pages("/v2/sandboxes/sessions", &query, "sessions").await
}

/// The commands of a session, newest first.
pub(crate) async fn commands(client: &Client, session: &str) -> Outcome<Vec<Value>> {
    let path = format!("/v2/sandboxes/sessions/{session}/cmd");
    let mut answer = client.get(&path, &client.scope()).await?;
    match answer.get_mut("commands").map(Value::take) {
        Some(Value::Array(commands)) => Ok(commands),
        _ => Err(Failure::new("the engine's answer has no commands")),
    }
}

/// A command of a sandbox and the session that it ran in: the named one in whichever session, else
/// the newest of the newest session that ran any.
pub(crate) async fn find_command(
    client: &Client,
    name: &str,
    wanted: Option<&str>,
) -> Outcome<(String, Value)> {
    // A missing sandbox is told as such, and the current session answers almost every question.
    let current = session_id(&get(client, name).await?)?;
    if let Some(found) = find_in(client, &current, wanted).await? {
        return Ok((current, found));
    }
    for session in sessions(client, name).await? {
        let session = text(&session, "/id")?;
        if session != current
            && let Some(found) = find_in(client, &session, wanted).await?
        {
            return Ok((session, found));
        }
    }
    Err(match wanted {
        Some(id) => Failure::new(format!("{name} has no command {id}"))
            .hint(format!("list them with: bivouac ps {name}")),
        None => Failure::new(format!("no command has run in {name} yet")),
    })
}

async fn find_in(client: &Client, session: &str, wanted: Option<&str>) -> Outcome<Option<Value>> {
    let commands = commands(client, session).await?;
    Ok(commands.into_iter().find(|command| match wanted {
        Some(id) => command["id"] == id,
        None => !is_helper(command),
    }))
}

/// Whether a command is one of `cp`'s own.
pub(crate) fn is_helper(command: &Value) -> bool {
    command["name"] == "sh" && command["args"][0] == "-c" && command["args"][2] == HELPER
}

/// A command as one line: quoted where a shell would need it.
pub(crate) fn command_line(command: &Value) -> String {
    let mut line = quoted(command["name"].as_str().unwrap_or_default());
    for arg in command["args"].as_array().into_iter().flatten() {
        line.push(' ');
        line.push_str(&quoted(arg.as_str().unwrap_or_default()));
    }
    line
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=+./:,@%^".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::failure::ExitStatus;
    use crate::cli::parse::env_var;

    #[test]
    fn a_revision_stands_behind_the_address() {
        let url = "https://git.example.com/app.git";
        assert_eq!(git(url), json!({ "type": "git", "url": url }));
        let with = json!({ "type": "git", "url": url, "revision": "v1#2" });
        assert_eq!(git(&format!("{url}#v1#2")), with);
        assert_eq!(resources(None, None, 2), None);
        assert_eq!(resources(None, Some(9), 4), Some(json!({ "vcpus": 4, "diskBytes": 9 })));
        assert_eq!(resources(Some(8), None, 4), Some(json!({ "vcpus": 8 })));
    }

    #[test]
    fn variables_come_from_the_line_or_the_caller() {
        let own = |name: &str| (name == "HOME").then(|| "/h".to_owned());
        let read = |texts: &[&str]| {
            let variables: Vec<_> = texts.iter().map(|text| env_var(text).unwrap()).collect();
            environment_from(&variables, own)
        };
        let map = read(&["A=1", "HOME", "A=2"]).unwrap();
        assert_eq!(map.get("A").map(String::as_str), Some("2"), "the last one counts");
        assert_eq!(map.get("HOME").map(String::as_str), Some("/h"));
        assert_eq!(read(&["MISSING"]).unwrap_err().report(), ExitStatus::Usage);
    }

    #[test]
    fn command_lines_can_be_pasted() {
        let command = json!({ "name": "sh", "args": ["-c", "echo 'a b'", ""] });
        assert!(!is_helper(&command));
        assert!(is_helper(&json!({ "name": "sh", "args": ["-c", "x", HELPER, "/p"] })));
        assert_eq!(command_line(&command), r"sh -c 'echo '\''a b'\''' ''");
    }
}
