//! `/openapi.json`, made from the list of routes.

use axum::Json;
use serde_json::{Map, Value, json};

use super::{Doors, headers};
use crate::client_headers;

/// Returns the description of all routes. Bodies are OpenAI's, so their fields are described where OpenAI describes them.
pub(super) fn document(doors: Doors) -> Json<Value> {
    let mut paths = Map::new();
    for route in doors.routes() {
        let path = route.path.replace("{*", "{");
        let operations: Map<String, Value> = route
            .operations
            .iter()
            .map(|(method, summary)| ((*method).to_owned(), operation(method, &path, summary)))
            .collect();
        paths.insert(path, operations.into());
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": {"title": "MicroServing router", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"schemas": {"Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }},
        }}},
    }))
}

fn operation(method: &str, path: &str, summary: &str) -> Value {
    let mut parameters = Vec::new();
    for name in path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name) {
        parameters.push(json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    let is_change = path.starts_with("/admin/") && method != "get" && !path.ends_with("/explain");
    if is_change && !path.contains("/scripts") {
        for (name, about) in [
            ("dry_run", "true checks the change and makes nothing"),
            ("force", "true sends requests on an engine that leaves elsewhere"),
        ] {
            let schema = json!({"type": "boolean"});
            parameters.push(json!({"name": name, "in": "query", "description": about, "schema": schema}));
        }
        parameters.push(json!({
            "name": "if-match", "in": "header", "schema": {"type": "string"},
            "description": "the ETag of the revision that the change is for; at another one it is refused with 412",
        }));
    }
    if path.ends_with("completions") {
        for (name, about) in [
            (headers::PATTERN, "the pattern that serves this request, such as balanced:0.25"),
            (client_headers::TENANT, "whose request it is, for rules and fairness"),
            (headers::STATS, "1 adds an object `microserving` beside the usage"),
        ] {
            let schema = json!({"type": "string"});
            parameters
                .push(json!({"name": name.as_str(), "in": "header", "description": about, "schema": schema}));
        }
    }
    let mut operation = json!({
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "done"},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    });
    let (kind, schema) = match (method, path.ends_with("/scripts/{name}")) {
        ("get" | "delete", _) => return operation,
        _ if path.ends_with("drain") => return operation,
        (_, true) => ("text/plain", "string"),
        (_, false) => ("application/json", "object"),
    };
    operation["requestBody"] =
        json!({"required": !path.contains("/{name}/"), "content": {kind: {"schema": {"type": schema}}}});
    operation
}
