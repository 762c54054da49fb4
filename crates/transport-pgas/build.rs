//! Lets this crate's tests and examples be elements of an OpenSHMEM world: see `check_end_symbol` in `openshmem.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-tests=-Wl,--undefined=_end,--export-dynamic-symbol=_end");
    println!("cargo:rustc-link-arg-examples=-Wl,--undefined=_end,--export-dynamic-symbol=_end");
}
