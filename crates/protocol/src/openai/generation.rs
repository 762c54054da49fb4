//! From what a client wrote to what an engine does: every bound is checked here, once, for router and engine alike.

use std::sync::Arc;

use serde_json::Value;

use super::{CompletionRequest, ResponseFormat};
use crate::{ApiError, SamplingParams, TokenId};

/// Choices at most.
const MAX_CHOICES: i64 = 64;
/// Alternatives at most, per token.
pub(super) const MAX_LOGPROBS: i64 = 20;
/// Stop strings at most, and the length of each in bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Entries of `logit_bias` and `stop_token_ids` at most.
const MAX_TOKEN_LIST: usize = 4096;
/// The length of a cache salt in bytes.
const MAX_SALT_BYTES: usize = 256;

/// The form that the output must have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum OutputFormat {
    /// Any text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that fits this schema.
    JsonSchema(Value),
}

/// A request's parameters with every bound checked.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// Choices to generate, in `[1, 64]`.
    pub n: u32,
    /// How tokens are chosen; the seed is the client's, or the drawn one.
    pub sampling: SamplingParams,
    /// Output tokens at most, at least 1; `None` is up to the context.
    pub max_tokens: Option<u32>,
    /// Output tokens at least; not above `max_tokens`.
    pub min_tokens: u32,
    /// Strings that end the output; none is empty.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_tokens: Vec<TokenId>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Return the prompt's text before the output.
    pub echo: bool,
    /// The form the output must have.
    pub format: OutputFormat,
    /// Answer token by token.
    pub stream: bool,
    /// End a stream with a usage chunk.
    pub include_usage: bool,
    /// Put the usage so far into every chunk.
    pub continuous_usage_stats: bool,
    /// Return token ids beside text.
    pub return_token_ids: bool,
    /// Separates tenants in the context cache; empty is the common cache.
    pub cache_salt: Arc<str>,
    /// Higher runs earlier.
    pub priority: i32,
}

impl CompletionRequest {
    /// Checks every bound; `drawn_seed` is used where the client gave no seed.
    ///
    /// # Errors
    /// 400 naming the field, its value and the bound.
    pub fn generation(&self, drawn_seed: u64) -> Result<GenerationParams, ApiError> {
        let max_tokens =
            self.max_tokens.map(|v| whole("max_tokens", v, 1, i64::from(u32::MAX))).transpose()?;
        let min_tokens = whole("min_tokens", self.min_tokens.unwrap_or(0), 0, i64::from(u32::MAX))?;
        if let Some(max) = max_tokens
            && min_tokens > max
        {
            return Err(ApiError::bad_request(
                "min_tokens",
                format!("min_tokens is {min_tokens}, must not be above max_tokens, which is {max}"),
            ));
        }
        if self.echo && self.logprobs.is_some() {
            return Err(ApiError::bad_request(
                "logprobs",
                "logprobs together with echo (log-probabilities of the prompt) is not implemented",
            )
            .with_code("unsupported_parameter"));
        }
        let salt = self.cache_salt.as_deref().unwrap_or("");
        count("cache_salt", salt.len(), MAX_SALT_BYTES, "bytes")?;
        count("stop_token_ids", self.stop_token_ids.len(), MAX_TOKEN_LIST, "entries")?;
        let options = self.stream_options.unwrap_or_default();
        Ok(GenerationParams {
            n: whole("n", self.n, 1, MAX_CHOICES)?,
            sampling: self.sampling(drawn_seed)?,
            max_tokens,
            min_tokens,
            stop: self.checked_stop()?,
            stop_tokens: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            echo: self.echo,
            format: match &self.response_format {
                None | Some(ResponseFormat::Text) => OutputFormat::Text,
                Some(ResponseFormat::JsonObject) => OutputFormat::JsonObject,
                Some(ResponseFormat::JsonSchema { schema, .. }) => OutputFormat::JsonSchema(schema.clone()),
            },
            stream: self.stream,
            include_usage: options.include_usage,
            continuous_usage_stats: options.continuous_usage_stats,
            return_token_ids: self.return_token_ids,
            cache_salt: salt.into(),
            priority: priority(self.priority.unwrap_or(0))?,
        })
    }

