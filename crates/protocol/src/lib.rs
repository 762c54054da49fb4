//! The words that engines and routers share: ids, units, ranges, memory layout and wire types.
//!
//! - Ids and units: [`SeqId`], [`TokenId`], [`PageId`], [`KvRange`]; [`KvLayout`] says how KV lies in memory and [`KvMemory`] is the memory.
//! - OpenAI's requests and answers: [`CompletionRequest`], [`ChatCompletionRequest`], [`CompletionResponse`], [`ApiError`].
//! - The three calls: [`PrepRecvRequest`], [`RemoteSendRequest`], [`StartGenerateRequest`]; [`KvAddrInfo`] is the address between them.
//! - Framing: [`sse_event`] and [`SseParser`].
//!
//! # Requests are read by hand
//!
//! Answers go both ways by `serde`'s derives, but requests are read one field at a time through [`Fields`]. It costs a page of code
//! and buys what a derive cannot give: every error names its field, value and bound; whole numbers may come as `"-1"` or `2.0`, as Python
//! clients send them; and a parameter that is known and not implemented is refused instead of being an unknown field.
//! The two steps are apart on purpose: reading checks types (422), [`CompletionRequest::generation`] checks bounds (400), so a router can
//! read, change and forward a request without giving up what the client wrote.
//!
//! This crate does no IO and reads no clock; randomness comes in as an argument.
//!
//! ```
//! use microserving_protocol::CompletionRequest;
//!
//! let request = CompletionRequest::from_json(br#"{"prompt": "once", "max_tokens": "8", "top_p": 0.9}"#)?;
//! let params = request.generation(42)?;
//! assert_eq!((params.max_tokens, params.sampling.seed), (Some(8), 42));
//!
//! let error = CompletionRequest::from_json(br#"{"prompt": [1, 2], "top_p": 1.5}"#)?.generation(0).unwrap_err();
//! assert_eq!(error.to_string(), "400: top_p is 1.5, must be in (0, 1]");
//! # Ok::<(), microserving_protocol::ApiError>(())
//! ```

mod addr;
mod body;
mod cluster_key;
mod error;
mod ids;
mod lax;
mod layout;
mod memory;
mod microserving;
mod openai;
mod page_hash;
mod range;
mod relay;
mod sampling;
mod sse;
mod token_ids;

pub use addr::{AddrError, KvAddrInfo, addr_from_text, addr_to_text, prompt_digest};
pub use cluster_key::{ClusterKey, ShortKey};
pub use error::ApiError;
pub use ids::{Attempt, EngineId, Generation, Incarnation, LayerId, PageId, PeId, SeqId, TokenId};
pub use lax::Fields;
pub use layout::{KvDtype, KvGeometry, KvLayout};
pub use memory::{KvMemory, MemoryKind};
pub use microserving::{
    AbortRequest, AbortResponse, CallOptions, CommitRequest, CommitResponse, CountersView, KvEvent,
    KvEventKind, PagesView, PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse,
    RemoteSendRequest, RemoteSendResponse, SequenceList, SequenceView, StartGenerateRequest, StateView,
    normalise_begin, normalise_prep_end, normalise_send_range,
};
pub use openai::{
    ChatChoice, ChatChoiceDelta, ChatChunk, ChatCompletionRequest, ChatDelta, ChatLogprobs, ChatMessage,
    ChatResponse, ChatStream, ChatTokenLogprob, ChatTopLogprob, CompletionAssembler, CompletionChoice,
    CompletionLogprobs, CompletionRequest, CompletionResponse, DebugConfig, DetokenizeRequest,
    DetokenizeResponse, GenerationParams, ModelCard, ModelList, OutputFormat, Prompt, PromptTokensDetails,
    ResponseFormat, ServingStats, StreamOptions, TokenizeInput, TokenizeRequest, TokenizeResponse,
    TopLogprobs, Usage, chat_response, wire_logprob,
};
pub use page_hash::{PageHash, page_hashes};
pub use range::KvRange;
pub use relay::{
    RELAY_HEADER, RelayCutter, RelayError, RelayPart, RelayUsage, relay_bare_mark, relay_end_mark, relay_mark,
};
pub use sampling::{FinishReason, SamplingParams, TokenLogprob};
pub use sse::{SSE_DONE, SseError, SseEvent, SseParser, sse_event};
pub use token_ids::TokenIds;
