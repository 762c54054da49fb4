//! Measures how fast KV goes from one process into another's pages, beside `memcpy` in the same run.
//!
//! ```text
//! cargo run --release -p microserving-transport-shm --example bandwidth
//! ```
//!
//! Two processes: this one receives, and starts itself again as the sender. After that, the same over `loopback`, between two threads. Prints
//! objects of JSON, one a line, with checksums off and on.

#![allow(clippy::print_stdout, reason = "this is a program, and what it prints is its result")]

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use microserving_protocol::KvMemory;
use microserving_transport::measure::{Failure, ROUND_BYTES, receive, send};
use microserving_transport::{KvTransport, LoopbackHub, PeerAddress};
use microserving_transport_shm::{NAME, ShmConfig, ShmTransport};

const SENDER: &str = "MICROSERVING_BANDWIDTH_SENDER";

fn main() -> Result<(), Failure> {
    if std::env::var_os(SENDER).is_some() {
        return be_the_sender();
    }
    for (mode, checksum) in [("plain", false), ("checksum", true)] {
        let mut transport = ShmTransport::new(ShmConfig::default().with_checksum(checksum))?;
        let mut child =
            Command::new(std::env::current_exe()?).env(SENDER, mode).stdin(Stdio::piped()).spawn()?;
        let address: Vec<String> = transport.peer_address().bytes.iter().map(u8::to_string).collect();
        writeln!(child.stdin.take().ok_or("the sender has no input")?, "{}", address.join(","))?;
        receive(&mut transport, || match child.try_wait()? {
            Some(status) => Err(format!("the sender ended early: {status}").into()),
            None => Ok(()),
        })?;
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("the sender failed: {status}").into());
        }
    }
    for (mode, checksum) in [("plain", false), ("checksum", true)] {
        loopback(mode, checksum)?;
    }
    Ok(())
}

fn loopback(mode: &str, checksum: bool) -> Result<(), Failure> {
    let hub = if checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
    let (mut sender, mut receiver) = (hub.transport("sender"), hub.transport("receiver"));
    let (peer, gave_up) = (receiver.peer_address(), AtomicBool::new(false));
    let (gave_up, receiver) = (&gave_up, &mut receiver);
    let figures = std::thread::scope(|scope| {
        let lives = move || match gave_up.load(Ordering::Relaxed) {
            true => Err("the sender ended early".into()),
            false => Ok(()),
        };
        let receiving = scope.spawn(move || receive(receiver, lives).map_err(|error| error.to_string()));
        let figures = send(&mut sender, &peer, memcpy);
        gave_up.store(figures.is_err(), Ordering::Relaxed);
        let received = receiving.join();
        let figures = figures?;
        received.map_err(|_| "the receiver panicked")??;
        Ok::<_, Failure>(figures)
    })?;
    for figures in figures {
        println!("{}", figures.to_json("loopback", mode));
    }
    Ok(())
}

fn be_the_sender() -> Result<(), Failure> {
    let mut address = String::new();
    std::io::stdin().read_line(&mut address)?;
    let bytes = address.trim().split(',').map(str::parse).collect::<Result<Vec<u8>, _>>()?;
    let peer = PeerAddress { transport: NAME.into(), bytes };
    let mode = std::env::var(SENDER)?;
    let mut transport = ShmTransport::new(ShmConfig::default())?;
    for figures in send(&mut transport, &peer, memcpy)? {
        println!("{}", figures.to_json(NAME, &mode));
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
