//! The executor contract, the sampler, and the executors that need no model.

#![forbid(unsafe_code)]

mod constraint;
mod contract;
mod numeric;
mod penalties;
mod philox;
mod sampler;
mod select;

pub use constraint::{ConstraintError, TokenConstraint, TokenMask};
pub use contract::{Batch, BatchItem, Executor, ExecutorError, ExecutorInfo, Sampled, StepOutput};
pub use sampler::{SampleError, Sampler};
