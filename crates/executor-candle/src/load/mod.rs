//! From files to packed weights.

mod build;
mod fill;

pub(crate) use build::{LayerWeights, ModelWeights, build};
