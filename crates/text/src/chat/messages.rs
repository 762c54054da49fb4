//! Brings the messages of a request into the form templates expect.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::TextError;

/// Checks the messages and joins contents given as parts.
pub(super) fn normalise<M: Serialize>(messages: &[M]) -> Result<Vec<Value>, TextError> {
    if messages.is_empty() {
        return Err(TextError::invalid("messages", "at least one message is needed"));
    }
    messages.iter().enumerate().map(|(index, message)| one(index, message)).collect()
}

fn one<M: Serialize>(index: usize, message: &M) -> Result<Value, TextError> {
    let field = format!("messages[{index}]");
    let value =
        serde_json::to_value(message).map_err(|error| TextError::invalid(&field, error.to_string()))?;
    let Value::Object(mut message) = value else {
        return Err(TextError::invalid(field, "must be an object"));
    };
    match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        _ => return Err(TextError::invalid(format!("{field}.role"), "must be a text such as `user`")),
    }
    let content = match message.get("content") {
        Some(Value::String(_)) => return Ok(Value::Object(message)),
        Some(Value::Array(parts)) => Value::String(join(&field, parts)?),
        // What an assistant's message that only calls tools looks like.
        Some(Value::Null) | None if has_tool_calls(&message) => Value::Null,
        Some(Value::Null) | None => {
            return Err(TextError::invalid(format!("{field}.content"), "is missing"));
        }
        Some(_) => {
            return Err(TextError::invalid(format!("{field}.content"), "must be a text or a list of parts"));
        }
    };
    message.insert("content".to_owned(), content);
    Ok(Value::Object(message))
}

fn has_tool_calls(message: &Map<String, Value>) -> bool {
    message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty())
}

fn join(field: &str, parts: &[Value]) -> Result<String, TextError> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let field = format!("{field}.content[{index}]");
        match part["type"].as_str() {
            Some("text") => match part["text"].as_str() {
                Some(part) => text.push_str(part),
                None => return Err(TextError::invalid(format!("{field}.text"), "must be a text")),
            },
            Some(other) => {
                return Err(TextError::invalid(
                    format!("{field}.type"),
                    format!("`{other}` is not supported, only `text` is"),
                ));
            }
            None => return Err(TextError::invalid(format!("{field}.type"), "must be `text`")),
        }
    }
    Ok(text)
}
