//! The weights on the device, in the rows of the files.
//!
//! Tensors that are multiplied with the same activations lie one below the other: q, k and v; gate and up. What kernels want in
//! multiples of eight is padded with zeros: the vocabulary, and the width of the gated layer.

use std::sync::Arc;

use half::{bf16, f16};
use microserving_checkpoint::{
    Identity, LoadProgress, ModelConfig, Place, Role, Tensor, TensorSource, TensorType, Wanted, find,
    load_error,
};
use microserving_executor::ExecutorError;
use microserving_kernels::{DevicePtr, Dtype, KernelError};

use crate::accelerator::{Accelerator, Buffer, HostBuffer, Stream};
use crate::config::CudaDtype;

/// Bytes that are converted before they are copied.
const STAGED_BYTES: usize = 16 << 20;

/// Kernels take rows and columns in multiples of this.
const MULTIPLE: usize = 8;

/// One layer's.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    /// `[hidden]`.
    pub(crate) attention_norm: Buffer,
    /// `[q_width + 2 * kv_width, hidden]`.
    pub(crate) qkv: Buffer,
    /// `[q_width + 2 * kv_width]`.
    pub(crate) qkv_bias: Option<Buffer>,
    /// `[head_dim]`.
    pub(crate) q_norm: Option<Buffer>,
    /// `[head_dim]`.
    pub(crate) k_norm: Option<Buffer>,
    /// `[hidden, q_width]`.
    pub(crate) output: Buffer,
    /// `[hidden]`.
    pub(crate) mlp_norm: Buffer,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub(crate) gate_up: Buffer,
    /// `[hidden, intermediate]`.
    pub(crate) down: Buffer,
}

/// All of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) dtype: Dtype,
    /// The gated layer's width, padded.
    pub(crate) intermediate: usize,
    /// Rows of the output matrix, padded.
    pub(crate) vocab_rows: usize,
    pub(crate) layers: Vec<LayerWeights>,
    /// `[vocab_rows, hidden]`.
    pub(crate) embedding: Buffer,
    /// `[hidden]`.
    pub(crate) final_norm: Buffer,
    /// `[vocab_rows, hidden]`; none if the embedding serves as it.
    pub(crate) output: Option<Buffer>,
    pub(crate) num_bytes: usize,
    /// The model's identity.
    pub(crate) hash: u64,
}

impl Weights {
    pub(crate) fn output(&self) -> DevicePtr {
        self.output.as_ref().unwrap_or(&self.embedding).ptr()
    }

