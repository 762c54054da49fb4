//! A request on its way through the router.

use std::sync::Arc;

use axum::http::HeaderMap;
use microserving_client::Written;
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
    /// As the client wrote it; only where some engine may need it so.
    written: Option<Arc<Written>>,
    /// What stands for the tokens where placement looks for prefixes, if there are none.
    chunks: Arc<[TokenId]>,
}

/// Bytes of text that stand for one token where nobody can count tokens.
const BYTES_PER_TOKEN: usize = 4;

impl Request {
    /// Makes a request of a checked completion whose prompt is `tokens`. They are empty only where no engine's tokenizer is known; the request
    /// then needs [`Request::written_as`].
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
            written: None,
            chunks: Arc::default(),
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

    /// Adds what its client wrote, for engines that take no token ids.
    #[must_use]
    pub fn written_as(mut self, written: Written) -> Self {
        if self.tokens.is_empty() {
            self.chunks = chunks(&written).into();
        }
        self.written = Some(Arc::new(written));
        self
    }

    /// Returns what its client wrote, if some engine may need it.
    #[must_use]
    pub fn written(&self) -> Option<&Written> {
        self.written.as_deref()
    }

    /// Says whether its prompt is known in tokens: only then can KV be moved for it.
    #[must_use]
    pub fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Returns what placement hashes: the prompt's tokens, or its text in pieces of the size of tokens.
    pub(crate) fn placement_keys(&self) -> &[TokenId] {
        if self.has_tokens() { &self.tokens } else { &self.chunks }
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

    /// Returns the prompt; nothing where no engine's tokenizer is known.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Returns the prompt's length in tokens, at least 1; a guess where there are none.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.placement_keys().len()).unwrap_or(u32::MAX).max(1)
    }

    /// Says whether there is no prompt; never true of a request that the service made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.written.is_none()
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
        if let Some(Written::Completion(completion)) = self.written.as_mut().map(Arc::make_mut) {
            completion.echo = false;
        }
        self
    }
}

/// Cuts a text into pieces of the size of tokens, so that equal beginnings have equal pieces.
fn chunks(written: &Written) -> Vec<TokenId> {
    let mut text = String::new();
    match written {
        Written::Completion(completion) => match &completion.prompt {
            Prompt::Text(prompt) => text.push_str(prompt),
            Prompt::Tokens(tokens) => return tokens.clone(),
        },
        Written::Chat(chat) => {
            for message in &chat.messages {
                text.extend([message.role.as_str(), "\0", message.content.as_str(), "\0"]);
            }
        }
    }
    let piece = |bytes: &[u8]| {
        let mut word = [0; BYTES_PER_TOKEN];
        word[..bytes.len()].copy_from_slice(bytes);
        TokenId(u32::from_le_bytes(word))
    };
    text.as_bytes().chunks(BYTES_PER_TOKEN).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use microserving_protocol::ChatCompletionRequest;

    use super::*;

    fn chat(body: &str) -> Vec<TokenId> {
        let chat = ChatCompletionRequest::from_json(body.as_bytes()).expect("a chat");
        let params = chat.rest.generation(1).expect("in bounds");
        let request =
            Request::new("k".into(), &chat.rest.clone(), params, Vec::new()).written_as(Written::Chat(chat));
        assert!(!request.has_tokens() && !request.is_empty());
        assert_eq!(request.len() as usize, request.placement_keys().len());
        request.placement_keys().to_vec()
    }

    #[test]
    fn a_longer_chat_begins_as_the_shorter_one() {
        let first = chat(r#"{"messages":[{"role":"user","content":"a question of some length"}]}"#);
        let second = chat(
            r#"{"messages":[{"role":"user","content":"a question of some length"},{"role":"assistant","content":"yes"},{"role":"user","content":"why"}]}"#,
        );
        let other = chat(r#"{"messages":[{"role":"user","content":"another one of that length"}]}"#);
        let shared = |a: &[TokenId], b: &[TokenId]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        assert!(shared(&first, &second) >= first.len() - 1);
        assert!(shared(&first, &other) < 3);
    }
}
