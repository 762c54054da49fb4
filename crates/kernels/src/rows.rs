//! What is done to rows of activations, one by one.

use crate::launch::{Checks, launch};
use crate::{Device, DevicePtr, Dtype, KernelError, Launch, Params};

/// `r = x + residual; out = r / sqrt(mean(r^2) + eps) * weight` for each row (`kernels/rms_norm.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct RmsNorm {
    /// `[num_rows, hidden]`; may be `x`. Written.
    pub out: DevicePtr,
    /// `[num_rows, hidden]`.
    pub x: DevicePtr,
    /// `[num_rows, hidden]`, or null. Read, and written with the sum.
    pub residual: DevicePtr,
    /// `[hidden]`.
    pub weight: DevicePtr,
    /// Elements of a row.
    pub hidden: u32,
    /// Added to the mean square.
    pub eps: f32,
}

// SAFETY: four addresses and two words, no padding; `RmsNormParams` is the same.
unsafe impl Params for RmsNorm {}

impl RmsNorm {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let checks = Checks("rms_norm");
        let holds = self.hidden.is_multiple_of(8) && (8..=16_384).contains(&self.hidden);
        checks.that(holds, "hidden", self.hidden.into(), "a multiple of 8, 8 to 16384")?;
        Ok(Launch {
            kernel: dtype.pick("rms_norm_f32", "rms_norm_f16", "rms_norm_bf16"),
            grid: [checks.many_blocks("num_rows", num_rows.into())?, 1, 1],
            threads: 256,
            shared_bytes: self.hidden * 4 + 32,
        })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to 16 bytes, and hold what the fields say, of type `dtype`; no one else writes to any, or reads
    /// `out` or `residual`, until the kernel has run.
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}

/// `out = silu(gate) * up` (`kernels/swiglu.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Swiglu {
    /// `[num_rows, intermediate]`. Written.
    pub out: DevicePtr,
    /// `[num_rows, intermediate]`, rows `in_stride` elements apart.
    pub gate: DevicePtr,
    /// The same.
    pub up: DevicePtr,
    /// Elements of a row.
    pub intermediate: u32,
    /// Elements from one row of `gate` and `up` to the next.
    pub in_stride: u32,
}

// SAFETY: three addresses and two words, no padding; `SwigluParams` is the same.
unsafe impl Params for Swiglu {}

impl Swiglu {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let checks = Checks("swiglu");
        let holds =
            self.intermediate.is_multiple_of(8) && self.intermediate > 0 && self.intermediate <= 1 << 30;
        checks.that(holds, "intermediate", self.intermediate.into(), "a multiple of 8, 8 to 2^30")?;
        let holds = self.in_stride.is_multiple_of(8) && self.in_stride >= self.intermediate;
        checks.that(holds, "in_stride", self.in_stride.into(), "a multiple of 8, at least intermediate")?;
        checks.blocks("num_rows", num_rows)?;
        Ok(Launch {
            kernel: dtype.pick("swiglu_f32", "swiglu_f16", "swiglu_bf16"),
            grid: [self.intermediate.div_ceil(1024), num_rows, 1],
            threads: 128,
            shared_bytes: 0,
        })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// As of [`RmsNorm::launch`]; what is written is `out`, which overlaps neither input.
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}

/// `out[row] = table[tokens[row]]` (`kernels/embedding.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Embedding {
    /// `[num_rows, hidden]`. Written.
    pub out: DevicePtr,
    /// `[vocab_size, hidden]`.
    pub table: DevicePtr,
    /// `[num_rows]`, u32. One that is not below `vocab_size` becomes a row of NaNs.
    pub tokens: DevicePtr,
    /// Elements of a row.
    pub hidden: u32,
    /// Rows of the table.
    pub vocab_size: u32,
}

// SAFETY: three addresses and two words, no padding; `EmbeddingParams` is the same.
unsafe impl Params for Embedding {}

impl Embedding {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_rows: u32) -> Result<Launch, KernelError> {
        let checks = Checks("embedding");
        let holds = self.hidden.is_multiple_of(8) && self.hidden > 0;
        checks.that(holds, "hidden", self.hidden.into(), "a multiple of 8, at least 8")?;
        Ok(Launch {
            kernel: dtype.pick("embedding_f32", "embedding_f16", "embedding_bf16"),
            grid: [checks.many_blocks("num_rows", num_rows.into())?, 1, 1],
            threads: 128,
            shared_bytes: 0,
        })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// As of [`RmsNorm::launch`]; what is written is `out`, which overlaps no input.
    pub unsafe fn launch(&self, device: &dyn Device, dtype: Dtype, num_rows: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_rows)?, self) }
    }
}
