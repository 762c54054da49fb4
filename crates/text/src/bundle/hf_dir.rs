//! Models in the Hugging Face layout.

use std::io;
use std::path::Path;

use microserving_protocol::TokenId;
use serde_json::Value;

use super::{END_NAMES, TextBundle, TokenizerSource, VERSION, read};
use crate::error::TextError;
use crate::tokenizer::Tokenizer;

pub(super) fn load(tokenizer_json: &Path, dir: &Path, model: &str) -> Result<TextBundle, TextError> {
    let json = read(tokenizer_json)?;
    let tokenizer = Tokenizer::from_hf_json(&json)?;
    let tokenizer_config = optional_json(&dir.join("tokenizer_config.json"))?;
    let generation_config = optional_json(&dir.join("generation_config.json"))?;
    let config = optional_json(&dir.join("config.json"))?;

    let bos_token = token_text(&tokenizer_config["bos_token"], "tokenizer_config.json: bos_token")?;
    let eos_token = token_text(&tokenizer_config["eos_token"], "tokenizer_config.json: eos_token")?;
    // The most specific says it: how to generate, else what the tokenizer ends with, else what the model was
    // trained to end with.
    let mut eos_token_ids = ids(&generation_config["eos_token_id"], "generation_config.json: eos_token_id")?;
    if let Some(id) = eos_token.as_deref().and_then(|text| tokenizer.special_id(text)) {
        eos_token_ids.push(id);
    }
    if eos_token_ids.is_empty() {
        eos_token_ids = ids(&config["eos_token_id"], "config.json: eos_token_id")?;
    }
    let ends = END_NAMES.iter().filter_map(|name| tokenizer.special_id(name));
    eos_token_ids.extend(ends.filter(|&id| tokenizer.is_special(id)));
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    Ok(TextBundle {
        version: VERSION,
        model: model.to_owned(),
        chat_template: chat_template(dir, &tokenizer_config)?,
        bos_token,
        eos_token,
        eos_token_ids,
        tokenizer: TokenizerSource::Hf { json },
    })
}

/// Finds the chat template: a file of its own goes before the one in the tokenizer's configuration, and of
/// several named ones the `default`.
fn chat_template(dir: &Path, tokenizer_config: &Value) -> Result<Option<String>, TextError> {
    if let Some(template) = optional_text(&dir.join("chat_template.jinja"))? {
        return Ok(Some(template));
    }
    let file = optional_json(&dir.join("chat_template.json"))?;
    let value = match &file["chat_template"] {
        Value::Null => &tokenizer_config["chat_template"],
        value => value,
    };
    match value {
        Value::Null => Ok(None),
        Value::String(template) => Ok(Some(template.clone())),
        Value::Array(templates) => {
            let default = templates.iter().find(|template| template["name"] == "default");
            match default.and_then(|template| template["template"].as_str()) {
                Some(template) => Ok(Some(template.to_owned())),
                None => {
                    Err(TextError::malformed("chat_template", "none of the templates is named `default`"))
                }
            }
        }
        _ => Err(TextError::malformed("chat_template", "it is neither a text nor a list of templates")),
    }
}

/// Reads a token's text: a string, or an object with its `content`.
fn token_text(value: &Value, field: &str) -> Result<Option<String>, TextError> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Object(token) => match token.get("content") {
            Some(Value::String(text)) => Ok(Some(text.clone())),
            _ => Err(TextError::malformed(field, "it has no `content`")),
        },
        _ => Err(TextError::malformed(field, "it is no token")),
    }
}

/// Reads token ids: a number, or a list of them.
fn ids(value: &Value, field: &str) -> Result<Vec<TokenId>, TextError> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(TokenId).ok_or_else(|| TextError::malformed(field, format!("{value} is no token id")))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(values) => values.iter().map(id).collect(),
        value => Ok(vec![id(value)?]),
    }
}

fn optional_text(path: &Path) -> Result<Option<String>, TextError> {
    match read(path) {
        Ok(text) => Ok(Some(text)),
        Err(TextError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn optional_json(path: &Path) -> Result<Value, TextError> {
    match optional_text(path)? {
        None => Ok(Value::Null),
        Some(text) => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            serde_json::from_str(&text).map_err(|error| TextError::malformed(name, error))
        }
    }
}
