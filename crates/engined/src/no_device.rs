//! What stands in for devices in a build that has only the toy model.

use anyhow::Result;
use microserving_daemon::Refused;

use crate::options::{Device, Options};

/// What computes.
#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    /// The processor.
    Cpu,
}

/// Refuses a GPU.
///
/// # Errors
/// [`Refused`] if one is asked for.
pub(crate) fn choose(options: &Options, _is_toy: bool) -> Result<Chosen> {
    if options.device == Device::Cuda {
        let reason = "cuda: not available (this build has only the toy model; build with the feature `cuda`)";
        return Err(Refused(reason.into()).into());
    }
    Ok(Chosen::Cpu)
}