    /// Reads all weights of `source` onto the device.
    pub(crate) fn load(
        accelerator: &Arc<dyn Accelerator>,
        source: &dyn TensorSource,
        dtype: CudaDtype,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ExecutorError> {
        let config = source.config();
        let found = find(source)?;
        let dtype = choose(dtype, &found);
        let mut weights = Self::allocate(accelerator, config, dtype).map_err(no_memory)?;
        let mut loader = Loader::new(accelerator, source, dtype).map_err(no_memory)?;
        let mut identity = Identity::new(config);
        let (mut bytes, total_bytes) = (0, source.total_bytes());
        for (wanted, tensor) in &found {
            let target = weights.target(config, wanted.place);
            loader.load(wanted, tensor, &target, &mut identity)?;
            bytes += source.bytes(tensor)?.len() as u64;
            progress(LoadProgress { bytes, total_bytes });
        }
        weights.hash = identity.get();
        Ok(weights)
    }

    fn allocate(
        accelerator: &Arc<dyn Accelerator>,
        config: &ModelConfig,
        dtype: Dtype,
    ) -> Result<Self, KernelError> {
        let mut num_bytes = 0;
        let mut room = |elements: usize| {
            num_bytes += elements * dtype.num_bytes();
            Buffer::new(accelerator, elements * dtype.num_bytes())
        };
        let (hidden, q) = (config.hidden, config.q_width());
        let qkv = q + 2 * config.kv_width();
        let intermediate = config.intermediate.next_multiple_of(MULTIPLE);
        let vocab_rows = config.vocab_size.next_multiple_of(MULTIPLE);
        let mut layers = Vec::new();
        for _ in 0..config.num_layers {
            let mut vector = |is_there: bool, len| is_there.then(|| room(len)).transpose();
            let (bias, norms) = (config.architecture.has_qkv_bias(), config.architecture.has_qk_norm());
            let qkv_bias = vector(bias, qkv)?;
            let (q_norm, k_norm) = (vector(norms, config.head_dim)?, vector(norms, config.head_dim)?);
            layers.push(LayerWeights {
                attention_norm: room(hidden)?,
                qkv: room(qkv * hidden)?,
                qkv_bias,
                q_norm,
                k_norm,
                output: room(hidden * q)?,
                mlp_norm: room(hidden)?,
                gate_up: room(2 * intermediate * hidden)?,
                down: room(hidden * intermediate)?,
            });
        }
        let embedding = room(vocab_rows * hidden)?;
        let final_norm = room(hidden)?;
        let output = (!config.tied).then(|| room(vocab_rows * hidden)).transpose()?;
        Ok(Self {
            dtype,
            intermediate,
            vocab_rows,
            layers,
            embedding,
            final_norm,
            output,
            num_bytes,
            hash: 0,
        })
    }

    /// Returns where a tensor goes.
    fn target(&self, config: &ModelConfig, place: Place) -> Target {
        let size = self.dtype.num_bytes();
        let (q, kv, hidden) = (config.q_width(), config.kv_width(), config.hidden);
        let (layer, role) = match place {
            Place::Embedding => return Target::new(&self.embedding, 0, hidden),
            Place::FinalNorm => return Target::new(&self.final_norm, 0, hidden),
            Place::OutputMatrix => {
                return Target::new(self.output.as_ref().unwrap_or(&self.embedding), 0, hidden);
            }
            Place::Layer(layer, role) => (&self.layers[layer], role),
        };
        let of = |buffer: &Option<Buffer>, first: usize, len| {
            let buffer = buffer.as_ref().expect("allocated for every architecture that has it");
            Target::new(buffer, first * size, len)
        };
        match role {
            Role::AttentionNorm => Target::new(&layer.attention_norm, 0, hidden),
            Role::Q => Target::new(&layer.qkv, 0, hidden),
            Role::K => Target::new(&layer.qkv, q * hidden * size, hidden),
            Role::V => Target::new(&layer.qkv, (q + kv) * hidden * size, hidden),
            Role::QBias => of(&layer.qkv_bias, 0, q),
            Role::KBias => of(&layer.qkv_bias, q, kv),
            Role::VBias => of(&layer.qkv_bias, q + kv, kv),
            Role::QNorm => of(&layer.q_norm, 0, config.head_dim),
            Role::KNorm => of(&layer.k_norm, 0, config.head_dim),
            Role::Output => Target::new(&layer.output, 0, q),
            Role::MlpNorm => Target::new(&layer.mlp_norm, 0, hidden),
            Role::Gate => Target::new(&layer.gate_up, 0, hidden),
            Role::Up => Target::new(&layer.gate_up, self.intermediate * hidden * size, hidden),
            Role::Down => Target::new(&layer.down, 0, self.intermediate),
        }
    }
}

/// Chooses the type. `auto` keeps half precision where all is, and takes the other 16-bit type for the rest, whose range is f32's.
fn choose(dtype: CudaDtype, found: &[(Wanted, Tensor)]) -> Dtype {
    match dtype {
        CudaDtype::F32 => Dtype::F32,
        CudaDtype::F16 => Dtype::F16,
        CudaDtype::Bf16 => Dtype::Bf16,
        CudaDtype::Auto => {
            let mut matrices = found.iter().filter(|(wanted, _)| wanted.rows.is_some());
            let is_half = matrices.all(|(_, tensor)| tensor.kind == TensorType::F16);
            if is_half { Dtype::F16 } else { Dtype::Bf16 }
        }
    }
}

/// Where a tensor's rows go.
#[derive(Clone, Copy, Debug)]
struct Target {
    ptr: DevicePtr,
    /// Elements from one row to the next.
    stride: usize,
}

impl Target {
    fn new(buffer: &Buffer, offset: usize, stride: usize) -> Self {
        Self { ptr: buffer.at(offset), stride }
    }
}

/// Converts rows in host memory and copies them.
struct Loader<'a> {
    accelerator: &'a Arc<dyn Accelerator>,
    source: &'a dyn TensorSource,
    dtype: Dtype,
    staged: HostBuffer,
    /// Reused from row to row.
    values: Vec<f32>,
    scratch: Vec<u32>,
}

impl<'a> Loader<'a> {
    fn new(
        accelerator: &'a Arc<dyn Accelerator>,
        source: &'a dyn TensorSource,
        dtype: Dtype,
    ) -> Result<Self, KernelError> {
        let mut staged = HostBuffer::empty(accelerator);
        let widest = source.config().hidden.max(source.config().intermediate).max(source.config().q_width());
        staged.fit(STAGED_BYTES.max((widest + MULTIPLE) * dtype.num_bytes()))?;
        Ok(Self { accelerator, source, dtype, staged, values: Vec::new(), scratch: Vec::new() })
    }

