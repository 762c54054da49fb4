//! NVSHMEM: GPU memory, processes that find each other by a unique id.
//!
//! Puts, counters and their order are given to one CUDA stream of this element's own, so that they run beside the executor's kernels
//! and nothing on the host waits for a copy but [`Pgas::quiet`]. Processes that share a GPU are no exception: the calls that NVSHMEM does
//! not have for them (waits on a stream) are not made.

mod cuda;
mod rendezvous;

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvMemory as _, PeId};
use nvshmem_sys::{NvshmemHost, nvshmemx_signal_op_t};

use self::cuda::{Cuda, DeviceBlock, Stream};
use crate::pgas::{Pgas, PgasError, Put, SymmetricMemory, check_run};
use crate::singleton::Singleton;

/// The address space's name in addresses and configuration.
pub const NVSHMEM: &str = "nvshmem";

static LIBRARY: Singleton<Arc<Library>, DeviceBlock> = Singleton::new(NVSHMEM);

/// How a process joins a world of GPUs.
#[derive(Clone, Debug)]
pub struct NvshmemConfig {
    /// The library; wherever the dynamic loader finds it if not given.
    pub library: Option<PathBuf>,
    /// Which element this is.
    pub pe: PeId,
    /// How many there are.
    pub num_pes: u32,
    /// The CUDA device.
    pub device: u32,
    /// A file that all elements see: element 0 writes the world's unique id there, the others read it.
    pub id_file: PathBuf,
    /// How long the others wait for the file.
    pub patience: Duration,
}

struct Library {
    nvshmem: NvshmemHost,
    cuda: Arc<Cuda>,
    stream: Stream,
}

impl Library {
    /// Loads, and joins the world. Blocks until all elements have come.
    fn join(config: &NvshmemConfig) -> Result<Self, PgasError> {
        let missing = |reason: String| PgasError::Library { name: NVSHMEM, reason };
        let world = |reason: String| PgasError::World { name: NVSHMEM, reason };
        // SAFETY: whoever configures the path, or the loader's, vouches for the file.
        let nvshmem = unsafe { nvshmem_sys::load(config.library.as_deref()) };
        let nvshmem = nvshmem.map_err(|error| missing(chain(&error)))?;
        let cuda = Cuda::open(config.device).map_err(missing)?;
        let id = rendezvous::agree(&nvshmem, config).map_err(world)?;
        let number = |number: u32| {
            c_int::try_from(number).map_err(|_| world(format!("{number} elements are too many")))
        };
        let (pe, num_pes, device) = (number(config.pe.0)?, number(config.num_pes)?, number(config.device)?);
        // SAFETY: `Singleton::enter` lets this happen once in the life of the process, and in one thread.
        unsafe { nvshmem_sys::join(&nvshmem, &id, pe, num_pes, device) }
            .map_err(|error| world(error.to_string()))?;
        let stream = cuda.stream().map_err(missing)?;
        Ok(Self { nvshmem, cuda, stream })
    }

    fn wait(&self) {
        self.cuda.synchronise(&self.stream);
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("cuda", &self.cuda).finish_non_exhaustive()
    }
}

/// This process as an element of a world of GPUs.
#[derive(Debug)]
pub struct Nvshmem {
    library: Arc<Library>,
    pe: PeId,
    num_pes: u32,
}

impl Nvshmem {
    /// Joins the world. Blocks until all of its processes have come. Where the library cannot go on, it ends the process.
    ///
    /// # Errors
    /// [`PgasError::Library`] without NVSHMEM, a driver or the device; [`PgasError::World`] if the elements do not find each other, or
    /// the world is in use.
    pub fn join(config: &NvshmemConfig) -> Result<Self, PgasError> {
        let library = LIBRARY.enter(|| Library::join(config).map(Arc::new))?;
        Ok(Self { library, pe: config.pe, num_pes: config.num_pes })
    }

    fn number(&self, pe: PeId) -> c_int {
        assert!(pe.0 < self.num_pes, "there is no element {pe}");
        pe.0.cast_signed()
    }
}

