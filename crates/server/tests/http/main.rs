//! The server over real TCP, with toy engines that exchange KV in this process.

#![allow(clippy::unwrap_used, reason = "a test may end by it")]

mod bad_input;
mod calls;
mod conformance;
mod disconnects;
mod openai;
mod operations;
mod support;
