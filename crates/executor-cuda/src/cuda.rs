//! A GPU by CUDA's driver, which is loaded when one is opened.
//!
//! Never run so far: written and compiled where no GPU is.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUevent_flags, CUevent_wait_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use microserving_executor::ExecutorError;
use microserving_kernels::cuda::Module;
use microserving_kernels::{Device, DevicePtr, KernelError};
use microserving_protocol::MemoryKind;

use crate::accelerator::{Accelerator, Event, Stream};

/// One GPU.
struct Cuda {
    ordinal: u32,
    name: String,
    module: Module,
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    transfer: Arc<CudaStream>,
    events: Mutex<Vec<CudaEvent>>,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("ordinal", &self.ordinal)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Opens a GPU and loads the kernels.
///
/// # Errors
/// [`ExecutorError::Device`] if there is no driver, no such GPU, or none that the kernels were compiled for.
pub fn open_cuda(ordinal: u32) -> Result<Arc<dyn Accelerator>, ExecutorError> {
    // SAFETY: loading the driver's library runs its initialisation, as every CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(ExecutorError::Device {
            reason: "there is no libcuda.so, which comes with NVIDIA's driver".into(),
        });
    }
    let cuda = Cuda::open(ordinal).map_err(|error| ExecutorError::Device { reason: error.to_string() })?;
    Ok(Arc::new(cuda))
}

impl Cuda {
    fn open(ordinal: u32) -> Result<Self, KernelError> {
        let fail = failure("opening the GPU");
        let context = CudaContext::new(ordinal as usize).map_err(&fail)?;
        let (major, minor) = context.compute_capability().map_err(&fail)?;
        let compute = context.new_stream().map_err(&fail)?;
        let transfer = context.new_stream().map_err(&fail)?;
        let module = Module::on_stream(Arc::clone(&compute))?;
        let (name, events) = (format!("cuda_sm{major}{minor}"), Mutex::default());
        Ok(Self { ordinal, name, module, context, compute, transfer, events })
    }

    fn stream(&self, stream: Stream) -> &Arc<CudaStream> {
        match stream {
            Stream::Compute => &self.compute,
            Stream::Transfer => &self.transfer,
        }
    }

    /// Makes the driver's calls of this thread go to this GPU.
    fn enter(&self, what: &'static str) -> Result<(), KernelError> {
        self.context.bind_to_thread().map_err(failure(what))
    }

    fn with_event<R>(
        &self,
        event: Event,
        what: &'static str,
        run: impl FnOnce(&CudaEvent) -> Result<R, DriverError>,
    ) -> Result<R, KernelError> {
        self.enter(what)?;
        run(&self.events.lock().unwrap_or_else(PoisonError::into_inner)[event.0]).map_err(failure(what))
    }
}

fn failure(what: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |error| KernelError::Device { kernel: what, reason: error.to_string() }
}

