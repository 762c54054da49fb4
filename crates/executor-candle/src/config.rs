//! What to load, and how.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use microserving_protocol::{KvDtype, TokenId};

use crate::KernelLevel;

/// The options of [`crate::CandleExecutor::load`].
#[derive(Clone, Debug)]
pub struct CandleConfig {
    /// A GGUF file, or a directory with `config.json` and safetensors files.
    pub path: PathBuf,
    /// The name to serve the model under; `None` takes the directory's name, or the file's without its extension.
    pub model: Option<String>,
    /// The form that weights are kept in.
    pub dtype: WeightDtype,
    /// The element type of the KV cache: `f32`, `f16` or `bf16`.
    pub kv_dtype: KvDtype,
    /// Threads that compute, the calling one included.
    pub threads: NonZeroUsize,
    /// Each of the threads stays on a core of its own.
    pub pin_threads: bool,
    /// The longest sequence in tokens, at most what the model was made for, which `None` takes.
    pub max_context: Option<u32>,
    /// The instruction level; `None` takes the machine's best.
    pub kernel_level: Option<KernelLevel>,
    /// Tokens in a KV page.
    pub page_size: u32,
    /// The tokens that end a sequence; `None` takes those of the files.
    pub eos_tokens: Option<Vec<TokenId>>,
}

impl CandleConfig {
    /// Returns the usual options for the model at `path`: its own form of weights, KV in half precision, one thread, pages of 16.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            model: None,
            dtype: WeightDtype::Auto,
            kv_dtype: KvDtype::F16,
            threads: NonZeroUsize::MIN,
            pin_threads: false,
            max_context: None,
            kernel_level: None,
            page_size: 16,
            eos_tokens: None,
        }
    }
}

/// The form that the weights of the matrices are kept in; norms and biases are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// As the file has them: Q8_0, Q4_0, Q4_1, Q4_K and Q6_K tensors each in their own blocks, other quantised types as `q8_0`.
    #[default]
    Auto,
    /// Single precision.
    F32,
    /// Half precision, multiplied with f32 activations.
    F16,
    /// bfloat16, activations rounded to it as well.
    Bf16,
    /// Eight bits with a scale per block of 32, activations quantised alike.
    Q8_0,
}

impl WeightDtype {
    /// All values.
    pub const ALL: [Self; 5] = [Self::Auto, Self::F32, Self::F16, Self::Bf16, Self::Q8_0];

    /// Returns the name used in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Returns the value of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
