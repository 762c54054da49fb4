//! The kernels against plain readings of their formulas, on every device there is: the CPU by the shim, and a GPU.
//!
//! What must not depend on something is compared bit for bit; what is rounded otherwise than the reference, by a bound.

#![cfg(feature = "emulated")]
#![allow(clippy::print_stderr, reason = "a skip says so")]

mod attention;
mod attention_reference;
mod barriers;
mod kv;
mod matmul;
mod model;
mod model_reference;
mod numbers;
mod rig;
mod rows;
mod sampling;
