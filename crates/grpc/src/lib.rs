//! The MicroServing calls over gRPC.
//!
//! - [`wire`] is what `microserving.proto` becomes: messages, and the service's two ends.
//! - Requests and answers of the protocol become messages and come back by `From` and `TryFrom`. Every field is named in both
//!   directions, so that a new one does not compile until it is carried.
//! - [`to_status`] and [`error_of`] carry an error whole: a router judges it as it judges REST's.
//! - [`GrpcEngineClient`] implements the calls over one HTTP/2 connection; [`AnyWireClient`] takes gRPC where an engine offers it and
//!   REST elsewhere.
//!
//! # What stays REST
//!
//! Readiness, models and the tokenizer: they are asked once or by things that speak plain HTTP anyway. So does the state of an
//! engine whose wires are not known yet, because it says what they are.

#![forbid(unsafe_code)]

mod any_wire;
mod channel;
mod client;
mod convert;
mod error;
pub mod wire;

pub use any_wire::{AnyWireClient, WirePolicy};
pub use client::GrpcEngineClient;
pub use convert::BadMessage;
pub use error::{ERROR_TRAILER, error_of, to_status};
