//! Planning the arena, then filling it tensor by tensor.

use std::collections::{BTreeSet, HashMap};

use microserving_checkpoint::{
    LoadProgress, ModelConfig, Place, Role, Tensor, TensorSource, TensorType, Wanted, find,
};
use microserving_executor::ExecutorError;

use super::fill::Filler;
use crate::WeightDtype;
use crate::kernels::{NR, Quants};
use crate::pool::Pool;
use crate::weights::{Arena, Form, Matrix, Plan, Vector};

/// One layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Vector,
    /// q, k and v one below the other: `[q_width + 2 * kv_width][hidden]`.
    pub(crate) qkv: Matrix,
    pub(crate) qkv_bias: Option<Vector>,
    /// Over `head_dim`.
    pub(crate) q_norm: Option<Vector>,
    /// Over `head_dim`.
    pub(crate) k_norm: Option<Vector>,
    /// `[hidden][q_width]`.
    pub(crate) output: Matrix,
    pub(crate) mlp_norm: Vector,
    /// Gate and up, each padded to whole tiles: `[2 * padded intermediate][hidden]`.
    pub(crate) gate_up: Matrix,
    /// `[hidden][intermediate]`.
    pub(crate) down: Matrix,
}

/// All weights of a model.
#[derive(Debug)]
pub(crate) struct ModelWeights {
    pub(crate) arena: Arena,
    /// All forms of matrices, in their order.
    pub(crate) forms: BTreeSet<Form>,
    /// A hash of configuration, names, types and weights: the model's identity.
    pub(crate) hash: u64,
    pub(crate) layers: Vec<LayerWeights>,
    /// `[vocab][hidden]`.
    pub(crate) embedding: Matrix,
    pub(crate) final_norm: Vector,
    /// `[vocab][hidden]`; the embedding itself if they are tied.
    pub(crate) output: Matrix,
}

/// [`ModelWeights`] before there is memory.
#[derive(Debug)]
struct Places {
    layers: Vec<LayerWeights>,
    embedding: Matrix,
    final_norm: Vector,
    output: Matrix,
}

/// Where the rows of a tensor go.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Matrix { matrix: Matrix, first_row: usize },
    Vector { vector: Vector, first: usize },
}

/// A tensor that the model needs, and where it goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) wanted: Wanted,
    pub(super) target: Target,
}

/// Columns of gate (and of up) in the fused matrix: whole tiles, so that both halves of an output row begin on a tile.
pub(crate) const fn padded_intermediate(intermediate: usize) -> usize {
    intermediate.next_multiple_of(NR)
}

/// Reads all weights of `source` into the forms that `dtype` asks for.
pub(crate) fn build(
    source: &dyn TensorSource,
    dtype: WeightDtype,
    pool: &mut Pool,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<ModelWeights, ExecutorError> {
    let config = source.config().clone();
    let found = find(source)?;
    let choice = choose_form(dtype, &found);
    let kinds: HashMap<String, TensorType> =
        found.iter().map(|(_, tensor)| (tensor.name.clone(), tensor.kind)).collect();
    let form_of = |place: Place| match choice {
        Some(form) => form,
        None => kinds.get(&source.name_of(place)).map_or(Form::F32, |&kind| Form::of(kind)),
    };
    let (plan, places, needs) = layout(&config, &form_of);
    debug_assert!(needs.iter().map(|need| need.wanted).eq(found.iter().map(|(wanted, _)| *wanted)));
    let mut filler = Filler::new(source, &config, pool);
    let mut arena = Arena::new(&plan)?;
    let total_bytes = source.total_bytes();
    for (need, (_, tensor)) in needs.iter().zip(&found) {
        let bytes = filler.fill(&mut arena, need, tensor)?;
        progress(LoadProgress { bytes, total_bytes });
    }
    let hash = filler.hash();
    let Places { layers, embedding, final_norm, output } = places;
    let mut forms: BTreeSet<Form> = embedding.forms().chain(output.forms()).collect();
    for layer in &layers {
        for matrix in [&layer.qkv, &layer.output, &layer.gate_up, &layer.down] {
            forms.extend(matrix.forms());
        }
    }
    Ok(ModelWeights { arena, forms, hash, layers, embedding, final_norm, output })
}

/// Chooses one form for all matrices, or for each its tensor's own. `auto` follows the file: one with quantised tensors is
/// kept as it is, else the widest type found is all matrices'.
fn choose_form(dtype: WeightDtype, tensors: &[(Wanted, Tensor)]) -> Option<Form> {
    match dtype {
        WeightDtype::F32 => Some(Form::F32),
        WeightDtype::F16 => Some(Form::F16),
        WeightDtype::Bf16 => Some(Form::Bf16),
        WeightDtype::Q8_0 => Some(Form::Quantised(Quants::Q8_0)),
        WeightDtype::Auto => {
            let matrices = tensors.iter().filter(|(wanted, _)| wanted.rows.is_some());
            let mut kinds = matrices.map(|(_, tensor)| tensor.kind);
            let has = |kind| kinds.clone().any(|other| other == kind);
            if kinds.clone().any(|kind| matches!(kind, TensorType::Quantised(_))) {
                None
            } else if has(TensorType::F32)
                || (has(TensorType::F16) && (has(TensorType::Bf16) || has(TensorType::F8E4M3)))
            {
                Some(Form::F32)
            } else {
                Some(kinds.next().map_or(Form::F32, Form::of))
            }
        }
    }
}

/// Collects what the model needs, planning a place for each.
struct Layout<'a> {
    plan: Plan,
    needs: Vec<Need>,
    form_of: &'a dyn Fn(Place) -> Form,
}

