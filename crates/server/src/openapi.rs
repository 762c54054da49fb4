//! `/openapi.json`, made from the table of routes.

use serde_json::{Map, Value, json};

/// One field of a body: name, JSON type, meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    name: &'static str,
    kind: &'static str,
    required: bool,
    about: &'static str,
}

/// What an operation answers with status 200.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Reply {
    Json,
    Text,
    /// Server-sent events.
    Stream,
    /// Server-sent events if the body asks for them by `stream`.
    JsonOrStream,
}

/// One method on one path.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    summary: &'static str,
    reply: Reply,
    body: Vec<Field>,
    query: Vec<(&'static str, &'static str)>,
}

impl Operation {
    pub(crate) fn get(path: &'static str, summary: &'static str, reply: Reply) -> Self {
        Self { method: "get", path, summary, reply, body: Vec::new(), query: Vec::new() }
    }

    pub(crate) fn post(path: &'static str, summary: &'static str, reply: Reply) -> Self {
        Self { method: "post", ..Self::get(path, summary, reply) }
    }

    pub(crate) fn body(mut self, groups: &[&'static [Field]]) -> Self {
        self.body = groups.concat();
        self
    }

    pub(crate) fn query(mut self, name: &'static str, about: &'static str) -> Self {
        self.query.push((name, about));
        self
    }

    fn describe(&self) -> Value {
        let mut parameters: Vec<Value> = self
            .query
            .iter()
            .map(|(name, about)| json!({"name": name, "in": "query", "description": about, "schema": {}}))
            .collect();
        if let Some((_, rest)) = self.path.split_once('{')
            && let Some((name, _)) = rest.split_once('}')
        {
            parameters
                .push(json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
        }
        let mut operation = json!({
            "summary": self.summary,
            "parameters": parameters,
            "responses": {
                "200": {"description": "done", "content": self.content()},
                "default": {
                    "description": "an error",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        });
        if !self.body.is_empty() {
            operation["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": self.schema()}}});
        }
        operation
    }

    fn content(&self) -> Value {
        let mut content = Map::new();
        if matches!(self.reply, Reply::Json | Reply::JsonOrStream) {
            content.insert("application/json".into(), json!({"schema": {"type": "object"}}));
        }
        if matches!(self.reply, Reply::Stream | Reply::JsonOrStream) {
            content.insert("text/event-stream".into(), json!({"schema": {"type": "string"}}));
        }
        if self.reply == Reply::Text {
            content.insert("text/plain".into(), json!({"schema": {"type": "string"}}));
        }
        Value::Object(content)
    }

    fn schema(&self) -> Value {
        let mut properties = Map::new();
        for field in &self.body {
            let mut property = json!({"description": field.about});
            // An empty type is one of several; the description says which.
            if !field.kind.is_empty() {
                property["type"] = field.kind.into();
            }
            properties.insert(field.name.into(), property);
        }
        let required: Vec<_> =
            self.body.iter().filter(|field| field.required).map(|field| field.name).collect();
        json!({"type": "object", "properties": properties, "required": required})
    }
}

/// Makes the whole document; health is served by the daemon around us and listed here for its readers.
pub(crate) fn document(operations: &[Operation]) -> Value {
    let health = [
        Operation::get("/health/live", "Should this process go on living", Reply::Json),
        Operation::get("/health/ready", "May it get work", Reply::Json),
        Operation::get("/health", "As /health/ready", Reply::Json),
    ];
    let mut paths = Map::new();
    for operation in operations.iter().chain(&health) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = operation.describe();
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "microserving engine", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {"schemas": {"Error": {
            "type": "object",
            "properties": {"error": {"type": "object", "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }}},
        }}},
    })
}

/// The fields of bodies, in groups that several operations share.
pub(crate) mod fields {
    use super::Field;

    const fn field(name: &'static str, kind: &'static str, about: &'static str) -> Field {
        Field { name, kind, required: false, about }
    }

    const fn required(name: &'static str, kind: &'static str, about: &'static str) -> Field {
        Field { name, kind, required: true, about }
    }

    pub(crate) const PROMPT: &[Field] = &[
        required("prompt", "", "a string, or a list of token ids"),
        field("echo", "boolean", "return the prompt's text before the output"),
    ];

    pub(crate) const CHAT: &[Field] = &[
        required("messages", "array", "the conversation: objects with role and content"),
        field("top_logprobs", "integer", "alternatives per token, 0 to 20; needs logprobs"),
    ];

