//! GGUF files: header and dequantisation by candle, names and row order by us.

use std::fs::File;
use std::io::Cursor;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use memmap2::Mmap;
use microserving_executor::ExecutorError;
use microserving_protocol::TokenId;

use crate::architecture::{Architecture, ModelConfig, RopeScaling};
use crate::header;
use crate::source::{Place, Role, Tensor, TensorSource, TensorType, drop_pages, load_error};

/// The tensor of ready-made rotary divisors.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// An open GGUF file.
pub(crate) struct GgufSource {
    path: PathBuf,
    map: Mmap,
    content: Content,
    config: ModelConfig,
}

impl GgufSource {
    /// Opens a file and reads its header.
    pub(crate) fn open(path: &Path) -> Result<Self, ExecutorError> {
        let io = |err: std::io::Error| load_error(format!("{}: {err}", path.display()));
        let file = File::open(path).map_err(io)?;
        // SAFETY: the file must not be truncated or changed while it is loaded, which the documentation asks of the user
        // as every engine that maps its weights does; nothing is kept mapped afterwards.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        header::check(&map).map_err(|err| load_error(format!("{}: {err}", path.display())))?;
        // The reader divides by the alignment that the file names; a damaged file may name zero.
        let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut Cursor::new(&map[..]))))
            .map_err(|_| load_error(format!("{}: the header is damaged", path.display())))?
            .map_err(|err| load_error(format!("{}: {err}", path.display())))?;
        for (name, info) in &content.tensor_infos {
            let bytes = info
                .shape
                .dims()
                .iter()
                .try_fold(1_usize, |all, &dim| all.checked_mul(dim))
                .filter(|elements| elements.is_multiple_of(info.ggml_dtype.block_size()))
                .and_then(|elements| {
                    (elements / info.ggml_dtype.block_size()).checked_mul(info.ggml_dtype.type_size())
                });
            let end = bytes.and_then(|bytes| {
                content.tensor_data_offset.checked_add(info.offset)?.checked_add(bytes as u64)
            });
            if end.is_none_or(|end| end > map.len() as u64) {
                return Err(load_error(format!(
                    "{}: tensor {name} reaches past the end of the file",
                    path.display()
                )));
            }
        }
        let mut source = Self {
            path: path.to_owned(),
            config: Fields { path, content: &content }.config()?,
            map,
            content,
        };
        source.read_divisors()?;
        Ok(source)
    }

    /// Returns where a tensor lies in the map.
    fn range(&self, tensor: &Tensor) -> Result<Range<usize>, ExecutorError> {
        let name = &tensor.name;
        let info = self
            .content
            .tensor_infos
            .get(name)
            .ok_or_else(|| load_error(format!("tensor {name} is missing")))?;
        let columns = tensor.shape.last().copied().unwrap_or(1);
        let rows = tensor.shape.iter().product::<usize>() / columns.max(1);
        let row_bytes = tensor.kind.row_bytes(columns).ok_or_else(|| {
            let block = info.ggml_dtype.block_size();
            load_error(format!("tensor {name} has rows of {columns}, not whole blocks of {block}"))
        })?;
        // That it ends inside the file was checked when it was opened.
        let begin = (self.content.tensor_data_offset + info.offset) as usize;
        Ok(begin..begin + rows * row_bytes)
    }

    /// Takes the rotary divisors, a tensor that is configuration.
    fn read_divisors(&mut self) -> Result<(), ExecutorError> {
        let Some(tensor) = self.tensors().into_iter().find(|tensor| tensor.name == ROPE_DIVISORS) else {
            return Ok(());
        };
        if tensor.shape.len() != 1 {
            return Err(load_error(format!("tensor {ROPE_DIVISORS} has the shape {:?}", tensor.shape)));
        }
        let mut divisors = vec![0.0; tensor.shape[0]];
        let bytes = self.bytes(&tensor)?;
        tensor
            .kind
            .widen(bytes, &mut divisors, &mut Vec::new())
            .map_err(|err| load_error(format!("tensor {ROPE_DIVISORS}: {err}")))?;
        if divisors.iter().any(|divisor| !(divisor.is_finite() && *divisor > 0.0)) {
            return Err(load_error(format!("tensor {ROPE_DIVISORS} has a value that is not positive")));
        }
        self.config.rope_scaling = RopeScaling::Divisors(divisors);
        self.config.check().map_err(|reason| load_error(format!("{}: {reason}", self.path.display())))
    }
}

