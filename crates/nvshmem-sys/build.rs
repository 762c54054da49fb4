//! With the feature `nvshmem`: turns NVSHMEM's headers into bindings. Without it: nothing.

use std::process::ExitCode;

#[cfg(not(feature = "nvshmem"))]
fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    ExitCode::SUCCESS
}

#[cfg(feature = "nvshmem")]
fn main() -> ExitCode {
    match bindings::generate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "nvshmem")]
mod bindings {
    use std::env;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// How to get what is missing.
    const HOW: &str = "\
the feature `nvshmem` needs headers that are not in this repository. To get them:
    cargo xtask nvshmem --fetch
which prints what to set NVSHMEM_HOME, CUDA_HOME and LIBCLANG_PATH to";

    /// What the bindings hold; the library exports some 1,500 symbols, most of them typed variants of these.
    const FUNCTIONS: [&str; 6] = [
        // Memory and places.
        "nvshmem_(malloc|calloc|align|free|ptr|my_pe|n_pes|team_my_pe|team_n_pes|info_get_(version|name)|query_thread)",
        // Puts, gets and their order.
        "nvshmem_(put|get)mem(_nbi)?|nvshmem_(quiet|fence|barrier_all|sync_all)",
        // Arrival counters.
        "nvshmem_uint64_(p|g|atomic_(add|fetch|fetch_add|set|swap|compare_swap))|nvshmem_signal_fetch",
        // The same on a CUDA stream.
        "nvshmemx_(put|get)mem(_nbi)?_on_stream|nvshmemx_putmem_signal(_nbi)?_on_stream|nvshmemx_signal_op_on_stream",
        "nvshmemx_(signal_wait_until|quiet|barrier_all)_on_stream",
        // Beginning, end, memory of others, device code.
        "nvshmemx_(hostlib_(init_attr|finalize)|init_status|get_uniqueid|set_attr_uniqueid_args|vendor_get_version_info|buffer_(un)?register(_symmetric)?|cu(module|library)_(init|finalize))",
    ];
    const TYPES: &str = "nvshmemx_(init_attr|init_args|uniqueid|uniqueid_args)_(t|v[0-9]+)|nvshmemx_(status|signal_op_t|init_status_t)|nvshmemi_(cmp_type|init_status.*)|flags";
    const CONSTANTS: &str = "NVSHMEM_(SIGNAL_(SET|ADD)|CMP_.*|VENDOR_.*|TEAM_.*|STATUS_.*|INIT_ATTR_VER)|NVSHMEMX_(INIT_.*|SUCCESS|ERROR_.*)";

    pub(crate) fn generate() -> Result<(), String> {
        println!("cargo:rustc-check-cfg=cfg(init_args_v2)");
        println!("cargo:rerun-if-changed=build.rs");
        println!("cargo:rerun-if-changed=wrapper.hpp");
        for name in ["NVSHMEM_HOME", "CUDA_HOME", "LIBCLANG_PATH"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let nvshmem = include_dir("NVSHMEM_HOME", "nvshmem_host.h")?;
        let cuda = include_dir("CUDA_HOME", "cuda_runtime.h")?;
        if has_init_args_v2(&nvshmem) {
            println!("cargo:rustc-cfg=init_args_v2");
        }
        let mut builder = bindgen::Builder::default()
            .header("wrapper.hpp")
            .clang_args(["-x", "c++", "-std=c++17", "-DNVSHMEM_HOSTLIB_ONLY"])
            .clang_arg(format!("-I{}", nvshmem.display()))
            .clang_arg(format!("-I{}", cuda.display()))
            .allowlist_type(TYPES)
            .allowlist_var(CONSTANTS)
            // Opaque here: whoever has a stream or a module has it from a CUDA crate, as a pointer.
            .blocklist_type("CUstream_st|cudaStream_t|CUmodule|CUmod_st|CUlibrary|CUlib_st")
            .raw_line("/// A CUDA stream.\npub type cudaStream_t = *mut ::std::os::raw::c_void;")
            .raw_line("/// A loaded CUDA module.\npub type CUmodule = *mut ::std::os::raw::c_void;")
            .raw_line("/// A loaded CUDA library.\npub type CUlibrary = *mut ::std::os::raw::c_void;")
            .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
            // An enum of the headers is called `flags`, as are parameters; as constants they do not clash.
            .constified_enum("flags")
            .wrap_unsafe_ops(true)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .dynamic_library_name("NvshmemHost")
            // A symbol that is missing is an error when loading, not a panic when calling.
            .dynamic_link_require_all(true);
        for functions in FUNCTIONS {
            builder = builder.allowlist_function(functions);
        }
        if let Some(dir) = compiler_headers() {
            builder = builder.clang_arg(format!("-isystem{dir}"));
        }
        // bindgen panics, rather than fails, when there is no libclang.
        let made = catch_unwind(AssertUnwindSafe(|| builder.generate()));
        let made = made.map_err(|_| format!("libclang cannot be loaded; {HOW}"))?;
        let made = made.map_err(|error| format!("the headers cannot be read: {error}\n{HOW}"))?;
        let out = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: this is not run by cargo")?;
        made.write_to_file(Path::new(&out).join("bindings.rs"))
            .map_err(|error| format!("the bindings cannot be written: {error}"))
    }

    /// Says whether these headers have the second revision of the initialisation arguments, which names the device. It has the size of
    /// the first, so only the revision number tells the library what lies there.
    fn has_init_args_v2(include: &Path) -> bool {
        let header = include.join("device_host/nvshmem_types.h");
        std::fs::read_to_string(header).is_ok_and(|text| text.contains("nvshmemx_init_args_v2"))
    }

    fn include_dir(variable: &str, header: &str) -> Result<PathBuf, String> {
        let home = env::var_os(variable).ok_or_else(|| format!("{variable} is not set; {HOW}"))?;
        let dir = Path::new(&home).join("include");
        if dir.join(header).is_file() {
            return Ok(dir);
        }
        Err(format!("{variable} is {}, which has no include/{header}; {HOW}", Path::new(&home).display()))
    }

    /// Returns the C compiler's own headers: the libclang of the Python package comes without any.
    fn compiler_headers() -> Option<String> {
        let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
        let output = Command::new(compiler).arg("-print-file-name=include").output().ok()?;
        let dir = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        Path::new(&dir).join("stddef.h").is_file().then_some(dir)
    }
}
