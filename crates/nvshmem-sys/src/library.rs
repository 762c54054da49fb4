//! Opening the library.

use std::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::NvshmemHost;

/// The name under which the dynamic loader finds the library, in its own search path.
pub const LIBRARY_NAME: &str = "libnvshmem_host.so.3";

/// Why the library cannot be used: it is not there, or is not the one that the bindings were made for.
#[derive(Debug)]
pub struct LoadError {
    /// What was tried.
    pub path: PathBuf,
    /// What the dynamic loader says.
    pub source: libloading::Error,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot load NVSHMEM from {}", self.path.display())
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Opens NVSHMEM's host library: the file at `path`, or [`LIBRARY_NAME`] wherever the dynamic loader finds it.
///
/// Every function of the bindings is looked up at once, so that none can turn out to be missing later. Nothing is
/// initialised yet.
///
/// # Errors
/// [`LoadError`] if there is no such library, or a function of the bindings is not in it.
///
/// # Safety
/// The file's initialisers run in this process, and the bindings are right only for the version whose headers they were made
/// from: the file must be that.
pub unsafe fn load(path: Option<&Path>) -> Result<NvshmemHost, LoadError> {
    let path = path.unwrap_or(Path::new(LIBRARY_NAME));
    // SAFETY: the caller vouches for the file.
    unsafe { NvshmemHost::new(path) }.map_err(|source| LoadError { path: path.to_owned(), source })
}

/// Returns what the `version` field of a struct must hold: the struct's revision and its size.
///
/// The headers have this as `…_INITIALIZER` macros, which bindings cannot carry.
///
/// # Panics
/// If `T` is larger than 64 KiB, or the revision does not fit; both are constants of the headers.
#[must_use]
pub const fn versioned<T>(revision: c_int) -> c_int {
    let size = size_of::<T>();
    assert!(size < 1 << 16 && revision >= 0 && revision < 1 << 15, "not a version of NVSHMEM's structs");
    // The assertion above keeps both parts in their halves.
    (revision << 16) | size as c_int
}