impl TensorSource for GgufSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensors(&self) -> Vec<Tensor> {
        let tensor = |name: &String, info: &candle_core::quantized::gguf_file::TensorInfo| Tensor {
            name: name.clone(),
            shape: info.shape.dims().to_vec(),
            kind: match info.ggml_dtype {
                GgmlDType::F32 => TensorType::F32,
                GgmlDType::F16 => TensorType::F16,
                GgmlDType::BF16 => TensorType::Bf16,
                quantised => TensorType::Quantised(quantised),
            },
            scales: None,
        };
        self.content.tensor_infos.iter().map(|(name, info)| tensor(name, info)).collect()
    }

    fn name_of(&self, place: Place) -> String {
        let (layer, role) = match place {
            Place::Embedding => return "token_embd.weight".into(),
            Place::FinalNorm => return "output_norm.weight".into(),
            Place::OutputMatrix => return "output.weight".into(),
            Place::Layer(layer, role) => (layer, role),
        };
        let role = match role {
            Role::AttentionNorm => "attn_norm.weight",
            Role::Q => "attn_q.weight",
            Role::K => "attn_k.weight",
            Role::V => "attn_v.weight",
            Role::QBias => "attn_q.bias",
            Role::KBias => "attn_k.bias",
            Role::VBias => "attn_v.bias",
            Role::QNorm => "attn_q_norm.weight",
            Role::KNorm => "attn_k_norm.weight",
            Role::Output => "attn_output.weight",
            Role::MlpNorm => "ffn_norm.weight",
            Role::Gate => "ffn_gate.weight",
            Role::Up => "ffn_up.weight",
            Role::Down => "ffn_down.weight",
        };
        format!("blk.{layer}.{role}")
    }

    fn is_ignorable(&self, name: &str) -> bool {
        name == ROPE_DIVISORS
    }

    /// In files of the Llama family a head's rows come as the pairs that are rotated together (0, d/2, 1, d/2 + 1, …),
    /// while the model counts all first halves, then all second halves.
    fn row_in_file(&self, place: Place, row: usize) -> usize {
        let permuted = matches!(self.config.architecture, Architecture::Llama | Architecture::Mistral)
            && matches!(place, Place::Layer(_, Role::Q | Role::K));
        if !permuted {
            return row;
        }
        let (head_dim, half) = (self.config.head_dim, self.config.head_dim / 2);
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % half * 2 + within / half
    }

    fn bytes(&self, tensor: &Tensor) -> Result<&[u8], ExecutorError> {
        Ok(&self.map[self.range(tensor)?])
    }

    fn release(&self, tensor: &Tensor, bytes: Range<usize>) {
        if let Ok(range) = self.range(tensor) {
            drop_pages(&self.map, range.start + bytes.start..range.start + bytes.end);
        }
    }

    fn total_bytes(&self) -> u64 {
        self.map.len() as u64 - self.content.tensor_data_offset
    }
}

/// The metadata of a file, read with errors that name file and key.
struct Fields<'a> {
    path: &'a Path,
    content: &'a Content,
}

