//! JSON Schemas of what verbs print with `--json`.
//!
//! Owns the shape of each verb's document; the parts come from the OpenAPI document, so a field that the
//! API gets is in the schema as well. Invariant: the files in `docs/schemas` are what [`all`] answers (a
//! test compares them), and every verb that takes `--json` has one. Printed by `selftest schemas`.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::http;

/// Verb, whether it prints one document a line, and the document's shape.
fn shapes() -> Vec<(&'static str, bool, Value)> {
    let of = |name: &str| json!({ "$ref": format!("#/$defs/{name}") });
    let list = |item: Value| json!({ "type": "array", "items": item });
    let lines = || {
        json!({ "oneOf": [
            object(&[("command", of("CommandView"), true)]),
            object(&[
                ("stream", json!({ "enum": ["stdout", "stderr"] }), true),
                ("data", json!({ "type": "string" }), true),
            ]),
            object(&[("stream", json!({ "const": "cut" }), true)]),
        ] })
    };
    let text = || json!({ "type": "string" });
    let count = || json!({ "type": "integer", "minimum": 0 });
    let missing = object(&[
        ("sandbox", object(&[("name", text(), true)]), true),
        ("missing", json!({ "const": true }), true),
    ]);
    let inspected = object(&[
        ("sandbox", of("SandboxView"), true),
        ("session", of("SessionView"), true),
        ("routes", list(of("RouteView")), true),
        ("usage", of("UsageBody"), true),
    ]);
    let check = object(&[
        ("name", text(), true),
        ("status", json!({ "enum": ["ok", "warn", "fail"] }), true),
        ("found", text(), true),
        ("mend", text(), false),
    ]);
    let rate = |what: &str| json!({ "type": "integer", "minimum": 0, "description": what });
    let used = json!({ "allOf": [of("UseView")], "required": ["cpuPercent"],
        "properties": {
            "cpuPercent": { "type": "number", "minimum": 0,
                "description": "of one CPU, between two looks" },
            "networkReceivedPerSecond": rate("bytes, between two looks"),
            "networkSentPerSecond": rate("bytes, between two looks"),
        } });
    // What it holds, with `--usage`.
    let listed_sandbox =
        json!({ "allOf": [of("SandboxView")], "properties": { "usage": of("UsageBody") } });
    let deleted = json!({ "oneOf": [of("SandboxBody"), missing] });
    let learned = json!({ "oneOf": [lines(), object(&[("learned", of("LearnedBody"), true)])] });
    let flag = || json!({ "type": "boolean" });
    let damage = || json!({ "type": ["string", "null"] });
    let listed = image(&[("current", flag(), true), ("damage", damage(), true)]);
    vec![
        ("attach", false, of("TerminalView")),
        ("completions", false, object(&[("shell", text(), true), ("script", text(), true)])),
        ("cp", false, object(&[("files", count(), true), ("bytes", count(), true)])),
        ("create", false, of("ViewBody")),
        ("credential-add", false, list(of("CredentialChangeBody"))),
        ("credential-ls", false, list(of("CredentialView"))),
        ("credential-rm", false, list(of("CredentialChangeBody"))),
        ("doctor", false, list(check)),
        ("drive-attach", false, of("AttachmentBody")),
        ("drive-cat", false, object(&[("bytes", count(), true), ("base64", text(), true)])),
        ("drive-cp", false, object(&[("files", count(), true), ("bytes", count(), true)])),
        ("drive-create", false, of("DriveBody")),
        ("drive-detach", false, of("AttachmentBody")),
        ("drive-fork", false, of("DriveBody")),
        (
            "drive-ls",
            false,
            json!({ "oneOf": [list(of("DriveView")), list(of("DriveEntryView"))] }),
        ),
        ("drive-rm", false, list(of("DriveBody"))),
        ("drive-show", false, of("DriveUsageBody")),
        ("env", false, json!({ "type": "object", "additionalProperties": text() })),
        ("exec", true, lines()),
        ("exec-detach", false, of("CommandBody")),
        ("fork", false, of("ForksAnswer")),
        ("forward", false, list(object(&[("local", text(), true), ("port", count(), true)]))),
        ("gc", false, of("GcBody")),
        ("hangup", false, list(of("TerminalView"))),
        ("image-build", false, image(&[("built", flag(), true)])),
        ("image-import", false, image(&[("built", flag(), true)])),
        ("image-inspect", false, image(&[("damage", damage(), true)])),
        ("image-ls", false, list(listed)),
        ("image-prune", false, pruned_images()),
        ("image-pull", false, of("PulledView")),
        ("image-rm", false, list(image(&[]))),
        ("inspect", false, inspected),
        ("keep-alive", false, of("KeptBody")),
        ("kill", false, of("CommandView")),
        ("logs", true, lines()),
        ("open", false, of("LinkView")),
        ("pause", false, list(of("PausedBody"))),
        ("ls", false, list(listed_sandbox)),
        ("policy-allow", false, of("PolicyBody")),
        ("policy-deny", false, of("PolicyBody")),
        ("policy-explain", false, of("ExplainBody")),
        ("policy-learn", true, learned),
        ("policy-log", true, json!({ "type": "object" })),
        ("policy-set", false, of("PolicyBody")),
        ("policy-show", false, of("PolicyBody")),
        ("pool-migrate", false, pool_moved()),
        ("pool-show", false, pool_shown()),
        ("ports", false, list(of("PortView"))),
        ("ports-link", false, of("LinkView")),
        ("ports-publish", false, of("PortBody")),
        ("ports-revoke", false, of("RevokedBody")),
        ("ports-unpublish", false, of("PortBody")),
        ("ps", false, list(of("CommandView"))),
        ("resume", false, list(of("PausedBody"))),
        ("resize", false, of("UpdatedBody")),
        ("rm", false, list(deleted)),
        ("rollback", false, of("RollbackAnswer")),
        ("run", true, lines()),
        ("secret-ls", false, list(of("SecretView"))),
        ("secret-rm", false, list(of("RemovedSecretBody"))),
        ("secret-set", false, of("SecretView")),
        ("set", false, of("UpdatedBody")),
        ("shell", false, of("TerminalView")),
        ("snapshot", false, of("SnapshotAndSession")),
        ("snapshots-export", false, exported()),
        ("snapshots-get", false, of("SnapshotBody")),
        ("snapshots-import", false, of("SnapshotBody")),
        ("snapshots-label", false, of("SnapshotBody")),
        ("snapshots-ls", false, list(of("SnapshotView"))),
        ("snapshots-rm", false, list(of("SnapshotBody"))),
        ("snapshots-tree", false, list(of("TreeNodeView"))),
        ("ssh", false, ssh_shown()),
        ("ssh-config", false, ssh_config()),
        ("ssh-key-add", false, of("SshKeyView")),
        ("ssh-key-ls", false, list(of("SshKeyView"))),
        ("ssh-key-rm", false, list(of("SshKeyBody"))),
        ("start", false, list(of("ViewBody"))),
        ("stop", false, list(of("StoppedBody"))),
        ("token-create", false, of("NewTokenAnswer")),
        ("token-log", true, json!({ "type": "object" })),
        ("token-ls", false, list(of("TokenView"))),
        ("token-revoke", false, list(of("RevokedTokensBody"))),
        ("token-whoami", false, of("WhoamiBody")),
        ("terminals", false, list(of("TerminalView"))),
        ("top", false, list(used)),
        ("version", false, object(&[("version", text(), true)])),
        ("wait", false, of("CommandView")),
    ]
}

