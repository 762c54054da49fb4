//! Raw bindings to NVSHMEM's host library.
//!
//! Empty by default. With the feature `nvshmem` the build script makes bindings from NVSHMEM's own headers (`NVSHMEM_HOME`,
//! `CUDA_HOME`; it says how to get them if they are missing), and `load` opens the library at run time:
//!
//! - `NvshmemHost`: one method a function of the library, all `unsafe`, with the C names.
//! - `LoadError`: why there is no library, as a value; versions 3.4 to 3.8 are known.
//! - `UniqueId` and `join`: how processes form a world, with "no device" as a value.
//! - `versioned`: the version field that the library wants in its structs.
//!
//! # Why it is loaded and not linked
//!
//! A program linked against NVSHMEM does not start on a machine without it, and the library does not come with a driver or
//! a distribution. Loaded, its absence is a `LoadError` that an engine reports as one transport less. The headers are not
//! in this repository for another reason: those of the version that CUDA 13.0 wants are not under a free licence, so
//! bindings are made where the headers are.
//!
//! # What to know before calling
//!
//! - Not everything in the headers is in the host library: `nvshmem_init` and `nvshmemx_init_attr` are inline C++
//!   (call `nvshmemx_hostlib_init_attr`), `nvshmem_putmem_signal` is device code. What is missing here is missing there.
//! - Without a GPU the library loads, tells its version and makes unique ids, and two processes find each other; then device
//!   initialisation fails. Versions differ in how: 3.4.5 answers 0 all the same, so ask `nvshmemx_init_status()`, which is
//!   at least 2 when puts are possible. `nvshmem_malloc` before that ends the process in 3.4.5.
//! - One thread at a time, one processing element a process, and membership is fixed from initialisation on; many errors end
//!   the process. So it belongs in a process of its own.

#[cfg(feature = "nvshmem")]
mod bindings;
#[cfg(feature = "nvshmem")]
mod library;
#[cfg(feature = "nvshmem")]
mod world;

#[cfg(feature = "nvshmem")]
pub use bindings::*;
#[cfg(feature = "nvshmem")]
pub use library::{LIBRARY_NAME, LoadError, SUPPORTED, Version, header_version, load, version, versioned};
#[cfg(feature = "nvshmem")]
pub use world::{JoinError, UniqueId, join};