impl Fields<'_> {
    fn error(&self, reason: impl std::fmt::Display) -> ExecutorError {
        load_error(format!("{}: {reason}", self.path.display()))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    fn int(&self, key: &str) -> Result<Option<u64>, ExecutorError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let int = match *value {
            Value::I8(x) => u64::try_from(x).ok(),
            Value::I16(x) => u64::try_from(x).ok(),
            Value::I32(x) => u64::try_from(x).ok(),
            Value::I64(x) => u64::try_from(x).ok(),
            ref other => other.to_u64().ok(),
        };
        int.map(Some).ok_or_else(|| self.error(format_args!("{key} is not a whole number")))
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ExecutorError> {
        let int = self.int(key)?;
        int.map(|int| usize::try_from(int).map_err(|_| self.error(format_args!("{key} is too large"))))
            .transpose()
    }

    fn required(&self, key: &str) -> Result<usize, ExecutorError> {
        self.size(key)?.ok_or_else(|| self.error(format_args!("{key} is missing")))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ExecutorError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(x)) => Ok(Some(f64::from(*x))),
            Some(Value::F64(x)) => Ok(Some(*x)),
            Some(_) => Err(self.error(format_args!("{key} is not a number with a fraction"))),
        }
    }

    fn string(&self, key: &str) -> Result<Option<&str>, ExecutorError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.error(format_args!("{key} is not a text"))),
        }
    }

    fn config(&self) -> Result<ModelConfig, ExecutorError> {
        let name = self
            .string("general.architecture")?
            .ok_or_else(|| self.error("general.architecture is missing"))?;
        let architecture = Architecture::from_name(name)
            .ok_or_else(|| self.error(format_args!("general.architecture {name} is not supported")))?;
        if self.int("split.count")?.is_some_and(|count| count > 1) {
            return Err(self.error("split.count: a model split over several files is not supported"));
        }
        let key = |rest: &str| format!("{name}.{rest}");
        let hidden = self.required(&key("embedding_length"))?;
        let num_heads = self.required(&key("attention.head_count"))?;
        let head_dim = match self.size(&key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None if num_heads > 0 && hidden.is_multiple_of(num_heads) => hidden / num_heads,
            None => {
                let reason = format_args!(
                    "{} is missing, and heads do not divide the width",
                    key("attention.key_length")
                );
                return Err(self.error(reason));
            }
        };
        for same in ["attention.value_length", "rope.dimension_count"] {
            if let Some(value) = self.size(&key(same))?
                && value != head_dim
            {
                let reason =
                    format_args!("{} is {value}, only the head dimension {head_dim} is supported", key(same));
                return Err(self.error(reason));
            }
        }
        for absent in ["attention.sliding_window", "expert_count"] {
            if self.int(&key(absent))?.is_some_and(|value| value > 0) {
                return Err(self.error(format_args!("{} is not supported", key(absent))));
            }
        }
        let rope_scaling = match self.string(&key("rope.scaling.type"))? {
            None | Some("none") => RopeScaling::None,
            Some("linear") => {
                let factor_key = key("rope.scaling.factor");
                let factor = self.float(&factor_key)?.filter(|factor| factor.is_finite() && *factor > 0.0);
                let factor = factor
                    .ok_or_else(|| self.error(format_args!("{factor_key} is missing or not positive")))?;
                RopeScaling::Linear { factor }
            }
            Some(other) => {
                return Err(self.error(format_args!("{} {other} is not supported", key("rope.scaling.type"))));
            }
        };
        let embedding = self.content.tensor_infos.get("token_embd.weight");
        let Some(&[vocab_size, _]) = embedding.map(|info| info.shape.dims()) else {
            return Err(self.error("tensor token_embd.weight is missing or not a matrix"));
        };
        let rms_key = key("attention.layer_norm_rms_epsilon");
        let rms_eps =
            self.float(&rms_key)?.ok_or_else(|| self.error(format_args!("{rms_key} is missing")))? as f32;
        let max_context = self.required(&key("context_length"))?;
        let config = ModelConfig {
            architecture,
            num_layers: self.required(&key("block_count"))?,
            hidden,
            intermediate: self.required(&key("feed_forward_length"))?,
            num_heads,
            num_kv_heads: self.size(&key("attention.head_count_kv"))?.unwrap_or(num_heads),
            head_dim,
            vocab_size,
            max_context: u32::try_from(max_context)
                .map_err(|_| self.error(format_args!("{} is too large", key("context_length"))))?,
            rms_eps,
            rope_theta: self.float(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling,
            tied: !self.content.tensor_infos.contains_key("output.weight"),
            eos_tokens: self.eos_tokens()?,
        };
        config.check().map_err(|reason| self.error(reason))?;
        Ok(config)
    }

    fn eos_tokens(&self) -> Result<Vec<TokenId>, ExecutorError> {
        let mut tokens = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            if let Some(id) = self.int(key)? {
                let id = u32::try_from(id).map_err(|_| self.error(format_args!("{key} is too large")))?;
                if !tokens.contains(&TokenId(id)) {
                    tokens.push(TokenId(id));
                }
            }
        }
        Ok(tokens)
    }
}
