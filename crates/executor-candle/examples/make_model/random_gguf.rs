//! Random weights in the shape of real models, in the mixtures of types that llama.cpp's quantiser makes.

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};

use super::noise::uniform;
use super::vocabulary;

/// What goes into a file.
pub(crate) struct Gguf {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<(String, QTensor)>,
}

/// The type of a file: that of most of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileType {
    Q8_0,
    Q4_0,
    Q4_1,
    /// Q4_K with some matrices in Q6_K, as `Q4_K_M` names it.
    Q4KM,
    Bf16,
}

impl FileType {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "q8_0" => Self::Q8_0,
            "q4_0" => Self::Q4_0,
            "q4_1" => Self::Q4_1,
            "q4_k_m" => Self::Q4KM,
            "bf16" => Self::Bf16,
            _ => return None,
        })
    }

    /// Returns the number that `general.file_type` has for it.
    pub(crate) const fn number(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
            Self::Q4KM => 15,
            Self::Bf16 => 32,
        }
    }

    /// Chooses the type of a tensor as llama.cpp's quantiser does: vectors in f32, the matrix that makes logits in Q6_K below eight
    /// bits, and in Q4_K_M so also v and down of the outer eighths of the layers and every third one between.
    pub(crate) fn of_tensor(self, name: &str, rank: usize, num_layers: u32, tied: bool) -> GgmlDType {
        let makes_logits = name == "output.weight" || (tied && name == "token_embd.weight");
        let more_bits = || {
            let layer =
                name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
            let eighth = num_layers / 8;
            layer.is_some_and(|layer| {
                layer < eighth || layer >= 7 * num_layers / 8 || (layer - eighth) % 3 == 2
            })
        };
        match self {
            _ if rank < 2 => GgmlDType::F32,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Bf16 => GgmlDType::BF16,
            _ if makes_logits => GgmlDType::Q6K,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q4KM if (name.contains("attn_v.") || name.contains("ffn_down.")) && more_bits() => {
                GgmlDType::Q6K
            }
            Self::Q4KM => GgmlDType::Q4K,
        }
    }
}

/// The shape of a model with tied embeddings.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    /// `general.architecture`: `llama` or `qwen3`.
    pub(crate) architecture: &'static str,
    /// `tokenizer.ggml.pre`.
    pub(crate) pre: &'static str,
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) num_layers: u32,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_context: u32,
    pub(crate) rope_theta: f32,
    pub(crate) rms_eps: f32,
}

impl Shape {
    /// Returns the shape that people know by this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "qwen3-0.6b" => Self {
                name: "Qwen3-0.6B, random weights",
                architecture: "qwen3",
                pre: "qwen2",
                vocab: 151_936,
                hidden: 1024,
                intermediate: 3072,
                num_layers: 28,
                num_heads: 16,
                num_kv_heads: 8,
                head_dim: 128,
                max_context: 40_960,
                rope_theta: 1e6,
                rms_eps: 1e-6,
            },
            "llama-3.2-1b" => Self {
                name: "Llama-3.2-1B, random weights",
                architecture: "llama",
                pre: "llama-bpe",
                vocab: 128_256,
                hidden: 2048,
                intermediate: 8192,
                num_layers: 16,
                num_heads: 32,
                num_kv_heads: 8,
                head_dim: 64,
                max_context: 8192,
                rope_theta: 5e5,
                rms_eps: 1e-5,
            },
            _ => return None,
        })
    }

    /// Returns the tensors by name with their shapes, outermost dimension first.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let mut tensors = vec![
            ("token_embd.weight".to_owned(), vec![self.vocab, self.hidden]),
            ("output_norm.weight".to_owned(), vec![self.hidden]),
        ];
        for layer in 0..self.num_layers {
            let mut add = |role: &str, shape: &[usize]| {
                tensors.push((format!("blk.{layer}.{role}.weight"), shape.to_vec()));
            };
            add("attn_norm", &[self.hidden]);
            add("attn_q", &[q, self.hidden]);
            add("attn_k", &[kv, self.hidden]);
            add("attn_v", &[kv, self.hidden]);
            if self.architecture == "qwen3" {
                add("attn_q_norm", &[self.head_dim]);
                add("attn_k_norm", &[self.head_dim]);
            }
            add("attn_output", &[self.hidden, q]);
            add("ffn_norm", &[self.hidden]);
            add("ffn_gate", &[self.intermediate, self.hidden]);
            add("ffn_up", &[self.intermediate, self.hidden]);
            add("ffn_down", &[self.hidden, self.intermediate]);
        }
        tensors
    }

    fn metadata(&self, kind: FileType) -> Vec<(String, Value)> {
        let mut metadata = vec![
            ("general.architecture".to_owned(), Value::String(self.architecture.into())),
            ("general.name".to_owned(), Value::String(self.name.into())),
            ("general.file_type".to_owned(), Value::U32(kind.number())),
            ("general.quantization_version".to_owned(), Value::U32(2)),
        ];
        let mut put = |key: &str, value| metadata.push((format!("{}.{key}", self.architecture), value));
        let size = |size: usize| Value::U32(size as u32);
        put("context_length", Value::U32(self.max_context));
        put("embedding_length", size(self.hidden));
        put("feed_forward_length", size(self.intermediate));
        put("block_count", Value::U32(self.num_layers));
        put("attention.head_count", size(self.num_heads));
        put("attention.head_count_kv", size(self.num_kv_heads));
        put("attention.key_length", size(self.head_dim));
        put("attention.value_length", size(self.head_dim));
        put("attention.layer_norm_rms_epsilon", Value::F32(self.rms_eps));
        put("rope.dimension_count", size(self.head_dim));
        put("rope.freq_base", Value::F32(self.rope_theta));
        metadata.extend(vocabulary::metadata(self.pre, self.vocab));
        metadata
    }
}

/// Returns the weights of a tensor before they are quantised.
///
/// A matrix keeps the size of what goes through it (variance 1 / inputs), and norms are near one, so that activations and logits stay as
/// large as a trained model's through any number of layers.
pub(crate) fn weights(name: &str, shape: &[usize]) -> Vec<f32> {
    let len = shape.iter().product();
    let uniform = uniform(name).take(len);
    match shape {
        [_, inputs] => {
            let bound = (3.0 / *inputs as f64).sqrt();
            uniform.map(|x| (x * bound) as f32).collect()
        }
        _ => uniform.map(|x| (1.0 + x / 4.0) as f32).collect(),
    }
}

/// Makes the file: every type of a shape comes from the same weights.
pub(crate) fn make(shape: &Shape, kind: FileType) -> Result<Gguf> {
    let mut tensors = Vec::new();
    for (name, dimensions) in shape.tensors() {
        let values = Tensor::from_vec(weights(&name, &dimensions), dimensions.as_slice(), &Device::Cpu)?;
        let dtype = kind.of_tensor(&name, dimensions.len(), shape.num_layers, true);
        tensors.push((name, QTensor::quantize(&values, dtype)?));
    }
    Ok(Gguf { metadata: shape.metadata(kind), tensors })
}
