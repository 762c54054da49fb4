//! `POST /v1/completions`, and the common part of all requests that generate.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::parts::{DebugConfig, ResponseFormat, StreamOptions};
use super::{CompletionLogprobs, ServingStats, Usage};
use crate::lax::{self, Fields};
use crate::{ApiError, FinishReason, TokenId, TokenIds};

/// Parameters of other servers that we know and do not implement; asking for one is an error, never ignored.
const NOT_IMPLEMENTED: &[&str] = &[
    "suffix",
    "prompt_embeds",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "logits_processors",
    "lora_path",
    "repetition_detection",
    "kv_transfer_params",
];

/// What to continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    /// Text, yet to be turned into tokens.
    Text(String),
    /// Tokens.
    Tokens(TokenIds),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Tokens(TokenIds::default())
    }
}

impl Prompt {
    /// Reads a string, a list of token ids, or a list that holds exactly one of these.
    ///
    /// # Errors
    /// 400 for an empty prompt, for several prompts, and for a token id out of range; 422 for anything else.
    pub fn from_value(value: Value) -> Result<Self, ApiError> {
        Self::read(value, true)
    }

    fn read(value: Value, outermost: bool) -> Result<Self, ApiError> {
        let prompt = match value {
            Value::String(text) => Self::Text(text),
            Value::Array(mut items) => {
                if items.first().is_some_and(|item| item.is_array() || is_text(item)) && outermost {
                    if items.len() > 1 {
                        return Err(ApiError::bad_request(
                            "prompt",
                            format!("prompt holds {} prompts, must hold one", items.len()),
                        ));
                    }
                    return Self::read(items.remove(0), false);
                }
                Self::Tokens(token_ids("prompt", &items)?.into())
            }
            other => {
                return Err(ApiError::unprocessable(format!(
                    "prompt is {}, must be a string or a list of token ids",
                    lax::name_of(&other)
                ))
                .with_param("prompt"));
            }
        };
        prompt.checked()
    }

    /// Refuses a prompt that holds nothing.
    ///
    /// # Errors
    /// 400 naming `prompt`.
    pub fn checked(self) -> Result<Self, ApiError> {
        if self.is_empty() { Err(ApiError::bad_request("prompt", "prompt is empty")) } else { Ok(self) }
    }

    /// Says whether there is nothing to continue.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Tokens(tokens) => tokens.is_empty(),
        }
    }

    /// Returns the tokens, if it is tokens.
    #[must_use]
    pub fn tokens(&self) -> Option<&[TokenId]> {
        match self {
            Self::Text(_) => None,
            Self::Tokens(tokens) => Some(tokens),
        }
    }
}

/// A string that is not a number: `["7", "8"]` are token ids, `["one"]` is a prompt.
fn is_text(value: &Value) -> bool {
    value.is_string() && lax::int(value).is_err()
}

/// Reads a list of token ids.
pub(crate) fn token_ids(path: &str, items: &[Value]) -> Result<Vec<TokenId>, ApiError> {
    let mut tokens = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let id = lax::int(item)
            .map_err(|what| ApiError::unprocessable(format!("{path}[{i}] {what}")).with_param(path))?;
        let id = u32::try_from(id).map_err(|_| {
            ApiError::bad_request(path, format!("{path}[{i}] is {id}, must be in [0, {}]", u32::MAX))
        })?;
        tokens.push(TokenId(id));
    }
    Ok(tokens)
}

