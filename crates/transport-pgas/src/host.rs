//! Symmetric memory in host memory.
//!
//! **Who guarantees what.** The bytes are written by this process and, through the address space, by others. No reference to them is
//! ever made: access is by copies through raw pointers and by atomics. That two accesses to the same bytes do not race is the page rule
//! for the region (a page has one writer at a time and is read when that is done: see `KvMemory`) and the mailbox's for the rest (a byte
//! is read behind the counter that was put behind it, and written again after the reader's acknowledgement). A peer that breaks the rule
//! spoils bytes, never this process: nothing in them is used as an address, and lengths are checked.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use microserving_protocol::{KvMemory, MemoryKind};

use crate::pgas::SymmetricMemory;

/// Bytes of host memory that stay where they are as long as the value lives.
#[derive(Debug)]
pub(crate) struct HostBlock {
    base: NonNull<u8>,
    num_bytes: usize,
    /// What to give back when the value goes, if it is ours.
    layout: Option<std::alloc::Layout>,
}

// SAFETY: the block is plain bytes, accessed by raw copies and atomics only, under the rules in the module's documentation.
unsafe impl Send for HostBlock {}
// SAFETY: as above; `&HostBlock` gives out no reference into the memory but to atomics.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Takes memory that somebody else owns.
    ///
    /// # Safety
    /// `num_bytes` bytes at `base` are readable and writable as long as the process lives, and are accessed by raw copies and atomics
    /// only.
    pub(crate) unsafe fn borrowed(base: NonNull<u8>, num_bytes: usize) -> Self {
        Self { base, num_bytes, layout: None }
    }

    /// Allocates zeroed memory.
    pub(crate) fn zeroed(num_bytes: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(num_bytes.max(1), 4096).ok()?;
        // SAFETY: the layout is of at least one byte.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { base, num_bytes, layout: Some(layout) })
    }

    /// Returns the address of `offset` after checking that the run lies in the block.
    pub(crate) fn at(&self, offset: usize, num_bytes: usize) -> NonNull<u8> {
        crate::pgas::check_run(self, offset, num_bytes);
        // SAFETY: `offset` lies within the block, which is one allocation and shorter than `isize::MAX`.
        unsafe { self.base.add(offset) }
    }

    /// Writes a word as a whole; whoever sees it sees what was written before.
    pub(crate) fn store_word(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, size_of::<AtomicU64>());
        assert!(at.addr().get().is_multiple_of(align_of::<AtomicU64>()), "words are aligned");
        // SAFETY: 8 aligned bytes of the block, which lives as long as `self`; words are accessed as atomics only.
        unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `zeroed` with this layout, and nobody holds a pointer beyond the value's life.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl KvMemory for HostBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        self.base.as_ptr().expose_provenance()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `from` was checked; `into` is a distinct, exclusive buffer; the rules above exclude a writer.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) }
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: `to` was checked; `from` is a distinct buffer; the rules above make us the only writer.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) }
    }
}

impl SymmetricMemory for HostBlock {
    fn load_word(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_zero_and_holds_what_is_written() {
        let block = HostBlock::zeroed(100).unwrap();
        block.write(7, b"keys");
        block.store_word(16, 77);
        let mut bytes = [1; 6];
        block.read(6, &mut bytes);
        assert_eq!(&bytes, b"\0keys\0");
        assert_eq!((block.load_word(16), block.load_word(24)), (77, 0));
    }

    #[test]
    #[should_panic(expected = "do not lie in a memory of 100 bytes")]
    fn nothing_is_read_beyond_the_end() {
        HostBlock::zeroed(100).unwrap().read(97, &mut [0; 4]);
    }
}
