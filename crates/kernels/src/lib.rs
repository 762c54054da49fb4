//! The kernels of the folder `kernels/` as checked launches.
//!
//! - One struct a kernel ([`Matmul`], [`RmsNorm`], [`Swiglu`], [`Embedding`], [`KvAppend`], [`KvPages`],
//!   [`PagedAttention`], [`PagedAttentionCombine`], [`SamplingBest`], [`SamplingWeights`], [`SamplingCandidates`]): its parameters, byte for byte as the
//!   source in `kernels/` declares them. `plan` checks sizes against the kernel's bounds and returns the [`Launch`]; `launch` does it.
//! - [`Device`]: what runs a [`Launch`]. `Emulated` (feature `emulated`) runs the sources on the CPU by their shim, `cuda::Module`
//!   (feature `cuda`) runs the embedded images on a GPU.
//! - [`Dtype`], [`KvType`]: types of elements. [`Arithmetic`]: how products are added up. [`DevicePtr`]: an address on the device.
//!
//! With neither feature this crate is the structs and their checks, and needs neither CUDA nor a C++ compiler.
//!
//! # Why grids are made here, and not beside the kernels
//!
//! CUDA's usual way is a C++ function beside each kernel that launches it by the runtime library. A program that has one needs
//! that library to link. Here a kernel is an entry in an image that the driver loads, so a program with all of them still starts
//! on a machine without CUDA; and what runs on a GPU and what the CPU tests ran are launched by the same Rust code, with the same grids.
//!
//! ```
//! use microserving_kernels::{DevicePtr, Dtype, RmsNorm};
//!
//! let norm = RmsNorm {
//!     out: DevicePtr(0x1000),
//!     x: DevicePtr(0x1000),
//!     residual: DevicePtr::NULL,
//!     weight: DevicePtr(0x9000),
//!     hidden: 2048,
//!     eps: 1e-6,
//! };
//! let launch = norm.plan(Dtype::Bf16, 7).expect("a good shape");
//! assert_eq!((launch.kernel, launch.grid, launch.shared_bytes), ("rms_norm_bf16", [7, 1, 1], 2048 * 4 + 32));
//!
//! let odd = RmsNorm { hidden: 2047, ..norm };
//! assert_eq!(
//!     odd.plan(Dtype::Bf16, 7).expect_err("not a multiple of 8").to_string(),
//!     "rms_norm: hidden is 2047, must be a multiple of 8, 8 to 16384"
//! );
//! ```

#[cfg(feature = "cuda")]
pub mod cuda;

mod attention;
mod dtype;
#[cfg(feature = "emulated")]
mod emulated;
mod kv;
mod launch;
mod matmul;
mod rows;
mod sampling;

pub use attention::{PagedAttention, PagedAttentionCombine};
pub use dtype::{Arithmetic, DevicePtr, Dtype, KvType};
#[cfg(feature = "emulated")]
pub use emulated::{Emulated, Order};
pub use kv::{KvAppend, KvPages, NO_SLOT};
pub use launch::{Device, KernelError, Launch, Params};
pub use matmul::Matmul;
pub use rows::{Embedding, RmsNorm, Swiglu};
pub use sampling::{NO_TOKEN, SamplingBest, SamplingCandidates, SamplingWeights};
