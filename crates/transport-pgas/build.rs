//! Lets this crate's tests be elements of an OpenSHMEM world: see `check_end_symbol` in `openshmem.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-tests=-Wl,--undefined=_end,--export-dynamic-symbol=_end");
}
