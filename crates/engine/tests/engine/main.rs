//! The engine's tests: toy executors and a loopback hub, in virtual time and on threads.

mod apart;
mod bounds;
mod cancelling;
mod devices;
mod failures;
mod handle;
mod idempotency;
mod leases;
mod losses;
mod migration;
#[cfg(feature = "mutants")]
mod mutants;
mod overlap;
mod pace;
mod patterns;
mod preemption;
mod storm;
mod support;

/// A file that nobody names is a test that nobody runs.
#[test]
fn no_file_is_forgotten() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engine");
    let main = std::fs::read_to_string(folder.join("main.rs")).expect("this file");
    for entry in std::fs::read_dir(folder).expect("this folder") {
        let name = entry.expect("readable").file_name().into_string().expect("plain names");
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        assert!(main.contains(&format!("mod {module};")), "{name} is not in main.rs");
    }
}
