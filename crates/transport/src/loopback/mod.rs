//! The in-process transport: the executable reading of the contract, and the network of the simulator.
//!
//! ```text
//!  LoopbackTransport ─┐                      ┌─ LoopbackTransport
//!   (engine a)        ├── LoopbackHub: peers, ┤   (engine b)
//!                     │   messages by due time│
//! ```
//!
//! It behaves as a **one-sided** transport does: a put lands in the receiver's memory when it is due, whatever the receiver
//! has decided meanwhile; only a writer's acknowledgement or its fence ends that. Without faults everything is delivered
//! within the call that causes it.

mod channel;
mod faults;
mod hub;
mod memory;
mod state;
mod transport;

pub use faults::LoopbackFaults;
pub use hub::LoopbackHub;
pub use memory::LoopbackMemory;
pub use transport::LoopbackTransport;

#[cfg(test)]
mod tests;
