//! What the executor asks of a device, and memory that is given back.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use microserving_kernels::{Device, DevicePtr, KernelError};
use microserving_protocol::MemoryKind;

/// A queue of work that is done in order, beside the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Kernels, and copies of what they need and what they found.
    Compute,
    /// Copies of KV between the device and a region in host memory.
    Transfer,
}

/// A mark in a stream, made by [`Accelerator::event`]; recording it again moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub usize);

/// A device with memory and two streams: a GPU by CUDA's driver, or the CPU by the kernels' shim.
///
/// All but allocating, waiting and synchronising returns before it is done. What fails later is reported by a later call.
pub trait Accelerator: Send + Sync + fmt::Debug {
    /// Returns what launches kernels, on [`Stream::Compute`].
    fn kernels(&self) -> &dyn Device;

    /// Returns the device's part of [`KvLayout::numeric_mode`](microserving_protocol::KvLayout::numeric_mode): the same for
    /// devices that compute the same bits.
    fn name(&self) -> &str;

    /// Returns the kind of memory that kernels can address.
    fn memory_kind(&self) -> MemoryKind;

    /// Allocates zeroed device memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if there is not so much.
    fn allocate(&self, num_bytes: usize) -> Result<DevicePtr, KernelError>;

    /// Gives device memory back, after all that was queued.
    ///
    /// # Safety
    /// `ptr` is from [`Self::allocate`], not given back yet, and nothing queued later uses it.
    unsafe fn free(&self, ptr: DevicePtr);

    /// Allocates zeroed host memory that streams copy from and to without a detour, aligned to 64 bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if there is not so much.
    fn allocate_host(&self, num_bytes: usize) -> Result<NonNull<u8>, KernelError>;

    /// Gives host memory back.
    ///
    /// # Safety
    /// `ptr` is from [`Self::allocate_host`] with the same size, not given back yet, and no copy that is queued uses it.
    unsafe fn free_host(&self, ptr: NonNull<u8>, num_bytes: usize);

    /// Lets streams copy from and to host memory of another allocator without a detour. Copies are right without it, only slower.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system refuses.
    ///
    /// # Safety
    /// The memory stays mapped until [`Self::unpin`].
    unsafe fn pin(&self, ptr: NonNull<u8>, num_bytes: usize) -> Result<(), KernelError>;

    /// Ends [`Self::pin`].
    ///
    /// # Safety
    /// `ptr` was pinned and is not unpinned yet; no copy that is queued uses it.
    unsafe fn unpin(&self, ptr: NonNull<u8>);

    /// Queues a copy to the device.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// Both ranges are allocated; no one changes `from` or accesses `to` until the copy is done, but by what is queued in order.
    unsafe fn copy_in(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: NonNull<u8>,
        num_bytes: usize,
    ) -> Result<(), KernelError>;

    /// Queues a copy to the host.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// Both ranges are allocated; no one changes `from` or accesses `to` until the copy is done, but by what is queued in order.
    unsafe fn copy_out(
        &self,
        stream: Stream,
        to: NonNull<u8>,
        from: DevicePtr,
        num_bytes: usize,
    ) -> Result<(), KernelError>;

    /// Makes an event, which is passed until it is recorded. It lives as long as the device.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn event(&self) -> Result<Event, KernelError>;

    /// Queues the event: it is passed when all that was queued in the stream before it is done.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError>;

    /// Makes what is queued in the stream from now on wait for the event, as it was recorded last.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError>;

    /// Waits on the host for the event, as it was recorded last.
    ///
    /// # Errors
    /// [`KernelError::Device`] if something before it failed.
    fn wait_on_host(&self, event: Event) -> Result<(), KernelError>;

    /// Waits on the host for all that is queued in the stream.
    ///
    /// # Errors
    /// [`KernelError::Device`] if something of it failed.
    fn synchronize(&self, stream: Stream) -> Result<(), KernelError>;
}

/// Device memory that is given back when it is dropped, and may be exchanged for more.
#[derive(Debug)]
pub(crate) struct Buffer {
    accelerator: Arc<dyn Accelerator>,
    /// Null for none.
    ptr: DevicePtr,
    num_bytes: usize,
}

impl Buffer {
    pub(crate) fn new(accelerator: &Arc<dyn Accelerator>, num_bytes: usize) -> Result<Self, KernelError> {
        let mut buffer = Self::empty(accelerator);
        if num_bytes > 0 {
            buffer.ptr = accelerator.allocate(num_bytes)?;
            buffer.num_bytes = num_bytes;
        }
        Ok(buffer)
    }

    pub(crate) fn empty(accelerator: &Arc<dyn Accelerator>) -> Self {
        Self { accelerator: Arc::clone(accelerator), ptr: DevicePtr::NULL, num_bytes: 0 }
    }

    pub(crate) const fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) const fn at(&self, offset: usize) -> DevicePtr {
        DevicePtr(self.ptr.0 + offset as u64)
    }

    /// Makes it at least so large; what it held is lost where it was not.
    pub(crate) fn fit(&mut self, num_bytes: usize) -> Result<(), KernelError> {
        if num_bytes > self.num_bytes {
            let accelerator = Arc::clone(&self.accelerator);
            // The old memory first, so that both need not be there at a time.
            *self = Self::empty(&accelerator);
            *self = Self::new(&accelerator, num_bytes.next_power_of_two())?;
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.ptr != DevicePtr::NULL {
            // SAFETY: allocated by `new`, given back once; whoever launches with a buffer's address keeps the buffer.
            unsafe { self.accelerator.free(self.ptr) };
        }
    }
}

/// Host memory for copies, likewise.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    accelerator: Arc<dyn Accelerator>,
    /// Dangling for none.
    ptr: NonNull<u8>,
    num_bytes: usize,
}

// SAFETY: the memory is the value's own; its users synchronise with the streams that access it.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    pub(crate) fn empty(accelerator: &Arc<dyn Accelerator>) -> Self {
        Self { accelerator: Arc::clone(accelerator), ptr: NonNull::dangling(), num_bytes: 0 }
    }

    pub(crate) const fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Makes it at least so large; what it held is lost where it was not.
    pub(crate) fn fit(&mut self, num_bytes: usize) -> Result<(), KernelError> {
        if num_bytes > self.num_bytes {
            let accelerator = Arc::clone(&self.accelerator);
            *self = Self::empty(&accelerator);
            let num_bytes = num_bytes.next_power_of_two();
            self.ptr = accelerator.allocate_host(num_bytes)?;
            self.num_bytes = num_bytes;
        }
        Ok(())
    }

    /// Returns its bytes.
    ///
    /// # Safety
    /// No copy from or to it is queued.
    pub(crate) unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, zeroed; no one else accesses it, as the caller promises. Dangling for no bytes.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.num_bytes) }
    }

    /// Returns its first words.
    ///
    /// # Safety
    /// No copy from or to it is queued.
    pub(crate) unsafe fn words(&mut self, num_words: usize) -> &mut [u32] {
        assert!(num_words * 4 <= self.num_bytes, "as many as it was fitted for");
        if num_words == 0 {
            return &mut [];
        }
        // SAFETY: as `bytes`; aligned to 64 bytes.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), num_words) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.num_bytes > 0 {
            // SAFETY: allocated by `fit` with this size, given back once; its users wait for their copies.
            unsafe { self.accelerator.free_host(self.ptr, self.num_bytes) };
        }
    }
}
