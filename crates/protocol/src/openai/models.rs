//! `/v1/models`, `/tokenize`, `/detokenize`.

use serde::{Deserialize, Serialize};

use super::ChatMessage;
use super::completion::token_ids;
use crate::lax::Fields;
use crate::{ApiError, TokenId};

/// The answer to `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: String,
    /// The models served.
    pub data: Vec<ModelCard>,
}

impl ModelList {
    /// Lists `data`.
    #[must_use]
    pub fn new(data: Vec<ModelCard>) -> Self {
        Self { object: "list".into(), data }
    }
}

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name to ask for.
    pub id: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub created: u64,
    /// Always `model`.
    #[serde(default)]
    pub object: String,
    /// Who offers it.
    #[serde(default)]
    pub owned_by: String,
    /// The longest sequence, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

impl ModelCard {
    /// Describes a model that we serve.
    #[must_use]
    pub fn new(id: &str, created: u64, max_model_len: u32) -> Self {
        Self {
            id: id.to_owned(),
            created,
            object: "model".into(),
            owned_by: "microserving".into(),
            max_model_len: Some(max_model_len),
        }
    }
}

/// What to turn into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizeInput {
    /// Text as it is.
    Text(String),
    /// Messages, through the model's chat template.
    Chat(Vec<ChatMessage>),
}

/// `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizeRequest {
    /// The model; none is the only one.
    pub model: Option<String>,
    /// What to turn into tokens.
    pub input: TokenizeInput,
    /// Add what the model expects before a text (its BOS token); for messages the template does that.
    pub add_special_tokens: bool,
}

impl TokenizeRequest {
    /// Reads the body of `POST /tokenize`: `prompt`, or `messages`.
    ///
    /// # Errors
    /// 422 for wrong types, 400 if both or none are there.
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let input = match (fields.opt_string("prompt")?, fields.has("messages")) {
            (Some(text), false) => TokenizeInput::Text(text),
            (None, true) => TokenizeInput::Chat(ChatMessage::list(&mut fields)?),
            (None, false) => return Err(ApiError::unprocessable("prompt is missing").with_param("prompt")),
            (Some(_), true) => {
                return Err(ApiError::bad_request(
                    "messages",
                    "prompt and messages are both given: give one",
                ));
            }
        };
        Ok(Self {
            model: fields.opt_string("model")?,
            input,
            add_special_tokens: fields.opt_bool("add_special_tokens")?.unwrap_or(true),
        })
    }
}

/// The answer to `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeResponse {
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// How many they are.
    pub count: usize,
    /// The longest sequence of the model, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

/// `POST /detokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model; none is the only one.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<TokenId>,
}

impl DetokenizeRequest {
    /// Reads the body of `POST /detokenize`.
    ///
    /// # Errors
    /// 422 for wrong types, 400 for token ids out of range.
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let Some(items) = fields.opt_array("tokens")? else {
            return Err(ApiError::unprocessable("tokens is missing").with_param("tokens"));
        };
        Ok(Self { model: fields.opt_string("model")?, tokens: token_ids("tokens", &items)? })
    }
}

/// The answer to `POST /detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text.
    pub prompt: String,
}
