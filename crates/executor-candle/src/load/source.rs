//! What the two file formats have in common: named tensors, read row by row.

use microserving_executor::ExecutorError;

use crate::architecture::ModelConfig;
use crate::weights::Row;

/// Makes an [`ExecutorError::Load`].
pub(crate) fn load_error(reason: impl Into<String>) -> ExecutorError {
    ExecutorError::Load { reason: reason.into() }
}

/// The number format of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// GGUF's Q8_0, which a q8_0 matrix keeps to the bit.
    Q8_0,
    /// Another quantised type of GGUF.
    Quantised,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Its name in the file.
    pub(crate) name: String,
    /// Its shape, outermost first.
    pub(crate) shape: Vec<usize>,
    /// Its number format.
    pub(crate) kind: TensorType,
}

/// The roles of a layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    AttentionNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    Output,
    MlpNorm,
    Gate,
    Up,
    Down,
}

/// A tensor's place in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Embedding,
    FinalNorm,
    OutputMatrix,
    Layer(usize, Role),
}

/// A model's files.
pub(crate) trait TensorSource {
    /// Returns the model's shape.
    fn config(&self) -> &ModelConfig;

    /// Returns all tensors.
    fn tensors(&self) -> Vec<Tensor>;

    /// Returns the name that the format gives to a place.
    fn name_of(&self, place: Place) -> String;

    /// Says whether the format may carry this tensor although no weight comes of it.
    fn is_ignorable(&self, name: &str) -> bool;

    /// Returns the row of the model's tensor that row `row` of the file's tensor is.
    ///
    /// GGUF files of the Llama family keep the rows of q and k in another order.
    fn row_in_model(&self, place: Place, row: usize) -> usize;

    /// Calls `each(index, row)` for the rows of a tensor in file order; stops at the first error. A vector is one row.
    ///
    /// `raw_q8` asks for the blocks of Q8_0 tensors as they are.
    fn for_each_row(
        &mut self,
        tensor: &Tensor,
        raw_q8: bool,
        each: &mut dyn FnMut(usize, Row<'_>) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError>;

    /// Returns a hash of configuration, names, types and weights read so far: the model's identity once all are read.
    fn hash(&self) -> u64;

    /// Returns the bytes of tensors read so far, and those of all files.
    fn progress(&self) -> (u64, u64);
}
