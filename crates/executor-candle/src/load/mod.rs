//! From files to packed weights.

mod build;
mod fill;
mod gguf;
mod header;
mod safetensors;
mod source;

pub(crate) use build::{LayerWeights, ModelWeights, build};
pub(crate) use gguf::GgufSource;
pub(crate) use safetensors::{SafetensorsSource, shard_paths};
pub(crate) use source::{Tensor, TensorSource, TensorType, load_error};
