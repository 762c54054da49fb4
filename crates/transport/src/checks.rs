//! Checks that every transport makes of its callers.

use crate::{PutRun, TransportError};

/// Checks that the sources of all runs lie in the sender's region.
///
/// # Errors
/// [`TransportError::Misuse`] naming the first that does not.
pub fn check_source_runs(
    transport: &'static str,
    runs: &[PutRun],
    region_bytes: usize,
) -> Result<(), TransportError> {
    let outside = |run: &&PutRun| {
        run.local_offset.checked_add(run.num_bytes).is_none_or(|end| end > region_bytes)
            || run.remote_offset.checked_add(run.num_bytes).is_none()
    };
    match runs.iter().find(outside) {
        None => Ok(()),
        Some(run) => Err(TransportError::Misuse {
            transport,
            reason: format!(
                "run of {} bytes from {} to {} does not lie in the region of {region_bytes} bytes",
                run.num_bytes, run.local_offset, run.remote_offset
            ),
        }),
    }
}
