//! What stands in for the GPU in a build without the feature `cuda`.

use std::sync::Arc;

use microserving_executor::ExecutorError;

use crate::accelerator::Accelerator;

/// Opens a GPU.
///
/// # Errors
/// [`ExecutorError::Device`]: this build has no GPU.
pub fn open_cuda(_ordinal: u32) -> Result<Arc<dyn Accelerator>, ExecutorError> {
    Err(ExecutorError::Device { reason: "this build has none; build with the feature `cuda`".into() })
}
