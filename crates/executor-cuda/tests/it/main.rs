//! The executor on the emulated device: the whole of it, beside the executor for the CPU.

#![cfg(feature = "emulated")]
#![allow(clippy::unwrap_used, reason = "a test may stop at a surprise")]

mod contract;
mod equality;
mod invariance;
#[path = "../../../executor-candle/tests/it/memory.rs"]
mod memory;
#[path = "../../../executor-candle/tests/it/noise.rs"]
mod noise;
mod sampling;
mod support;
#[path = "../../../executor-candle/tests/it/tiny.rs"]
#[allow(dead_code, reason = "not all of it is wanted here")]
mod tiny;
mod transfer;

/// A file that nobody names is a test that nobody runs.
#[test]
fn no_file_is_forgotten() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let main = std::fs::read_to_string(folder.join("main.rs")).expect("this file");
    for entry in std::fs::read_dir(folder).expect("this folder") {
        let name = entry.expect("readable").file_name().into_string().expect("plain names");
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        assert!(main.contains(&format!("mod {module};")), "{name} is not in main.rs");
    }
}
