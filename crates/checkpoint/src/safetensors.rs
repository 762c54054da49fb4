//! Directories of the Hugging Face hub: `config.json` and one or several safetensors files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use microserving_executor::ExecutorError;
use microserving_protocol::TokenId;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::architecture::{Architecture, ModelConfig, RopeScaling};
use crate::scales::{Scales, is_scale};
use crate::source::{Place, Role, Tensor, TensorSource, TensorType, drop_pages, load_error};

/// A tensor's bytes in one of the maps.
#[derive(Debug)]
struct Location {
    shard: usize,
    offset: usize,
    tensor: Tensor,
}

/// An open directory.
pub(crate) struct SafetensorsSource {
    shards: Vec<Mmap>,
    locations: HashMap<String, Location>,
    config: ModelConfig,
}

impl SafetensorsSource {
    /// Opens a directory and reads its headers.
    pub(crate) fn open(directory: &Path) -> Result<Self, ExecutorError> {
        let (config, block) = read_config(directory)?;
        let mut shards = Vec::new();
        let mut locations = HashMap::new();
        for path in shard_paths(directory)? {
            let io = |err: std::io::Error| load_error(format!("{}: {err}", path.display()));
            let file = File::open(&path).map_err(io)?;
            // SAFETY: the file must not be truncated or changed while it is loaded, which the documentation asks of the
            // user as every engine that maps its weights does; nothing is kept mapped afterwards.
            let map = unsafe { Mmap::map(&file) }.map_err(io)?;
            let damaged = |err: safetensors::SafeTensorError| {
                load_error(format!("{}: damaged safetensors file: {err}", path.display()))
            };
            let views = SafeTensors::deserialize(&map).map_err(damaged)?;
            for (name, view) in views.tensors() {
                let kind = match view.dtype() {
                    Dtype::F32 => TensorType::F32,
                    Dtype::F16 => TensorType::F16,
                    Dtype::BF16 => TensorType::Bf16,
                    Dtype::F8_E4M3 => TensorType::F8E4M3,
                    other => {
                        return Err(load_error(format!(
                            "{}: tensor {name} has the type {other:?}, supported are F32, F16, BF16 and F8_E4M3",
                            path.display()
                        )));
                    }
                };
                let location = Location {
                    shard: shards.len(),
                    offset: view.data().as_ptr() as usize - map.as_ptr() as usize,
                    tensor: Tensor { name: name.clone(), shape: view.shape().to_vec(), kind, scales: None },
                };
                if locations.insert(name.clone(), location).is_some() {
                    return Err(load_error(format!("{}: tensor {name} is in two files", path.display())));
                }
            }
            shards.push(map);
        }
        let mut source = Self { shards, locations, config };
        source.find_scales(block)?;
        Ok(source)
    }

    /// Gives eight-bit tensors their scales.
    fn find_scales(&mut self, block: Option<(usize, usize)>) -> Result<(), ExecutorError> {
        let tensors: HashMap<String, Tensor> =
            self.tensors().into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        for tensor in tensors.values().filter(|tensor| tensor.kind == TensorType::F8E4M3) {
            let scales = Scales::find(self, &tensors, tensor, block)?.map(Arc::new);
            if let Some(location) = self.locations.get_mut(&tensor.name) {
                location.tensor.scales = scales;
            }
        }
        Ok(())
    }

    /// Returns the file that a tensor is in, and where.
    fn range(&self, tensor: &Tensor) -> Result<(&Mmap, Range<usize>), ExecutorError> {
        let location = self
            .locations
            .get(&tensor.name)
            .ok_or_else(|| load_error(format!("tensor {} is missing", tensor.name)))?;
        // That shape and type fit the bytes was checked when the file was opened.
        let bytes = tensor.kind.row_bytes(tensor.shape.iter().product()).unwrap_or(0);
        Ok((&self.shards[location.shard], location.offset..location.offset + bytes))
    }
}

/// Returns the weight files: those that the index names, else the one without an index.
pub fn shard_paths(directory: &Path) -> Result<Vec<PathBuf>, ExecutorError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index = directory.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(vec![directory.join("model.safetensors")]);
    }
    let Index { weight_map } = read_json(&index)?;
    let mut names: Vec<String> = weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    for name in &names {
        // The index is data from elsewhere: it may not lead out of the directory.
        if Path::new(name).file_name().is_none_or(|file| file != name.as_str()) {
            return Err(load_error(format!("{}: weight_map names the file {name:?}", index.display())));
        }
    }
    if names.is_empty() {
        return Err(load_error(format!("{}: weight_map is empty", index.display())));
    }
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}

