//! The server over real TCP, with toy engines that exchange KV in this process.

#![allow(clippy::unwrap_used, reason = "a test may end by it")]

#[macro_use]
mod wires;

mod bad_input;
mod calls;
mod clients;
mod conformance;
mod disconnects;
mod grpc;
mod openai;
mod operations;
mod support;
