//! Lets the daemon be an element of an OpenSHMEM world: the library takes the memory below `_end` for the program's own, and crashes where
//! the program does not export the symbol.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-Wl,--undefined=_end,--export-dynamic-symbol=_end");
}
