//! KV memory on the heap, as a transport would allocate it.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use microserving_protocol::{KvMemory, MemoryKind};

/// A region of bytes, filled with a pattern at first so that what is read before it is written shows.
#[derive(Debug)]
pub(crate) struct HeapMemory {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: the region is plain memory; who writes which page is the contract of `KvMemory`.
unsafe impl Send for HeapMemory {}
// SAFETY: as above.
unsafe impl Sync for HeapMemory {}

impl HeapMemory {
    /// Allocates `num_bytes` of `fill`.
    pub(crate) fn new(num_bytes: usize, fill: u8) -> Self {
        let layout = Layout::from_size_align(num_bytes.max(64), 64).expect("a region fits the address space");
        // SAFETY: the layout has a size.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: freshly allocated with this size.
        unsafe { base.write_bytes(fill, layout.size()) };
        Self { base, layout }
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.base, self.layout) };
    }
}

impl KvMemory for HeapMemory {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.layout.size()
    }

    fn base_address(&self) -> usize {
        self.base as usize
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset + into.len() <= self.layout.size());
        // SAFETY: inside the region, and no one writes these bytes meanwhile, by the contract of `KvMemory`.
        unsafe { self.base.add(offset).copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
    }

    fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset + from.len() <= self.layout.size());
        // SAFETY: inside the region, and no one else accesses these bytes meanwhile, by the contract of `KvMemory`.
        unsafe { self.base.add(offset).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}
