//! The little of CUDA's driver that device memory needs, loaded at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use libloading::os::unix::Library;
use microserving_protocol::{KvMemory, MemoryKind};

use crate::pgas::{SymmetricMemory, check_run};

type Code = c_int;
type Handle = *mut c_void;

/// What is called of the driver; all functions have C's calling convention, and `CUDA_SUCCESS` is 0.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(flags: c_uint) -> Code,
    device_get: unsafe extern "C" fn(device: *mut c_int, ordinal: c_int) -> Code,
    context_retain: unsafe extern "C" fn(context: *mut Handle, device: c_int) -> Code,
    context_set: unsafe extern "C" fn(context: Handle) -> Code,
    stream_create: unsafe extern "C" fn(stream: *mut Handle, flags: c_uint) -> Code,
    stream_synchronise: unsafe extern "C" fn(stream: Handle) -> Code,
    copy_in:
        unsafe extern "C" fn(target: u64, source: *const c_void, num_bytes: usize, stream: Handle) -> Code,
    copy_out:
        unsafe extern "C" fn(target: *mut c_void, source: u64, num_bytes: usize, stream: Handle) -> Code,
    set_bytes: unsafe extern "C" fn(target: u64, value: u8, num_bytes: usize, stream: Handle) -> Code,
    error_name: unsafe extern "C" fn(code: Code, name: *mut *const c_char) -> Code,
}

/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;

/// One device, by its primary context: the one that CUDA's runtime, and so the executor, uses too.
pub(super) struct Cuda {
    functions: Functions,
    context: Handle,
    ordinal: u32,
}

// SAFETY: a context may be used by any thread that has made it current, as every method here does first.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver is safe to call from several threads.
unsafe impl Sync for Cuda {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

/// A stream of the device.
pub(super) struct Stream(Handle);

// SAFETY: a stream may be used by any thread whose current context it belongs to.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders what several threads give to one stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn raw(&self) -> Handle {
        self.0
    }
}

impl Cuda {
    /// Loads the driver and takes hold of a device.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>, String> {
        // SAFETY: the driver's initialisers are those of every CUDA program.
        let library =
            unsafe { Library::new("libcuda.so.1") }.map_err(|error| format!("no CUDA driver: {error}"))?;
        // SAFETY: each type is that of the driver's declaration of the symbol.
        let functions = unsafe {
            Functions {
                init: symbol(&library, "cuInit")?,
                device_get: symbol(&library, "cuDeviceGet")?,
                context_retain: symbol(&library, "cuDevicePrimaryCtxRetain")?,
                context_set: symbol(&library, "cuCtxSetCurrent")?,
                stream_create: symbol(&library, "cuStreamCreate")?,
                stream_synchronise: symbol(&library, "cuStreamSynchronize")?,
                copy_in: symbol(&library, "cuMemcpyHtoDAsync_v2")?,
                copy_out: symbol(&library, "cuMemcpyDtoHAsync_v2")?,
                set_bytes: symbol(&library, "cuMemsetD8Async")?,
                error_name: symbol(&library, "cuGetErrorName")?,
            }
        };
        // The driver is never unloaded.
        std::mem::forget(library);
        let check = |what: &str, code| match code {
            0 => Ok(()),
            code => Err(format!("no CUDA device: {what} answers {}", functions.name(code))),
        };
        let (mut device, mut context) = (0, null_mut());
        let number =
            c_int::try_from(ordinal).map_err(|_| format!("no CUDA device: {ordinal} is no number of one"))?;
        // SAFETY: takes no pointer.
        check("cuInit", unsafe { (functions.init)(0) })?;
        // SAFETY: the pointer is to a live integer.
        check("cuDeviceGet", unsafe { (functions.device_get)(&raw mut device, number) })?;
        // SAFETY: the pointer is to a live handle.
        check("cuDevicePrimaryCtxRetain", unsafe { (functions.context_retain)(&raw mut context, device) })?;
        // SAFETY: the context was retained above and is never released.
        check("cuCtxSetCurrent", unsafe { (functions.context_set)(context) })?;
        Ok(Arc::new(Self { functions, context, ordinal }))
    }

    /// Makes the device the calling thread's.
    pub(super) fn enter(&self) {
        // SAFETY: the context is retained as long as the process lives.
        self.demand("make a context current", unsafe { (self.functions.context_set)(self.context) });
    }

    pub(super) fn stream(&self) -> Result<Stream, String> {
        self.enter();
        let mut stream = null_mut();
        // SAFETY: the pointer is to a live handle, and the context is current.
        match unsafe { (self.functions.stream_create)(&raw mut stream, NON_BLOCKING) } {
            0 => Ok(Stream(stream)),
            code => Err(format!("no CUDA stream: {}", self.functions.name(code))),
        }
    }

    /// Waits until a stream has done what it was given.
    pub(super) fn synchronise(&self, stream: &Stream) {
        self.enter();
        // SAFETY: the stream is of this context, and is never destroyed.
        self.demand("wait for a stream", unsafe { (self.functions.stream_synchronise)(stream.0) });
    }

    /// Ends the process's use of a device that failed: an error here is sticky, and what the memory holds is not known.
    fn demand(&self, what: &str, code: Code) {
        assert!(code == 0, "CUDA device {} cannot {what}: {}", self.ordinal, self.functions.name(code));
    }
}

