//! Measures how fast KV goes from one element of an OpenSHMEM world into another's pages, beside `memcpy` in the same run.
//!
//! ```text
//! cargo build --release -p microserving-transport-pgas --example pgas_bandwidth
//! oshrun --oversubscribe --mca btl ^uct -x SHMEM_SYMMETRIC_HEAP_SIZE=1G -np 2 target/release/examples/pgas_bandwidth
//! ```
//!
//! Element 0 receives, element 1 sends. Prints objects of JSON, one a line, with checksums off and on.

#![allow(clippy::print_stdout, reason = "this is a program, and what it prints is its result")]

use std::time::Duration;

use microserving_protocol::{KvMemory, PeId};
use microserving_transport::measure::{Failure, REGION_BYTES, ROUND_BYTES, receive, send};
use microserving_transport_pgas::{OPENSHMEM, OpenShmem, PgasConfig, PgasTransport};

fn main() -> Result<(), Failure> {
    for (mode, checksum) in [("plain", false), ("checksum", true)] {
        let last = checksum;
        let mut config = PgasConfig::new(REGION_BYTES).with_checksum(checksum);
        if last {
            config = config.leaving_within(Duration::from_secs(5));
        }
        let mut transport = PgasTransport::form(Box::new(OpenShmem::join()?), config)?;
        if transport.pe() == PeId(0) {
            // The launcher ends this element with the other.
            receive(&mut transport, || Ok(()))?;
        } else {
            let peer = transport.address_of(PeId(0));
            for figures in send(&mut transport, &peer, memcpy)? {
                println!("{}", figures.to_json(OPENSHMEM, mode));
            }
        }
    }
    Ok(())
}

/// Copies the first half of the region to the second.
fn memcpy(region: &dyn KvMemory, piece: usize) {
    assert!(region.num_bytes() >= 2 * ROUND_BYTES, "the region of this program");
    for offset in (0..ROUND_BYTES).step_by(piece) {
        let from = std::ptr::with_exposed_provenance::<u8>(region.base_address() + offset);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(region.base_address() + ROUND_BYTES + offset);
        // SAFETY: both runs lie in the halves of one region of host memory, which `piece` divides and which lives through the call;
        // nobody writes to either meanwhile: no claim is open, and no grant was ever made on this region.
        unsafe { std::ptr::copy_nonoverlapping(from, to, piece) };
    }
}
