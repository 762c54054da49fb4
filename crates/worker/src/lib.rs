//! The device half of an engine as a process of its own: executor, KV pages and transport behind a socket (docs/adr/020).
//!
//! - [`FrontSocket`] is where a front waits for its worker; [`FrontSocket::accept`] yields a [`Worker`]: an executor and a
//!   transport as an engine wants them, and [`LostWorker`], which tells of the worker's end.
//! - [`Connection`] is the worker's side: it finds its front, hears the [`Order`], and [`Connection::serve`]s an executor and a
//!   transport of its own until the front leaves or the transport's world ends.
//!
//! A worker holds the weights, the pages and whatever the transport is; a front holds everything that a client notices: HTTP,
//! tokens, samplers. So a worker may end at any time, as libraries of PGAS worlds do to their processes, and its front goes on
//! with another one.
//!
//! # Why samplers stay in front
//!
//! A sampler is what the tokens so far imply, grammar and penalties included; in the worker it would be lost with it, and
//! would have to be told of stops and replays. What crosses the socket instead is what a draw needs of the logits
//! ([`microserving_executor::LogitNeed`]): one token, or a few dozen with weights, and only for shaped or unbounded draws all.
//! Both ends use the code that an engine in one process uses, so the tokens are the same.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use microserving_executor::{Executor, ToyConfig, ToyExecutor};
//! use microserving_transport::{KvTransport, LoopbackHub};
//! use microserving_worker::{Connection, Ended, FrontSocket, Order};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let path = folder.path().join("front.sock");
//! let front = FrontSocket::bind(&path)?;
//! let worker = std::thread::spawn(move || {
//!     let connection = Connection::to_front(&path, Duration::from_secs(5)).expect("a front");
//!     assert_eq!(connection.order().arguments, ["--model", "toy"]);
//!     let executor = ToyExecutor::new(ToyConfig::default()).expect("a toy");
//!     let transport = LoopbackHub::new().transport("worker");
//!     connection.serve(Box::new(executor), Box::new(transport), "up", None).expect("served")
//! });
//!
//! let order = Order { folder: "/".into(), arguments: vec!["--model".into(), "toy".into()] };
//! let up = front.accept(&order, || true, |_| {})?.expect("a worker");
//! assert_eq!(up.executor.info().vocab_size, ToyExecutor::VOCAB_SIZE);
//! assert_eq!((up.transport.name(), up.report.as_str()), ("loopback", "up"));
//! drop(up.transport);
//! assert_eq!(worker.join().expect("no panic"), Ended::FrontLeft);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod connection;
mod error;
mod executor;
mod front;
mod hello;
mod link;
mod lost;
mod names;
mod serve;
mod steps;
mod transfers;
mod transport;
mod wire;

pub use connection::Connection;
pub use error::WorkerError;
pub use executor::RemoteExecutor;
pub use front::{FrontSocket, Worker};
pub use hello::Order;
pub use lost::LostWorker;
pub use serve::{Ended, WorldEnd};
pub use transport::RemoteTransport;
