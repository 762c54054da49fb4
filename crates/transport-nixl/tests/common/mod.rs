//! Making the transports under test.

use std::path::PathBuf;

use microserving_transport_nixl::{NixlConfig, NixlTransport};

/// Returns NIXL's library, or says that what needs it is skipped.
pub(crate) fn library() -> Option<PathBuf> {
    let library = std::env::var_os("NIXL_LIBRARY").map(PathBuf::from);
    if library.is_none() {
        assert!(std::env::var_os("MICROSERVING_FULL").is_none(), "NIXL_LIBRARY is not set");
        eprintln!("SKIPPED: NIXL_LIBRARY does not name a libnixl_capi.so (cargo xtask nixl --fetch)");
    }
    library
}

pub(crate) fn config(checksum: bool) -> NixlConfig {
    let listen = "127.0.0.1:0".parse().expect("an address");
    NixlConfig::new(listen).with_library(library()).with_checksum(checksum)
}

pub(crate) fn transport(checksum: bool) -> NixlTransport {
    NixlTransport::new(config(checksum)).expect("a transport")
}
