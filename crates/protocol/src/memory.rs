//! The memory that holds the KV region: allocated by a transport, borrowed by an executor.

use std::fmt;

/// Where the bytes of a region live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory: [`KvMemory::base_address`] is a pointer of this process.
    Host,
    /// Memory of a CUDA device: the address is a device pointer.
    Cuda {
        /// The device's number.
        ordinal: u32,
    },
    /// Memory of another process: there is no address here, and `read` and `write` ask that process.
    Elsewhere,
}

/// A region of KV memory.
///
/// A transport allocates it (NVSHMEM can write only to its own symmetric heap, shared memory only to what both processes
/// map), an executor computes in it, and a peer may be writing to granted pages of it at any time. There are therefore no
/// `&[u8]` views: access is by copy, or by address inside the crates that may use `unsafe`, under the rule that **a page
/// has one writer at a time** (the page states of `kvcache` see to that) and is read only after its writer has finished.
///
/// The region lives as long as the value; dropping the last reference unmaps it.
pub trait KvMemory: Send + Sync + fmt::Debug {
    /// Returns where the bytes live.
    fn kind(&self) -> MemoryKind;

    /// Returns the size in bytes.
    fn num_bytes(&self) -> usize;

    /// Returns the address of the first byte, aligned to at least 64 bytes; stays the same for the life of the value;
    /// 0 where there is none here.
    fn base_address(&self) -> usize;

    /// Copies `into.len()` bytes out of the region, starting at `offset`.
    ///
    /// # Panics
    /// If the range does not lie inside the region.
    fn read(&self, offset: usize, into: &mut [u8]);

    /// Copies `from` into the region, starting at `offset`.
    ///
    /// # Panics
    /// If the range does not lie inside the region.
    fn write(&self, offset: usize, from: &[u8]);
}
