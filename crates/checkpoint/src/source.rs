//! What the two file formats have in common: named tensors in mapped files.

use std::ops::Range;
use std::sync::Arc;

use candle_core::CpuStorage;
use candle_core::quantized::GgmlDType;
use half::{bf16, f16};
use memmap2::{Mmap, UncheckedAdvice};
use microserving_executor::ExecutorError;

use crate::ModelConfig;
use crate::scales::Scales;

/// Makes an [`ExecutorError::Load`].
pub fn load_error(reason: impl Into<String>) -> ExecutorError {
    ExecutorError::Load { reason: reason.into() }
}

/// The number format of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Eight bits: four of exponent, three of mantissa, no infinities.
    F8E4M3,
    /// A quantised type of GGUF.
    Quantised(GgmlDType),
}

impl TensorType {
    /// Returns the bytes of a row; `None` if it is not made of whole blocks.
    #[must_use]
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (block, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::F8E4M3 => (1, 1),
            Self::Quantised(kind) => (kind.block_size(), kind.type_size()),
        };
        columns.is_multiple_of(block).then(|| columns / block * bytes)
    }

    /// Widens a row to f32. `scratch` is memory for it to reuse.
    ///
    /// # Errors
    /// What candle says of blocks that it cannot widen.
    pub fn widen(self, bytes: &[u8], out: &mut [f32], scratch: &mut Vec<u32>) -> Result<(), String> {
        match self {
            Self::F32 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
            Self::F16 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *x = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            Self::Bf16 => {
                for (x, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *x = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
            Self::F8E4M3 => {
                for (x, &byte) in out.iter_mut().zip(bytes) {
                    *x = e4m3(byte);
                }
            }
            Self::Quantised(kind) => {
                // Blocks are read as structures of 16-bit words, which the file need not align.
                scratch.clear();
                scratch.extend(bytes.chunks(4).map(|bytes| {
                    let mut whole = [0; 4];
                    whole[..bytes.len()].copy_from_slice(bytes);
                    u32::from_ne_bytes(whole)
                }));
                // SAFETY: the words are at least as many bytes, and any bytes are `u8`s.
                let bytes = unsafe { std::slice::from_raw_parts(scratch.as_ptr().cast::<u8>(), bytes.len()) };
                match kind.from_data(bytes.into()).dequantize(out.len()) {
                    Ok(CpuStorage::F32(values)) => out.copy_from_slice(&values),
                    Ok(_) => return Err(format!("{kind:?} did not widen to f32")),
                    Err(err) => return Err(err.to_string()),
                }
            }
        }
        Ok(())
    }
}

/// Widens an eight-bit number.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2_f32.powi(-9),
        _ => (8.0 + mantissa) * 2_f32.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Its number format.
    pub kind: TensorType,
    /// What its numbers are multiplied with, where the file keeps them apart from it.
    pub scales: Option<Arc<Scales>>,
}

impl Tensor {
    /// Widens row `row` of the file's tensor to f32; a vector is one row. `scratch` is memory for it to reuse.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming the tensor, if its blocks cannot be widened.
    pub fn widen(
        &self,
        row: usize,
        bytes: &[u8],
        out: &mut [f32],
        scratch: &mut Vec<u32>,
    ) -> Result<(), ExecutorError> {
        let failed = |err| load_error(format!("tensor {}: {err}", self.name));
        self.kind.widen(bytes, out, scratch).map_err(failed)?;
        if let Some(scales) = &self.scales {
            scales.apply(row, out);
        }
        Ok(())
    }
}

/// The roles of a layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The norm before attention: `[hidden]`.
    AttentionNorm,
    /// Queries: `[q_width, hidden]`.
    Q,
    /// Keys: `[kv_width, hidden]`.
    K,
    /// Values: `[kv_width, hidden]`.
    V,
    /// `[q_width]`.
    QBias,
    /// `[kv_width]`.
    KBias,
    /// `[kv_width]`.
    VBias,
    /// The norm of each query head: `[head_dim]`.
    QNorm,
    /// The norm of each key head: `[head_dim]`.
    KNorm,
    /// What attention's heads are joined by: `[hidden, q_width]`.
    Output,
    /// The norm before the gated layer: `[hidden]`.
    MlpNorm,
    /// `[intermediate, hidden]`.
    Gate,
    /// `[intermediate, hidden]`.
    Up,
    /// `[hidden, intermediate]`.
    Down,
}

/// A tensor's place in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A row for each token: `[vocab, hidden]`.
    Embedding,
    /// The norm before the output matrix: `[hidden]`.
    FinalNorm,
    /// A row for each token's logit: `[vocab, hidden]`.
    OutputMatrix,
    /// A layer's tensor.
    Layer(usize, Role),
}

/// A model's files.
pub trait TensorSource: Sync {
    /// Returns the model's shape.
    fn config(&self) -> &ModelConfig;

    /// Returns all tensors.
    fn tensors(&self) -> Vec<Tensor>;

    /// Returns the name that the format gives to a place.
    fn name_of(&self, place: Place) -> String;

    /// Says whether the format may carry this tensor although no weight comes of it.
    fn is_ignorable(&self, name: &str) -> bool;

    /// Returns the row of the file's tensor that row `row` of the model's tensor is.
    ///
    /// GGUF files of the Llama family keep the rows of q and k in another order.
    fn row_in_file(&self, place: Place, row: usize) -> usize;

    /// Returns a tensor's bytes: as many as its shape and type say.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] if there is no such tensor, or its rows are not whole blocks.
    fn bytes(&self, tensor: &Tensor) -> Result<&[u8], ExecutorError>;

    /// Says that some bytes of a tensor will not be read again, so that they need not stay in memory.
    fn release(&self, tensor: &Tensor, bytes: Range<usize>);

    /// Returns the bytes of all tensors.
    fn total_bytes(&self) -> u64;
}

/// Drops a part of a mapped file from this process's memory.
pub(crate) fn drop_pages(map: &Mmap, range: Range<usize>) {
    // SAFETY: the pages are a private map of a file and hold no change of ours: reading them again reads the file.
    let dropped = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    // Only memory is at stake, not correctness.
    if let Err(err) = dropped {
        tracing::debug!(%err, "a converted part of the file stays in memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_are_widened_exactly() {
        // By the format's definition: one, the largest, the smallest normal and subnormal, and a value in between.
        let known =
            [(0x38, 1.0), (0x7e, 448.0), (0x08, 0.015_625), (0x01, 0.001_953_125), (0x45, 3.25), (0x00, 0.0)];
        for (byte, value) in known {
            assert_eq!(e4m3(byte), value, "{byte:#x}");
            assert_eq!(e4m3(byte | 0x80), -value, "{byte:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let mut last = -1.0;
        for byte in 0..0x7f {
            assert!(e4m3(byte) > last, "{byte:#x} is not above the one before");
            last = e4m3(byte);
        }
    }
}
