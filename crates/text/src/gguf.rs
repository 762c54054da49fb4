//! What GGUF files say about text.
//!
//! Only the header and the key/value section are read, never a tensor, so that a router can serve the text of
//! a model whose weights it does not have. The format is ggml's (`docs/gguf.md` in its repository), versions
//! 2 and 3, little endian.

mod reader;
mod value;
mod vocab;

pub use reader::GgufMetadata;
pub use value::GgufValue;
pub use vocab::{GgufTokenType, GgufVocab};
