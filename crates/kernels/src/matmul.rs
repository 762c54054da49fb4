//! Products of activations with weights.

use crate::launch::{Checks, launch};
use crate::{Arithmetic, Device, DevicePtr, Dtype, KernelError, Launch, Params};

/// `out[row][n] = sum_k x[row][k] * weight[n][k]` (`kernels/matmul.h`). A row does not depend on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Matmul {
    /// `[num_rows, out_features]`, of the type of `x`, or f32 if `out_is_f32`. Written.
    pub out: DevicePtr,
    /// `[num_rows, in_features]`.
    pub x: DevicePtr,
    /// `[out_features, in_features]`.
    pub weight: DevicePtr,
    /// Rows of `x`.
    pub num_rows: u32,
    /// Rows of `weight`.
    pub out_features: u32,
    /// Elements of a row of either.
    pub in_features: u32,
    /// 1 for an output that is not rounded, as logits want; else 0.
    pub out_is_f32: u32,
}

// SAFETY: three addresses and four words, no padding; `MatmulParams` is the same.
unsafe impl Params for Matmul {}

/// A kernel and its blocks.
struct Tiles {
    kernel: &'static str,
    rows: u32,
    columns: u32,
    threads: u32,
    shared_bytes: u32,
}

impl Matmul {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`], or [`KernelError::NotCompiled`] for f32 on tensor cores.
    pub fn plan(&self, arithmetic: Arithmetic, dtype: Dtype) -> Result<Launch, KernelError> {
        let checks = Checks("matmul");
        for (field, value) in [("in_features", self.in_features), ("out_features", self.out_features)] {
            let holds = value.is_multiple_of(8) && value > 0 && value <= 1 << 30;
            checks.that(holds, field, value.into(), "a multiple of 8, 8 to 2^30")?;
        }
        let tiles = match arithmetic {
            Arithmetic::Plain => Tiles {
                kernel: dtype.pick("matmul_f32", "matmul_f16", "matmul_bf16"),
                rows: 16,
                columns: 64,
                threads: 128,
                shared_bytes: 80 * 33 * 4,
            },
            Arithmetic::TensorCore => self.tensor_core(dtype)?,
        };
        let rows = self.num_rows.div_ceil(tiles.rows);
        checks.blocks("blocks of rows", rows)?;
        let grid = [self.out_features.div_ceil(tiles.columns), rows, 1];
        Ok(Launch { kernel: tiles.kernel, grid, threads: tiles.threads, shared_bytes: tiles.shared_bytes })
    }

    fn tensor_core(&self, dtype: Dtype) -> Result<Tiles, KernelError> {
        let names = match dtype {
            Dtype::F16 => ["matmul_mma_f16_m16", "matmul_mma_f16_m64", "matmul_mma_f16_m128"],
            Dtype::Bf16 => ["matmul_mma_bf16_m16", "matmul_mma_bf16_m64", "matmul_mma_bf16_m128"],
            Dtype::F32 => {
                return Err(KernelError::NotCompiled {
                    kernel: "matmul",
                    what: "f32 on tensor cores".into(),
                });
            }
        };
        // The choice does not show in the result. Above 16 rows weights would be read twice, above 64 products are what takes time.
        Ok(match self.num_rows {
            0..=16 => Tiles { kernel: names[0], rows: 16, columns: 32, threads: 64, shared_bytes: 52_224 },
            17..=64 => Tiles { kernel: names[1], rows: 64, columns: 64, threads: 128, shared_bytes: 55_296 },
            _ => Tiles { kernel: names[2], rows: 128, columns: 128, threads: 256, shared_bytes: 81_920 },
        })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to 16 bytes, and hold what the fields say, of type `dtype`; `out` overlaps no input. No one else
    /// writes to any, or reads `out`, until the kernel has run.
    pub unsafe fn launch(
        &self,
        device: &dyn Device,
        arithmetic: Arithmetic,
        dtype: Dtype,
    ) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(arithmetic, dtype)?, self) }
    }
}
