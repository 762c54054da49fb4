//! For tests only: virtual time, seeded dice, plain memory, and a whole cluster in one thread.
//!
//! - [`Dice`] draws everything that a test leaves to chance, from a seed; [`PlainMemory`] is KV memory without a transport.
//! - [`sim`] runs real engines, with the toy executor and the in-process transport, in virtual time under seeded faults, and
//!   checks after every step what must hold.
//!
//! **Why virtual time.** A fault that needs a lease to run out while a writer sleeps takes seconds on a clock and a
//! millisecond here, and the same seed gives the same run to the last event. The price is that nothing may read a clock or
//! draw a number of its own; the crates are built so that nothing does.
//!
//! ```
//! use microserving_testkit::sim::{self, SimOptions};
//!
//! let report = sim::run(7, &SimOptions::swarm(7));
//! assert!(report.is_ok(), "{report}");
//! ```

#![forbid(unsafe_code)]

mod dice;
mod memory;
pub mod sim;

pub use dice::Dice;
pub use memory::PlainMemory;