impl Layout<'_> {
    /// A vector that one tensor fills.
    fn vector(&mut self, place: Place, len: usize) -> Vector {
        let vector = Vector::plan(&mut self.plan, len);
        self.part(place, vector, 0, len);
        vector
    }

    /// A part of a vector.
    fn part(&mut self, place: Place, vector: Vector, first: usize, len: usize) {
        let wanted = Wanted { place, rows: None, columns: len };
        self.needs.push(Need { wanted, target: Target::Vector { vector, first } });
    }

    /// A matrix that one tensor fills.
    fn matrix(&mut self, place: Place, n: usize, k: usize) -> Matrix {
        let matrix = Matrix::plan(&mut self.plan, (self.form_of)(place), n, k);
        self.rows(place, matrix, 0, n, k);
        matrix
    }

    /// A matrix that several tensors fill, one below the other; each comes with its rows and those that it takes up.
    ///
    /// Tensors of several quantised types (q4_k files keep some v as q6_k) become parts that multiply with the same
    /// activations. Where that cannot be, with a type of floating point among them or tiles shared by two, all become q8_0.
    fn joined(&mut self, tensors: &[(Place, usize, usize)], k: usize) -> Matrix {
        let parts: Vec<(Form, usize)> =
            tensors.iter().map(|&(place, _, space)| ((self.form_of)(place), space)).collect();
        let rows = parts.iter().map(|&(_, space)| space).sum();
        let is_quantised = |form| matches!(form, Form::Quantised(_));
        let fills_tiles = |(form, space): &(Form, usize)| is_quantised(*form) && space.is_multiple_of(NR);
        let matrix = if parts.iter().all(|part| part.0 == parts[0].0) {
            Matrix::plan(&mut self.plan, parts[0].0, rows, k)
        } else if parts.iter().all(fills_tiles) {
            Matrix::plan_parts(&mut self.plan, &parts, k)
        } else {
            Matrix::plan(&mut self.plan, Form::Quantised(Quants::Q8_0), rows, k)
        };
        let mut first_row = 0;
        for &(place, rows, space) in tensors {
            self.rows(place, matrix, first_row, rows, k);
            first_row += space;
        }
        matrix
    }

    /// Some rows of a matrix.
    fn rows(&mut self, place: Place, matrix: Matrix, first_row: usize, rows: usize, columns: usize) {
        let target = Target::Matrix { matrix, first_row };
        let wanted = Wanted { place, rows: Some(rows), columns };
        self.needs.push(Need { wanted, target });
    }
}

/// Places every weight in the arena to be.
fn layout(config: &ModelConfig, form_of: &dyn Fn(Place) -> Form) -> (Plan, Places, Vec<Need>) {
    let mut all = Layout { plan: Plan::default(), needs: Vec::new(), form_of };
    let embedding = all.matrix(Place::Embedding, config.vocab_size, config.hidden);
    let layers = (0..config.num_layers).map(|layer| layer_layout(&mut all, config, layer)).collect();
    let final_norm = all.vector(Place::FinalNorm, config.hidden);
    let output = if config.tied {
        embedding
    } else {
        all.matrix(Place::OutputMatrix, config.vocab_size, config.hidden)
    };
    (all.plan, Places { layers, embedding, final_norm, output }, all.needs)
}

fn layer_layout(all: &mut Layout<'_>, config: &ModelConfig, layer: usize) -> LayerWeights {
    let place = |role| Place::Layer(layer, role);
    let (hidden, head_dim) = (config.hidden, config.head_dim);
    let (q, kv, half) = (config.q_width(), config.kv_width(), padded_intermediate(config.intermediate));
    let attention_norm = all.vector(place(Role::AttentionNorm), hidden);
    let tensors = [(place(Role::Q), q, q), (place(Role::K), kv, kv), (place(Role::V), kv, kv)];
    let qkv = all.joined(&tensors, hidden);
    let qkv_bias = config.architecture.has_qkv_bias().then(|| {
        let bias = Vector::plan(&mut all.plan, q + 2 * kv);
        all.part(place(Role::QBias), bias, 0, q);
        all.part(place(Role::KBias), bias, q, kv);
        all.part(place(Role::VBias), bias, q + kv, kv);
        bias
    });
    let (q_norm, k_norm) = if config.architecture.has_qk_norm() {
        (Some(all.vector(place(Role::QNorm), head_dim)), Some(all.vector(place(Role::KNorm), head_dim)))
    } else {
        (None, None)
    };
    let output = all.matrix(place(Role::Output), hidden, q);
    let mlp_norm = all.vector(place(Role::MlpNorm), hidden);
    let tensors =
        [(place(Role::Gate), config.intermediate, half), (place(Role::Up), config.intermediate, half)];
    let gate_up = all.joined(&tensors, hidden);
    let down = all.matrix(place(Role::Down), hidden, config.intermediate);
    LayerWeights { attention_norm, qkv, qkv_bias, q_norm, k_norm, output, mlp_norm, gate_up, down }
}