impl TensorSource for SafetensorsSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensors(&self) -> Vec<Tensor> {
        self.locations.values().map(|location| location.tensor.clone()).collect()
    }

    fn name_of(&self, place: Place) -> String {
        let (layer, role) = match place {
            Place::Embedding => return "model.embed_tokens.weight".into(),
            Place::FinalNorm => return "model.norm.weight".into(),
            Place::OutputMatrix => return "lm_head.weight".into(),
            Place::Layer(layer, role) => (layer, role),
        };
        let role = match role {
            Role::AttentionNorm => "input_layernorm.weight",
            Role::Q => "self_attn.q_proj.weight",
            Role::K => "self_attn.k_proj.weight",
            Role::V => "self_attn.v_proj.weight",
            Role::QBias => "self_attn.q_proj.bias",
            Role::KBias => "self_attn.k_proj.bias",
            Role::VBias => "self_attn.v_proj.bias",
            Role::QNorm => "self_attn.q_norm.weight",
            Role::KNorm => "self_attn.k_norm.weight",
            Role::Output => "self_attn.o_proj.weight",
            Role::MlpNorm => "post_attention_layernorm.weight",
            Role::Gate => "mlp.gate_proj.weight",
            Role::Up => "mlp.up_proj.weight",
            Role::Down => "mlp.down_proj.weight",
        };
        format!("model.layers.{layer}.{role}")
    }

    fn is_ignorable(&self, name: &str) -> bool {
        // Old checkpoints carry the frequencies that the configuration defines.
        name.ends_with("rotary_emb.inv_freq") || is_scale(name)
    }

    fn row_in_file(&self, _place: Place, row: usize) -> usize {
        row
    }

    fn bytes(&self, tensor: &Tensor) -> Result<&[u8], ExecutorError> {
        let (map, range) = self.range(tensor)?;
        Ok(&map[range])
    }

    fn release(&self, tensor: &Tensor, bytes: Range<usize>) {
        if let Ok((map, range)) = self.range(tensor) {
            drop_pages(map, range.start + bytes.start..range.start + bytes.end);
        }
    }

    fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|map| map.len() as u64).sum()
    }
}

/// `config.json` as far as we read it.
#[derive(Debug, Deserialize)]
struct HubConfig {
    model_type: Option<String>,
    num_hidden_layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: u32,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<HubRopeScaling>,
    /// Where newer files keep both.
    rope_parameters: Option<HubRopeScaling>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    partial_rotary_factor: Option<f64>,
    eos_token_id: Option<OneOrMany>,
    quantization_config: Option<HubQuantization>,
}

/// `quantization_config` of `config.json`.
#[derive(Debug, Deserialize)]
struct HubQuantization {
    /// Rows and columns that share a scale.
    weight_block_size: Option<[usize; 2]>,
}

/// `rope_scaling` of `config.json`.
#[derive(Debug, Deserialize)]
struct HubRopeScaling {
    rope_type: Option<String>,
    /// What `rope_type` was called before; some files have both.
    #[serde(rename = "type")]
    former_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// `eos_token_id`, which may be one or a list.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl From<OneOrMany> for Vec<TokenId> {
    fn from(ids: OneOrMany) -> Self {
        match ids {
            OneOrMany::One(id) => vec![TokenId(id)],
            OneOrMany::Many(ids) => ids.into_iter().map(TokenId).collect(),
        }
    }
}

/// `generation_config.json` as far as we read it.
#[derive(Debug, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<OneOrMany>,
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, ExecutorError> {
    let text = std::fs::read(path).map_err(|err| load_error(format!("{}: {err}", path.display())))?;
    serde_json::from_slice(&text).map_err(|err| load_error(format!("{}: {err}", path.display())))
}

