//! Models on disk: what executors need to know of a model, and its tensors.
//!
//! - [`ModelFormat`] tells a GGUF file from a directory in the Hugging Face layout and opens it as a [`TensorSource`].
//! - [`ModelConfig`], [`Architecture`], [`RopeScaling`]: the numbers that define a model, from whichever file they came.
//! - [`ModelConfig::wanted`] lists what a model needs, [`find`] finds it, [`Identity`] hashes it.
//! - [`TensorType`] widens rows of any of the files' number formats to f32.
//!
//! # Why tensors are handed out as mapped bytes
//!
//! An executor keeps weights in a form of its own: tiles for a CPU's vectors, rows for a GPU. What it needs of the files is one pass
//! over their bytes, row by row, with memory given back behind it; a loader that made tensors of its own would hold a large model
//! twice.
//!
//! ```
//! use std::path::Path;
//! use microserving_checkpoint::ModelFormat;
//!
//! let nothing = ModelFormat::of(Path::new("no/such/model.gguf")).expect_err("there is no such file");
//! assert!(nothing.to_string().starts_with("cannot load the model: no/such/model.gguf: "));
//! ```

mod architecture;
mod format;
mod gguf;
mod header;
mod safetensors;
mod scales;
mod source;
mod wanted;

pub use architecture::{Architecture, ModelConfig, RopeScaling};
pub use format::{LoadProgress, ModelFormat};
pub use safetensors::shard_paths;
pub use scales::Scales;
pub use source::{Place, Role, Tensor, TensorSource, TensorType, load_error};
pub use wanted::{Identity, Wanted, find, max_context};
