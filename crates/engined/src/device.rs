//! Which device computes, and what it cannot do.

use std::sync::Arc;

use anyhow::Result;
use microserving_daemon::Refused;
use microserving_executor::ExecutorError;
use microserving_executor_cuda::{Accelerator, open_cuda};
use tracing::info;

use crate::options::{Device, KvForm, Options, WeightForm};

/// What computes.
#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    /// The processor.
    Cpu,
    /// A GPU.
    Cuda(Arc<dyn Accelerator>),
}

/// Opens the device that the options ask for. `auto` takes a GPU where there is one, and says why it does not.
///
/// # Errors
/// [`Refused`] if the device is not there, or cannot do what other options ask of it.
pub(crate) fn choose(options: &Options, is_toy: bool) -> Result<Chosen> {
    if options.device == Device::Cpu {
        return Ok(Chosen::Cpu);
    }
    if options.device == Device::Auto && is_toy {
        return Ok(on_cpu("the toy model computes there"));
    }
    match open_cuda(0) {
        Ok(_) if is_toy => Err(refuse("device: the toy model computes on the CPU")),
        Ok(gpu) => {
            check(options)?;
            info!(device = gpu.name(), "computing on a GPU");
            Ok(Chosen::Cuda(gpu))
        }
        Err(error) if options.device == Device::Cuda => {
            Err(refuse(&format!("cuda: not available ({})", reason(error))))
        }
        Err(error) => Ok(on_cpu(&reason(error))),
    }
}

fn on_cpu(reason: &str) -> Chosen {
    info!(reason, "computing on the CPU");
    Chosen::Cpu
}

/// Returns a device's own words.
fn reason(error: ExecutorError) -> String {
    match error {
        ExecutorError::Device { reason } => reason,
        other => other.to_string(),
    }
}

/// Refuses what a GPU would have to ignore.
fn check(options: &Options) -> Result<()> {
    let same = match (options.dtype, options.kv_dtype) {
        (_, None) | (None | Some(WeightForm::Auto), _) => true,
        (Some(WeightForm::F32), Some(kv)) => kv == KvForm::F32,
        (Some(WeightForm::F16), Some(kv)) => kv == KvForm::F16,
        (Some(WeightForm::Bf16), Some(kv)) => kv == KvForm::Bf16,
        (Some(WeightForm::Q8_0), Some(_)) => false,
    };
    let wrong = [
        (options.threads.is_some(), "threads: a GPU computes, on no threads; give --device cpu"),
        (options.pin_threads, "pin_threads: a GPU computes, on no threads; give --device cpu"),
        (
            options.dtype == Some(WeightForm::Q8_0),
            "dtype: q8_0 is not multiplied on a GPU; give auto, f32, f16 or bf16",
        ),
        (!same, "kv_dtype: a GPU keeps KV in the weights' type; leave it out, or give the same for both"),
        (options.max_batch_tokens > 65_535, "max_batch_tokens: a GPU takes 65535 tokens a step at most"),
    ];
    match wrong.iter().find(|(holds, _)| *holds) {
        Some((_, reason)) => Err(refuse(reason)),
        None => Ok(()),
    }
}

fn refuse(reason: &str) -> anyhow::Error {
    Refused(reason.to_owned()).into()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn said(args: &[&str]) -> Option<String> {
        let args = ["engined", "--model", "m.gguf", "--device", "cuda"].iter().chain(args);
        let options = Options::try_parse_from(args).expect("sound options");
        check(&options).err().map(|error| error.to_string())
    }

    #[test]
    fn what_a_gpu_would_ignore_is_refused_by_name() {
        for (args, field) in [
            (&["--threads", "2"][..], "threads"),
            (&["--pin-threads"], "pin_threads"),
            (&["--dtype", "q8_0"], "dtype"),
            (&["--dtype", "bf16", "--kv-dtype", "f16"], "kv_dtype"),
            (&["--max-batch-tokens", "65536"], "max_batch_tokens"),
        ] {
            let said = said(args).expect(field);
            assert!(said.starts_with(&format!("{field}: ")), "{said}");
        }
        assert_eq!(said(&["--dtype", "f16", "--kv-dtype", "f16", "--max-batch-tokens", "65535"]), None);
    }
}
