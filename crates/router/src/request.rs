//! A request on its way through the router.

use std::sync::Arc;

use axum::http::HeaderMap;
use microserving_client::{Door, EngineKind, Written};
use microserving_protocol::{
    ApiError, CompletionRequest, GenerationParams, Prompt, SeqId, StreamOptions, TokenId, TokenIds,
};

use crate::client_headers::ClientHeaders;
use crate::pages::{Chains, Pages};

/// A request as programs see it: tokens, checked parameters, and the body that goes to engines.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    seq_id: SeqId,
    model: Option<String>,
    tokens: TokenIds,
    params: GenerationParams,
    completion: CompletionRequest,
    headers: ClientHeaders,
    /// As the client wrote it; only where some engine may need it so.
    written: Option<Arc<Written>>,
    /// What stands for the tokens where placement looks for prefixes, if there are none.
    chunks: Arc<[TokenId]>,
    /// Where the prompt ends, if output of an earlier attempt follows it in `tokens`.
    generated_from: Option<u32>,
    /// Which choice of the client's request this is, if it is one of several that goes on alone.
    choice_index: Option<u32>,
    /// As whose the answer may be passed on unread.
    door: Option<Door>,
    chains: Chains,
}

/// Bytes of text that stand for one token where nobody can count tokens.
const BYTES_PER_TOKEN: usize = 4;

