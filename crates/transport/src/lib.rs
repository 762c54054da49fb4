//! Moving KV pages between engines: the contract, page-to-byte planning, and the in-process transport.
//!
//! - [`KvTransport`] is the contract: a receiver grants, a sender claims and puts, and the receiver learns when everything
//!   arrived ([`TransportEvent::Complete`]) or when nothing can arrive any more ([`TransportEvent::Released`]).
//! - [`plan_layer`] and [`grant_runs`] turn pages and token ranges into byte runs; a transport never sees a page.
//! - [`GrantBook`] is the receiver's half of the rules, shared by all transports.
//! - [`LoopbackHub`] connects engines of one process, with seeded faults for simulation if wanted.
//! - [`one_sided`] holds what transports share whose senders write straight into the receiver's memory.
//! - `conformance` (feature `conformance`) is the suite that every implementation runs.
//!
//! **Why a revoke waits.** Puts are one-sided: they land in the receiver's memory without its doing. Freeing a page because
//! a lease ended, a connection broke or the sender was told to stop would let a late put land in a page that serves another
//! request by then. A revoked grant therefore keeps its pages until the writer has said that it drained, or is known to
//! have exited; waiting may end, safety may not.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use microserving_protocol::{Generation, KvMemory, KvRange};
//! use microserving_transport::{
//!     Admission, ByteRun, Claim, Grant, KvTransport, LoopbackHub, PutRun, Refusal, TransportEvent,
//! };
//!
//! #[derive(Debug)]
//! struct Anyone;
//! impl Admission for Anyone {
//!     fn admit(&self, _: &[u8]) -> Result<Generation, Refusal> {
//!         Ok(Generation(1))
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hub = LoopbackHub::new();
//! let (mut sender, mut receiver) = (hub.transport("prefill"), hub.transport("decode"));
//! let (from, to) = (sender.allocate_region(64)?, receiver.allocate_region(64)?);
//! receiver.set_admission(Arc::new(Anyone));
//! from.write(0, b"keys and values.");
//!
//! let range = KvRange::new(0, 2).expect("ordered");
//! let runs = vec![ByteRun { offset: 32, num_bytes: 16 }];
//! receiver.grant(Grant { generation: Generation(1), range, token_bytes: 8, runs })?;
//! let channel = sender.open(Claim { peer: receiver.peer_address(), credential: vec![], range })?;
//! sender.put(channel, &[PutRun { local_offset: 0, remote_offset: 32, num_bytes: 16 }])?;
//! sender.finish(channel);
//!
//! let mut events = Vec::new();
//! receiver.poll(Duration::ZERO, &mut events);
//! assert_eq!(events, [TransportEvent::Complete { generation: Generation(1) }]);
//! let mut arrived = [0; 16];
//! to.read(32, &mut arrived);
//! assert_eq!(&arrived, b"keys and values.");
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod book;
mod checks;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod contract;
mod loopback;
#[cfg(feature = "measure")]
pub mod measure;
pub mod one_sided;
mod plan;

pub use book::{Accepted, ClaimId, Delivery, Ending, GrantBook, run_is_allowed};
pub use checks::check_source_runs;
pub use contract::{
    Admission, ByteRun, ChannelId, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, Telemetry,
    TransportError, TransportEvent,
};
pub use loopback::{LoopbackFaults, LoopbackHub, LoopbackMemory, LoopbackTransport};
pub use plan::{PlanError, Side, grant_runs, plan_layer};
