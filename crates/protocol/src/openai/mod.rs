//! OpenAI's requests and answers, as far as we serve them, and the way from one to another.

mod assemble;
mod chat;
mod completion;
mod convert;
mod generation;
mod logprobs;
mod models;
mod parts;
#[cfg(test)]
mod tests;
mod usage;

pub use assemble::CompletionAssembler;
pub use chat::{
    ChatChoice, ChatChoiceDelta, ChatChunk, ChatCompletionRequest, ChatDelta, ChatMessage, ChatResponse,
};
pub use completion::{CompletionChoice, CompletionRequest, CompletionResponse, Prompt};
pub use convert::{ChatStream, chat_response};
pub use generation::{GenerationParams, OutputFormat};
pub use logprobs::{
    ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs, TopLogprobs, wire_logprob,
};
pub use models::{
    DetokenizeRequest, DetokenizeResponse, ModelCard, ModelList, TokenizeInput, TokenizeRequest,
    TokenizeResponse,
};
pub use parts::{DebugConfig, ResponseFormat, StreamOptions};
#[cfg(test)]
pub(crate) use tests::MLC_BODY;
pub use usage::{PromptTokensDetails, ServingStats, Usage};
