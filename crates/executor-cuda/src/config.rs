//! What to load, and how.

use std::path::PathBuf;

use microserving_kernels::Dtype;
use microserving_protocol::{KvDtype, TokenId};

/// The options of [`crate::CudaExecutor::load`].
#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// A GGUF file, or a directory with `config.json` and safetensors files.
    pub path: PathBuf,
    /// The name to serve the model under; `None` takes the directory's name, or the file's without its extension.
    pub model: Option<String>,
    /// The type of weights, activations and KV.
    pub dtype: CudaDtype,
    /// Whether tensor cores multiply; `None` has them do so where the type has them. f32 has none.
    pub tensor_cores: Option<bool>,
    /// The longest sequence in tokens, at most what the model was made for, which `None` takes.
    pub max_context: Option<u32>,
    /// Tokens in a KV page.
    pub page_size: u32,
    /// The tokens that end a sequence; `None` takes those of the files.
    pub eos_tokens: Option<Vec<TokenId>>,
    /// Tokens of a step that memory is set aside for when the model is loaded. A larger step makes it grow.
    pub max_batch_tokens: u32,
}

impl CudaConfig {
    /// Returns the usual options for the model at `path`: the file's own type, tensor cores, pages of 16, steps of 512 tokens.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            model: None,
            dtype: CudaDtype::Auto,
            tensor_cores: None,
            max_context: None,
            page_size: 16,
            eos_tokens: None,
            max_batch_tokens: 512,
        }
    }
}

/// The type of weights, activations and KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaDtype {
    /// `f16` if all matrices of the files are, else `bf16`.
    #[default]
    Auto,
    /// Single precision, on no tensor cores: for comparisons.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// Returns the KV's type, which is the activations'.
pub(crate) const fn kv_dtype(dtype: Dtype) -> KvDtype {
    match dtype {
        Dtype::F32 => KvDtype::F32,
        Dtype::F16 => KvDtype::F16,
        Dtype::Bf16 => KvDtype::Bf16,
    }
}