/// A request to continue a prompt, types checked, bounds not yet (see [`CompletionRequest::generation`]).
///
/// It serialises to what [`CompletionRequest::from_json`] reads, fields left at their default left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionRequest {
    /// The model; none is the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What to continue.
    pub prompt: Prompt,
    /// Return the prompt's text before the output.
    #[serde(skip_serializing_if = "is_false")]
    pub echo: bool,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// See [`crate::SamplingParams`]; `-1` also means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<i64>,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
    /// See [`crate::SamplingParams`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    /// Added to single logits; keys are token ids.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<u32, f32>,
    /// The seed of the draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    /// Log-probabilities of the chosen and of so many most probable tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<i64>,
    /// Output tokens at most. `max_completion_tokens` is read as a synonym.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<i64>,
    /// Output tokens at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tokens: Option<i64>,
    /// Choices to generate.
    pub n: i64,
    /// Strings that end the output and are not part of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Tokens that end the output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past the model's end-of-sequence tokens. Also read from `debug_config`.
    #[serde(skip_serializing_if = "is_false")]
    pub ignore_eos: bool,
    /// Answer token by token.
    #[serde(skip_serializing_if = "is_false")]
    pub stream: bool,
    /// What a stream carries beside text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<StreamOptions>,
    /// The end user on `/v1/*`; on `/microserving/*` it is the sequence key, read by those calls' own types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The form the output must have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_format: Option<ResponseFormat>,
    /// Separates tenants in the context cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Higher runs earlier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// Return each choice's `token_ids` beside its text.
    #[serde(skip_serializing_if = "is_false")]
    pub return_token_ids: bool,
}

impl CompletionRequest {
    /// Makes a request with every option at its default.
    #[must_use]
    pub fn new(prompt: Prompt) -> Self {
        Self { prompt, n: 1, ..Self::default() }
    }

    /// Reads the body of `POST /v1/completions`.
    ///
    /// # Errors
    /// 422 if the body is not JSON or a field has the wrong type; 400 for a parameter that is known and not implemented.
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        Self::from_fields(&mut Fields::parse(body)?)
    }

    /// Takes the fields of a completion request out of `fields`, leaving what it does not know.
    ///
    /// # Errors
    /// As [`CompletionRequest::from_json`].
    pub fn from_fields(fields: &mut Fields) -> Result<Self, ApiError> {
        let prompt = fields.prompt()?;
        let mut request = Self::common(fields)?;
        request.prompt = prompt;
        request.echo = fields.flag("echo")?;
        request.logprobs = fields.opt_int("logprobs")?;
        let best_of = fields.int_or("best_of", 1)?;
        if best_of != 1 && best_of != request.n {
            return Err(ApiError::bad_request(
                "best_of",
                format!(
                    "best_of is {best_of}: choosing among more candidates than n = {} is not implemented",
                    request.n
                ),
            )
            .with_code("unsupported_parameter"));
        }
        Ok(request)
    }

    /// Reads what completions and chats have in common.
    pub(crate) fn common(fields: &mut Fields) -> Result<Self, ApiError> {
        fields.refuse(NOT_IMPLEMENTED)?;
        for (name, usual) in [
            ("skip_special_tokens", true),
            ("add_special_tokens", true),
            ("spaces_between_special_tokens", true),
        ] {
            if fields.opt_bool(name)?.is_some_and(|value| value != usual) {
                return Err(ApiError::not_implemented(name));
            }
        }
        let max_tokens = fields.opt_int("max_tokens")?;
        let max_completion_tokens = fields.opt_int("max_completion_tokens")?;
        if let (Some(a), Some(b)) = (max_tokens, max_completion_tokens)
            && a != b
        {
            return Err(ApiError::bad_request(
                "max_completion_tokens",
                format!("max_completion_tokens is {b} and max_tokens is {a}: give one"),
            ));
        }
        let debug_config = DebugConfig::from_fields(fields)?;
        let ignore_eos = fields.opt_bool("ignore_eos")?.unwrap_or(false);
        Ok(Self {
            model: fields.opt_string("model")?,
            prompt: Prompt::default(),
            echo: false,
            temperature: fields.opt_f32("temperature")?,
            top_p: fields.opt_f32("top_p")?,
            top_k: fields.opt_int("top_k")?,
            min_p: fields.opt_f32("min_p")?,
            repetition_penalty: fields.opt_f32("repetition_penalty")?,
            frequency_penalty: fields.opt_f32("frequency_penalty")?,
            presence_penalty: fields.opt_f32("presence_penalty")?,
            logit_bias: logit_bias(fields)?,
            seed: fields.opt_int("seed")?,
            logprobs: None,
            max_tokens: max_tokens.or(max_completion_tokens),
            min_tokens: fields.opt_int("min_tokens")?,
            n: fields.int_or("n", 1)?,
            stop: stop(fields)?,
            stop_token_ids: match fields.opt_array("stop_token_ids")? {
                Some(items) => token_ids("stop_token_ids", &items)?,
                None => Vec::new(),
            },
            ignore_eos: ignore_eos || debug_config.ignore_eos,
            stream: fields.flag("stream")?,
            stream_options: StreamOptions::from_fields(fields)?,
            user: fields.opt_string("user")?,
            response_format: ResponseFormat::from_fields(fields)?,
            cache_salt: fields.opt_string("cache_salt")?,
            priority: fields.opt_int("priority")?,
            return_token_ids: fields.opt_bool("return_token_ids")?.unwrap_or(false),
        })
    }
}

