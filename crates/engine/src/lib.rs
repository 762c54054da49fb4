//! The engine: a synchronous heart that schedules, and an async face.

#![forbid(unsafe_code)]

mod actions;
mod api;
mod calls;
mod command;
mod compute;
mod config;
mod ending;
mod engine;
mod expiry;
mod gatekeeper;
mod handle;
mod kv_events;
mod lease;
mod mutants;
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
