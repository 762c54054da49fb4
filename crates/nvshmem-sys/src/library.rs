//! Opening the library.

use std::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::NvshmemHost;

/// The name under which the dynamic loader finds the library, in its own search path.
pub const LIBRARY_NAME: &str = "libnvshmem_host.so.3";

/// The versions that the bindings are known to fit, first and last.
pub const SUPPORTED: (Version, Version) =
    (Version { major: 3, minor: 4, patch: 0 }, Version { major: 3, minor: 8, patch: c_int::MAX });

/// A version of NVSHMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes with the binary interface.
    pub major: c_int,
    /// Grows with what is added.
    pub minor: c_int,
    /// Grows with what is mended.
    pub patch: c_int,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why the library cannot be used.
#[derive(Debug)]
pub enum LoadError {
    /// It is not there, or lacks a function of the bindings.
    Missing {
        /// What was tried.
        path: PathBuf,
        /// What the dynamic loader says.
        source: libloading::Error,
    },
    /// It is another version than the bindings can speak to.
    Version {
        /// What was loaded.
        path: PathBuf,
        /// Its version.
        found: Version,
        /// The version whose headers the bindings were made from: the library must not be older.
        headers: Version,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { path, .. } => write!(f, "cannot load NVSHMEM from {}", path.display()),
            Self::Version { path, found, headers } => {
                let (first, last) = SUPPORTED;
                write!(
                    f,
                    "{} is NVSHMEM {found}; this build was made with the headers of {headers} and speaks to versions from \
                     there on, of {}.{} to {}.{}",
                    path.display(),
                    first.major,
                    first.minor,
                    last.major,
                    last.minor
                )
            }
        }
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Missing { source, .. } => Some(source),
            Self::Version { .. } => None,
        }
    }
}

/// Opens NVSHMEM's host library: the file at `path`, or [`LIBRARY_NAME`] wherever the dynamic loader finds it.
///
/// Every function of the bindings is looked up at once, so that none can turn out to be missing later, and the version is
/// compared with that of the headers. Nothing is initialised yet.
///
/// # Errors
/// [`LoadError`] if there is no such library, a function of the bindings is not in it, or it is of another version.
///
/// # Safety
/// The file's initialisers run in this process, and what it says of its version must be true: the bindings are right only for that.
pub unsafe fn load(path: Option<&Path>) -> Result<NvshmemHost, LoadError> {
    let path = path.unwrap_or(Path::new(LIBRARY_NAME));
    // SAFETY: the caller vouches for the file.
    let library = unsafe { NvshmemHost::new(path) }
        .map_err(|source| LoadError::Missing { path: path.to_owned(), source })?;
    let (found, headers) = (version(&library), header_version());
    if fits(found, headers) {
        Ok(library)
    } else {
        Err(LoadError::Version { path: path.to_owned(), found, headers })
    }
}

/// Returns what a loaded library says of its version.
#[must_use]
pub fn version(library: &NvshmemHost) -> Version {
    let mut version = Version { major: 0, minor: 0, patch: 0 };
    let Version { major, minor, patch } = &mut version;
    // SAFETY: three pointers to live integers are what the function fills; it needs no initialisation.
    unsafe { library.nvshmemx_vendor_get_version_info(major, minor, patch) };
    version
}

/// Returns the version of the headers that the bindings were made from.
#[must_use]
pub const fn header_version() -> Version {
    Version {
        major: crate::NVSHMEM_VENDOR_MAJOR_VERSION as c_int,
        minor: crate::NVSHMEM_VENDOR_MINOR_VERSION as c_int,
        patch: crate::NVSHMEM_VENDOR_PATCH_VERSION as c_int,
    }
}

/// A library keeps what older ones of its major version have, and knows the structs' older revisions.
fn fits(found: Version, headers: Version) -> bool {
    let (first, last) = SUPPORTED;
    let known = |version| first <= version && version <= last;
    known(found) && known(headers) && (found.major, found.minor) >= (headers.major, headers.minor)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_not_older_than_the_headers_and_of_a_known_version() {
        let version = |minor, patch| Version { major: 3, minor, patch };
        for (found, headers, fit) in [
            (version(4, 5), version(4, 5), true),
            (version(8, 0), version(4, 5), true),
            (version(4, 0), version(4, 5), true),
            (version(4, 5), version(8, 0), false),
            (version(9, 0), version(4, 5), false),
            (version(3, 9), version(3, 0), false),
            (Version { major: 4, minor: 4, patch: 5 }, version(4, 5), false),
        ] {
            assert_eq!(fits(found, headers), fit, "{found} with headers of {headers}");
        }
        assert!(fits(header_version(), header_version()), "{}", header_version());
    }
}
