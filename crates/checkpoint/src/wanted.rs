//! What a model needs of its files, and who it is.

use std::collections::HashMap;

use microserving_executor::ExecutorError;
use xxhash_rust::xxh3::Xxh3;

use crate::ModelConfig;
use crate::source::{Place, Role, Tensor, TensorSource, load_error};

/// A tensor that a model needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its place in the model.
    pub place: Place,
    /// Rows of a matrix; `None` for a vector.
    pub rows: Option<usize>,
    /// Elements of a row, or of the vector.
    pub columns: usize,
}

impl ModelConfig {
    /// Returns every tensor that the model needs, in the order in which they are read and hashed.
    #[must_use]
    pub fn wanted(&self) -> Vec<Wanted> {
        let matrix = |place, rows, columns| Wanted { place, rows: Some(rows), columns };
        let vector = |place, columns| Wanted { place, rows: None, columns };
        let (hidden, q, kv, head_dim) = (self.hidden, self.q_width(), self.kv_width(), self.head_dim);
        let mut all = vec![matrix(Place::Embedding, self.vocab_size, hidden)];
        for layer in 0..self.num_layers {
            let at = |role| Place::Layer(layer, role);
            all.push(vector(at(Role::AttentionNorm), hidden));
            all.extend(
                [(Role::Q, q), (Role::K, kv), (Role::V, kv)]
                    .map(|(role, rows)| matrix(at(role), rows, hidden)),
            );
            if self.architecture.has_qkv_bias() {
                all.extend(
                    [(Role::QBias, q), (Role::KBias, kv), (Role::VBias, kv)]
                        .map(|(role, len)| vector(at(role), len)),
                );
            }
            if self.architecture.has_qk_norm() {
                all.extend([Role::QNorm, Role::KNorm].map(|role| vector(at(role), head_dim)));
            }
            all.push(matrix(at(Role::Output), hidden, q));
            all.push(vector(at(Role::MlpNorm), hidden));
            all.extend([Role::Gate, Role::Up].map(|role| matrix(at(role), self.intermediate, hidden)));
            all.push(matrix(at(Role::Down), hidden, self.intermediate));
        }
        all.push(vector(Place::FinalNorm, hidden));
        if !self.tied {
            all.push(matrix(Place::OutputMatrix, self.vocab_size, hidden));
        }
        all
    }
}

/// Finds what a model needs among the tensors of its files, by name, before anything is read: a wrong shape should not show only
/// after a minute of reading. Returns them in the order of [`ModelConfig::wanted`].
///
/// # Errors
/// [`ExecutorError::Load`] naming a tensor that is missing, has another shape, or has no place in the architecture.
pub fn find(source: &dyn TensorSource) -> Result<Vec<(Wanted, Tensor)>, ExecutorError> {
    let config = source.config();
    let mut left: HashMap<String, Tensor> =
        source.tensors().into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    if config.num_layers > left.len() {
        return Err(load_error(format!(
            "the configuration names {} layers, the files hold only {} tensors",
            config.num_layers,
            left.len()
        )));
    }
    let mut found = Vec::new();
    for wanted in config.wanted() {
        let name = source.name_of(wanted.place);
        let tensor = left.remove(&name).ok_or_else(|| load_error(format!("tensor {name} is missing")))?;
        let shape: Vec<usize> = wanted.rows.into_iter().chain([wanted.columns]).collect();
        if tensor.shape != shape {
            return Err(load_error(format!(
                "tensor {name} has the shape {:?}, the configuration asks for {shape:?}",
                tensor.shape
            )));
        }
        found.push((wanted, tensor));
    }
    if config.tied {
        // Some writers store the tied matrix twice.
        left.remove(&source.name_of(Place::OutputMatrix));
    }
    let mut unknown: Vec<String> = left.into_keys().filter(|name| !source.is_ignorable(name)).collect();
    unknown.sort_unstable();
    if let Some(name) = unknown.first() {
        return Err(load_error(format!(
            "tensor {name} ({} such) has no place in the {} architecture",
            unknown.len(),
            config.architecture.name()
        )));
    }
    Ok(found)
}

/// A hash of configuration, names, types and weights, in the order of [`ModelConfig::wanted`]: the model's identity, whatever
/// executor has read it.
pub struct Identity(Xxh3);

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Identity").field(&self.get()).finish()
    }
}

impl Identity {
    /// Begins with the configuration.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let mut hash = Xxh3::new();
        hash.update(format!("{config:?}").as_bytes());
        Self(hash)
    }

    /// Begins the next tensor.
    pub fn tensor(&mut self, tensor: &Tensor) {
        self.0.update(format!("{} {:?} {:?}", tensor.name, tensor.shape, tensor.kind).as_bytes());
        for scale in tensor.scales.iter().flat_map(|scales| &scales.values) {
            self.0.update(&scale.to_le_bytes());
        }
    }

    /// Takes in more of the tensor's bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash of all so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.digest()
    }
}

/// Checks how long sequences may be: what is asked for, at most what the model was made for.
///
/// # Errors
/// [`ExecutorError::Load`] naming `max_context`.
pub fn max_context(config: &ModelConfig, asked: Option<u32>) -> Result<u32, ExecutorError> {
    match asked {
        None => Ok(config.max_context),
        Some(asked) if (1..=config.max_context).contains(&asked) => Ok(asked),
        Some(asked) => {
            Err(load_error(format!("max_context is {asked}, the model allows 1..={}", config.max_context)))
        }
    }
}
