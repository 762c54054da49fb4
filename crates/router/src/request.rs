//! A request on its way through the router.

use std::sync::Arc;

use axum::http::HeaderMap;
use microserving_protocol::{
    ApiError, CompletionRequest, GenerationParams, Prompt, SeqId, StreamOptions, TokenId,
};

use crate::client_headers::ClientHeaders;

/// A request as programs see it: tokens, checked parameters, and the body that goes to engines.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    seq_id: SeqId,
    model: Option<String>,
    tokens: Arc<[TokenId]>,
    params: GenerationParams,
    completion: CompletionRequest,
    headers: ClientHeaders,
}

impl Request {
    /// Makes a request of a checked completion whose prompt is `tokens`, which must not be empty.
    ///
    /// Engines always get it as a stream with usage: then a router sees the first token when it is there, and what it took, however
    /// the client wants its answer.
    #[must_use]
    pub fn new(
        seq_id: SeqId,
        completion: &CompletionRequest,
        params: GenerationParams,
        tokens: Vec<TokenId>,
    ) -> Self {
        let body = CompletionRequest {
            model: completion.model.clone(),
            prompt: Prompt::Tokens(tokens.clone()),
            seed: Some(params.sampling.seed.cast_signed()),
            stream: true,
            stream_options: Some(StreamOptions {
                include_usage: true,
                continuous_usage_stats: params.continuous_usage_stats,
            }),
            user: None,
            ..completion.clone()
        };
        Self {
            seq_id,
            model: completion.model.clone(),
            tokens: tokens.into(),
            params,
            completion: body,
            headers: ClientHeaders::default(),
        }
    }

    /// Adds what the client sent along, for rules and programs to look at.
    ///
    /// # Errors
    /// 400 if `x-microserving-tenant` is longer than 128 bytes or no plain text.
    pub fn with_headers(self, headers: HeaderMap) -> Result<Self, ApiError> {
        Ok(Self { headers: ClientHeaders::keep(headers)?, ..self })
    }

    /// Adds what has been kept of the client's headers.
    pub(crate) fn with_kept(self, headers: ClientHeaders) -> Self {
        Self { headers, ..self }
    }

    /// Returns whose request it is, as the header `x-microserving-tenant` says; empty if it does not say.
    #[must_use]
    pub fn tenant(&self) -> &str {
        self.headers.tenant()
    }

    /// Returns the first value of a header that the client sent; names are not case-sensitive. Secrets (authorization, cookies, keys) are
    /// never there, nor values above 1 KiB, nor what goes beyond 8 KiB in all.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// Returns its priority; higher goes first, 0 is usual.
    #[must_use]
    pub const fn priority(&self) -> i32 {
        self.params.priority
    }

    /// Returns the key that ties its calls together.
    #[must_use]
    pub const fn seq_id(&self) -> &SeqId {
        &self.seq_id
    }

    /// Returns the model asked for; none is any.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Returns the prompt.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Returns the prompt's length in tokens, at least 1.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// Says whether there is no prompt; never true of a request that the service made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the checked parameters.
    #[must_use]
    pub const fn params(&self) -> &GenerationParams {
        &self.params
    }

    pub(crate) fn cache_salt(&self) -> &str {
        &self.params.cache_salt
    }

    /// Returns the body of a call that generates.
    pub(crate) fn body(&self) -> CompletionRequest {
        self.completion.clone()
    }

    /// Returns the body of a call that moves KV: the prompt, and whose it is.
    pub(crate) fn bare_body(&self) -> CompletionRequest {
        CompletionRequest {
            model: self.model.clone(),
            cache_salt: self.completion.cache_salt.clone(),
            priority: self.completion.priority,
            ..CompletionRequest::new(self.completion.prompt.clone())
        }
    }

    /// Changes the body so that the engine does not echo: the router has the prompt's very text.
    pub(crate) fn without_echo(mut self) -> Self {
        self.completion.echo = false;
        self
    }
}