    pub(crate) const COMPLETION: &[Field] = &[
        field("model", "string", "the served model, or null"),
        field("max_tokens", "integer", "output tokens at most; also max_completion_tokens"),
        field("min_tokens", "integer", "output tokens at least"),
        field("temperature", "number", "0 is greedy; in [0, 100]"),
        field("top_p", "number", "in (0, 1]"),
        field("top_k", "integer", "0 or -1 keeps all"),
        field("min_p", "number", "in [0, 1]"),
        field("repetition_penalty", "number", "in (0, 100]; 1 is off"),
        field("frequency_penalty", "number", "in [-2, 2]"),
        field("presence_penalty", "number", "in [-2, 2]"),
        field("logit_bias", "object", "token id to a number in [-100, 100]"),
        field("seed", "integer", "of the draws; drawn if absent"),
        field("n", "integer", "choices, 1 to 64"),
        field("stop", "", "a string or a list of strings that end the output"),
        field("stop_token_ids", "array", "tokens that end the output"),
        field("ignore_eos", "boolean", "go on past the model's end-of-sequence tokens"),
        field("logprobs", "", "completions: alternatives per token, 0 to 20; chats: a boolean"),
        field("response_format", "object", "text, json_object or json_schema"),
        field("stream", "boolean", "answer by server-sent events"),
        field("stream_options", "object", "include_usage, continuous_usage_stats"),
        field("cache_salt", "string", "separates tenants in the context cache"),
        field("priority", "integer", "higher runs earlier"),
        field("return_token_ids", "boolean", "token ids beside the text"),
        field("timeout_seconds", "number", "when the caller gives up"),
        field("user", "string", "the end user; on /microserving/* the key of the request"),
    ];

    pub(crate) const KEY: &[Field] = &[
        field("seq_id", "string", "the key that ties the calls of a request together; also user"),
        field("attempt", "integer", "the number of the try; a higher one replaces a lower one"),
        field("debug_config", "object", "ignore_eos; other fields must be off"),
    ];

    pub(crate) const PREP_RECV: &[Field] = &[
        required("end", "integer", "receive [0, end); negative counts from the prompt's end"),
        field("reserve_tokens", "integer", "tokens to make room for past end"),
        field("commit", "boolean", "the transfer will be committed, not generated from"),
    ];

    pub(crate) const REMOTE_SEND: &[Field] = &[
        required("begin", "integer", "the first position to deliver"),
        required("end", "integer", "the position after the last"),
        required("kv_addr_info", "string", "the address, as prep_recv answered it"),
        required("recv_rank", "integer", "the receiver's rank under PGAS transports"),
    ];

    pub(crate) const START_GENERATE: &[Field] = &[
        required("begin", "integer", "where prefilling begins; the prepared end if there is one"),
        field("generated_from", "integer", "where the prompt ends and replayed output begins"),
        field("choice_index", "integer", "what the sampler calls the first choice"),
        field("resume_from", "integer", "attach to a running stream from this token on"),
    ];

    pub(crate) const SEQUENCE: &[Field] = &[
        required("seq_id", "string", "the request"),
        field("attempt", "integer", "the try; none is the one known here"),
    ];

    pub(crate) const TOKENIZE: &[Field] = &[
        field("model", "string", "the served model, or null"),
        field("prompt", "string", "a text"),
        field("messages", "array", "or a conversation"),
        field("add_special_tokens", "boolean", "add what the model expects around a text; true"),
    ];

    pub(crate) const DETOKENIZE: &[Field] =
        &[field("model", "string", "the served model, or null"), required("tokens", "array", "token ids")];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described() {
        let table = crate::routes::table();
        let operations: Vec<_> = table.iter().map(|(operation, _)| operation.clone()).collect();
        let document = document(&operations);
        for operation in &operations {
            let described = &document["paths"][operation.path][operation.method];
            assert!(described["responses"]["200"].is_object(), "{} {}", operation.method, operation.path);
            assert_eq!(
                described["requestBody"].is_object(),
                operation.method == "post",
                "{}",
                operation.path
            );
        }
        assert_eq!(document["paths"].as_object().unwrap().len(), operations.len() + 3);
        assert_eq!(
            document["paths"]["/microserving/sequences/{seq_id}"]["get"]["parameters"][0]["name"],
            "seq_id"
        );
    }
}
