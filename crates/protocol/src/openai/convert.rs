//! From completions, which is what engines generate, to chats, which is what clients see.

use std::collections::HashSet;

use super::{
    ChatChoice, ChatChoiceDelta, ChatChunk, ChatDelta, ChatMessage, ChatResponse, CompletionResponse,
};

/// Turns the answer to a completion into the answer to a chat.
#[must_use]
pub fn chat_response(completion: CompletionResponse) -> ChatResponse {
    ChatResponse {
        id: chat_id(&completion.id),
        object: "chat.completion".into(),
        created: completion.created,
        model: completion.model.unwrap_or_default(),
        choices: completion
            .choices
            .into_iter()
            .map(|choice| ChatChoice {
                index: choice.index,
                message: ChatMessage::new("assistant", &choice.text),
                logprobs: choice.logprobs.map(|logprobs| logprobs.to_chat()),
                finish_reason: choice.finish_reason,
                token_ids: choice.token_ids,
            })
            .collect(),
        usage: completion.usage,
        microserving: completion.microserving,
    }
}

/// Turns the chunks of one completion into the chunks of one chat; the first part of each choice names the role.
#[derive(Debug, Default)]
pub struct ChatStream {
    begun: HashSet<u32>,
}

impl ChatStream {
    /// Begins a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on with a stream whose client has had the beginning of these choices.
    #[must_use]
    pub fn going_on(choices: impl IntoIterator<Item = u32>) -> Self {
        Self { begun: choices.into_iter().collect() }
    }

    /// Notes that the client has had the beginning of a choice in another way.
    pub fn note_begun(&mut self, choice: u32) {
        self.begun.insert(choice);
    }

    /// Turns the next chunk.
    pub fn convert(&mut self, chunk: CompletionResponse) -> ChatChunk {
        ChatChunk {
            id: chat_id(&chunk.id),
            object: "chat.completion.chunk".into(),
            created: chunk.created,
            model: chunk.model.unwrap_or_default(),
            choices: chunk
                .choices
                .into_iter()
                .map(|choice| {
                    let first = self.begun.insert(choice.index);
                    // The last chunk often has no text; its delta is then empty, as OpenAI's is.
                    let content = (first || !choice.text.is_empty()).then_some(choice.text);
                    ChatChoiceDelta {
                        index: choice.index,
                        delta: ChatDelta { role: first.then(|| "assistant".to_owned()), content },
                        logprobs: choice.logprobs.map(|logprobs| logprobs.to_chat()),
                        finish_reason: choice.finish_reason,
                        token_ids: choice.token_ids,
                    }
                })
                .collect(),
            usage: chunk.usage,
            microserving: chunk.microserving,
        }
    }
}

fn chat_id(id: &str) -> String {
    match id.strip_prefix("cmpl-") {
        Some(rest) => format!("chatcmpl-{rest}"),
        None => id.to_owned(),
    }
}
