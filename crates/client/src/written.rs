//! A request as its client wrote it.

use microserving_protocol::{ChatCompletionRequest, CompletionRequest};

/// A request as its client wrote it: text or messages where the client sent these, for engines whose tokenizer nobody else has.
#[derive(Clone, Debug, PartialEq)]
pub enum Written {
    /// Sent to `/v1/completions`.
    Completion(CompletionRequest),
    /// Sent to `/v1/chat/completions`.
    Chat(ChatCompletionRequest),
}

impl Written {
    /// Returns everything but the prompt or the messages.
    #[must_use]
    pub const fn params(&self) -> &CompletionRequest {
        match self {
            Self::Completion(request) => request,
            Self::Chat(request) => &request.rest,
        }
    }
}
