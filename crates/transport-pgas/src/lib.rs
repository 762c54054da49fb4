//! KV transport over a partitioned global address space (PGAS): memory of which every process has as much, and into which all of them
//! write.
//!
//! - [`PgasTransport`] is the transport; one code for every address space.
//! - [`Pgas`] is the little that it needs of one: symmetric memory, puts, order, completion.
//! - [`OpenShmem`] has it in host memory. `Nvshmem` (feature `nvshmem`) has it on GPUs. [`LocalPgas`] has it within a process, as weakly
//!   ordered as may be, for tests.
//!
//! ```text
//!  sender                                                    receiver
//!  put ─▶ progress thread ── puts ─────────────────────────▶ region (symmetric)
//!                         ── fence, then a word ───────────▶ arrival counter (symmetric)
//!                         ── messages ─────────────────────▶ inbox (symmetric) ─▶ progress thread
//! ```
//!
//! Claims, stops and ends travel through the same memory, so that there is no socket and nothing to configure beside the world itself.
//!
//! **A world is formed once.** Membership is fixed from the beginning: an element that was not there cannot join, one that leaves is not
//! taken back, and when one dies the world is lost. Nothing of a formed world is mended: all of its processes start anew, and what was
//! being generated is computed again from its tokens.
//!
//! **When a page is free again.** Puts are one-sided, so a revoked grant is released only when its writer has said `Drained`, which it
//! says behind a fence, or when the writer's *process* is known to have exited, where it runs on this host. What a lost element of
//! another host may still write keeps its pages until this process ends: its memory goes with it.
//!
//! ```
//! use microserving_transport::KvTransport;
//! use microserving_transport_pgas::{LocalPgas, PgasConfig, PgasTransport};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let alone = LocalPgas::world(1, 0).remove(0);
//! let mut transport = PgasTransport::form(Box::new(alone), PgasConfig::new(1 << 20))?;
//! let region = transport.allocate_region(1 << 20)?;
//! region.write(0, b"keys");
//! assert_eq!(transport.pe().0, 0);
//! # Ok(())
//! # }
//! ```

mod address;
mod clock;
mod config;
mod control;
mod guest;
mod host;
mod local;
mod mailbox;
#[cfg(feature = "nvshmem")]
mod nvshmem;
mod openshmem;
mod peer;
mod pgas;
mod progress;
mod shared;
mod singleton;
mod transport;
mod world;

pub use config::PgasConfig;
pub use local::{LOCAL, LocalPgas};
#[cfg(feature = "nvshmem")]
pub use nvshmem::{NVSHMEM, Nvshmem, NvshmemConfig};
pub use openshmem::{OPENSHMEM, OpenShmem};
pub use pgas::{Pgas, PgasError, Put, SymmetricMemory};
pub use transport::{PgasTransport, WorldWatch};
pub use world::FirstTransfer;