/// What `ssh --json` would do.
fn ssh_shown() -> Value {
    let text = || json!({ "type": "string" });
    object(&[
        ("sandbox", text(), true),
        ("host", text(), true),
        ("identityFile", text(), true),
        ("knownHostsFile", text(), true),
        ("command", json!({ "type": "array", "items": text() }), true),
    ])
}

/// What `ssh-config` prints, or where it wrote.
fn ssh_config() -> Value {
    let (text, flag) = (|| json!({ "type": "string" }), || json!({ "type": "boolean" }));
    let written = [("file", text(), true), ("written", flag(), true), ("changed", flag(), true)];
    json!({ "oneOf": [object(&[("config", text(), true)]), object(&written)] })
}

fn pool_mode() -> Value {
    json!({ "enum": ["loop", "native", "folder"] })
}

/// What `pool migrate` did.
fn pool_moved() -> Value {
    let count = || json!({ "type": "integer", "minimum": 0 });
    object(&[
        ("from", pool_mode(), true),
        ("to", pool_mode(), true),
        ("volumes", count(), true),
        ("bytes", count(), true),
    ])
}

/// What `pool show` sees; `null` is what is not there yet, or not mounted.
fn pool_shown() -> Value {
    let (text, count) = (json!({ "type": "string" }), json!({ "type": "integer", "minimum": 0 }));
    let or_null = |shape: Value| json!({ "oneOf": [shape, { "type": "null" }] });
    let storage = object(&[
        ("size", count.clone(), true),
        ("used", count.clone(), true),
        ("free", count.clone(), true),
        ("reserve", count.clone(), true),
        ("limits", json!({ "type": "boolean" }), true),
    ]);
    let check = object(&[
        ("state", json!({ "enum": ["running", "clean", "damaged", "failed"] }), true),
        ("startedAt", json!({ "type": "integer" }), true),
        ("bytes", count.clone(), true),
        ("errors", count, true),
        ("note", text.clone(), false),
    ]);
    object(&[
        ("dataDir", text.clone(), true),
        ("mode", or_null(pool_mode()), true),
        ("place", or_null(text.clone()), true),
        ("storage", or_null(storage), true),
        ("check", or_null(check), true),
        ("leftovers", json!({ "type": "array", "items": text }), true),
    ])
}