impl Drop for Nvshmem {
    fn drop(&mut self) {
        LIBRARY.release(Arc::clone(&self.library));
    }
}

impl Pgas for Nvshmem {
    fn name(&self) -> &'static str {
        NVSHMEM
    }

    fn pe(&self) -> PeId {
        self.pe
    }

    fn num_pes(&self) -> u32 {
        self.num_pes
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Arc<dyn SymmetricMemory>, PgasError> {
        let library = &self.library;
        library.cuda.enter();
        // SAFETY: the library is initialised, the device's context is this thread's, and all elements ask for the same size.
        let base = unsafe { library.nvshmem.nvshmem_malloc(num_bytes) };
        if base.is_null() {
            let hint = "the GPU has less free memory, or NVSHMEM_SYMMETRIC_SIZE is too small";
            return Err(PgasError::Memory { name: NVSHMEM, num_bytes, hint });
        }
        // SAFETY: `num_bytes` bytes of the device, which the library keeps until it is finalised; `Singleton::leave` does that only when
        // nobody holds a block.
        let block = unsafe { DeviceBlock::new(Arc::clone(&library.cuda), base as u64, num_bytes) };
        let block = block.map_err(|reason| PgasError::Library { name: NVSHMEM, reason })?;
        block.clear();
        let block = LIBRARY.keep(block);
        self.barrier();
        Ok(block)
    }

    fn barrier(&mut self) {
        self.library.cuda.enter();
        // SAFETY: the library is initialised, and the stream is of this context. The variant on a stream is the one that processes on
        // one GPU have, too.
        unsafe { self.library.nvshmem.nvshmemx_barrier_all_on_stream(self.library.stream.raw()) }
        self.library.wait();
    }

    fn put(&mut self, put: Put<'_>) {
        check_run(put.target, put.target_offset, put.num_bytes);
        check_run(put.source, put.source_offset, put.num_bytes);
        let address = |memory, offset| (LIBRARY.find(memory).base_address() + offset) as *mut c_void;
        let target = address(put.target, put.target_offset);
        let source = address(put.source, put.source_offset).cast_const();
        let Library { nvshmem, cuda, stream } = &*self.library;
        cuda.enter();
        // SAFETY: both runs lie in symmetric memory, as was checked; that they do not race are the rules of `KvMemory`.
        unsafe {
            nvshmem.nvshmemx_putmem_nbi_on_stream(
                target,
                source,
                put.num_bytes,
                self.number(put.pe),
                stream.raw(),
            );
        }
    }

    fn put_word(&mut self, pe: PeId, target: &dyn SymmetricMemory, offset: usize, value: u64) {
        check_run(target, offset, 8);
        assert!(offset.is_multiple_of(8), "words are aligned");
        let target = (LIBRARY.find(target).base_address() + offset) as *mut u64;
        let set = nvshmemx_signal_op_t::NVSHMEM_SIGNAL_SET.0.cast_signed();
        let Library { nvshmem, cuda, stream } = &*self.library;
        cuda.enter();
        // SAFETY: an aligned word of symmetric memory, as was checked.
        unsafe { nvshmem.nvshmemx_signal_op_on_stream(target, value, set, self.number(pe), stream.raw()) }
    }

    fn fence(&mut self) {
        let Library { nvshmem, cuda, stream } = &*self.library;
        cuda.enter();
        // There is no fence on a stream; this orders more than is asked, and the host does not wait for it.
        // SAFETY: the library is initialised, and the stream is of this context.
        unsafe { nvshmem.nvshmemx_quiet_on_stream(stream.raw()) }
    }

    fn quiet(&mut self) {
        self.fence();
        self.library.wait();
    }

    fn leave(&mut self) -> Result<(), PgasError> {
        LIBRARY.release(Arc::clone(&self.library));
        LIBRARY.leave(|library| {
            library.cuda.enter();
            // SAFETY: the library is initialised, and nobody holds memory of it, as `leave` sees to.
            unsafe { library.nvshmem.nvshmemx_hostlib_finalize() }
        })
    }
}

/// Returns an error's text with those of its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}
