//! The same models in plain tensor operations: what the kernels are tested against.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use microserving_checkpoint::{Architecture, ModelConfig, ModelFormat, load_error, shard_paths};
use microserving_executor::ExecutorError;
use microserving_protocol::TokenId;

/// A model in straightforward candle operations: f32, whole sequence, no cache, no batching.
///
/// It shares nothing with the executor but the reading of the configuration: weights come through candle's own loaders, and
/// attention is a masked softmax. Meant for tests and for telling a broken model from a broken engine; it is slow.
pub struct ReferenceModel {
    config: ModelConfig,
    weights: VarBuilder<'static>,
}

impl std::fmt::Debug for ReferenceModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReferenceModel").field("config", &self.config).finish_non_exhaustive()
    }
}

impl ReferenceModel {
    /// Loads a GGUF file or a directory; every weight is widened to f32.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming what is wrong.
    pub fn load(path: &Path) -> std::result::Result<Self, ExecutorError> {
        let failed = |err: candle_core::Error| load_error(format!("{}: {err}", path.display()));
        match ModelFormat::of(path)? {
            ModelFormat::Safetensors => {
                let config = ModelFormat::Safetensors.open(path)?.config().clone();
                let shards = shard_paths(path)?;
                // SAFETY: the files must not change while the model lives, which the documentation asks of the user.
                let weights =
                    unsafe { VarBuilder::from_mmaped_safetensors(&shards, DType::F32, &Device::Cpu) };
                Ok(Self { config, weights: weights.map_err(failed)? })
            }
            ModelFormat::Gguf => {
                let config = ModelFormat::Gguf.open(path)?.config().clone();
                let tensors = gguf_tensors(path, &config).map_err(failed)?;
                Ok(Self { config, weights: VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu) })
            }
        }
    }

    /// Returns the logits after each token of a sequence: `[tokens][vocabulary]`.
    ///
    /// # Errors
    /// [`ExecutorError::Compute`] if a tensor is missing or does not fit.
    pub fn logits(&self, tokens: &[TokenId]) -> std::result::Result<Vec<Vec<f32>>, ExecutorError> {
        self.forward(tokens)
            .and_then(|logits| logits.to_vec2())
            .map_err(|err| ExecutorError::Compute { reason: err.to_string() })
    }

    fn forward(&self, tokens: &[TokenId]) -> Result<Tensor> {
        let config = &self.config;
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        let len = ids.len();
        let model = self.weights.pp("model");
        let embedding = model.get((config.vocab_size, config.hidden), "embed_tokens.weight")?;
        let mut x = embedding.index_select(&Tensor::new(ids, &Device::Cpu)?, 0)?;
        let angles: Vec<f64> = (0..len)
            .flat_map(|position| {
                config.inverse_frequencies().into_iter().map(move |frequency| position as f64 * frequency)
            })
            .collect();
        let angles = Tensor::from_vec(angles, (len, config.head_dim / 2), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?.to_dtype(DType::F32)?, angles.sin()?.to_dtype(DType::F32)?);
        let mask: Vec<f32> = (0..len)
            .flat_map(|query| (0..len).map(move |key| if key > query { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let mask = Tensor::from_vec(mask, (len, len), &Device::Cpu)?;
        for layer in 0..config.num_layers {
            let weights = model.pp(format!("layers.{layer}"));
            let norm = weights.get(config.hidden, "input_layernorm.weight")?;
            let attended = self.attention(
                &weights.pp("self_attn"),
                &rms_norm(&x, &norm, config.rms_eps)?,
                (&cos, &sin),
                &mask,
            )?;
            x = (x + attended)?;
            let norm = weights.get(config.hidden, "post_attention_layernorm.weight")?;
            let h = rms_norm(&x, &norm, config.rms_eps)?;
            let mlp = weights.pp("mlp");
            let gate = h.matmul(&mlp.get((config.intermediate, config.hidden), "gate_proj.weight")?.t()?)?;
            let up = h.matmul(&mlp.get((config.intermediate, config.hidden), "up_proj.weight")?.t()?)?;
            let down = mlp.get((config.hidden, config.intermediate), "down_proj.weight")?;
            x = (x + (silu(&gate)? * up)?.matmul(&down.t()?)?)?;
        }
        let x = rms_norm(&x, &model.get(config.hidden, "norm.weight")?, config.rms_eps)?;
        let output = if config.tied {
            embedding
        } else {
            self.weights.get((config.vocab_size, config.hidden), "lm_head.weight")?
        };
        x.matmul(&output.t()?)
    }

    fn attention(
        &self,
        weights: &VarBuilder<'_>,
        x: &Tensor,
        (cos, sin): (&Tensor, &Tensor),
        mask: &Tensor,
    ) -> Result<Tensor> {
        let config = &self.config;
        let (len, head_dim) = (x.dim(0)?, config.head_dim);
        // [heads, tokens, head_dim] of one of q, k and v.
        let project = |name: &str, heads: usize| {
            let matrix = weights.get((heads * head_dim, config.hidden), &format!("{name}_proj.weight"))?;
            let mut y = x.matmul(&matrix.t()?)?;
            if config.architecture.has_qkv_bias() {
                y = y.broadcast_add(&weights.get(heads * head_dim, &format!("{name}_proj.bias"))?)?;
            }
            let mut y = y.reshape((len, heads, head_dim))?;
            if config.architecture.has_qk_norm() && name != "v" {
                let norm = weights.get(head_dim, &format!("{name}_norm.weight"))?;
                y = rms_norm(&y.contiguous()?, &norm, config.rms_eps)?;
            }
            let y = y.transpose(0, 1)?.contiguous()?;
            if name == "v" { Ok(y) } else { rope(&y.unsqueeze(0)?, cos, sin)?.i(0) }
        };
        let (q, k, v) = (
            project("q", config.num_heads)?,
            project("k", config.num_kv_heads)?,
            project("v", config.num_kv_heads)?,
        );
        let group = config.num_heads / config.num_kv_heads;
        let heads = (0..config.num_heads)
            .map(|head| {
                let scores = (q.i(head)?.matmul(&k.i(head / group)?.t()?)? / (head_dim as f64).sqrt())?;
                softmax_last_dim(&scores.broadcast_add(mask)?)?.matmul(&v.i(head / group)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let all = Tensor::cat(&heads, 1)?;
        all.matmul(&weights.get((config.hidden, config.q_width()), "o_proj.weight")?.t()?)
    }
}

/// Reads a GGUF file into tensors named and ordered as in a directory of the hub.
fn gguf_tensors(path: &Path, config: &ModelConfig) -> Result<HashMap<String, Tensor>> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let permuted = matches!(config.architecture, Architecture::Llama | Architecture::Mistral);
    let mut tensors = HashMap::new();
    for name in content.tensor_infos.keys() {
        let mut tensor = content.tensor(&mut file, name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        if permuted && (name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight")) {
            let (rows, columns) = tensor.dims2()?;
            let heads = rows / config.head_dim;
            tensor = tensor
                .reshape((heads, config.head_dim / 2, 2, columns))?
                .transpose(1, 2)?
                .reshape((rows, columns))?;
        }
        tensors.insert(hub_name(name), tensor);
    }
    Ok(tensors)
}

fn hub_name(name: &str) -> String {
    const PARTS: [(&str, &str); 11] = [
        ("attn_norm", "input_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let mut parts = name.splitn(4, '.');
    let (Some("blk"), Some(layer), Some(role), Some(suffix)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return name.to_owned();
    };
    let role = PARTS.iter().find(|(gguf, _)| *gguf == role).map_or(role, |(_, hub)| *hub);
    format!("model.layers.{layer}.{role}.{suffix}")
}