/// What `snapshots export` wrote.
fn exported() -> Value {
    let text = || json!({ "type": "string" });
    object(&[
        ("id", text(), true),
        ("file", text(), true),
        ("format", json!({ "enum": ["tar.zst", "oci"] }), true),
        ("bytes", json!({ "type": "integer", "minimum": 0 }), true),
    ])
}

/// A built image, with what one verb adds to it.
fn image(more: &[(&str, Value, bool)]) -> Value {
    let text = || json!({ "type": "string" });
    let versions = || json!({ "type": "object", "additionalProperties": text() });
    let mut fields = vec![
        ("name", text(), true),
        ("digest", text(), true),
        ("reference", text(), true),
        ("bytes", json!({ "type": "integer", "minimum": 0 }), true),
        ("builtAt", json!({ "type": "integer" }), true),
        ("recipe", text(), true),
        ("architecture", text(), true),
        ("debian", text(), true),
        ("defaultRuntime", text(), true),
        ("runtimes", versions(), true),
        ("tools", versions(), true),
        ("usedBy", json!({ "type": "array", "items": text() }), true),
        ("oci", origin(), false),
    ];
    fields.extend(more.iter().cloned());
    object(&fields)
}

/// Where an image came from that was not built here.
fn origin() -> Value {
    let text = || json!({ "type": "string" });
    let texts = || json!({ "type": "array", "items": text() });
    let layer = object(&[
        ("digest", text(), true),
        ("size", json!({ "type": "integer", "minimum": 0 }), true),
    ]);
    let config = object(&[
        ("env", json!({ "type": "object", "additionalProperties": text() }), true),
        ("user", text(), false),
        ("workingDir", text(), false),
        ("entrypoint", texts(), false),
        ("cmd", texts(), false),
    ]);
    object(&[
        ("source", text(), true),
        ("manifest", text(), false),
        ("index", text(), false),
        ("configDigest", text(), true),
        ("layers", json!({ "type": "array", "items": layer }), true),
        ("config", config, true),
        ("fileDigest", text(), true),
    ])
}

/// What `image prune` removed.
fn pruned_images() -> Value {
    let text = || json!({ "type": "string" });
    let count = || json!({ "type": "integer", "minimum": 0 });
    let image =
        object(&[("name", text(), true), ("reference", text(), true), ("bytes", count(), true)]);
    let pieces = object(&[("files", count(), true), ("bytes", count(), true)]);
    object(&[
        ("images", json!({ "type": "array", "items": image }), true),
        ("pieces", pieces, true),
        ("dryRun", json!({ "type": "boolean" }), true),
    ])
}

/// An object with these fields and no others; `true`: always there.
fn object(fields: &[(&str, Value, bool)]) -> Value {
    let properties: Map<String, Value> =
        fields.iter().map(|(name, shape, _)| ((*name).to_owned(), shape.clone())).collect();
    let required: Vec<&str> =
        fields.iter().filter(|(_, _, always)| *always).map(|(name, _, _)| *name).collect();
    json!({ "type": "object", "properties": properties, "required": required,
        "additionalProperties": false })
}

/// Every schema by the name of its file.
pub(crate) fn all() -> Value {
    let document = http::openapi_document();
    let parts = &document["components"]["schemas"];
    let schemas = shapes()
        .into_iter()
        .map(|(verb, lines, shape)| (format!("{verb}.json"), whole(verb, lines, shape, parts)));
    Value::Object(schemas.collect())
}

/// A verb as it is written: `snapshots ls`, of `snapshots-ls`. A few have a hyphen of their own.
fn words(verb: &str) -> String {
    if ["keep-alive", "ssh-config"].contains(&verb) {
        return verb.to_owned();
    }
    match verb.strip_prefix("ssh-key-") {
        Some(below) => format!("ssh-key {below}"),
        None => verb.replacen('-', " ", 1),
    }
}

