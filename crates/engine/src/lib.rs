//! The engine: a synchronous heart that schedules, and an async face.

#![forbid(unsafe_code)]

mod api;

pub use api::{
    CallKey, CallOptions, EngineCounters, EngineError, EngineState, GenerateEvent, GenerateUsage, PageCounts,
    PrepRecv, PrepRecvReply, RemoteSend, RemoteSendReply, SequenceInfo, StartGenerate,
};
