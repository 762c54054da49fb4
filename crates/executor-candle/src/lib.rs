//! Runs language models on the CPU: Llama, Mistral, Qwen2 and Qwen3 from safetensors directories and GGUF files.

mod architecture;
mod attention;
mod config;
mod executor;
mod forward;
mod kernels;
mod load;
mod pool;
mod weights;

pub use config::{CandleConfig, LoadProgress, ModelFormat, WeightDtype};
pub use executor::CandleExecutor;
pub use kernels::KernelLevel;
