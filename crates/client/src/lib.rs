//! The three calls and their companions, from the caller's side.
//!
//! - [`EngineCalls`] is an engine as a router sees it; object safe, so that programs run over HTTP, over an engine in the same
//!   process and over scripted engines in tests alike.
//! - [`HttpEngineClient`] is the implementation over HTTP/1.1 and JSON.
//! - [`EngineAddress`] says where an engine is and what [`EngineKind`] it is: one of ours, a server of MLC-LLM ([`MlcEngineClient`]), or
//!   any that speaks OpenAI's API ([`OpenAiEngineClient`]).
//! - [`CallContext`] carries what every call of one request shares: its id, its trace, its deadline.
//! - [`ClientError`] says how a call failed, by what the caller can do about it.
//!
//! # Generation is always a stream
//!
//! [`EngineCalls::start_generate`] returns a [`ChunkStream`] whether or not the request said `stream`; an answer in one piece is a stream
//! of one. Callers then have one path to test, see the first token when it is there, and cancel in one way: **dropping a stream,
//! or the future of any call, closes its connection**, which is how the engine learns that nobody waits any more.
//!
//! ```no_run
//! use futures::StreamExt;
//! use microserving_client::{CallContext, EngineCalls, HttpEngineClient};
//! use microserving_protocol::{CompletionRequest, Prompt, StartGenerateRequest, TokenId};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = HttpEngineClient::new("http://127.0.0.1:8001")?;
//! let mut completion = CompletionRequest::new(Prompt::Tokens(vec![TokenId(1), TokenId(2)].into()));
//! completion.stream = true;
//! let request = StartGenerateRequest { completion, ..StartGenerateRequest::default() };
//! let mut chunks = engine.start_generate(&CallContext::default(), &request).await?;
//! while let Some(chunk) = chunks.next().await {
//!     for choice in chunk?.choices {
//!         eprint!("{}", choice.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod address;
mod body;
mod calls;
mod connection;
mod context;
mod error;
mod foreign;
mod http;
mod kind;
mod mlc;
mod openai;
mod pool;
mod relay;
mod stream;
mod written;

pub use address::EngineAddress;
pub use calls::{ChunkStream, EngineCalls, KvEventStream};
pub use context::CallContext;
pub use error::{BadUrl, ClientError};
pub use http::HttpEngineClient;
pub use kind::{BadKind, EngineKind};
pub use mlc::MlcEngineClient;
pub use openai::OpenAiEngineClient;
pub use relay::{Door, RelayStream, Relayed, relayed_fault};
pub use written::Written;
