//! KV transport between engines that come and go, on one host or on several, over NIXL.
//!
//! [`NixlTransport`] keeps the KV region in host memory that is registered with NIXL, and **reads**: a sender announces over a control
//! connection which runs of its pages are ready, the receiver looks whether its grant allows them and has NIXL fetch them: by RDMA, TCP or,
//! on one host, straight from the other process.
//!
//! ```text
//!  sender                                              receiver
//!  region, registered; announces ─── Put: runs ───────▶ looks, and reads
//!                      ◀═══════════ NIXL's reads ══════ into the granted pages
//!  these pages are free again ◀───── Taken ──────────── counts what arrived
//!                             ────── Finish ──────────▶ Complete: all was read while the sender still held its pages
//! ```
//!
//! **Why the receiver reads.** What lands in a region is then asked for by its owner alone. A sender that is stopped, cut off or taken for
//! dead cannot write late, so no proof of its exit is needed, which nobody has of a process on another host; a claim that is revoked is
//! over when the reads that this process began are. The other side of the coin is a sender that frees its pages while they are still being
//! read, because it takes the *receiver* for dead: what is read then is worthless, and never passes for complete, because the sender says
//! `Finish` only when it has heard that everything was read, and until then holds its pages.
//!
//! **When a read that failed is over.** NIXL gives a read up as soon as one lane of it fails; other lanes may go on. After a failure, and
//! where the other end of a read is gone, the agent that reads is therefore replaced and destroyed, which ends its connections and its hold
//! on the memory. Only then are the pages released: the fence is ours to draw, and takes milliseconds.
//!
//! **Trust.** Nothing of a peer is loaded before a claim of its is admitted by a credential that this receiver signed. An admitted sender
//! can place bytes only where its grant allows. Receivers can read the whole region of a sender that sends to them. The control connection
//! and what NIXL moves are neither encrypted nor authenticated: they belong on a network of the engines' own.
//!
//! The library is loaded when a transport is made; one that is not there is a value:
//!
//! ```
//! use microserving_transport_nixl::{NixlConfig, NixlTransport};
//!
//! let listen = "127.0.0.1:0".parse().expect("an address");
//! let config = NixlConfig::new(listen).with_library(Some("/nowhere/libnixl_capi.so".into()));
//! let error = NixlTransport::new(config).expect_err("there is none");
//! assert_eq!(error.to_string(), "nixl: load NIXL failed");
//! let source = std::error::Error::source(&error).expect("it says why").to_string();
//! assert!(source.contains("nixl-cu13"));
//! ```

mod address;
mod agent;
mod clock;
mod config;
mod inbound;
mod io;
mod link;
mod memory;
mod message;
mod nixl;
mod outbound;
mod reading;
mod shared;
#[cfg(test)]
mod tests;
mod transport;

pub use agent::NixlError;
pub use config::NixlConfig;
pub use nixl::{LIBRARY, Nixl, NotLoaded};
pub use transport::NixlTransport;

/// The transport's name in addresses and configuration.
pub const NAME: &str = "nixl";