    fn sampling(&self, drawn_seed: u64) -> Result<SamplingParams, ApiError> {
        let usual = SamplingParams::default();
        count("logit_bias", self.logit_bias.len(), MAX_TOKEN_LIST, "entries")?;
        let mut logit_bias = Vec::with_capacity(self.logit_bias.len());
        for (&token, &bias) in &self.logit_bias {
            let bias = number("logit_bias", bias, "[-100, 100]", |v| (-100.0..=100.0).contains(&v))?;
            logit_bias.push((TokenId(token), bias));
        }
        Ok(SamplingParams {
            temperature: number(
                "temperature",
                self.temperature.unwrap_or(usual.temperature),
                "[0, 100]",
                |v| (0.0..=100.0).contains(&v),
            )?,
            top_p: number("top_p", self.top_p.unwrap_or(usual.top_p), "(0, 1]", |v| v > 0.0 && v <= 1.0)?,
            top_k: match self.top_k {
                None | Some(-1) => 0,
                Some(k) => whole("top_k", k, 0, i64::from(u32::MAX))?,
            },
            min_p: number("min_p", self.min_p.unwrap_or(usual.min_p), "[0, 1]", |v| {
                (0.0..=1.0).contains(&v)
            })?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty.unwrap_or(usual.repetition_penalty),
                "(0, 100]",
                |v| v > 0.0 && v <= 100.0,
            )?,
            frequency_penalty: penalty("frequency_penalty", self.frequency_penalty)?,
            presence_penalty: penalty("presence_penalty", self.presence_penalty)?,
            logit_bias,
            seed: self.seed.map_or(drawn_seed, i64::cast_unsigned),
            logprobs: self.logprobs.map(|v| whole("logprobs", v, 0, MAX_LOGPROBS)).transpose()?,
        })
    }

    fn checked_stop(&self) -> Result<Vec<String>, ApiError> {
        count("stop", self.stop.len(), MAX_STOPS, "entries")?;
        for (i, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() {
                return Err(ApiError::bad_request("stop", format!("stop[{i}] is empty")));
            }
            if stop.len() > MAX_STOP_BYTES {
                return Err(ApiError::bad_request(
                    "stop",
                    format!("stop[{i}] has {} bytes, must have at most {MAX_STOP_BYTES}", stop.len()),
                ));
            }
        }
        Ok(self.stop.clone())
    }
}

pub(super) fn whole(name: &str, value: i64, least: i64, most: i64) -> Result<u32, ApiError> {
    if (least..=most).contains(&value)
        && let Ok(value) = u32::try_from(value)
    {
        return Ok(value);
    }
    Err(ApiError::bad_request(name, format!("{name} is {value}, must be in [{least}, {most}]")))
}

fn priority(value: i64) -> Result<i32, ApiError> {
    i32::try_from(value).map_err(|_| {
        ApiError::bad_request(
            "priority",
            format!("priority is {value}, must be in [{}, {}]", i32::MIN, i32::MAX),
        )
    })
}

fn number(name: &str, value: f32, bound: &str, fits: impl Fn(f32) -> bool) -> Result<f32, ApiError> {
    if fits(value) {
        Ok(value)
    } else {
        Err(ApiError::bad_request(name, format!("{name} is {value}, must be in {bound}")))
    }
}

fn penalty(name: &str, value: Option<f32>) -> Result<f32, ApiError> {
    number(name, value.unwrap_or(0.0), "[-2, 2]", |v| (-2.0..=2.0).contains(&v))
}

fn count(name: &str, value: usize, most: usize, what: &str) -> Result<(), ApiError> {
    if value <= most {
        Ok(())
    } else {
        Err(ApiError::bad_request(name, format!("{name} has {value} {what}, must have at most {most}")))
    }
}
