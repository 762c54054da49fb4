//! OpenSHMEM: host memory, processes that a launcher starts.
//!
//! The library is loaded, not linked: a program starts without it, and its absence is a value. What is called is declared here by hand
//! from OpenSHMEM 1.4; the whole of it is below.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use microserving_protocol::{KvMemory as _, PeId};

use crate::guest::{exit_now, keeping_signals, on_exit_first};
use crate::host::HostBlock;
use crate::pgas::{Pgas, PgasError, Put, SymmetricMemory, check_run};
use crate::singleton::Singleton;

/// The address space's name in addresses and configuration.
pub const OPENSHMEM: &str = "openshmem";

/// The files that may hold the library, tried in turn: Open MPI's on Debian, and any with development files.
const LIBRARY_NAMES: [&str; 2] = ["liboshmem.so.40", "liboshmem.so"];
/// `SHMEM_THREAD_SERIALIZED`, in Open MPI's header: calls from any thread, one at a time.
const THREAD_SERIALIZED: c_int = 2;

/// What is called of the library. All functions have C's calling convention.
#[derive(Clone, Copy, Debug)]
struct Functions {
    init_thread: unsafe extern "C" fn(requested: c_int, provided: *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(),
    my_pe: unsafe extern "C" fn() -> c_int,
    n_pes: unsafe extern "C" fn() -> c_int,
    malloc: unsafe extern "C" fn(num_bytes: usize) -> *mut c_void,
    putmem: unsafe extern "C" fn(target: *mut c_void, source: *const c_void, num_bytes: usize, pe: c_int),
    uint64_p: unsafe extern "C" fn(target: *mut u64, value: u64, pe: c_int),
    fence: unsafe extern "C" fn(),
    quiet: unsafe extern "C" fn(),
    barrier_all: unsafe extern "C" fn(),
}

impl Functions {
    fn load() -> Result<Self, String> {
        check_end_symbol()?;
        let mut reasons = Vec::new();
        let library = LIBRARY_NAMES.iter().find_map(|name| {
            // SAFETY: the initialisers of this library do nothing beyond registering itself; whoever installs another file under its
            // name vouches for it. Its plug-ins look for its symbols, so they have to be global.
            unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_GLOBAL) }
                .map_err(|error| reasons.push(error.to_string()))
                .ok()
        });
        let library =
            library.ok_or_else(|| format!("{}; on Debian it is in libopenmpi3", reasons.join("; ")))?;
        // SAFETY: each type is that of OpenSHMEM 1.4's declaration of the function.
        let functions = unsafe {
            Self {
                init_thread: symbol(&library, "shmem_init_thread")?,
                finalize: symbol(&library, "shmem_finalize")?,
                my_pe: symbol(&library, "shmem_my_pe")?,
                n_pes: symbol(&library, "shmem_n_pes")?,
                malloc: symbol(&library, "shmem_malloc")?,
                putmem: symbol(&library, "shmem_putmem")?,
                uint64_p: symbol(&library, "shmem_uint64_p")?,
                fence: symbol(&library, "shmem_fence")?,
                quiet: symbol(&library, "shmem_quiet")?,
                barrier_all: symbol(&library, "shmem_barrier_all")?,
            }
        };
        // The library leaves threads and mappings behind: it stays.
        std::mem::forget(library);
        Ok(functions)
    }
}

/// Looks a function up.
///
/// # Safety
/// `T` is the function pointer type of the symbol.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller vouches for the type.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|error| error.to_string())
}

/// Open MPI registers the writable memory below the symbol `_end`, meaning the program's own variables. In a program that does not export
/// the symbol it finds its own, takes everything mapped below for the program's, and crashes when that is too much.
fn check_end_symbol() -> Result<(), String> {
    let program = Library::this();
    // SAFETY: only the symbol's existence is asked for.
    let end = unsafe { program.get::<*const c_void>(b"_end\0") };
    end.map(drop).map_err(|_| {
        "the program does not export the symbol `_end`; link it with -Wl,--export-dynamic-symbol=_end"
            .to_owned()
    })
}

/// The library finalises itself when a process exits, which waits for all other elements: for those that are gone, or go on, forever. A
/// process whose world was not left ends without that.
extern "C" fn end_at_once(status: c_int, _: *mut c_void) {
    if LIBRARY.is_entered() {
        exit_now(status);
    }
}

static LIBRARY: Singleton<Functions, HostBlock> = Singleton::new(OPENSHMEM);

/// This process as an element of the world that its launcher started.
#[derive(Debug)]
pub struct OpenShmem {
    functions: Functions,
    pe: PeId,
    num_pes: u32,
}