fn whole(verb: &str, lines: bool, shape: Value, parts: &Value) -> Value {
    let (verb, flag) = match verb {
        "exec-detach" => ("exec".to_owned(), "--detach --json"),
        verb => (words(verb), "--json"),
    };
    let unit = if lines { "Each line" } else { "The document" };
    let about = about(&verb);
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": format!("bivouac {verb} {flag}"),
        "description": format!("{about}. {unit} that `bivouac {verb} {flag}` prints."),
    });
    let mut wanted = BTreeSet::new();
    mentioned(&shape, "#/$defs/", &mut wanted);
    if let (Some(schema), Value::Object(shape)) = (schema.as_object_mut(), shape) {
        schema.extend(shape);
    }
    let mut defs = Map::new();
    while let Some(name) = wanted.pop_first() {
        if defs.contains_key(&name) {
            continue;
        }
        let mut part = parts[&name].clone();
        mentioned(&part, "#/components/schemas/", &mut wanted);
        relocate(&mut part);
        defs.insert(name, part);
    }
    if !defs.is_empty() {
        schema["$defs"] = defs.into();
    }
    schema
}

/// What a verb does, by its help.
fn about(verb: &str) -> String {
    use clap::CommandFactory as _;
    let command = super::args::Cli::command();
    let found = verb.split(' ').try_fold(&command, |above, word| above.find_subcommand(word));
    found.and_then(clap::Command::get_about).map(ToString::to_string).unwrap_or_default()
}

/// Names that are referred to below `place`.
fn mentioned(value: &Value, place: &str, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            let target = object.get("$ref").and_then(Value::as_str);
            names.extend(target.and_then(|t| t.strip_prefix(place)).map(str::to_owned));
            object.values().for_each(|value| mentioned(value, place, names));
        }
        Value::Array(list) => list.iter().for_each(|value| mentioned(value, place, names)),
        _ => {}
    }
}

/// Makes the references of the OpenAPI document those of a schema.
fn relocate(value: &mut Value) {
    match value {
        Value::Object(object) => {
            if let Some(Value::String(target)) = object.get_mut("$ref") {
                *target = target.replace("#/components/schemas/", "#/$defs/");
            }
            object.values_mut().for_each(relocate);
        }
        Value::Array(list) => list.iter_mut().for_each(relocate),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::args::Cli;

    fn folder() -> std::path::PathBuf {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas")
    }

    #[test]
    fn the_files_are_current() {
        let Value::Object(all) = all() else { panic!("no schemas") };
        let wanted: BTreeMap<String, String> =
            all.iter().map(|(name, schema)| (name.clone(), format!("{schema:#}\n"))).collect();
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(folder()).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if name.ends_with(".json") {
                found.insert(name, std::fs::read_to_string(entry.path()).unwrap());
            }
        }
        let names = |map: &BTreeMap<String, String>| map.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&wanted), "script/schemas writes them");
        for (name, text) in wanted {
            assert!(
                found[&name] == text,
                "docs/schemas/{name} is not current: script/schemas writes it"
            );
        }
    }

    #[test]
    fn the_page_lists_every_schema_with_what_the_verb_does() {
        let page = std::fs::read_to_string(folder().join("../json.md")).unwrap();
        let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
        let mut shapes = shapes();
        shapes.sort_by_key(|(verb, _, _)| *verb);
        let wanted: Vec<String> = shapes
            .iter()
            .map(|(verb, _, _)| {
                let file = format!("{verb}.json");
                let (words, flag) = match *verb {
                    "exec-detach" => ("exec".to_owned(), " --detach"),
                    verb => (super::words(verb), ""),
                };
                format!("| `{words}{flag}` | [{file}](schemas/{file}) | {} |", about(&words))
            })
            .collect();
        assert_eq!(listed, wanted, "script/schemas writes them");
    }

    #[test]
    fn every_verb_that_answers_has_a_schema() {
        let known: Vec<String> = shapes().iter().map(|(verb, _, _)| words(verb)).collect();
        // Verbs that print no document.
        let none = ["serve", "help", "selftest"];
        for verb in Cli::command().get_subcommands() {
            let below: Vec<_> = verb.get_subcommands().map(clap::Command::get_name).collect();
            let name = verb.get_name();
            if none.contains(&name) {
                continue;
            }
            if below.is_empty() {
                assert!(known.iter().any(|known| known == name), "{name} has no schema");
            }
            let hidden: Vec<_> = verb.get_subcommands().filter(|v| v.is_hide_set()).collect();
            for below in below {
                if hidden.iter().any(|verb| verb.get_name() == below) {
                    continue;
                }
                let whole = format!("{name} {below}");
                assert!(known.contains(&whole), "{whole} has no schema");
            }
        }
    }

    #[test]
    fn what_is_referred_to_is_there() {
        let Value::Object(all) = all() else { panic!("no schemas") };
        for (name, schema) in all {
            let mut wanted = BTreeSet::new();
            mentioned(&schema, "#/$defs/", &mut wanted);
            mentioned(&schema, "#/components", &mut wanted);
            for part in wanted {
                let part_is = &schema["$defs"][&part];
                let whole = part_is["type"].is_string() || part_is["allOf"].is_array();
                assert!(whole, "{name}: {part}");
            }
        }
    }
}
