//! Runs language models on the CPU: Llama, Mistral, Qwen2 and Qwen3 from safetensors directories and GGUF files.
//!
//! [`CandleExecutor`] implements the [`Executor`](microserving_executor::Executor) contract. candle gives it what candle
//! is best at, the file formats, their number types and dequantisation, and the plain [`ReferenceModel`] that its logits are
//! tested against; the arithmetic of serving is the crate's own. Weights are packed once into tiles that the instruction
//! level ([`KernelLevel`]) multiplies with directly, and kept in one of these forms ([`WeightDtype`]):
//!
//! | form | from | activations |
//! |---|---|---|
//! | `f32` | any | f32 |
//! | `f16` | f16 files kept as they are, or any on request | f32 |
//! | `bf16` | bf16 files, files of FP8 (e4m3) with their scales, or any on request | bf16 |
//! | `q4_0`, `q4_1`, `q4_k`, `q6_k` | GGUF tensors of the type, to the bit | 8 bits, quantised per row and block of 32 |
//! | `q8_0` | Q8_0 tensors to the bit, other quantised types requantised per block of 32, or any on request | likewise |
//!
//! # Why not candle's own products
//!
//! A request must get the same tokens from every engine, whatever shares its batch, however its prompt was cut,
//! wherever its pages lie: orchestration patterns are compared, switched and resumed on that promise. Stock matrix
//! products choose a kernel, and with it an order of additions, by the number of rows, and attention over a growing
//! tensor moves its tiles with the chunk. Here each output element is one accumulator running over `k` in one order in
//! every kernel of a level, attention's tiles sit at absolute positions, and K and V are read back from the cache as a
//! later step would find them. The price is that results are equal only within one numeric mode, form and level, which
//! is why [`KvLayout::numeric_mode`](microserving_protocol::KvLayout::numeric_mode) names both. The gain beside it is
//! speed: weights that are already in the kernel's order stream at memory speed, four-bit ones stay at four bits there, and
//! types for which candle has only scalar products run at the rate of 8-bit ones; docs/performance.md has the figures.
//!
//! # Example
//!
//! ```
//! use microserving_executor::Executor;
//! use microserving_executor_candle::{CandleConfig, CandleExecutor, KernelLevel, WeightDtype};
//! use microserving_executor::ExecutorError;
//!
//! fn load(path: &str) -> Result<CandleExecutor, ExecutorError> {
//!     let mut config = CandleConfig::new(path);
//!     config.dtype = WeightDtype::Q8_0;
//!     config.max_context = Some(2048);
//!     CandleExecutor::load(&config, &mut |progress| {
//!         eprintln!("{} of {} bytes", progress.bytes, progress.total_bytes);
//!     })
//! }
//!
//! assert!(KernelLevel::detect().is_supported());
//! match load("models/SmolLM2-135M-Instruct.gguf") {
//!     Ok(executor) => println!("{} in {}", executor.info().model, executor.info().layout.numeric_mode),
//!     Err(err) => println!("{err}"), // cannot load the model: models/…: No such file or directory
//! }
//! ```

mod attention;
mod config;
mod executor;
mod forward;
mod kernels;
mod load;
mod pool;
mod products;
mod reference;
mod weights;

pub use config::{CandleConfig, WeightDtype};
pub use executor::CandleExecutor;
pub use kernels::KernelLevel;
pub use microserving_checkpoint::{LoadProgress, ModelFormat};
pub use reference::ReferenceModel;
