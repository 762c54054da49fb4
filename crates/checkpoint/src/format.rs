//! Which of the two formats a path holds.

use std::path::Path;

use microserving_executor::ExecutorError;

use crate::gguf::GgufSource;
use crate::safetensors::SafetensorsSource;
use crate::source::{TensorSource, load_error};

/// How a model lies on disk; the tokenizer lies beside or inside it accordingly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFormat {
    /// One file that holds weights, configuration and vocabulary.
    Gguf,
    /// A directory in the layout of the Hugging Face hub.
    Safetensors,
}

impl ModelFormat {
    /// Looks at `path`.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] if nothing is there or it is neither of the two.
    pub fn of(path: &Path) -> Result<Self, ExecutorError> {
        let reason = match std::fs::metadata(path) {
            Ok(meta) if meta.is_dir() && path.join("config.json").is_file() => return Ok(Self::Safetensors),
            Ok(meta) if meta.is_dir() => "is a directory without a config.json".to_owned(),
            Ok(_) => {
                let mut magic = [0; 4];
                let read = std::fs::File::open(path)
                    .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
                match read {
                    Ok(()) if &magic == b"GGUF" => return Ok(Self::Gguf),
                    Ok(()) => "is not a GGUF file".to_owned(),
                    Err(err) => err.to_string(),
                }
            }
            Err(err) => err.to_string(),
        };
        Err(load_error(format!("{}: {reason}", path.display())))
    }

    /// Opens the files and reads their headers.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming the file and what is wrong with it.
    pub fn open(self, path: &Path) -> Result<Box<dyn TensorSource>, ExecutorError> {
        Ok(match self {
            Self::Gguf => Box::new(GgufSource::open(path)?),
            Self::Safetensors => Box::new(SafetensorsSource::open(path)?),
        })
    }

    /// Names a model by its path: a file without its extension, a directory as it is, since `Qwen3-0.6B` has no extension.
    #[must_use]
    pub fn model_name(self, path: &Path) -> String {
        // `.` has a name only once it is resolved.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = match self {
            Self::Gguf => path.file_stem(),
            Self::Safetensors => path.file_name(),
        };
        name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

/// A word on how far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the files read so far.
    pub bytes: u64,
    /// Bytes of the files in total.
    pub total_bytes: u64,
}
