//! The one document that describes every path of the API: `/api/openapi.json`.
//!
//! Owns: what all operations have in common (scope, credentials, errors). Invariant: a path is
//! served only through an `OpenApiRouter`, which also describes it, so neither can be without the
//! other; a test compares the two.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use utoipa::PartialSchema as _;
use utoipa::ToSchema as _;
use utoipa::openapi::OpenApi;

use super::App;
use super::error::ErrorBody;

/// Fields that an answer may hold as null; every other optional field is absent instead.
const NULLABLE: [&str; 5] = ["exitCode", "next", "prev", "networkId", "keepLastSnapshots"];

/// Completes what the handlers' annotations gave.
pub(super) fn document(api: &OpenApi) -> Value {
    let mut document = serde_json::to_value(api).unwrap_or_else(|error| {
        tracing::error!(%error, "the OpenAPI document could not be written as JSON");
        json!({})
    });
    document["info"] = json!({
        "title": "Bivouac",
        "version": env!("CARGO_PKG_VERSION"),
        "description": "The Vercel Sandbox API with additions of our own below /api/bivouac.",
        "license": {"name": "Apache-2.0"},
    });
    document["security"] = json!([{"bearer": []}]);
    document["components"]["securitySchemes"] =
        json!({"bearer": {"type": "http", "scheme": "bearer"}});
    add_schemas(&mut document["components"]["schemas"]);
    if let Some(paths) = document["paths"].as_object_mut() {
        for (path, methods) in paths {
            for (method, operation) in methods.as_object_mut().into_iter().flatten() {
                complete(method, path, operation);
            }
        }
    }
    absent_not_null(&mut document["components"]["schemas"]);
    document
}

fn add_schemas(schemas: &mut Value) {
    let mut parts = vec![(ErrorBody::name().into_owned(), ErrorBody::schema())];
    ErrorBody::schemas(&mut parts);
    for (name, schema) in parts {
        schemas[name] = serde_json::to_value(schema).unwrap_or_default();
    }
}

fn complete(method: &str, path: &str, operation: &mut Value) {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id: Vec<&str> = std::iter::once(method).chain(words).collect();
    operation["operationId"] = id.join("_").into();
    let error = json!({
        "description": "what was refused, and why",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    });
    operation["responses"]["4XX"] = error.clone();
    operation["responses"]["5XX"] = error;
    let query = |name: &str, description: &str| {
        json!({"name": name, "in": "query", "required": false, "description": description,
            "schema": {"type": "string"}})
    };
    let common = [
        query("teamId", "team, by id or slug; 'local' by default"),
        query("slug", "the same as teamId"),
        query("projectId", "project, by id or slug; 'local' by default"),
        query("project", "the same as projectId"),
    ];
    if !operation["parameters"].is_array() {
        operation["parameters"] = json!([]);
    }
    if let Some(parameters) = operation["parameters"].as_array_mut() {
        parameters.extend(common);
    }
}

/// Turns "this or null" into "this": we leave a field out instead.
fn absent_not_null(value: &mut Value) {
    match value {
        Value::Object(object) => {
            if let Some(Value::Object(properties)) = object.get_mut("properties") {
                for (name, schema) in properties {
                    if !NULLABLE.contains(&name.as_str()) {
                        strip_null(schema);
                    }
                }
            }
            object.values_mut().for_each(absent_not_null);
        }
        Value::Array(list) => list.iter_mut().for_each(absent_not_null),
        _ => {}
    }
}

fn strip_null(schema: &mut Value) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|t| t != "null");
        if let [only] = types.as_slice() {
            schema["type"] = only.clone();
        }
    }
    for key in ["oneOf", "anyOf"] {
        let Some(Value::Array(choices)) = schema.get_mut(key) else { continue };
        choices.retain(|choice| choice["type"] != "null");
        if let [only] = choices.as_slice() {
            let only = only.clone();
            *schema = only;
        }
    }
}

/// The document
#[utoipa::path(get, path = "/openapi.json", tag = "bivouac",
    responses((status = 200, body = Object)))]
pub(super) async fn serve(State(app): State<App>) -> Json<Value> {
    Json(app.document.get().cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests;
