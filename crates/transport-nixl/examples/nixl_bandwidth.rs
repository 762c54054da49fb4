//! Measures how fast KV goes from one process into another's pages over NIXL, beside `memcpy` in the same run.
//!
//! ```text
//! cargo run --release -p microserving-transport-nixl --example nixl_bandwidth -- PATH/libnixl_capi.so
//! ```
//!
//! Two processes: this one receives, and starts itself again as the sender; once by whatever UCX likes best on this host, once over TCP
//! alone, as between hosts without RDMA. Prints objects of JSON, one a line, with checksums off and on.

#![allow(clippy::print_stdout, reason = "this is a program, and what it prints is its result")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use microserving_protocol::KvMemory;
use microserving_transport::measure::{Failure, ROUND_BYTES, receive, send};
use microserving_transport::{KvTransport, PeerAddress};
use microserving_transport_nixl::{NAME, NixlConfig, NixlTransport};

const SENDER: &str = "MICROSERVING_BANDWIDTH_SENDER";
/// UCX's own variable: which of its ways it may take.
const WAYS: &str = "UCX_TLS";

fn main() -> Result<(), Failure> {
    let library = std::env::args_os().nth(1).map(PathBuf::from);
    if std::env::var_os(SENDER).is_some() {
        return be_the_sender(library);
    }
    if std::env::var_os(WAYS).is_none() {
        // The library reads it when it is loaded, so each way has processes of its own.
        for ways in ["all", "tcp"] {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(&library).env(WAYS, ways);
            if !command.status()?.success() {
                return Err(format!("the measurement over {ways} failed").into());
            }
        }
        return Ok(());
    }
    for (mode, checksum) in [("plain", false), ("checksum", true)] {
        let mut transport = transport(library.clone(), checksum)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(&library)
            .env(SENDER, mode)
            .stdin(Stdio::piped())
            .spawn()?;
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
    Ok(())
}

fn transport(library: Option<PathBuf>, checksum: bool) -> Result<NixlTransport, Failure> {
    let config = NixlConfig::new("127.0.0.1:0".parse()?);
    Ok(NixlTransport::new(config.with_library(library).with_checksum(checksum))?)
}

fn be_the_sender(library: Option<PathBuf>) -> Result<(), Failure> {
    let mut address = String::new();
    std::io::stdin().read_line(&mut address)?;
    let bytes = address.trim().split(',').map(str::parse).collect::<Result<Vec<u8>, _>>()?;
    let peer = PeerAddress { transport: NAME.into(), bytes };
    let ways = std::env::var(WAYS)?;
    let mode = match (std::env::var(SENDER)?, ways.as_str()) {
        (mode, "all") => mode,
        (mode, ways) => format!("{mode}, {ways}"),
    };
    let mut transport = transport(library, false)?;
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
