//! `POST /v1/chat/completions`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::generation::{MAX_LOGPROBS, whole};
use super::{ChatLogprobs, CompletionRequest, Prompt, ServingStats, Usage};
use crate::lax::{self, Fields};
use crate::{ApiError, FinishReason, TokenId};

/// Parameters of chats that we know and do not implement.
const NOT_IMPLEMENTED: &[&str] = &[
    "tools",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "store",
    "prompt_cache_key",
    "prompt_cache_retention",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "best_of",
    "parallel_tool_calls",
];

/// One message, its content as plain text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text; parts are joined.
    pub content: String,
    /// The speaker's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ChatMessage {
    /// Makes a message without a name.
    #[must_use]
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned(), name: None }
    }

    /// Takes `messages` out of a request.
    pub(crate) fn list(fields: &mut Fields) -> Result<Vec<Self>, ApiError> {
        let Some(items) = fields.opt_array("messages")? else {
            return Err(ApiError::unprocessable("messages is missing").with_param("messages"));
        };
        if items.is_empty() {
            return Err(ApiError::bad_request("messages", "messages is empty"));
        }
        items.into_iter().enumerate().map(|(i, item)| Self::read(i, item)).collect()
    }

    fn read(i: usize, item: Value) -> Result<Self, ApiError> {
        let path = format!("messages[{i}]");
        let Value::Object(map) = item else {
            let what = lax::name_of(&item);
            return Err(
                ApiError::unprocessable(format!("{path} is {what}, must be an object")).with_param(path)
            );
        };
        let mut fields = Fields::nested(map, &path);
        fields.refuse(&["tool_calls", "tool_call_id", "function_call", "audio", "refusal"])?;
        let role = match fields.string("role")?.as_str() {
            // The newer name of the same thing; chat templates of open models know only the older one.
            "developer" | "system" => "system",
            "user" => "user",
            "assistant" => "assistant",
            "tool" | "function" => return Err(ApiError::not_implemented(format!("{path}.role tool"))),
            other => {
                return Err(ApiError::bad_request(
                    format!("{path}.role"),
                    format!("{path}.role is {other:?}, must be system, developer, user or assistant"),
                ));
            }
        };
        let content = match fields.require("content")? {
            Value::String(text) => text,
            Value::Array(parts) => Self::join(&path, parts)?,
            other => {
                return Err(fields.wrong(
                    "content",
                    format!("is {}, must be a string or a list of parts", lax::name_of(&other)),
                ));
            }
        };
        Ok(Self { role: role.to_owned(), content, name: fields.opt_string("name")? })
    }

    fn join(path: &str, parts: Vec<Value>) -> Result<String, ApiError> {
        let mut text = String::new();
        for (j, part) in parts.into_iter().enumerate() {
            let path = format!("{path}.content[{j}]");
            match part {
                Value::String(part) => text.push_str(&part),
                Value::Object(map) => {
                    let mut fields = Fields::nested(map, &path);
                    let kind = fields.string("type")?;
                    if kind != "text" {
                        return Err(ApiError::bad_request(
                            format!("{path}.type"),
                            format!("{path}.type is {kind:?}; only text is implemented"),
                        )
                        .with_code("unsupported_parameter"));
                    }
                    text.push_str(&fields.string("text")?);
                }
                other => {
                    let what = lax::name_of(&other);
                    return Err(ApiError::unprocessable(format!("{path} is {what}, must be an object"))
                        .with_param(path));
                }
            }
        }
        Ok(text)
    }
}

/// A request to continue a conversation, types checked, bounds not yet (see [`CompletionRequest::generation`]).
#[derive(Clone, Debug, PartialEq)]
pub struct ChatCompletionRequest {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Everything else, in the form of a completion request without a prompt.
    pub rest: CompletionRequest,
}

impl ChatCompletionRequest {
    /// Reads the body of `POST /v1/chat/completions`.
    ///
    /// # Errors
    /// 422 if the body is not JSON or a field has the wrong type; 400 for a parameter that is known and not implemented.
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        Self::from_fields(&mut Fields::parse(body)?)
    }

    /// Takes the fields of a chat request out of `fields`, leaving what it does not know.
    ///
    /// # Errors
    /// As [`ChatCompletionRequest::from_json`].
    pub fn from_fields(fields: &mut Fields) -> Result<Self, ApiError> {
        fields.refuse(NOT_IMPLEMENTED)?;
        if let Some(choice) = fields.take("tool_choice")
            && choice != "none"
            && choice != "auto"
        {
            return Err(ApiError::not_implemented("tool_choice"));
        }
        if let Some(modalities) = fields.opt_array("modalities")?
            && modalities.iter().any(|modality| modality != "text")
        {
            return Err(ApiError::not_implemented("modalities"));
        }
        if fields.opt_bool("add_generation_prompt")? == Some(false) {
            return Err(ApiError::not_implemented("add_generation_prompt"));
        }
        let messages = ChatMessage::list(fields)?;
        let wants_logprobs = fields.opt_bool("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.opt_int("top_logprobs")?;
        let mut rest = CompletionRequest::common(fields)?;
        rest.logprobs = match (wants_logprobs, top_logprobs) {
            // Here, where the field still has the name that the client gave it.
            (true, Some(top)) => Some(whole("top_logprobs", top, 0, MAX_LOGPROBS)?.into()),
            (true, None) => Some(0),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::bad_request("top_logprobs", "top_logprobs needs logprobs to be true"));
            }
        };
        Ok(Self { messages, rest })
    }

    /// Returns the completion request that continues `prompt`, the messages as the model's template writes them.
    #[must_use]
    pub fn into_completion(self, prompt: Prompt) -> CompletionRequest {
        CompletionRequest { prompt, ..self.rest }
    }
}

/// The answer to a chat request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatResponse {
    /// The request's id.
    pub id: String,
    /// Always `chat.completion`.
    pub object: String,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The choices.
    pub choices: Vec<ChatChoice>,
    /// What it took.
    pub usage: Option<Usage>,
    /// Where tokens were matched, computed and sent; only on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microserving: Option<ServingStats>,
}

/// One of the choices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    /// Its number, below `n`.
    pub index: u32,
    /// The answer.
    pub message: ChatMessage,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: Option<FinishReason>,
    /// The tokens of the answer; only with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// One chunk of the answer to a chat request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatChunk {
    /// The request's id, the same in all chunks.
    pub id: String,
    /// Always `chat.completion.chunk`.
    pub object: String,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// What is new; empty in the usage chunk.
    pub choices: Vec<ChatChoiceDelta>,
    /// What it took, in the last chunk, if asked for.
    pub usage: Option<Usage>,
    /// Where tokens were matched, computed and sent; only on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microserving: Option<ServingStats>,
}

/// What is new of one choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatChoiceDelta {
    /// Its number, below `n`.
    pub index: u32,
    /// The new part of the message.
    pub delta: ChatDelta,
    /// Log-probabilities of the new tokens, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Set with the last of the text.
    pub finish_reason: Option<FinishReason>,
    /// The new tokens; only with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// The new part of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatDelta {
    /// `assistant`, with the first part only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// The new text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}
