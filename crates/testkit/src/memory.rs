//! KV memory without a transport.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::{KvMemory, MemoryKind};

/// A region of host memory behind a lock, for executors under test.
pub struct PlainMemory(Mutex<Vec<u8>>);

impl PlainMemory {
    /// Allocates a region, zeroed.
    #[must_use]
    pub fn new(num_bytes: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![0; num_bytes])))
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PlainMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainMemory").field("num_bytes", &self.num_bytes()).finish()
    }
}

impl KvMemory for PlainMemory {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.bytes().len()
    }

    fn base_address(&self) -> usize {
        self.bytes().as_ptr() as usize
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes()[offset..offset + into.len()]);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.bytes()[offset..offset + from.len()].copy_from_slice(from);
    }
}