/// Reads and checks `config.json`, and the end-of-sequence tokens of `generation_config.json` if it is there. Returns the size of the blocks that share
/// a scale, too, if weights have such.
fn read_config(directory: &Path) -> Result<(ModelConfig, Option<(usize, usize)>), ExecutorError> {
    let path = directory.join("config.json");
    let hub: HubConfig = read_json(&path)?;
    let error = |reason: String| load_error(format!("{}: {reason}", path.display()));
    let model_type = hub.model_type.as_deref().ok_or_else(|| error("model_type is missing".into()))?;
    let architecture = Architecture::from_name(model_type)
        .ok_or_else(|| error(format!("model_type {model_type} is not supported")))?;
    if let Some(other) = hub.hidden_act.as_deref().filter(|&act| act != "silu") {
        return Err(error(format!("hidden_act {other} is not supported")));
    }
    // Qwen2 writes a window that it does not use.
    if hub.use_sliding_window != Some(false)
        && let Some(window) =
            hub.sliding_window.filter(|&window| window < u64::from(hub.max_position_embeddings))
    {
        return Err(error(format!("sliding_window {window} is not supported")));
    }
    if hub.attention_bias == Some(true) || hub.mlp_bias == Some(true) {
        return Err(error("attention_bias and mlp_bias are not supported".into()));
    }
    if hub.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return Err(error("partial_rotary_factor is not supported".into()));
    }
    let head_dim = match hub.head_dim {
        Some(head_dim) => head_dim,
        None if hub.num_attention_heads > 0 && hub.hidden_size.is_multiple_of(hub.num_attention_heads) => {
            hub.hidden_size / hub.num_attention_heads
        }
        None => return Err(error("head_dim is missing, and heads do not divide hidden_size".into())),
    };
    let generation = directory.join("generation_config.json");
    let eos = if generation.is_file() {
        read_json::<GenerationConfig>(&generation)?.eos_token_id.or_else(|| hub.eos_token_id.clone())
    } else {
        hub.eos_token_id.clone()
    };
    let rope = hub.rope_scaling.as_ref().or(hub.rope_parameters.as_ref());
    let config = ModelConfig {
        architecture,
        num_layers: hub.num_hidden_layers,
        hidden: hub.hidden_size,
        intermediate: hub.intermediate_size,
        num_heads: hub.num_attention_heads,
        num_kv_heads: hub.num_key_value_heads.unwrap_or(hub.num_attention_heads),
        head_dim,
        vocab_size: hub.vocab_size,
        max_context: hub.max_position_embeddings,
        rms_eps: hub.rms_norm_eps as f32,
        rope_theta: hub.rope_theta.or(rope.and_then(|rope| rope.rope_theta)).unwrap_or(10_000.0),
        rope_scaling: rope_scaling(rope).map_err(error)?,
        tied: hub.tie_word_embeddings.unwrap_or(false),
        eos_tokens: eos.map(Vec::from).unwrap_or_default(),
    };
    config.check().map_err(error)?;
    let block = match hub.quantization_config.and_then(|config| config.weight_block_size) {
        Some([rows, columns]) if rows > 0 && columns > 0 => Some((rows, columns)),
        Some(size) => {
            return Err(error(format!("quantization_config.weight_block_size is {size:?}, must be above 0")));
        }
        None => None,
    };
    Ok((config, block))
}

/// Understands `rope_scaling`.
fn rope_scaling(hub: Option<&HubRopeScaling>) -> Result<RopeScaling, String> {
    let Some(hub) = hub else { return Ok(RopeScaling::None) };
    let positive = |name: &str, value: Option<f64>| {
        value
            .filter(|value| value.is_finite() && *value > 0.0)
            .ok_or_else(|| format!("rope_scaling.{name} is missing or not positive"))
    };
    match hub.rope_type.as_deref().or(hub.former_type.as_deref()) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: positive("factor", hub.factor)? }),
        Some("llama3") => {
            let low_freq_factor = positive("low_freq_factor", hub.low_freq_factor)?;
            let high_freq_factor = positive("high_freq_factor", hub.high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return Err("rope_scaling.high_freq_factor must be above low_freq_factor".into());
            }
            Ok(RopeScaling::Llama3 {
                factor: positive("factor", hub.factor)?,
                low_freq_factor,
                high_freq_factor,
                original_context: positive(
                    "original_max_position_embeddings",
                    hub.original_max_position_embeddings,
                )?,
            })
        }
        Some(other) => Err(format!("rope_scaling.rope_type {other} is not supported")),
    }
}
