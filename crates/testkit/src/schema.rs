//! A JSON Schema, as far as our own schemas go, and stricter than the standard: a field that the schema
//! does not name is an error, so that an answer cannot have undocumented ones.
//!
//! Invariant: a keyword that is not known here is a panic, never a check that is left out.

use std::collections::BTreeSet;

use serde_json::Value;

/// Words that say nothing about which values are right.
const NOTES: [&str; 7] =
    ["$schema", "$defs", "title", "description", "format", "example", "deprecated"];

/// Everything in which `value` differs from `schema`; nothing is good.
#[must_use]
pub fn schema_breaches(schema: &Value, value: &Value) -> Vec<String> {
    let check = Check { root: schema };
    let mut breaches = Vec::new();
    let named = check.any(schema, value, "$", &mut breaches);
    check.leftovers(named.as_ref(), value, "$", &mut breaches);
    breaches
}

struct Check<'s> {
    root: &'s Value,
}

/// Fields that a schema names; `None`: it does not speak of fields, or takes any.
type Named = Option<BTreeSet<String>>;

impl Check<'_> {
    /// Checks one value; what is below it is complete, its own fields are the caller's to complete:
    /// with `allOf` the parts name them together.
    fn any(&self, schema: &Value, value: &Value, at: &str, out: &mut Vec<String>) -> Named {
        let Some(words) = schema.as_object() else {
            // `{}` and `true` take everything.
            assert!(schema == &Value::Bool(true), "{at}: no schema: {schema}");
            return None;
        };
        let mut named: Named = None;
        let mut open = words.is_empty();
        for (word, wanted) in words {
            match word.as_str() {
                "$ref" => {
                    let target = wanted.as_str().and_then(|t| t.strip_prefix("#/$defs/"));
                    let target = target.unwrap_or_else(|| panic!("{at}: reference {wanted}"));
                    let part = &self.root["$defs"][target];
                    assert!(part.is_object(), "{at}: there is no part {target}");
                    join(&mut named, self.any(part, value, at, out));
                }
                "type" if !is_of(value, wanted) => {
                    out.push(format!("{at}: is {value}, not of type {wanted}"));
                }
                "enum" if !wanted.as_array().is_some_and(|all| all.contains(value)) => {
                    out.push(format!("{at}: {value} is none of {wanted}"));
                }
                "const" if value != wanted => out.push(format!("{at}: {value} is not {wanted}")),
                "minimum" if value.as_f64() < wanted.as_f64() => {
                    out.push(format!("{at}: {value} is below {wanted}"));
                }
                "required" => {
                    for name in wanted.as_array().into_iter().flatten().filter_map(Value::as_str) {
                        if value.is_object() && value.get(name).is_none() {
                            out.push(format!("{at}: '{name}' is missing"));
                        }
                    }
                }
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        self.closed(wanted, item, &format!("{at}[{index}]"), out);
                    }
                }
                "properties" => {
                    let fields = wanted.as_object().into_iter().flatten();
                    let known = named.get_or_insert_default();
                    for (name, part) in fields {
                        known.insert(name.clone());
                        if let Some(field) = value.get(name) {
                            self.closed(part, field, &format!("{at}.{name}"), out);
                        }
                    }
                }
                "additionalProperties" if wanted == &Value::Bool(false) => {
                    named.get_or_insert_default();
                }
                "additionalProperties" => {
                    open = true;
                    let known = words.get("properties");
                    for (name, field) in value.as_object().into_iter().flatten() {
                        if known.is_none_or(|known| known.get(name).is_none()) {
                            self.closed(wanted, field, &format!("{at}.{name}"), out);
                        }
                    }
                }
                "propertyNames" => {}
                "allOf" => {
                    for part in wanted.as_array().into_iter().flatten() {
                        join(&mut named, self.any(part, value, at, out));
                    }
                }
                "oneOf" | "anyOf" => {
                    join(&mut named, self.one(word == "oneOf", wanted, value, at, out));
                }
                "type" | "enum" | "const" | "minimum" => {}
                word => assert!(NOTES.contains(&word), "{at}: keyword '{word}' is not known here"),
            }
        }
        // An object that is only said to be one may hold anything.
        let plain = words.get("type").is_some_and(|kind| kind == "object") && named.is_none();
        if open || plain { None } else { named.or(Some(BTreeSet::new())) }
    }

    fn one(
        &self,
        exactly: bool,
        choices: &Value,
        value: &Value,
        at: &str,
        out: &mut Vec<String>,
    ) -> Named {
        let mut right = Vec::new();
        let mut reasons = Vec::new();
        for choice in choices.as_array().into_iter().flatten() {
            let mut breaches = Vec::new();
            let named = self.any(choice, value, at, &mut breaches);
            self.leftovers(named.as_ref(), value, at, &mut breaches);
            if breaches.is_empty() { right.push(named) } else { reasons.extend(breaches) }
        }
        if right.is_empty() || (exactly && right.len() > 1) {
            out.push(format!("{at}: fits {} of the choices: {}", right.len(), reasons.join("; ")));
        }
        right.pop().flatten()
    }

    /// Checks a value of which nothing else speaks.
    fn closed(&self, schema: &Value, value: &Value, at: &str, out: &mut Vec<String>) {
        let named = self.any(schema, value, at, out);
        self.leftovers(named.as_ref(), value, at, out);
    }

    fn leftovers(
        &self,
        named: Option<&BTreeSet<String>>,
        value: &Value,
        at: &str,
        out: &mut Vec<String>,
    ) {
        let (Some(named), Some(fields)) = (named, value.as_object()) else { return };
        for name in fields.keys().filter(|name| !named.contains(*name)) {
            out.push(format!("{at}: the field '{name}' is in no schema"));
        }
    }
}

