//! What a sampler needs of a vocabulary's logits (`kernels/sampling.cu`).

use crate::launch::{Checks, launch};
use crate::{Device, DevicePtr, Dtype, KernelError, Launch, Params};

/// Where there is no token: no logit is finite, or all are; or `top_p` may keep more than were written.
pub const NO_TOKEN: u32 = u32::MAX;

const THREADS: u32 = 512;

/// The largest logit of each row, and the first that is not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct SamplingBest {
    /// `[num_rows, vocab_size]`, rows `row_stride` elements apart.
    pub logits: DevicePtr,
    /// `[num_rows]`, u32: the lowest token with the largest finite logit, or [`NO_TOKEN`]. Written.
    pub tokens: DevicePtr,
    /// `[num_rows]`, f32: that logit, or minus infinity. Written.
    pub best: DevicePtr,
    /// `[num_rows]`, u32: the lowest token whose logit is not finite, or [`NO_TOKEN`]. Written.
    pub not_finite: DevicePtr,
    /// Logits of a row.
    pub vocab_size: u32,
    /// Elements from one row to the next.
    pub row_stride: u32,
}

// SAFETY: four addresses and two words, no padding; `SamplingBestParams` is the same.
unsafe impl Params for SamplingBest {}

impl SamplingBest {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let kernel = dtype.pick("sampling_best_f32", "sampling_best_f16", "sampling_best_bf16");
        plan(Checks("sampling_best"), kernel, (self.vocab_size, self.row_stride, num_rows), 192)
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to their elements, and hold what the fields say; no one else writes to any, or reads what is
    /// written, until the kernel has run.
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}

/// Sums over each row: of the integer weights that draws are made by, and of what log-probabilities are relative to.
///
/// The weight of a logit is `round(2^44 * e^((logit - best) / temperature))`; the log-probability of one is `logit - best - ln(sum)`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct SamplingWeights {
    /// `[num_rows, vocab_size]`, rows `row_stride` elements apart.
    pub logits: DevicePtr,
    /// `[num_rows]`, f32, by [`SamplingBest`].
    pub best: DevicePtr,
    /// `[num_rows]`, f32, above 0 (any value for a row that takes the best token).
    pub temperatures: DevicePtr,
    /// `[num_rows]`, u64. Written.
    pub weights: DevicePtr,
    /// `[num_rows]`, f64, at temperature 1. Written.
    pub sums: DevicePtr,
    /// Logits of a row.
    pub vocab_size: u32,
    /// Elements from one row to the next.
    pub row_stride: u32,
}

// SAFETY: five addresses and two words, no padding; `SamplingWeightsParams` is the same.
unsafe impl Params for SamplingWeights {}

impl SamplingWeights {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let kernel = dtype.pick("sampling_weights_f32", "sampling_weights_f16", "sampling_weights_bf16");
        plan(Checks("sampling_weights"), kernel, (self.vocab_size, self.row_stride, num_rows), 256)
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// As of [`SamplingBest::launch`].
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}

/// The largest logits of each row with tokens and weights, most probable first, lowest token first among equals.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct SamplingCandidates {
    /// `[num_rows, vocab_size]`, rows `row_stride` elements apart.
    pub logits: DevicePtr,
    /// `[num_rows]`, f32, by [`SamplingBest`].
    pub best: DevicePtr,
    /// `[num_rows]`, f32, above 0.
    pub temperatures: DevicePtr,
    /// `[num_rows]`, u32; 0 for no bound.
    pub top_ks: DevicePtr,
    /// `[num_rows]`, f32, above 0; 1 for no bound.
    pub top_ps: DevicePtr,
    /// `[num_rows]`, u64, by [`SamplingWeights`].
    pub total_weights: DevicePtr,
    /// `[num_rows, max_candidates]`, u32. Written.
    pub tokens: DevicePtr,
    /// `[num_rows, max_candidates]`, f32. Written.
    pub candidate_logits: DevicePtr,
    /// `[num_rows, max_candidates]`, u64. Written.
    pub weights: DevicePtr,
    /// `[num_rows]`, u32: candidates written: `top_k`, `max_candidates`, or all that are not masked. Written.
    pub counts: DevicePtr,
    /// `[num_rows]`, u32: how many of them `top_k` and `top_p` keep, or [`NO_TOKEN`] if these may be more than were written: then all
    /// logits must be looked at. Written.
    pub kept: DevicePtr,
    /// Logits of a row.
    pub vocab_size: u32,
    /// Elements from one row to the next.
    pub row_stride: u32,
    /// Room for candidates in a row of the results.
    pub max_candidates: u32,
    /// Unused: fills the struct up to a multiple of eight bytes.
    pub reserved: u32,
}

// SAFETY: eleven addresses and four words, no padding; `SamplingCandidatesParams` is the same, its last word being padding.
unsafe impl Params for SamplingCandidates {}

impl SamplingCandidates {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let checks = Checks("sampling_candidates");
        let holds = (1..=1024).contains(&self.max_candidates);
        checks.that(holds, "max_candidates", self.max_candidates.into(), "1 to 1024")?;
        let kernel =
            dtype.pick("sampling_candidates_f32", "sampling_candidates_f16", "sampling_candidates_bf16");
        let shared_bytes = 1072 + self.max_candidates.next_power_of_two() * 16;
        plan(checks, kernel, (self.vocab_size, self.row_stride, num_rows), shared_bytes)
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// As of [`SamplingBest::launch`].
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}

fn plan(
    checks: Checks,
    kernel: &'static str,
    (vocab_size, row_stride, num_rows): (u32, u32, u32),
    shared_bytes: u32,
) -> Result<Launch, KernelError> {
    checks.that((1..u32::MAX).contains(&vocab_size), "vocab_size", vocab_size.into(), "1 to 2^32 - 2")?;
    checks.that(row_stride >= vocab_size, "row_stride", row_stride.into(), "at least vocab_size")?;
    Ok(Launch {
        kernel,
        grid: [checks.many_blocks("num_rows", num_rows.into())?, 1, 1],
        threads: THREADS,
        shared_bytes,
    })
}
