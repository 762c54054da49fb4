//! A KV region on the device itself.

use std::ptr::NonNull;
use std::sync::Arc;

use microserving_executor_cuda::{Accelerator, Stream};
use microserving_kernels::DevicePtr;
use microserving_protocol::{KvMemory, MemoryKind};

use crate::Result;

/// Memory that the device's kernels address.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Arc<dyn Accelerator>,
    ptr: DevicePtr,
    num_bytes: usize,
}

impl DeviceMemory {
    pub(crate) fn allocate(device: &Arc<dyn Accelerator>, num_bytes: usize) -> Result<Arc<dyn KvMemory>> {
        let ptr = device.allocate(num_bytes)?;
        Ok(Arc::new(Self { device: Arc::clone(device), ptr, num_bytes }))
    }

    fn at(&self, offset: usize, num_bytes: usize) -> DevicePtr {
        assert!(offset + num_bytes <= self.num_bytes, "inside the region");
        DevicePtr(self.ptr.0 + offset as u64)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate`, given back once, when no executor has it any more.
        unsafe { self.device.free(self.ptr) };
    }
}

impl KvMemory for DeviceMemory {
    fn kind(&self) -> MemoryKind {
        self.device.memory_kind()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        self.ptr.0 as usize
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let (from, num_bytes) = (self.at(offset, into.len()), into.len());
        // SAFETY: inside the region; waited for before the borrow ends.
        let copied =
            unsafe { self.device.copy_out(Stream::Transfer, NonNull::from(into).cast(), from, num_bytes) };
        copied.and_then(|()| self.device.synchronize(Stream::Transfer)).expect("the device copies");
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: inside the region; waited for before the borrow ends.
        let copied =
            unsafe { self.device.copy_in(Stream::Transfer, to, NonNull::from(from).cast(), from.len()) };
        copied.and_then(|()| self.device.synchronize(Stream::Transfer)).expect("the device copies");
    }
}
