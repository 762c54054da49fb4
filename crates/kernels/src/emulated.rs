//! The kernels on the CPU, by the shim in `kernels/shim`.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

use crate::{Device, KernelError, Launch};

/// How warps, and the lanes of a warp, take turns between barriers. A correct kernel does not notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Lowest first.
    Forward,
    /// Highest first.
    Backward,
    /// At random, the same in every run.
    Shuffled,
}

type Entry = unsafe extern "C" fn(*const c_void);
type LaunchFn =
    unsafe extern "C" fn(Entry, *const c_uint, c_uint, usize, *const c_void, c_int) -> *const c_char;
type SkipBarrierFn = unsafe extern "C" fn(*const c_char, c_uint);

/// Runs kernels on the calling thread, each before `launch` returns. Device addresses are addresses of this process.
#[derive(Debug)]
pub struct Emulated {
    library: Library,
    order: Order,
}

impl Emulated {
    /// Opens the library that this crate's build made.
    ///
    /// # Errors
    /// If it is gone: it lies in the folder that this crate was built into.
    pub fn open(order: Order) -> Result<Self, KernelError> {
        let path = Path::new(env!("MICROSERVING_EMULATED_KERNELS"));
        // SAFETY: our own library, whose initialisation does nothing.
        let library = unsafe { Library::new(path) };
        Ok(Self { library: library.map_err(|error| failure("any kernel", &error))?, order })
    }

    /// Leaves the barrier at `line` of the source `file` out of every launch in this process from now on, to see that a test notices.
    ///
    /// # Errors
    /// If `file` has a zero byte.
    pub fn skip_barrier(&self, file: &str, line: u32) -> Result<(), KernelError> {
        let file = CString::new(file).map_err(|error| failure("any kernel", &error))?;
        // SAFETY: the shim's function, as it is declared there.
        let skip = unsafe { self.library.get::<SkipBarrierFn>(b"cuda_on_cpu_skip_barrier") };
        let skip = skip.map_err(|error| failure("any kernel", &error))?;
        // SAFETY: the name is kept by the shim as an address, so it is never freed.
        unsafe { skip(file.into_raw(), line) };
        Ok(())
    }

    /// Returns a constant that a kernel's source exports beside it.
    fn constant(&self, kernel: &'static str, suffix: &str) -> Result<u32, KernelError> {
        // SAFETY: exported by the macro KERNEL as a constant of this type.
        let constant = unsafe { self.library.get::<*const u32>(format!("{kernel}{suffix}").as_bytes()) };
        let constant = constant.map_err(|error| failure(kernel, &error))?;
        // SAFETY: as above; the library lives as long as `self`.
        Ok(unsafe { **constant })
    }
}

fn failure(kernel: &'static str, error: &dyn std::error::Error) -> KernelError {
    KernelError::Device { kernel, reason: error.to_string() }
}

impl Device for Emulated {
    unsafe fn launch(&self, launch: &Launch, params: &[u8]) -> Result<(), KernelError> {
        let kernel = launch.kernel;
        let params_bytes = self.constant(kernel, "_params_bytes")?;
        if params_bytes as usize != params.len() {
            let reason =
                format!("its source has {params_bytes} bytes of parameters, the launch {}", params.len());
            return Err(KernelError::Device { kernel, reason });
        }
        let max_threads = self.constant(kernel, "_max_threads")?;
        if launch.threads > max_threads {
            let reason = format!(
                "its source has blocks of {max_threads} threads at most, the launch of {}",
                launch.threads
            );
            return Err(KernelError::Device { kernel, reason });
        }
        // The bytes as they were aligned in the caller's struct.
        let mut aligned = vec![0_u64; params.len().div_ceil(8)];
        // SAFETY: as many bytes as there are in both; neither overlaps the other.
        unsafe {
            std::ptr::copy_nonoverlapping(params.as_ptr(), aligned.as_mut_ptr().cast::<u8>(), params.len());
        };
        // SAFETY: exported by the macro KERNEL as a function of this type.
        let entry = unsafe { self.library.get::<Entry>(kernel.as_bytes()) };
        let entry = *entry.map_err(|error| failure(kernel, &error))?;
        // SAFETY: the shim's function, as it is declared there.
        let run = unsafe { self.library.get::<LaunchFn>(b"cuda_on_cpu_launch") };
        let run = *run.map_err(|error| failure(kernel, &error))?;
        let (shared, order) = (launch.shared_bytes as usize, self.order as c_int);
        // SAFETY: the kernel gets parameters of its size, in which the addresses are as the caller promises.
        let message = unsafe {
            run(entry, launch.grid.as_ptr(), launch.threads, shared, aligned.as_ptr().cast(), order)
        };
        if message.is_null() {
            return Ok(());
        }
        // SAFETY: the shim returns null or a string that lives until this thread's next launch.
        let reason = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
        Err(KernelError::Device { kernel, reason })
    }
}
