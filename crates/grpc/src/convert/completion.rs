//! The request to continue a prompt, which every call carries.

use microserving_protocol::{ApiError, CompletionRequest, Prompt, ResponseFormat, StreamOptions, TokenId};

use super::{ids, tokens};
use crate::wire;

impl From<&CompletionRequest> for wire::CompletionRequest {
    fn from(request: &CompletionRequest) -> Self {
        let CompletionRequest {
            model,
            prompt,
            echo,
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            seed,
            logprobs,
            max_tokens,
            min_tokens,
            n,
            stop,
            stop_token_ids,
            ignore_eos,
            stream,
            stream_options,
            user,
            response_format,
            cache_salt,
            priority,
            return_token_ids,
        } = request;
        Self {
            model: model.clone(),
            prompt: Some(match prompt {
                Prompt::Text(text) => wire::completion_request::Prompt::Text(text.clone()),
                Prompt::Tokens(tokens) => wire::completion_request::Prompt::Tokens(ids(tokens)),
            }),
            echo: *echo,
            temperature: *temperature,
            top_p: *top_p,
            top_k: *top_k,
            min_p: *min_p,
            repetition_penalty: *repetition_penalty,
            frequency_penalty: *frequency_penalty,
            presence_penalty: *presence_penalty,
            logit_bias: logit_bias.clone(),
            seed: *seed,
            logprobs: *logprobs,
            max_tokens: *max_tokens,
            min_tokens: *min_tokens,
            n: Some(*n),
            stop: stop.clone(),
            stop_token_ids: stop_token_ids.iter().map(|token| token.0).collect(),
            ignore_eos: *ignore_eos,
            stream: *stream,
            stream_options: stream_options.map(|options| {
                let StreamOptions { include_usage, continuous_usage_stats } = options;
                wire::StreamOptions { include_usage, continuous_usage_stats }
            }),
            user: user.clone(),
            response_format: response_format.as_ref().map(Into::into),
            cache_salt: cache_salt.clone(),
            priority: *priority,
            return_token_ids: *return_token_ids,
        }
    }
}

impl TryFrom<wire::CompletionRequest> for CompletionRequest {
    type Error = ApiError;

    /// Reads a request; refuses what the reader of JSON refuses.
    fn try_from(message: wire::CompletionRequest) -> Result<Self, ApiError> {
        let wire::CompletionRequest {
            model,
            prompt,
            echo,
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            seed,
            logprobs,
            max_tokens,
            min_tokens,
            n,
            stop,
            stop_token_ids,
            ignore_eos,
            stream,
            stream_options,
            user,
            response_format,
            cache_salt,
            priority,
            return_token_ids,
        } = message;
        let prompt = match prompt {
            Some(wire::completion_request::Prompt::Text(text)) => Prompt::Text(text),
            Some(wire::completion_request::Prompt::Tokens(list)) => Prompt::Tokens(tokens(list.ids).into()),
            None => return Err(ApiError::unprocessable("prompt is missing").with_param("prompt")),
        };
        Ok(Self {
            model,
            prompt: prompt.checked()?,
            echo,
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            seed,
            logprobs,
            max_tokens,
            min_tokens,
            n: n.unwrap_or(1),
            stop,
            stop_token_ids: stop_token_ids.into_iter().map(TokenId).collect(),
            ignore_eos,
            stream,
            stream_options: stream_options.map(|options| {
                let wire::StreamOptions { include_usage, continuous_usage_stats } = options;
                StreamOptions { include_usage, continuous_usage_stats }
            }),
            user,
            response_format: response_format.map(TryInto::try_into).transpose()?,
            cache_salt,
            priority,
            return_token_ids,
        })
    }
}

impl From<&ResponseFormat> for wire::ResponseFormat {
    fn from(format: &ResponseFormat) -> Self {
        let (kind, json_schema) = match format {
            ResponseFormat::Text => ("text", None),
            ResponseFormat::JsonObject => ("json_object", None),
            ResponseFormat::JsonSchema { name, schema } => {
                ("json_schema", Some(wire::JsonSchema { name: name.clone(), schema: schema.to_string() }))
            }
        };
        Self { r#type: kind.to_owned(), json_schema }
    }
}

impl TryFrom<wire::ResponseFormat> for ResponseFormat {
    type Error = ApiError;

    fn try_from(message: wire::ResponseFormat) -> Result<Self, ApiError> {
        let wire::ResponseFormat { r#type: kind, json_schema } = message;
        match (kind.as_str(), json_schema) {
            ("text", None) => Ok(Self::Text),
            ("json_object", None) => Ok(Self::JsonObject),
            ("json_schema", Some(wire::JsonSchema { name, schema })) => Self::from_schema_text(name, &schema),
            ("json_schema", None) => {
                Err(ApiError::bad_request("response_format", "response_format.json_schema is missing"))
            }
            ("text" | "json_object", Some(_)) => Err(ApiError::bad_request(
                "response_format",
                format!("response_format.json_schema does not go with the type {kind:?}"),
            )),
            _ => Err(Self::unknown(&kind)),
        }
    }
}