fn logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let Some(map) = fields.opt_object("logit_bias")? else { return Ok(BTreeMap::new()) };
    let mut out = BTreeMap::new();
    for (key, value) in map.rest() {
        let path = format!("logit_bias.{key}");
        let id = lax::int(&Value::String(key.clone()))
            .ok()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| {
                ApiError::bad_request(
                    "logit_bias",
                    format!("logit_bias has the key {key:?}, must be token ids"),
                )
            })?;
        let bias = lax::float(&value)
            .map_err(|what| ApiError::unprocessable(format!("{path} {what}")).with_param("logit_bias"))?;
        let bias = lax::finite_f32(&path, bias).map_err(|error| error.with_param("logit_bias"))?;
        out.insert(id, bias);
    }
    Ok(out)
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    match fields.take("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(Value::Array(items)) => items
            .into_iter()
            .enumerate()
            .map(|(i, item)| match item {
                Value::String(text) => Ok(text),
                other => Err(ApiError::unprocessable(format!(
                    "stop[{i}] is {}, must be a string",
                    lax::name_of(&other)
                ))
                .with_param("stop")),
            })
            .collect(),
        Some(other) => Err(fields
            .wrong("stop", format!("is {}, must be a string or a list of strings", lax::name_of(&other)))),
    }
}

/// For `skip_serializing_if`.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// The answer to a completion request, or one chunk of it: both have the same form.
///
/// A chunk's choices hold what is new. With `include_usage` the last chunk has no choices and the usage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionResponse {
    /// The request's id, the same in all chunks.
    pub id: String,
    /// Always `text_completion`.
    #[serde(default = "text_completion")]
    pub object: String,
    /// When it was made, in seconds since 1970.
    #[serde(default)]
    pub created: u64,
    /// The model that answered.
    #[serde(default)]
    pub model: Option<String>,
    /// The choices.
    pub choices: Vec<CompletionChoice>,
    /// What it took.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// Where tokens were matched, computed and sent; only on request (`x-microserving-stats: 1`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microserving: Option<ServingStats>,
}

/// One of the choices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    /// Its number, below `n`.
    #[serde(default)]
    pub index: u32,
    /// The text, or what is new of it.
    #[serde(default)]
    pub text: String,
    /// The log-probabilities of the tokens of `text`, if asked for.
    #[serde(default)]
    pub logprobs: Option<CompletionLogprobs>,
    /// Set with the last of the text.
    #[serde(default)]
    pub finish_reason: Option<FinishReason>,
    /// The tokens of `text`; only with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

fn text_completion() -> String {
    "text_completion".to_owned()
}

impl CompletionResponse {
    /// Makes an answer or chunk that holds `choices`.
    #[must_use]
    pub fn new(id: &str, created: u64, model: &str, choices: Vec<CompletionChoice>) -> Self {
        Self {
            id: id.to_owned(),
            object: text_completion(),
            created,
            model: Some(model.to_owned()),
            choices,
            usage: None,
            microserving: None,
        }
    }
}
