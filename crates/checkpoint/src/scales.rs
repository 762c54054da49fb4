//! The scales that files keep beside eight-bit weights, in tensors of their own.
//!
//! ```text
//! X.weight        [n, k] e4m3
//! X.weight_scale  a number, or [n, 1]: one for all, or one a row (compressed-tensors, FBGEMM)
//! X.weight_scale_inv  [n / b, k / c], rounded up: one a block, whose size is `weight_block_size` of config.json
//! ```
//!
//! In spite of its name the last one is multiplied with, too. Scales of activations and of a KV cache are of use only to who rounds those to eight bits.

use microserving_executor::ExecutorError;

use crate::source::{Tensor, TensorSource, load_error};

/// Names that end so are scales.
const WEIGHT_SCALES: [&str; 2] = ["_scale", "_scale_inv"];
const ALL: [&str; 6] =
    ["weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub", ".k_scale", ".v_scale"];

/// Says whether a tensor of that name holds scales.
pub(crate) fn is_scale(name: &str) -> bool {
    ALL.iter().any(|end| name.ends_with(end))
}

/// What a tensor's numbers are to be multiplied with.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// Rows and columns that share one.
    pub(crate) block: (usize, usize),
    /// Those of a row.
    pub(crate) per_row: usize,
    /// `[rows / block.0, rounded up][per_row]`.
    pub(crate) values: Vec<f32>,
}

impl Scales {
    /// Reads the scales of an eight-bit tensor; `None` if the file has none. `block` is the size of a block that the configuration names.
    pub(crate) fn find(
        source: &dyn TensorSource,
        tensors: &std::collections::HashMap<String, Tensor>,
        of: &Tensor,
        block: Option<(usize, usize)>,
    ) -> Result<Option<Self>, ExecutorError> {
        let names = WEIGHT_SCALES.map(|end| format!("{}{end}", of.name));
        let Some(tensor) = names.iter().find_map(|name| tensors.get(name)) else { return Ok(None) };
        let error = |reason: String| load_error(format!("tensor {}: {reason}", tensor.name));
        let [rows, columns] = of.shape[..] else {
            return Err(load_error(format!("tensor {} has eight bits and is no matrix", of.name)));
        };
        let (rows, columns) = (rows.max(1), columns.max(1));
        let blocks = |(rows_each, columns_each): (usize, usize)| {
            [rows.div_ceil(rows_each), columns.div_ceil(columns_each)]
        };
        let block = match tensor.shape[..] {
            [] | [1] | [1, 1] => (rows, columns),
            [n] | [n, 1] if n == rows => (1, columns),
            [n, m] => match block {
                Some(block) if [n, m] == blocks(block) => block,
                Some(block) => {
                    return Err(error(format!(
                        "it has the shape [{n}, {m}], blocks of {block:?} (weight_block_size) ask for {:?}",
                        blocks(block)
                    )));
                }
                None => return Err(error("config.json has no weight_block_size".into())),
            },
            _ => {
                return Err(error(format!(
                    "it has the shape {:?}, which is neither one scale, nor one a row or block of {:?}",
                    tensor.shape, of.shape
                )));
            }
        };
        let mut values = vec![0.0; tensor.shape.iter().product()];
        tensor.kind.widen(source.bytes(tensor)?, &mut values, &mut Vec::new()).map_err(error)?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            return Err(error(format!("{value} is no scale")));
        }
        Ok(Some(Self { block, per_row: columns.div_ceil(block.1), values }))
    }

    /// Multiplies a row's numbers.
    pub(crate) fn apply(&self, row: usize, values: &mut [f32]) {
        let scales = &self.values[row / self.block.0 * self.per_row..][..self.per_row];
        for (values, scale) in values.chunks_mut(self.block.1).zip(scales) {
            values.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_rows_and_columns_shares_a_scale() {
        let scales = Scales { block: (2, 3), per_row: 2, values: vec![1.0, 10.0, 100.0, 1000.0] };
        let row = |row| {
            let mut values = [1.0; 5];
            scales.apply(row, &mut values);
            values
        };
        assert_eq!(row(1), [1.0, 1.0, 1.0, 10.0, 10.0]);
        assert_eq!(row(2), [100.0, 100.0, 100.0, 1000.0, 1000.0]);
    }
}