impl Request {
    /// Makes a request of a checked completion whose prompt is `tokens`. They are empty only where no engine's tokenizer is known; the request
    /// then needs [`Request::written_as`].
    ///
    /// Engines always get it as a stream with token ids and usage: then a router sees the first token when it is there, what it took,
    /// and what to continue from on another engine, however the client wants its answer.
    #[must_use]
    pub fn new(
        seq_id: SeqId,
        completion: &CompletionRequest,
        params: GenerationParams,
        tokens: impl Into<TokenIds>,
    ) -> Self {
        let tokens = tokens.into();
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
            return_token_ids: true,
            ..completion.clone()
        };
        Self {
            seq_id,
            model: completion.model.clone(),
            tokens,
            params,
            completion: body,
            headers: ClientHeaders::default(),
            written: None,
            chunks: Arc::default(),
            generated_from: None,
            choice_index: None,
            door: None,
            chains: Chains::default(),
        }
    }

    /// Says that the answer goes to a client of `door`, so that an engine may write it for that client. That is for answers of one choice: of
    /// several, the tokens of each would have to be told apart. An echo is the router's, and so is the usage. What the client wants in one
    /// piece is put together here, of chunks of a completion.
    pub(crate) fn for_door(mut self, door: Door, wants_stream: bool) -> Self {
        let GenerationParams { n, echo, continuous_usage_stats, .. } = self.params;
        let plain = n == 1 && !echo && !continuous_usage_stats;
        self.door = plain.then_some(if wants_stream { door } else { Door::Completions });
        self
    }

    /// Returns as whose an engine may write the answer.
    pub(crate) const fn door(&self) -> Option<Door> {
        self.door
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

    /// Returns what has been kept of the client's headers.
    pub(crate) const fn headers(&self) -> &ClientHeaders {
        &self.headers
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
            self.chains = Chains::default();
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

    /// Makes the request that goes on with one choice after `output`, which has been generated already.
    ///
    /// `max_tokens` and `min_tokens` stay: engines count replayed output as output. What the client has seen of the echo is not asked
    /// for again.
    pub(crate) fn continuing(&self, choice: u32, output: &[TokenId], echoed: bool) -> Self {
        let prompt_len = self.prompt_len();
        let mut tokens = self.tokens[..prompt_len as usize].to_vec();
        tokens.extend_from_slice(output);
        let tokens = TokenIds::from(tokens);
        let alone = self.params.n == 1 && self.choice_index.is_none();
        let choice_index = if alone { None } else { Some(self.choice_index.unwrap_or(choice)) };
        let seq_id = match choice_index {
            // Choices that go on alone may meet on one engine, where each needs a key of its own.
            Some(choice) if self.choice_index.is_none() => SeqId::from(format!("{}-c{choice}", self.seq_id)),
            _ => self.seq_id.clone(),
        };
        Self {
            seq_id,
            model: self.model.clone(),
            completion: CompletionRequest {
                prompt: Prompt::Tokens(tokens.clone()),
                n: 1,
                echo: self.completion.echo && !echoed,
                ..self.completion.clone()
            },
            params: GenerationParams { n: 1, ..self.params.clone() },
            tokens,
            headers: self.headers.clone(),
            // What its client wrote says nothing of the output.
            written: None,
            chunks: Arc::default(),
            generated_from: (!output.is_empty()).then_some(prompt_len),
            choice_index,
            door: None,
            chains: Chains::default(),
        }
    }

    /// Makes a request of another name for moving the KV of `tokens`, which is no request of a client.
    pub(crate) fn copying(&self, name: &str, tokens: &[TokenId]) -> Self {
        let tokens = TokenIds::from(tokens);
        Self {
            seq_id: SeqId::from(name),
            tokens: tokens.clone(),
            completion: CompletionRequest {
                prompt: Prompt::Tokens(tokens),
                model: self.model.clone(),
                cache_salt: self.completion.cache_salt.clone(),
                priority: self.completion.priority,
                ..CompletionRequest::default()
            },
            written: None,
            generated_from: None,
            choice_index: None,
            door: None,
            chains: Chains::default(),
            ..self.clone()
        }
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

    /// Returns the prompt, with what an earlier attempt generated behind it; nothing where no engine's tokenizer is known.
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

    /// Returns the length of the client's own prompt: of [`Request::tokens`] without what an earlier attempt generated.
    #[must_use]
    pub fn prompt_len(&self) -> u32 {
        self.generated_from.unwrap_or_else(|| self.len())
    }

    /// Returns how many tokens of output an earlier attempt generated.
    #[must_use]
    pub fn num_generated(&self) -> u32 {
        self.len() - self.prompt_len()
    }

    /// Says whether output follows its prompt, or it is one of several choices: only engines that know of both can take it.
    pub(crate) const fn is_continued(&self) -> bool {
        self.generated_from.is_some() || self.choice_index.is_some()
    }

    pub(crate) const fn generated_from(&self) -> Option<u32> {
        self.generated_from
    }

    pub(crate) const fn choice_index(&self) -> Option<u32> {
        self.choice_index
    }

    /// Returns the checked parameters.
    #[must_use]
    pub const fn params(&self) -> &GenerationParams {
        &self.params
    }

    /// Returns the names of its pages, which are made as they are asked for, once.
    pub(crate) fn pages(&self, page_size: u32) -> Pages<'_> {
        self.chains.of(self.placement_keys(), &self.params.cache_salt, page_size)
    }

    /// Says whether the engine returns the prompt's text before the output.
    pub(crate) const fn echoes(&self) -> bool {
        self.completion.echo
    }

    /// Returns the body of a call that generates.
    pub(crate) fn body(&self, kind: EngineKind) -> CompletionRequest {
        let mut body = self.completion.clone();
        if kind != EngineKind::Microserving {
            // Ours tell their tokens for us to continue from; of others only what the client wants is asked.
            body.return_token_ids = self.params.return_token_ids;
        }
        body
    }

    /// Returns the body of a call whose answer is passed on: it asks for what the client gets, and marks tell the rest.
    pub(crate) fn body_to_pass_on(&self) -> CompletionRequest {
        CompletionRequest {
            stream_options: None,
            return_token_ids: self.params.return_token_ids,
            ..self.completion.clone()
        }
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
            Prompt::Tokens(tokens) => return tokens.to_vec(),
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

    fn request(n: i64) -> Request {
        let completion = CompletionRequest {
            n,
            max_tokens: Some(8),
            echo: true,
            ..CompletionRequest::new(Prompt::Tokens(vec![TokenId(1), TokenId(2)].into()))
        };
        let params = completion.generation(7).expect("within bounds");
        Request::new(SeqId::from("r"), &completion, params, vec![TokenId(1), TokenId(2)])
    }

    #[test]
    fn one_choice_keeps_its_name_and_one_of_several_gets_its_own() {
        let output = [TokenId(5), TokenId(6)];
        for (n, choice, name, index) in [(1, 0, "r", None), (3, 2, "r-c2", Some(2))] {
            let next = request(n).continuing(choice, &output, true);
            assert_eq!((next.seq_id().as_str(), next.choice_index()), (name, index));
            assert_eq!((next.len(), next.prompt_len(), next.num_generated()), (4, 2, 2));
            assert_eq!(next.generated_from(), Some(2));
            let body = next.body(EngineKind::Microserving);
            assert_eq!((body.n, body.echo, body.max_tokens, body.seed), (1, false, Some(8), Some(7)));
            // And once more, after more of it.
            let later = next.continuing(choice, &[TokenId(5), TokenId(6), TokenId(7)], true);
            assert_eq!((later.seq_id().as_str(), later.choice_index()), (name, index));
            assert_eq!((later.len(), later.num_generated()), (5, 3));
        }
        let begun = request(3).continuing(1, &[], false);
        assert_eq!(
            (begun.generated_from(), begun.body(EngineKind::Microserving).echo, begun.choice_index()),
            (None, true, Some(1))
        );
    }
}
