//! NIXL's C functions as they are declared, loaded at run time: the raw level.
//!
//! Building needs neither the library nor its headers. The names and types are those of `wrapper.h` of NIXL 1.5, the C interface that its
//! own packages carry as `libnixl_capi.so`. Statuses are integers: 0 is success, 1 is in progress, everything below 0 an error.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

pub(crate) type Status = c_int;
/// A pointer to an object of the library.
pub(crate) type Handle = *mut c_void;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const IN_PROGRESS: Status = 1;
/// `nixl_capi_mem_type_t` of host memory.
pub(crate) const DRAM: c_int = 0;
/// `nixl_capi_xfer_op_t` of a read.
pub(crate) const READ: c_int = 0;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
pub(crate) struct AgentConfig {
    pub(crate) enable_prog_thread: bool,
    pub(crate) enable_listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_int,
    pub(crate) num_workers: c_uint,
    pub(crate) pthr_delay_us: u64,
    pub(crate) lthr_delay_us: u64,
    pub(crate) capture_telemetry: bool,
}

/// Declares the table of functions, and how each is found: by its field's name behind `nixl_capi_`.
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            /// # Safety
            /// The library must be NIXL's C interface, and must stay loaded as long as the functions are called.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the type is that of the declaration of the symbol, which the caller vouches for.
                    $($name: *unsafe { library.get(concat!("nixl_capi_", stringify!($name), "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_mem_list(Handle);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    create_reg_dlist(c_int, *mut Handle);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

/// NIXL, loaded into this process: once, and for its life.
#[derive(Clone)]
pub struct Nixl(Arc<Functions>);

impl std::fmt::Debug for Nixl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nixl")
    }
}

/// NIXL's C interface cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} cannot be loaded; it is part of the package nixl-cu13 of PyPI (`cargo xtask nixl --fetch` fetches it and prints its path), and is \
     named by nixl_library", library.display()
)]
pub struct NotLoaded {
    library: PathBuf,
    #[source]
    source: libloading::Error,
}

/// The library's name where the system's loader is to look for it.
pub const LIBRARY: &str = "libnixl_capi.so";

// The C library's; std links it.
unsafe extern "C" {
    safe fn _exit(status: c_int) -> !;
    fn on_exit(handler: extern "C" fn(c_int, *mut c_void), data: *mut c_void) -> c_int;
}

/// Runs before the finalisers of what NIXL brought along, and instead of them: one of libnl's faults when UCX's own has run before it.
extern "C" fn end_at_once(status: c_int, _: *mut c_void) {
    _exit(status)
}

static LOADED: OnceLock<(PathBuf, Nixl)> = OnceLock::new();

impl Nixl {
    /// Loads the library from a file, or from where the system's loader finds [`LIBRARY`]. It finds its own parts beside itself. A process
    /// has one: where another file was loaded before, that one is returned.
    ///
    /// # Errors
    /// [`NotLoaded`] if it is not there, or is not of a version that has all functions.
    pub fn load(library: Option<&Path>) -> Result<Self, NotLoaded> {
        let path = library.unwrap_or_else(|| Path::new(LIBRARY)).to_path_buf();
        if let Some((loaded, nixl)) = LOADED.get() {
            if *loaded != path {
                tracing::warn!(loaded = %loaded.display(), asked = %path.display(), "NIXL was loaded before");
            }
            return Ok(nixl.clone());
        }
        let fail = |source| NotLoaded { library: path.clone(), source };
        // SAFETY: the initialisers are those that every program with NIXL runs; they set nothing up that this process uses otherwise.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(fail)?;
        // SAFETY: a library with all these names is NIXL's C interface; it is never unloaded (below), as it may have threads.
        let functions = unsafe { Functions::of(&library) }.map_err(fail)?;
        std::mem::forget(library);
        let (_, nixl) = LOADED.get_or_init(|| {
            // SAFETY: the handler takes no data, and is code of this program, which stays.
            if unsafe { on_exit(end_at_once, std::ptr::null_mut()) } != 0 {
                tracing::warn!("no exit handler can be registered; the process may fault when it exits");
            }
            (path, Self(Arc::new(functions)))
        });
        Ok(nixl.clone())
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_how_to_get_it() {
        let error = Nixl::load(Some(Path::new("/nowhere/libnixl_capi.so"))).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("/nowhere/libnixl_capi.so cannot be loaded") && text.contains("xtask nixl"),
            "{text}"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn another_library_is_refused() {
        let error = Nixl::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(matches!(error.source, libloading::Error::DlSym { .. }), "{error:?}");
    }
}
