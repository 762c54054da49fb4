//! The embedded images on a GPU, by CUDA's driver, which is loaded when a module is opened.
//!
//! Never run so far: written and compiled where no GPU is. What it does is kept to what must be here: open the driver, find a
//! kernel, launch it on one stream, copy bytes for tests.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUfunction_attribute, CUmodule};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, DriverError, result};

use crate::{Device, DevicePtr, KernelError, Launch};

/// Images by source: machine code for sm_80 and sm_90, and PTX for what comes later.
static IMAGES: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// An image where the driver may look for words in it.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

/// A kernel that was found in an image.
#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a handle of the driver, which may be used by any thread with the context; only `launch` does, having bound it.
unsafe impl Send for Function {}

/// The kernels on one GPU, launched on one stream.
pub struct Module {
    stream: Arc<CudaStream>,
    images: Vec<CUmodule>,
    functions: Mutex<HashMap<&'static str, Function>>,
    /// Shared memory that a block may have, if it asks.
    max_shared_bytes: i32,
}

// SAFETY: the images are handles of the driver, used like `Function`.
unsafe impl Send for Module {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("images", &self.images.len()).finish_non_exhaustive()
    }
}

/// Bytes on the GPU.
#[derive(Debug)]
pub struct Memory {
    slice: CudaSlice<u8>,
    len: usize,
    ptr: DevicePtr,
}

impl Memory {
    /// Returns the address, which is the memory's as long as it lives.
    #[must_use]
    pub const fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Module {
    /// Opens a GPU and loads the images.
    ///
    /// # Errors
    /// If there is no driver, no such GPU, or none that the images are for.
    pub fn open(ordinal: usize) -> Result<Self, KernelError> {
        // SAFETY: loading the driver's library runs its initialisation, as every CUDA program does.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(KernelError::Device { kernel: "any kernel", reason: "there is no libcuda".into() });
        }
        let context = CudaContext::new(ordinal).map_err(|error| failure("any kernel", &error))?;
        let stream = context.new_stream().map_err(|error| failure("any kernel", &error))?;
        Self::on_stream(stream)
    }

    /// Loads the images for launches on a stream.
    ///
    /// # Errors
    /// If the GPU is none that the images are for.
    pub fn on_stream(stream: Arc<CudaStream>) -> Result<Self, KernelError> {
        let fail = |error: DriverError| failure("any kernel", &error);
        if IMAGES.is_empty() {
            let reason = "this build has no images: it was made with NVCC=none".into();
            return Err(KernelError::Device { kernel: "any kernel", reason });
        }
        let context = stream.context();
        context.bind_to_thread().map_err(fail)?;
        let max_shared_bytes = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(fail)?;
        let mut module = Self { stream, images: Vec::new(), functions: Mutex::default(), max_shared_bytes };
        for (source, image) in IMAGES {
            // SAFETY: a whole image as nvcc wrote it, which carries its own length.
            let loaded = unsafe { result::module::load_data(image.0.as_ptr().cast()) };
            let loaded = loaded.map_err(|error| KernelError::Device {
                kernel: "any kernel",
                reason: format!("the image of {source} cannot be loaded: {error}"),
            })?;
            module.images.push(loaded);
        }
        Ok(module)
    }

    /// Returns the stream that kernels are launched on.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Copies bytes to the GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn upload(&self, bytes: &[u8]) -> Result<Memory, KernelError> {
        let fail = |error: DriverError| failure("a copy to the GPU", &error);
        // The driver refuses to allocate nothing.
        let slice =
            if bytes.is_empty() { self.stream.clone_htod(&[0_u8]) } else { self.stream.clone_htod(bytes) };
        let slice = slice.map_err(fail)?;
        let ptr = DevicePtr(slice.device_ptr(&self.stream).0);
        Ok(Memory { slice, len: bytes.len(), ptr })
    }

    /// Copies bytes back, after everything that was launched.
    ///
    /// # Errors
    /// If the driver refuses, or a kernel before failed.
    pub fn download(&self, memory: &Memory) -> Result<Vec<u8>, KernelError> {
        let fail = |error: DriverError| failure("a copy from the GPU", &error);
        let mut bytes = self.stream.clone_dtoh(&memory.slice).map_err(fail)?;
        self.stream.synchronize().map_err(fail)?;
        bytes.truncate(memory.len);
        Ok(bytes)
    }

    fn function(&self, kernel: &'static str) -> Result<Function, KernelError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = functions.get(kernel) {
            return Ok(function);
        }
        let name = CString::new(kernel).map_err(|error| failure(kernel, &error))?;
        let found = self.images.iter().find_map(|&image| {
            // SAFETY: loaded by `on_stream`, and not unloaded before `self` is dropped.
            unsafe { result::module::get_function(image, name.clone()) }.ok()
        });
        let Some(found) = found else {
            return Err(KernelError::NotCompiled { kernel, what: "this name in the images".into() });
        };
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: found just now; no kernel has shared memory of its own beside the dynamic.
        unsafe { result::function::set_function_attribute(found, most, self.max_shared_bytes) }
            .map_err(|error| failure(kernel, &error))?;
        functions.insert(kernel, Function(found));
        Ok(Function(found))
    }
}

fn failure(kernel: &'static str, error: &dyn std::error::Error) -> KernelError {
    KernelError::Device { kernel, reason: error.to_string() }
}

impl Device for Module {
    unsafe fn launch(&self, launch: &Launch, params: &[u8]) -> Result<(), KernelError> {
        let fail = |error: DriverError| failure(launch.kernel, &error);
        self.stream.context().bind_to_thread().map_err(fail)?;
        let function = self.function(launch.kernel)?;
        let [x, y, z] = launch.grid;
        // The driver reads as many bytes as the kernel's parameter has, before it returns.
        let mut pointers = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: a function of an image that is loaded; one parameter, which the source declares as the caller's struct; what its
        // addresses promise, the caller does.
        unsafe {
            result::launch_kernel(
                function.0,
                (x, y, z),
                (launch.threads, 1, 1),
                launch.shared_bytes,
                self.stream.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(fail)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // What cannot be said to anyone any more is not said.
        let _ = self.stream.synchronize();
        if self.stream.context().bind_to_thread().is_ok() {
            for &image in &self.images {
                // SAFETY: loaded by `on_stream`, unloaded once; nothing runs any more.
                let _ = unsafe { result::module::unload(image) };
            }
        }
    }
}
