//! Runs language models on a GPU: Llama, Mistral, Qwen2 and Qwen3 from safetensors directories and GGUF files.
//!
//! [`CudaExecutor`] implements the [`Executor`](microserving_executor::Executor) contract as launches of the kernels of
//! `microserving-kernels` on an [`Accelerator`]: a GPU by CUDA's driver ([`open_cuda`], feature `cuda`), or the CPU by the kernels' shim
//! (`EmulatedDevice`, feature `emulated`), where every CI runs the whole of it. **Nothing here has run on a GPU yet.**
//!
//! - Weights, activations and KV are of one type ([`CudaDtype`]); quantised and FP8 files are widened to it when they are loaded.
//! - A step is queued as a whole before anything of it is waited for: one copy of what kernels must know of the batch, the layers,
//!   the logits, and what samplers need of them. The host then waits for each layer's KV, as the contract has it told, and for the
//!   tokens. Memory for steps is kept and grows to the largest one.
//! - Greedy tokens and what `top_k` and `top_p` keep are found on the device. Whatever else shapes the choice (penalties, grammars,
//!   log-probabilities, no cut at all) has the logits of its row copied to the host.
//! - KV that a transport keeps in host memory is computed in a copy on the device; pages are exported and imported when the engine
//!   says that they are sent, or have arrived.
//!
//! # Why one walk over a trait, and not a GPU executor beside a test double
//!
//! What goes wrong in such an executor is seldom a kernel: it is a page table that is off by one, a buffer that is reused while a copy
//! still reads it, a stream that did not wait. A double would have its own page tables and no streams. Here all of that is the code
//! that a GPU runs; the emulated device executes it as late as events allow, so that a missing wait is wrong every time.
//!
//! ```
//! use microserving_executor_cuda::{CudaConfig, CudaExecutor, open_cuda};
//!
//! match open_cuda(0) {
//!     Ok(gpu) => match CudaExecutor::load(&gpu, &CudaConfig::new("models/Qwen3-0.6B"), &mut |_| ()) {
//!         Ok(executor) => println!("{} bytes of weights on {}", executor.weight_bytes(), gpu.name()),
//!         Err(error) => println!("{error}"),
//!     },
//!     // device not available: there is no libcuda.so, which comes with NVIDIA's driver
//!     Err(error) => println!("{error}"),
//! }
//! ```

mod accelerator;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "emulated")]
mod emulated;
mod executor;
mod inputs;
mod model;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod region;
mod sample;
mod weights;
mod workspace;

pub use accelerator::{Accelerator, Event, Stream};
pub use config::{CudaConfig, CudaDtype};
#[cfg(feature = "cuda")]
pub use cuda::open_cuda;
#[cfg(feature = "emulated")]
pub use emulated::EmulatedDevice;
pub use executor::CudaExecutor;
#[cfg(not(feature = "cuda"))]
pub use no_cuda::open_cuda;
