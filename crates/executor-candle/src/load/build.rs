//! Planning the arena, then filling it tensor by tensor.

use std::collections::HashMap;

use microserving_executor::ExecutorError;

use super::source::{Place, Role, load_error};
use super::{Tensor, TensorSource, TensorType};
use crate::architecture::ModelConfig;
use crate::weights::{Arena, Form, Matrix, Plan, Row, Vector};
use crate::{LoadProgress, WeightDtype};

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
    pub(crate) form: Form,
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
enum Target {
    Matrix { matrix: Matrix, first_row: usize },
    Vector { vector: Vector, first: usize },
}

/// A tensor that the model needs: its place, its shape and where it goes.
#[derive(Clone, Copy, Debug)]
struct Need {
    place: Place,
    rows: Option<usize>,
    columns: usize,
    target: Target,
}

/// Columns of gate (and of up) in the fused matrix: whole tiles, so that both halves of an output row begin on a tile.
pub(crate) const fn padded_intermediate(intermediate: usize) -> usize {
    intermediate.next_multiple_of(crate::kernels::NR)
}

/// Reads all weights of `source` into the form that `dtype` asks for.
pub(crate) fn build(
    source: &mut dyn TensorSource,
    dtype: WeightDtype,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<ModelWeights, ExecutorError> {
    let config = source.config().clone();
    let tensors: HashMap<String, Tensor> =
        source.tensors().into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let form = choose_form(dtype, &tensors);
    if config.num_layers > tensors.len() {
        return Err(load_error(format!(
            "the configuration names {} layers, the files hold only {} tensors",
            config.num_layers,
            tensors.len()
        )));
    }
    let (plan, places, needs) = layout(&config, form);
    let mut left: HashMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    // Shapes first: a wrong one should not show only after a minute of reading.
    let mut work = Vec::with_capacity(needs.len());
    for need in needs {
        let name = source.name_of(need.place);
        let tensor =
            left.remove(name.as_str()).ok_or_else(|| load_error(format!("tensor {name} is missing")))?;
        let shape: Vec<usize> = need.rows.into_iter().chain([need.columns]).collect();
        if tensor.shape != shape {
            return Err(load_error(format!(
                "tensor {name} has the shape {:?}, the configuration asks for {shape:?}",
                tensor.shape
            )));
        }
        work.push((need, tensor));
    }
    if config.tied {
        // Some writers store the tied matrix twice.
        left.remove(source.name_of(Place::OutputMatrix).as_str());
    }
    let mut unknown: Vec<&str> = left.into_keys().filter(|name| !source.is_ignorable(name)).collect();
    unknown.sort_unstable();
    if let Some(name) = unknown.first() {
        return Err(load_error(format!(
            "tensor {name} ({} such) has no place in the {} architecture",
            unknown.len(),
            config.architecture.name()
        )));
    }
    let mut arena = Arena::new(&plan)?;
    for (need, tensor) in work {
        fill(source, &mut arena, &need, tensor)?;
        let (bytes, total_bytes) = source.progress();
        progress(LoadProgress { bytes, total_bytes });
    }
    let Places { layers, embedding, final_norm, output } = places;
    Ok(ModelWeights { arena, form, layers, embedding, final_norm, output })
}

/// Reads one tensor into its place.
fn fill(
    source: &mut dyn TensorSource,
    arena: &mut Arena,
    need: &Need,
    tensor: &Tensor,
) -> Result<(), ExecutorError> {
    let name = &tensor.name;
    let not_finite = |row: usize, form: &str| {
        load_error(format!("tensor {name} has a value in row {row} that is not finite as {form}"))
    };
    match need.target {
        Target::Matrix { matrix, first_row } => {
            if first_row == 0 {
                matrix.clear(arena);
            }
            let rows: Vec<usize> =
                (0..need.rows.unwrap_or(1)).map(|row| source.row_in_model(need.place, row)).collect();
            source.for_each_row(tensor, matrix.form() == Form::Q8, &mut |index, row| {
                if matrix.pack(arena, first_row + rows[index], row) {
                    Ok(())
                } else {
                    Err(not_finite(index, matrix.form().name()))
                }
            })
        }
        Target::Vector { vector, first } => {
            let order: Vec<usize> = (0..need.columns).map(|at| source.row_in_model(need.place, at)).collect();
            source.for_each_row(tensor, false, &mut |_, row| {
                let Row::F32(row) = row else { unreachable!("raw blocks were not asked for") };
                for (&at, &x) in order.iter().zip(row) {
                    vector.get_mut(arena)[first + at] = x;
                }
                if row.iter().all(|x| x.is_finite()) { Ok(()) } else { Err(not_finite(0, "f32")) }
            })
        }
    }
}

/// Chooses the form of the matrices. `auto` follows the file: anything quantised makes all q8_0, else the widest type found.
fn choose_form(dtype: WeightDtype, tensors: &HashMap<String, Tensor>) -> Form {
    match dtype {
        WeightDtype::F32 => Form::F32,
        WeightDtype::F16 => Form::F16,
        WeightDtype::Bf16 => Form::Bf16,
        WeightDtype::Q8_0 => Form::Q8,
        WeightDtype::Auto => {
            let has = |kind| tensors.values().any(|tensor| tensor.shape.len() == 2 && tensor.kind == kind);
            if has(TensorType::Quantised) || has(TensorType::Q8_0) {
                Form::Q8
            } else if has(TensorType::F32) || (has(TensorType::F16) && has(TensorType::Bf16)) {
                Form::F32
            } else if has(TensorType::F16) {
                Form::F16
            } else {
                Form::Bf16
            }
        }
    }
}

/// Collects what the model needs, planning a place for each.
struct Layout {
    plan: Plan,
    needs: Vec<Need>,
    form: Form,
}

impl Layout {
    /// A vector that one tensor fills.
    fn vector(&mut self, place: Place, len: usize) -> Vector {
        let vector = Vector::plan(&mut self.plan, len);
        self.part(place, vector, 0, len);
        vector
    }

    /// A part of a vector.
    fn part(&mut self, place: Place, vector: Vector, first: usize, len: usize) {
        self.needs.push(Need { place, rows: None, columns: len, target: Target::Vector { vector, first } });
    }

    /// A matrix that one tensor fills.
    fn matrix(&mut self, place: Place, n: usize, k: usize) -> Matrix {
        let matrix = Matrix::plan(&mut self.plan, self.form, n, k);
        self.rows(place, matrix, 0, n, k);
        matrix
    }

    /// Some rows of a matrix.
    fn rows(&mut self, place: Place, matrix: Matrix, first_row: usize, rows: usize, columns: usize) {
        let target = Target::Matrix { matrix, first_row };
        self.needs.push(Need { place, rows: Some(rows), columns, target });
    }
}

/// Places every weight in the arena to be.
fn layout(config: &ModelConfig, form: Form) -> (Plan, Places, Vec<Need>) {
    let mut all = Layout { plan: Plan::default(), needs: Vec::new(), form };
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

fn layer_layout(all: &mut Layout, config: &ModelConfig, layer: usize) -> LayerWeights {
    let place = |role| Place::Layer(layer, role);
    let (hidden, head_dim) = (config.hidden, config.head_dim);
    let (q, kv, half) = (config.q_width(), config.kv_width(), padded_intermediate(config.intermediate));
    let attention_norm = all.vector(place(Role::AttentionNorm), hidden);
    let qkv = Matrix::plan(&mut all.plan, all.form, q + 2 * kv, hidden);
    all.rows(place(Role::Q), qkv, 0, q, hidden);
    all.rows(place(Role::K), qkv, q, kv, hidden);
    all.rows(place(Role::V), qkv, q + kv, kv, hidden);
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
    let gate_up = Matrix::plan(&mut all.plan, all.form, 2 * half, hidden);
    all.rows(place(Role::Gate), gate_up, 0, config.intermediate, hidden);
    all.rows(place(Role::Up), gate_up, half, config.intermediate, hidden);
    let down = all.matrix(place(Role::Down), hidden, config.intermediate);
    LayerWeights { attention_norm, qkv, qkv_bias, q_norm, k_norm, output, mlp_norm, gate_up, down }
}
