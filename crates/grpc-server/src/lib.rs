//! An engine over gRPC.
//!
//! - [`routes`] are the calls of an [`EngineService`], to be served beside its REST routes on the same port.
//! - A call does what its REST counterpart does, by the same functions; what is here turns messages into their arguments, bounds
//!   them in size and time, and turns errors into statuses.
//!
//! # Deadlines
//!
//! `grpc-timeout` bounds the call, not the sequence: when it passes, the call is dropped, as when a connection is closed. What a sequence
//! may take is `timeout_seconds` in the request, as over REST.

#![forbid(unsafe_code)]

mod calls;
mod deadline;
mod door;

pub use door::routes;
// Named in the signature above.
#[doc(no_inline)]
pub use microserving_server::EngineService;
