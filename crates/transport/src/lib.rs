//! The transport contract, page-to-byte planning, and the in-process transport.

#![forbid(unsafe_code)]

mod contract;

pub use contract::{
    Admission, ByteRun, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, Telemetry,
    TransportError, TransportEvent,
};
