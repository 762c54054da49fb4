//! What a request took.

use serde::{Deserialize, Serialize};

/// Tokens in and out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, over all choices.
    pub completion_tokens: u32,
    /// Their sum.
    pub total_tokens: u32,
    /// What became of the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

impl Usage {
    /// Sums up a request.
    #[must_use]
    pub const fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens }),
        }
    }

    /// Returns the prompt tokens that were found in a context cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }
}

/// What became of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Tokens found in a context cache, so that nobody computed them for this request.
    #[serde(default)]
    pub cached_tokens: u32,
}

/// Where a request's prompt tokens came from, phase by phase: ours, beside the usage.
///
/// An engine fills in what its own call did (`pattern` empty, the `prefill_*` fields 0); a router merges the calls of one request. Sent only to
/// those who ask by the header `x-microserving-stats: 1`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServingStats {
    /// The pattern that served the request.
    pub pattern: String,
    /// Tokens that the decoding engine found in its own context cache.
    pub matched_tokens: u32,
    /// Tokens whose KV the decoding engine received.
    pub received_tokens: u32,
    /// Prompt tokens that the decoding engine computed.
    pub computed_tokens: u32,
    /// Prompt tokens that the prefilling engine found in its context cache.
    pub prefill_cached_tokens: u32,
    /// Prompt tokens that the prefilling engine computed.
    pub prefill_computed_tokens: u32,
    /// Tokens whose KV the prefilling engine sent.
    pub sent_tokens: u32,
    /// Bytes of KV that were sent.
    pub sent_bytes: u64,
    /// Seconds spent sending.
    pub transfer_seconds: f64,
    /// Seconds of sending that no computing hid.
    pub exposed_transfer_seconds: f64,
    /// The engine that generated.
    pub decode_engine: String,
    /// The engine that sent, if any.
    pub prefill_engine: String,
}