impl Accelerator for Cuda {
    fn kernels(&self) -> &dyn Device {
        &self.module
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn memory_kind(&self) -> MemoryKind {
        MemoryKind::Cuda { ordinal: self.ordinal }
    }

    fn allocate(&self, num_bytes: usize) -> Result<DevicePtr, KernelError> {
        let what = "an allocation on the GPU";
        self.enter(what)?;
        // SAFETY: a call of the driver with a context; the memory is given back by `free`.
        let ptr = unsafe { result::malloc_sync(num_bytes) }.map_err(failure(what))?;
        // SAFETY: freshly allocated with this size.
        let cleared = unsafe { result::memset_d8_sync(ptr, 0, num_bytes) };
        // The driver clears on a stream of its own, which ours do not wait for.
        cleared.and_then(|()| result::ctx::synchronize()).map_err(failure(what))?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn free(&self, ptr: DevicePtr) {
        if self.enter("giving memory back").is_ok() {
            // SAFETY: from `allocate`, as the caller promises; the driver waits for what uses it.
            let freed = unsafe { result::free_sync(ptr.0) };
            if let Err(error) = freed {
                tracing::debug!(%error, "memory on the GPU is not given back");
            }
        }
    }

    fn allocate_host(&self, num_bytes: usize) -> Result<NonNull<u8>, KernelError> {
        let what = "an allocation of pinned memory";
        self.enter(what)?;
        // SAFETY: a call of the driver with a context; the memory is given back by `free_host`.
        let ptr = unsafe { result::malloc_host(num_bytes, 0) }.map_err(failure(what))?;
        let ptr = NonNull::new(ptr.cast::<u8>())
            .ok_or_else(|| KernelError::Device { kernel: what, reason: "the driver returned none".into() })?;
        // SAFETY: freshly allocated with this size.
        unsafe { ptr.write_bytes(0, num_bytes) };
        Ok(ptr)
    }

    unsafe fn free_host(&self, ptr: NonNull<u8>, _num_bytes: usize) {
        if self.enter("giving memory back").is_ok() {
            // SAFETY: from `allocate_host`, as the caller promises.
            let freed = unsafe { result::free_host(ptr.as_ptr().cast()) };
            if let Err(error) = freed {
                tracing::debug!(%error, "pinned memory is not given back");
            }
        }
    }

    unsafe fn pin(&self, ptr: NonNull<u8>, num_bytes: usize) -> Result<(), KernelError> {
        let what = "pinning the KV region";
        self.enter(what)?;
        // SAFETY: mapped for as long as it is pinned, as the caller promises.
        let code = unsafe { sys::cuMemHostRegister_v2(ptr.as_ptr().cast::<c_void>(), num_bytes, 0) };
        code.result().map_err(failure(what))
    }

    unsafe fn unpin(&self, ptr: NonNull<u8>) {
        if self.enter("unpinning the KV region").is_ok() {
            // SAFETY: pinned, as the caller promises.
            let code = unsafe { sys::cuMemHostUnregister(ptr.as_ptr().cast::<c_void>()) };
            if let Err(error) = code.result() {
                tracing::debug!(%error, "the KV region stays pinned");
            }
        }
    }

    unsafe fn copy_in(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: NonNull<u8>,
        num_bytes: usize,
    ) -> Result<(), KernelError> {
        let what = "a copy to the GPU";
        self.enter(what)?;
        let stream = self.stream(stream).cu_stream();
        // SAFETY: both ranges are allocated and used by no one else, as the caller promises. No slice is made of the host's, which a
        // region shares with other processes.
        let code =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast::<c_void>(), num_bytes, stream) };
        code.result().map_err(failure(what))
    }

    unsafe fn copy_out(
        &self,
        stream: Stream,
        to: NonNull<u8>,
        from: DevicePtr,
        num_bytes: usize,
    ) -> Result<(), KernelError> {
        let what = "a copy from the GPU";
        self.enter(what)?;
        let stream = self.stream(stream).cu_stream();
        // SAFETY: as in `copy_in`.
        let code =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast::<c_void>(), from.0, num_bytes, stream) };
        code.result().map_err(failure(what))
    }

    fn event(&self) -> Result<Event, KernelError> {
        let flags = Some(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = self.context.new_event(flags).map_err(failure("an event"))?;
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(event);
        Ok(Event(events.len() - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError> {
        self.with_event(event, "recording an event", |event| event.record(self.stream(stream)))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError> {
        let stream = self.stream(stream).cu_stream();
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        self.with_event(event, "waiting for an event", |event| {
            // SAFETY: both are handles of this context that live as long as `self`.
            unsafe { result::stream::wait_event(stream, event.cu_event(), flags) }
        })
    }

    fn wait_on_host(&self, event: Event) -> Result<(), KernelError> {
        // The handle outlives the lock: events are never destroyed before `self`.
        let handle = self.with_event(event, "waiting for an event", |event| Ok(event.cu_event()))?;
        // SAFETY: a handle of this context.
        unsafe { result::event::synchronize(handle) }.map_err(failure("what the GPU computes"))
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.enter("waiting for the GPU")?;
        self.stream(stream).synchronize().map_err(failure("what the GPU computes"))
    }
}
