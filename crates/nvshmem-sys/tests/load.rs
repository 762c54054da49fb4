//! Loading, with and without a library. Needs no GPU.

#![cfg(feature = "nvshmem")]
#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::error::Error;
use std::ffi::c_int;
use std::path::Path;

use nvshmem_sys::{load, nvshmemx_uniqueid_t, versioned};

#[test]
fn a_missing_library_is_an_error_value_that_names_it() {
    let missing = Path::new("/nonexistent/libnvshmem_host.so.3");
    // SAFETY: there is no file, so nothing is run.
    let error = unsafe { load(Some(missing)) }.err().unwrap();
    assert_eq!(error.to_string(), format!("cannot load NVSHMEM from {}", missing.display()));
    assert!(error.source().is_some());
}

#[test]
fn another_library_is_an_error_value_too() {
    // SAFETY: the C library runs in every process as it is.
    let error = unsafe { load(Some(Path::new("libc.so.6"))) }.err().unwrap();
    assert!(format!("{:?}", error.source().unwrap()).contains("undefined symbol: nvshmem"), "{error:?}");
}

#[test]
fn structs_have_the_sizes_that_the_library_checks() {
    assert_eq!(versioned::<nvshmemx_uniqueid_t>(1), (1 << 16) + 128);
}

/// The real library, wherever `NVSHMEM_LIBRARY` says it is: version and unique id need no device.
#[test]
fn the_library_tells_its_version_and_makes_unique_ids() {
    let Some(path) = std::env::var_os("NVSHMEM_LIBRARY") else {
        eprintln!("SKIPPED: NVSHMEM_LIBRARY does not name a libnvshmem_host.so.3");
        return;
    };
    // SAFETY: whoever sets the variable vouches for the file.
    let library = unsafe { load(Some(Path::new(&path))) }.unwrap();
    let (mut major, mut minor, mut patch): (c_int, c_int, c_int) = (0, 0, 0);
    // SAFETY: three pointers to live integers are what the function fills.
    unsafe { library.nvshmemx_vendor_get_version_info(&raw mut major, &raw mut minor, &raw mut patch) };
    assert_eq!(major, 3, "{major}.{minor}.{patch}");
    let mut id = nvshmemx_uniqueid_t { version: versioned::<nvshmemx_uniqueid_t>(1), internal: [0; 124] };
    // SAFETY: a pointer to a live id whose version field is set is what the function fills.
    let status = unsafe { library.nvshmemx_get_uniqueid(&raw mut id) };
    assert_eq!(status, 0);
    assert!(id.internal.iter().any(|byte| *byte != 0));
    // SAFETY: takes nothing, changes nothing.
    assert!(unsafe { library.nvshmemx_init_status() } < 2, "nobody has initialised a device");
}