fn join(all: &mut Named, more: Named) {
    if let Some(more) = more {
        all.get_or_insert_default().extend(more);
    }
}

fn is_of(value: &Value, kind: &Value) -> bool {
    match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
        kind => match kind.as_str().unwrap_or_default() {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("there is no type '{other}'"),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn good(schema: &Value, value: &Value) -> bool {
        schema_breaches(schema, value).is_empty()
    }

    #[test]
    fn values_are_judged() {
        let schema = json!({
            "$defs": { "Box": { "type": "object", "required": ["name"],
                "properties": { "name": { "type": "string" }, "n": { "type": ["integer", "null"] } } } },
            "type": "array", "items": { "$ref": "#/$defs/Box" },
        });
        assert!(good(&schema, &json!([{ "name": "a" }, { "name": "b", "n": null }])));
        for bad in [
            json!({}),
            json!([{}]),
            json!([{ "name": 1 }]),
            json!([{ "name": "a", "n": 1.5 }]),
            json!([{ "name": "a", "more": 1 }]),
        ] {
            assert!(!good(&schema, &bad), "{bad}");
        }
    }

    #[test]
    fn choices_and_sums() {
        let part = |name: &str| {
            json!({ "type": "object", "required": [name],
            "properties": { name: { "type": "string" } } })
        };
        let one = json!({ "oneOf": [part("a"), part("b")] });
        assert!(good(&one, &json!({ "a": "x" })) && good(&one, &json!({ "b": "x" })));
        assert!(!good(&one, &json!({})) && !good(&one, &json!({ "a": "x", "b": "y" })));
        let sum = json!({ "allOf": [part("a")], "required": ["b"],
            "properties": { "b": { "type": "string" } } });
        assert!(good(&sum, &json!({ "a": "x", "b": "y" })));
        assert!(!good(&sum, &json!({ "a": "x" })));
        assert!(!good(&sum, &json!({ "a": "x", "b": "y", "c": "z" })));
        let map = json!({ "type": "object", "additionalProperties": { "type": "string" } });
        assert!(good(&map, &json!({ "any": "x" })) && !good(&map, &json!({ "any": 1 })));
        assert!(good(&json!({ "type": "object" }), &json!({ "any": 1 })));
    }

    #[test]
    #[should_panic(expected = "is not known here")]
    fn an_unknown_keyword_is_no_check_that_passes() {
        let _ = good(&json!({ "maxItems": 3 }), &json!([]));
    }
}
