//! Seeded random tiny models of every architecture, written as a hub directory or as a GGUF file.
//!
//! Configurations and expected logits come from `tests/reference/tiny_models.json`, which the script beside it makes.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use microserving_protocol::TokenId;
use serde_json::Value as Json;

use crate::noise::uniform;

/// A tiny model.
#[derive(Clone, Debug)]
pub(crate) struct Tiny {
    pub(crate) config: Json,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// What the reference script says of a model.
pub(crate) struct Expected {
    pub(crate) name: String,
    pub(crate) tiny: Tiny,
    pub(crate) tokens: Vec<TokenId>,
    /// Logits after the token at an index.
    pub(crate) logits: Vec<(usize, Vec<f64>)>,
}

/// Reads the reference.
pub(crate) fn references() -> Vec<Expected> {
    let all: Json = serde_json::from_str(include_str!("../reference/tiny_models.json")).unwrap();
    let numbers =
        |json: &Json| -> Vec<f64> { json.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let each = |(name, model): (&String, &Json)| Expected {
        name: name.clone(),
        tiny: Tiny::new(model["config"].clone()),
        tokens: numbers(&model["tokens"]).iter().map(|&token| TokenId(token as u32)).collect(),
        logits: model["logits"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(at, logits)| (at.parse().unwrap(), numbers(logits)))
            .collect(),
    };
    all.as_object().unwrap().iter().map(each).collect()
}

/// Returns the model of that name.
pub(crate) fn tiny(name: &str) -> Tiny {
    references().into_iter().find(|expected| expected.name == name).unwrap().tiny
}

/// Weights as the script makes them.
fn weights(name: &str, len: usize) -> Vec<f32> {
    uniform(name)
        .take(len)
        .map(|uniform| {
            let x = if name.contains("norm") {
                1.0 + uniform / 4.0
            } else if name.contains("embed") {
                uniform
            } else {
                uniform / 4.0
            };
            x as f32
        })
        .collect()
}

impl Tiny {
    /// Makes the model of a hub configuration.
    pub(crate) fn new(config: Json) -> Self {
        let get = |key: &str| config[key].as_u64().map(|x| x as usize);
        let (hidden, inner, vocab) =
            (get("hidden_size").unwrap(), get("intermediate_size").unwrap(), get("vocab_size").unwrap());
        let heads = get("num_attention_heads").unwrap();
        let kv_heads = get("num_key_value_heads").unwrap_or(heads);
        let head_dim = get("head_dim").unwrap_or(hidden / heads);
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if config["tie_word_embeddings"] == false {
            shapes.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
        }
        for layer in 0..get("num_hidden_layers").unwrap() {
            let mut add = |name: &str, shape: &[usize]| {
                shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            for (part, n) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                add(&format!("self_attn.{part}_proj.weight"), &[n * head_dim, hidden]);
                if kind == "qwen2" {
                    add(&format!("self_attn.{part}_proj.bias"), &[n * head_dim]);
                }
                if kind == "qwen3" && part != "v" {
                    add(&format!("self_attn.{part}_norm.weight"), &[head_dim]);
                }
            }
            add("self_attn.o_proj.weight", &[hidden, heads * head_dim]);
            add("mlp.gate_proj.weight", &[inner, hidden]);
            add("mlp.up_proj.weight", &[inner, hidden]);
            add("mlp.down_proj.weight", &[hidden, inner]);
        }
        let tensors = shapes
            .into_iter()
            .map(|(name, shape)| {
                let values = weights(&name, shape.iter().product());
                (name, (shape, values))
            })
            .collect();
        Self { config, tensors }
    }

    /// Returns a number of the configuration.
    pub(crate) fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn head_dim(&self) -> usize {
        self.config["head_dim"]
            .as_u64()
            .map_or(self.size("hidden_size") / self.size("num_attention_heads"), |x| x as usize)
    }

    /// Writes a hub directory with the tensors spread over `shards` files; one shard has no index.
    pub(crate) fn write_directory(&self, directory: &Path, dtype: DType, shards: usize) {
        std::fs::create_dir_all(directory).unwrap();
        std::fs::write(directory.join("config.json"), self.config.to_string()).unwrap();
        let mut files: Vec<BTreeMap<String, Tensor>> = vec![BTreeMap::new(); shards];
        let mut index = serde_json::Map::new();
        for (i, (name, (shape, values))) in self.tensors.iter().enumerate() {
            let tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &Device::Cpu).unwrap();
            files[i % shards].insert(name.clone(), tensor.to_dtype(dtype).unwrap());
            index.insert(name.clone(), Json::String(shard_name(i % shards, shards)));
        }
        for (i, tensors) in files.iter().enumerate() {
            let path = directory.join(shard_name(i, shards));
            candle_core::safetensors::save(&tensors.clone().into_iter().collect(), path).unwrap();
        }
        if shards > 1 {
            let index = serde_json::json!({ "metadata": {}, "weight_map": index });
            std::fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
    }

    /// Writes a GGUF file, matrices as `kind`, vectors in f32.
    pub(crate) fn write_gguf(&self, path: &Path, kind: GgmlDType) {
        self.write_gguf_with(path, |_| kind, |_| ());
    }

    /// [`Self::write_gguf`] with a type for each matrix, and a change to the metadata.
    pub(crate) fn write_gguf_with(
        &self,
        path: &Path,
        kind_of: impl Fn(&str) -> GgmlDType,
        change: impl FnOnce(&mut BTreeMap<String, Value>),
    ) {
        let model_type = self.config["model_type"].as_str().unwrap();
        // Mistral's files say llama, as their converter does.
        let architecture = if model_type == "mistral" { "llama" } else { model_type };
        let permuted = architecture == "llama";
        let mut metadata = BTreeMap::new();
        metadata.insert("general.architecture".to_owned(), Value::String(architecture.into()));
        metadata.insert("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(2));
        let mut put = |key: &str, value: Value| {
            metadata.insert(format!("{architecture}.{key}"), value);
        };
        let size = |key: &str| Value::U32(self.size(key) as u32);
        let head_dim = self.head_dim();
        put("context_length", size("max_position_embeddings"));
        put("embedding_length", size("hidden_size"));
        put("feed_forward_length", size("intermediate_size"));
        put("block_count", size("num_hidden_layers"));
        put("attention.head_count", size("num_attention_heads"));
        if !self.config["num_key_value_heads"].is_null() {
            put("attention.head_count_kv", size("num_key_value_heads"));
        }
        put("attention.key_length", Value::U32(head_dim as u32));
        put("attention.value_length", Value::U32(head_dim as u32));
        put("rope.dimension_count", Value::U32(head_dim as u32));
        put(
            "attention.layer_norm_rms_epsilon",
            Value::F32(self.config["rms_norm_eps"].as_f64().unwrap() as f32),
        );
        put("rope.freq_base", Value::F32(self.config["rope_theta"].as_f64().unwrap() as f32));
        let mut tensors: Vec<(String, QTensor)> = Vec::new();
        let mut add = |name: &str, tensor: &Tensor, kind| {
            tensors.push((name.to_owned(), QTensor::quantize(tensor, kind).unwrap()));
        };
        let scaling = &self.config["rope_scaling"];
        if scaling["rope_type"] == "llama3" {
            let divisors = self.llama3_divisors();
            add("rope_freqs.weight", &Tensor::new(divisors, &Device::Cpu).unwrap(), GgmlDType::F32);
        } else if scaling["type"] == "linear" {
            put("rope.scaling.type", Value::String("linear".into()));
            put("rope.scaling.factor", Value::F32(scaling["factor"].as_f64().unwrap() as f32));
        }
        change(&mut metadata);
        for (name, (shape, values)) in &self.tensors {
            let mut tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &Device::Cpu).unwrap();
            let gguf = gguf_name(name);
            if permuted && (gguf.ends_with("attn_q.weight") || gguf.ends_with("attn_k.weight")) {
                let (rows, columns) = tensor.dims2().unwrap();
                tensor = tensor
                    .reshape((rows / head_dim, 2, head_dim / 2, columns))
                    .and_then(|tensor| tensor.transpose(1, 2)?.contiguous()?.reshape((rows, columns)))
                    .unwrap();
            }
            add(&gguf, &tensor, if shape.len() == 2 { kind_of(&gguf) } else { GgmlDType::F32 });
        }
        let metadata: Vec<(&str, &Value)> =
            metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<(&str, &QTensor)> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
    }

    /// The divisors that a converter computes from `rope_scaling`.
    fn llama3_divisors(&self) -> Vec<f32> {
        let scaling = &self.config["rope_scaling"];
        let number = |key: &str| scaling[key].as_f64().unwrap();
        let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
        let theta = self.config["rope_theta"].as_f64().unwrap();
        (0..self.head_dim() / 2)
            .map(|i| {
                let frequency = theta.powf(-((2 * i) as f64) / self.head_dim() as f64);
                let turns =
                    number("original_max_position_embeddings") * frequency / (2.0 * std::f64::consts::PI);
                let blend = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 / ((1.0 - blend) / factor + blend)) as f32
            })
            .collect()
    }
}

fn shard_name(shard: usize, shards: usize) -> String {
    if shards == 1 {
        "model.safetensors".into()
    } else {
        format!("model-{:05}-of-{shards:05}.safetensors", shard + 1)
    }
}

fn gguf_name(name: &str) -> String {
    name.replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("lm_head", "output")
        .replace("model.layers.", "blk.")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.", "attn_")
        .replace("_proj", "")
        .replace("mlp.", "ffn_")
}