impl OpenShmem {
    /// Joins the world. The first time it initialises the library, which blocks until all processes that the launcher started have come
    /// here; a process that no launcher started is a world of one. When the value was dropped, the world can be joined again.
    ///
    /// The library is configured by the launcher through the environment; where it cannot start, it ends the process.
    ///
    /// # Errors
    /// [`PgasError::Library`] if there is none, or it cannot be called from a thread; [`PgasError::World`] if the world is in use, or
    /// was left.
    pub fn join() -> Result<Self, PgasError> {
        let functions = LIBRARY.enter(|| {
            let library = |reason| PgasError::Library { name: OPENSHMEM, reason };
            let functions = Functions::load().map_err(library)?;
            let mut provided = 0;
            let code = keeping_signals(|| {
                // SAFETY: called once in the life of the process, as `enter` sees to; the pointer is to a live integer.
                unsafe { (functions.init_thread)(THREAD_SERIALIZED, &raw mut provided) }
            });
            if code != 0 || provided < THREAD_SERIALIZED {
                return Err(library(format!("it initialises with {code} and threads of level {provided}")));
            }
            on_exit_first(end_at_once).map_err(library)?;
            Ok(functions)
        })?;
        // SAFETY: the library is initialised.
        let (pe, num_pes) = unsafe { ((functions.my_pe)(), (functions.n_pes)()) };
        Ok(Self { functions, pe: PeId(pe.cast_unsigned()), num_pes: num_pes.cast_unsigned() })
    }

    /// Leaves the world in order. Blocks until all of its processes do so: a launcher takes a process that ends without for a failure, and
    /// ends all others.
    ///
    /// # Errors
    /// [`PgasError::World`] if the world or memory of it is in use.
    pub fn leave_world() -> Result<(), PgasError> {
        // SAFETY: the library is initialised, and nobody holds memory of it, as `leave` sees to.
        LIBRARY.leave(|functions| unsafe { (functions.finalize)() })
    }

    fn address(&self, memory: &dyn SymmetricMemory, offset: usize, num_bytes: usize) -> *mut c_void {
        check_run(memory, offset, num_bytes);
        LIBRARY.find(memory).at(offset, num_bytes).as_ptr().cast()
    }

    fn number(&self, pe: PeId) -> c_int {
        assert!(pe.0 < self.num_pes, "there is no element {pe}");
        pe.0.cast_signed()
    }
}

impl Drop for OpenShmem {
    fn drop(&mut self) {
        LIBRARY.release(self.functions);
    }
}

impl Pgas for OpenShmem {
    fn name(&self) -> &'static str {
        OPENSHMEM
    }

    fn pe(&self) -> PeId {
        self.pe
    }

    fn num_pes(&self) -> u32 {
        self.num_pes
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Arc<dyn SymmetricMemory>, PgasError> {
        // The library aligns to 16 bytes; a region begins at a cache line, or a huge page where it is large.
        let align = if num_bytes >= 2 << 20 { 2 << 20 } else { 64 };
        // SAFETY: the library is initialised; all elements ask for the same size, by the contract of `allocate`.
        let base = unsafe { (self.functions.malloc)(num_bytes + align) };
        let hint = "set SHMEM_SYMMETRIC_HEAP_SIZE for all of the launcher's processes to more than the largest KV region";
        let base = NonNull::new(base.cast::<u8>());
        let base = base.ok_or(PgasError::Memory { name: OPENSHMEM, num_bytes, hint })?;
        // The heaps of all elements begin at one address, so that the padding is the same everywhere.
        let padding = base.as_ptr().align_offset(align);
        // SAFETY: the padding is below `align`, so that `num_bytes` bytes of the allocation are left behind it; the library keeps it
        // until it is finalised, which `leave` does only when nobody uses it.
        let block = unsafe { HostBlock::borrowed(base.add(padding), num_bytes) };
        let zeros = vec![0; num_bytes.min(1 << 20)];
        for offset in (0..num_bytes).step_by(1 << 20) {
            block.write(offset, &zeros[..zeros.len().min(num_bytes - offset)]);
        }
        let block = LIBRARY.keep(block);
        self.barrier();
        Ok(block)
    }

    fn barrier(&mut self) {
        // SAFETY: the library is initialised, and `&mut self` is the only handle.
        unsafe { (self.functions.barrier_all)() }
    }

    fn put(&mut self, put: Put<'_>) {
        let target = self.address(put.target, put.target_offset, put.num_bytes);
        let source = self.address(put.source, put.source_offset, put.num_bytes);
        // SAFETY: both runs lie in symmetric memory, as was checked; that they do not race are the rules of `host`.
        unsafe { (self.functions.putmem)(target, source, put.num_bytes, self.number(put.pe)) }
    }

    fn put_word(&mut self, pe: PeId, target: &dyn SymmetricMemory, offset: usize, value: u64) {
        let target = self.address(target, offset, 8).cast::<u64>();
        assert!(target.is_aligned(), "words are aligned");
        // SAFETY: an aligned word of symmetric memory, as was checked.
        unsafe { (self.functions.uint64_p)(target, value, self.number(pe)) }
    }

    fn leave(&mut self) -> Result<(), PgasError> {
        LIBRARY.release(self.functions);
        Self::leave_world()
    }

    fn fence(&mut self) {
        // SAFETY: the library is initialised, and `&mut self` is the only handle.
        unsafe { (self.functions.fence)() }
    }

    fn quiet(&mut self) {
        // SAFETY: as above.
        unsafe { (self.functions.quiet)() }
    }
}
