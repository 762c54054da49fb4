//! Tests of the executor through its contract.
#![allow(clippy::unwrap_used, reason = "a test may stop at a surprise")]

mod contract;
mod damage;
mod demo_model;
mod eight_bit;
mod formats;
mod invariance;
mod memory;
mod noise;
mod random_model;
mod reference_logits;
mod support;
mod tiny;
