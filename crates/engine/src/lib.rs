//! The engine: one model on one device, the three calls, and whatever they need of scheduling, pages and transfers.
//!
//! - [`Engine`] is the synchronous heart: [`Engine::step`] takes the time and commands, computes one batch, and returns
//!   [`Effects`]. It reads no clock, draws no random number and does no IO of its own.
//! - [`EngineHandle`] is its async face: a bounded queue in, one [`GenerateStream`] a request out. [`EngineThread`] owns the
//!   thread between them.
//! - [`PrepRecv`], [`RemoteSend`], [`StartGenerate`] and their companions are the calls in the engine's own words;
//!   [`EngineError`] says why one was not done.
//!
//! ```text
//!  EngineHandle ── commands ──▶ step: commands → transport → leases → plan → forward → effects ──▶ streams, answers
//!                                        │           ▲                  │
//!                                     KvCache    KvTransport         Executor
//! ```
//!
//! **Why a synchronous heart.** Everything that makes a serving engine hard to get right is order: an abort that overtakes
//! its call, a page freed before its last write, two sequences that wait for each other's pages. In one function that is told
//! the time and what happened, each order is a list that a test can write down, a simulation can draw by the thousand, and a
//! failing seed replays. The price is that nothing here may wait, so what takes long (a transfer, a client) reports back and
//! is never asked.
//!
//! ```
//! use microserving_engine::{CallOptions, Engine, EngineConfig, EngineHandle, Entropy, GenerateEvent, StartGenerate};
//! use microserving_executor::{ToyConfig, ToyExecutor};
//! use microserving_protocol::{ClusterKey, Incarnation, SamplingParams, TokenId};
//! use microserving_transport::LoopbackHub;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Whoever embeds an engine brings the randomness.
//! let entropy = Entropy {
//!     incarnation: Incarnation(1),
//!     cluster_key: ClusterKey::from_random([7; 32]),
//!     key_is_shared: false,
//!     mint_seed: 1,
//! };
//! let executor = Box::new(ToyExecutor::new(ToyConfig::default())?);
//! let transport = Box::new(LoopbackHub::new().transport("e0"));
//! let engine = Engine::new(EngineConfig::new("e0", 64), executor, transport, entropy)?;
//! let (handle, thread) = EngineHandle::spawn(engine)?;
//!
//! let call = StartGenerate {
//!     key: None,
//!     prompt: b"once upon a time".iter().map(|&byte| TokenId(byte.into())).collect(),
//!     begin: 0,
//!     generated_from: 16,
//!     n: 1,
//!     first_choice: 0,
//!     sampling: SamplingParams::greedy(),
//!     max_tokens: Some(5),
//!     min_tokens: 0,
//!     stop_tokens: vec![],
//!     ignore_eos: true,
//!     constraints: vec![],
//!     resume_from: None,
//!     options: CallOptions::default(),
//! };
//! # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
//! let mut stream = handle.start_generate(call).await?;
//! let mut tokens = Vec::new();
//! while let Some(event) = stream.next_event().await {
//!     if let GenerateEvent::Token { token, .. } = event {
//!         tokens.push(token);
//!     }
//! }
//! assert_eq!(tokens.len(), 5);
//! # Ok::<(), microserving_engine::EngineError>(())
//! # })?;
//! assert!(thread.join());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod actions;
mod api;
mod calls;
mod command;
mod compute;
mod config;
mod device;
mod ending;
mod engine;
mod expiry;
mod gatekeeper;
mod handle;
mod kv_events;
mod lease;
mod mutants;
mod pace;
mod planner;
mod request;
mod reservations;
mod sequence;
mod stream;
mod thread;
mod transfers;
mod view;

pub use api::{
    Abort, CallKey, CallOptions, Commit, CommitReply, EngineCounters, EngineError, EngineInfo, EngineState,
    GenerateEvent, GenerateUsage, PageCounts, Pause, PauseReply, PrepRecv, PrepRecvReply, RemoteSend,
    RemoteSendReply, SequenceInfo, StartGenerate,
};
pub use command::{Call, CallId, Command, Effect, Effects, Reply};
pub use config::{EngineConfig, Entropy};
pub use device::Device;
pub use engine::{Engine, StartError};
pub use handle::EngineHandle;
pub use kv_events::{KvEventBatch, KvEventStream};
#[cfg(feature = "mutants")]
pub use mutants::Mutant;
pub use stream::GenerateStream;
pub use thread::EngineThread;

// What calls and answers are made of, so that a surface over the engine needs no crate below it.
pub use microserving_executor::{ConstraintError, ExecutorInfo, TokenConstraint, TokenMask};
pub use microserving_kvcache::{KvChange, KvEvent, KvSnapshot};
pub use microserving_transport::Refusal;
