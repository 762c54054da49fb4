//! KV transport between the processes of one host.
//!
//! [`ShmTransport`] keeps the KV region in a memfd. A sender whose claim is admitted maps the receiver's region and copies
//! each run straight from its own pages into the receiver's: written once, with no copy in between. A Unix socket carries
//! the claims and their ends; the bytes never touch it.
//!
//! ```text
//!  sender process                                         receiver process
//!  put ─▶ writer thread ── copies ──────────────────────▶ region (memfd, mapped by both)
//!                       └─ counts, after the bytes ─────▶ arrival counters (memfd)
//!         IO thread  ◀── claims, stops, ends: socket ──▶  IO thread ── pidfd: the writer's exit
//! ```
//!
//! **When a page is free again.** The receiver cannot hold a mapped writer back, so a revoked grant is released only when
//! its writer has said `Drained`, which it says with no copy under way, or when the writer's *process* is known to have
//! exited, by a pidfd taken when it connected. A closed socket is no proof, nor is silence: a stopped process holds what it
//! claimed until it goes on or dies.
//!
//! **Trust.** Whoever is admitted maps the whole region: the transport protects against accident (every run is checked
//! against the grant before it is copied), not against an admitted process that means harm. Admission asks for this user's
//! processes on this host with a credential that the receiver signed. A process that is not admitted maps nothing.
//!
//! ```
//! use microserving_transport::KvTransport;
//! use microserving_transport_shm::{ShmConfig, ShmTransport};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut transport = ShmTransport::new(ShmConfig::default())?;
//! let region = transport.allocate_region(1 << 20)?;
//! region.write(0, b"keys");
//! assert_eq!(transport.peer_address().transport, "shm");
//! # Ok(())
//! # }
//! ```

mod address;
mod config;
mod inbound;
mod io;
mod link;
mod memory;
mod outbound;
mod packets;
mod shared;
#[cfg(test)]
mod tests;
mod transport;
mod writer;

pub use config::ShmConfig;
pub use transport::ShmTransport;

/// The transport's name in addresses and configuration.
pub const NAME: &str = "shm";
