//! Joining a world by a unique id, and leaving it.

use std::error::Error;
use std::ffi::c_int;
use std::fmt;

use crate::{
    NvshmemHost, nvshmemx_init_args_t, nvshmemx_init_attr_t, nvshmemx_uniqueid_args_t, nvshmemx_uniqueid_t,
    versioned,
};

/// The revision of the initialisation structs that the headers define last.
const REVISION: c_int = if cfg!(init_args_v2) { 2 } else { 1 };
/// The flag of `nvshmemx_hostlib_init_attr` that says: by unique id. An enumerator in the headers.
const WITH_UNIQUE_ID: u32 = 1 << 3;
/// What `nvshmemx_init_status` says when puts are possible, at least.
const INITIALISED: c_int = 2;
/// What it says when the processes have found each other, and no more.
const BOOTSTRAPPED: c_int = 1;

/// Names a world that is about to be formed: one process makes it, all processes join by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId([u8; Self::NUM_BYTES]);

impl UniqueId {
    /// Bytes of an id.
    pub const NUM_BYTES: usize = size_of::<nvshmemx_uniqueid_t>();

    /// Makes an id; this process then waits for the others at an address that is part of it.
    ///
    /// # Errors
    /// [`JoinError::Refused`] if the library makes none (it finds no network interface).
    pub fn new(library: &NvshmemHost) -> Result<Self, JoinError> {
        let mut id = nvshmemx_uniqueid_t { version: versioned::<nvshmemx_uniqueid_t>(1), internal: [0; 124] };
        // SAFETY: a pointer to a live id whose version field is set is what the function fills.
        let code = unsafe { library.nvshmemx_get_uniqueid(&raw mut id) };
        if code != 0 {
            return Err(JoinError::Refused { operation: "make a unique id", code });
        }
        // SAFETY: the struct is 128 bytes of integers without padding, and any bytes are a value of the array.
        Ok(Self(unsafe { std::mem::transmute::<nvshmemx_uniqueid_t, [u8; Self::NUM_BYTES]>(id) }))
    }

    /// Takes an id that another process made.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::NUM_BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns what to tell the other processes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::NUM_BYTES] {
        &self.0
    }
}

/// Why this process is no part of a world that can move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinError {
    /// The library refused.
    Refused {
        /// What was tried.
        operation: &'static str,
        /// What it answered.
        code: c_int,
    },
    /// The processes found each other, but there is no device that NVSHMEM can use.
    NoDevice {
        /// What `nvshmemx_init_status` says: 1 is bootstrapped.
        status: c_int,
    },
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { operation, code } => write!(f, "NVSHMEM cannot {operation} (error {code})"),
            Self::NoDevice { status } => {
                write!(
                    f,
                    "no device: NVSHMEM found its peers but cannot use a GPU here (initialisation status {status})"
                )
            }
        }
    }
}

impl Error for JoinError {}

/// Joins a world of `num_ranks` processes as its `rank`. Blocks until all of them have come.
///
/// `device` is the CUDA device; where the library is too old to be told, the calling thread's current device counts, so set that,
/// too.
///
/// Whether it worked is asked of `nvshmemx_init_status`: the return code of `nvshmemx_hostlib_init_attr` is 0 without a device in 3.4
/// and an error in 3.8.
///
/// # Errors
/// [`JoinError::NoDevice`] if the processes found each other and there is no GPU; [`JoinError::Refused`] otherwise.
///
/// # Safety
/// Once in the life of a process, and from one thread: the library is a singleton. Many of its errors end the process.
pub unsafe fn join(
    library: &NvshmemHost,
    id: &UniqueId,
    rank: c_int,
    num_ranks: c_int,
    device: c_int,
) -> Result<(), JoinError> {
    // SAFETY: the same 128 bytes as in `UniqueId::new`, in which any value is valid.
    let id = unsafe { std::mem::transmute::<[u8; UniqueId::NUM_BYTES], nvshmemx_uniqueid_t>(id.0) };
    let mut attr = attributes(device);
    // SAFETY: both pointers are to live structs with their versions set; the library keeps a pointer to `id` in `attr`, and both live
    // until it has initialised.
    let code =
        unsafe { library.nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &raw const id, &raw mut attr) };
    if code != 0 {
        return Err(JoinError::Refused { operation: "take the unique id", code });
    }
    // SAFETY: as above; that it is called once is the caller's promise.
    let code = unsafe { library.nvshmemx_hostlib_init_attr(WITH_UNIQUE_ID, &raw mut attr) };
    // SAFETY: takes nothing, changes nothing.
    match unsafe { library.nvshmemx_init_status() } {
        INITIALISED.. => Ok(()),
        status @ BOOTSTRAPPED => Err(JoinError::NoDevice { status }),
        _ => Err(JoinError::Refused { operation: "join the world", code }),
    }
}

fn attributes(device: c_int) -> nvshmemx_init_attr_t {
    // SAFETY: a struct of integers, pointers and bytes, of which all zero is a value.
    let mut attr: nvshmemx_init_attr_t = unsafe { std::mem::zeroed() };
    attr.version = versioned::<nvshmemx_init_attr_t>(REVISION);
    attr.args.version = versioned::<nvshmemx_init_args_t>(REVISION);
    attr.args.uid_args.version = versioned::<nvshmemx_uniqueid_args_t>(1);
    #[cfg(init_args_v2)]
    {
        attr.args.cuda_device_id = device;
    }
    #[cfg(not(init_args_v2))]
    let _ = device;
    attr
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both revisions have one size, so that only the number tells them apart.
    #[test]
    fn structs_have_the_sizes_that_the_library_checks() {
        let attr = attributes(5);
        assert_eq!(attr.version, (REVISION << 16) + 144);
        assert_eq!(attr.args.version, (REVISION << 16) + 128);
        assert_eq!(attr.args.uid_args.version, (1 << 16) + 24);
        #[cfg(init_args_v2)]
        assert_eq!(attr.args.cuda_device_id, 5);
    }
}
