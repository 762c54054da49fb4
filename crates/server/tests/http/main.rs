//! The server over real TCP, with toy engines that exchange KV in this process.

mod bad_input;
mod calls;
mod conformance;
mod disconnects;
mod openai;
mod operations;
mod support;