    fn load(
        &mut self,
        wanted: &Wanted,
        tensor: &Tensor,
        target: &Target,
        identity: &mut Identity,
    ) -> Result<(), ExecutorError> {
        let bytes = self.source.bytes(tensor)?;
        identity.tensor(tensor);
        let rows = wanted.rows.unwrap_or(1);
        let row_bytes = bytes.len() / rows;
        let target_bytes = target.stride * self.dtype.num_bytes();
        let per_batch = (STAGED_BYTES / target_bytes).max(1);
        let in_order = (0..rows).all(|row| self.source.row_in_file(wanted.place, row) == row);
        for begin in (0..rows).step_by(per_batch) {
            let end = rows.min(begin + per_batch);
            identity.bytes(&bytes[begin * row_bytes..end * row_bytes]);
            for row in begin..end {
                let at = (row - begin) * target_bytes;
                self.convert(wanted, tensor, (bytes, row, row_bytes), at..at + target_bytes)?;
            }
            let to = DevicePtr(target.ptr.0 + (begin * target_bytes) as u64);
            let num_bytes = (end - begin) * target_bytes;
            let (from, stream) = (self.staged.ptr(), Stream::Transfer);
            // SAFETY: the target has room for all rows of its tensor, the staged bytes are as many and wait for the copy.
            let copied = unsafe { self.accelerator.copy_in(stream, to, from, num_bytes) };
            copied.and_then(|()| self.accelerator.synchronize(stream)).map_err(no_memory)?;
            if in_order {
                self.source.release(tensor, begin * row_bytes..end * row_bytes);
            }
        }
        Ok(())
    }

    /// Puts a row of the model's tensor into the staged bytes, padded with zeros.
    fn convert(
        &mut self,
        wanted: &Wanted,
        tensor: &Tensor,
        (bytes, row, row_bytes): (&[u8], usize, usize),
        to: std::ops::Range<usize>,
    ) -> Result<(), ExecutorError> {
        let columns = wanted.columns;
        let index = self.source.row_in_file(wanted.place, row);
        let bytes = &bytes[index * row_bytes..][..row_bytes];
        self.values.resize(columns, 0.0);
        tensor.widen(index, bytes, &mut self.values, &mut self.scratch)?;
        // SAFETY: the copy before was waited for.
        let to = &mut unsafe { self.staged.bytes() }[to];
        let (row, padding) = to.split_at_mut(columns * self.dtype.num_bytes());
        padding.fill(0);
        if narrow(self.dtype, &self.values, row) {
            return Ok(());
        }
        let (name, form) = (&tensor.name, format!("{:?}", self.dtype).to_lowercase());
        Err(load_error(format!("tensor {name} has a value in row {index} that is not finite as {form}")))
    }
}

/// Rounds a row to a type; returns `false` if a value is not finite in it.
fn narrow(dtype: Dtype, values: &[f32], row: &mut [u8]) -> bool {
    match dtype {
        Dtype::F32 => {
            for (to, x) in row.as_chunks_mut().0.iter_mut().zip(values) {
                *to = x.to_ne_bytes();
            }
            values.iter().all(|x| x.is_finite())
        }
        Dtype::F16 => row.as_chunks_mut().0.iter_mut().zip(values).fold(true, |is_finite, (to, &x)| {
            let x = f16::from_f32(x);
            *to = x.to_ne_bytes();
            is_finite & x.is_finite()
        }),
        Dtype::Bf16 => row.as_chunks_mut().0.iter_mut().zip(values).fold(true, |is_finite, (to, &x)| {
            let x = bf16::from_f32(x);
            *to = x.to_ne_bytes();
            is_finite & x.is_finite()
        }),
    }
}

fn no_memory(error: KernelError) -> ExecutorError {
    load_error(format!("the weights do not go to the device: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kinds: &[TensorType]) -> Vec<(Wanted, Tensor)> {
        let matrix = Wanted { place: Place::Embedding, rows: Some(1), columns: 8 };
        let norm = Wanted { place: Place::FinalNorm, rows: None, columns: 8 };
        let tensor = |kind| Tensor { name: "x".into(), shape: vec![1, 8], kind, scales: None };
        let matrices = kinds.iter().map(|&kind| (matrix, tensor(kind)));
        matrices.chain([(norm, tensor(TensorType::F32))]).collect()
    }

    #[test]
    fn auto_keeps_half_precision_and_nothing_else() {
        let auto = |kinds: &[TensorType]| choose(CudaDtype::Auto, &found(kinds));
        assert_eq!(auto(&[TensorType::F16, TensorType::F16]), Dtype::F16);
        assert_eq!(auto(&[TensorType::F16, TensorType::Bf16]), Dtype::Bf16);
        assert_eq!(auto(&[TensorType::F32]), Dtype::Bf16);
        assert_eq!(choose(CudaDtype::F32, &found(&[TensorType::F16])), Dtype::F32);
    }

    #[test]
    fn what_does_not_fit_a_type_is_noticed() {
        let mut row = [0; 8];
        assert!(narrow(Dtype::F16, &[1.0, -65504.0], &mut row[..4]));
        assert_eq!(row[..4], [0x00, 0x3c, 0xff, 0xfb]);
        assert!(!narrow(Dtype::F16, &[1.0, 70000.0], &mut row[..4]));
        assert!(narrow(Dtype::Bf16, &[70000.0, 1.0], &mut row[..4]));
        assert!(!narrow(Dtype::F32, &[f32::NAN, 1.0], &mut row));
    }
}
