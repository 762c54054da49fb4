//! What can be said of NVSHMEM without a GPU. The library itself is checked in `nvshmem-sys`; bytes are moved by the same code over the
//! other address spaces.

#![cfg(feature = "nvshmem")]
#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::path::PathBuf;
use std::time::Duration;

use microserving_protocol::PeId;
use microserving_transport_pgas::{Nvshmem, NvshmemConfig, PgasError};

fn config(library: Option<PathBuf>) -> NvshmemConfig {
    let id_file = std::env::temp_dir().join(format!("microserving-world-{}", std::process::id()));
    NvshmemConfig { library, pe: PeId(0), num_pes: 1, device: 0, id_file, patience: Duration::from_secs(5) }
}

#[test]
fn a_missing_library_is_a_value() {
    let error = Nvshmem::join(&config(Some("/nonexistent/libnvshmem_host.so.3".into()))).unwrap_err();
    assert!(matches!(error, PgasError::Library { .. }), "{error}");
    assert!(error.to_string().contains("/nonexistent/libnvshmem_host.so.3"), "{error}");
}

/// On a machine with a GPU this would form a world of one, which other tests are for.
#[test]
fn a_machine_without_a_gpu_is_a_value() {
    let library = std::env::var_os("NVSHMEM_LIBRARY").map(PathBuf::from);
    if library.is_none() || std::path::Path::new("/dev/nvidia0").exists() {
        eprintln!("SKIPPED: NVSHMEM_LIBRARY does not name a libnvshmem_host.so.3, or there is a GPU");
        return;
    }
    let error = Nvshmem::join(&config(library)).unwrap_err();
    assert!(
        error.to_string().contains("no CUDA dr") || error.to_string().contains("no CUDA device"),
        "{error}"
    );
}