impl Functions {
    fn name(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is to a live pointer; the name it is set to is a constant of the driver.
        let known = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        if !known {
            return format!("error {code}");
        }
        // SAFETY: the driver's names are constant C strings.
        unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// Looks a function up.
///
/// # Safety
/// `T` is the function pointer type of the symbol.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|error| format!("the CUDA driver lacks {name}: {error}"))
}

/// Bytes of a device, read and written through a stream of their own, so that looking at a counter never waits for a transfer.
#[derive(Debug)]
pub(crate) struct DeviceBlock {
    cuda: Arc<Cuda>,
    stream: Stream,
    base: u64,
    num_bytes: usize,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

impl DeviceBlock {
    /// Takes memory of the device that somebody else owns.
    ///
    /// # Safety
    /// `num_bytes` bytes at `base` of this device, as long as the process lives or no copy of the block does.
    pub(super) unsafe fn new(cuda: Arc<Cuda>, base: u64, num_bytes: usize) -> Result<Self, String> {
        let stream = cuda.stream()?;
        Ok(Self { cuda, stream, base, num_bytes })
    }

    /// Sets all bytes to zero.
    pub(super) fn clear(&self) {
        self.cuda.enter();
        // SAFETY: the whole block, of this context.
        let code = unsafe { (self.cuda.functions.set_bytes)(self.base, 0, self.num_bytes, self.stream.0) };
        self.cuda.demand("clear memory", code);
        self.cuda.synchronise(&self.stream);
    }
}

impl KvMemory for DeviceBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Cuda { ordinal: self.cuda.ordinal }
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        usize::try_from(self.base).expect("device addresses have the size of ours")
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        check_run(self, offset, into.len());
        self.cuda.enter();
        let (target, source) = (into.as_mut_ptr().cast(), self.base + offset as u64);
        // SAFETY: the run was checked; `into` is exclusive and outlives the copy, which is waited for.
        let code = unsafe { (self.cuda.functions.copy_out)(target, source, into.len(), self.stream.0) };
        self.cuda.demand("copy to the host", code);
        self.cuda.synchronise(&self.stream);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        check_run(self, offset, from.len());
        self.cuda.enter();
        // SAFETY: the run was checked; `from` outlives the copy, which is waited for; the page rule makes us the only writer.
        let code = unsafe {
            (self.cuda.functions.copy_in)(
                self.base + offset as u64,
                from.as_ptr().cast(),
                from.len(),
                self.stream.0,
            )
        };
        self.cuda.demand("copy to the device", code);
        self.cuda.synchronise(&self.stream);
    }
}

impl SymmetricMemory for DeviceBlock {
    fn load_word(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8), "words are aligned");
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes);
        u64::from_ne_bytes(bytes)
    }
}
