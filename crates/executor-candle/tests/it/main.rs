//! Tests of the executor through its contract.
#![allow(clippy::unwrap_used, reason = "a test may stop at a surprise")]

mod demo_model;
mod memory;
mod support;
