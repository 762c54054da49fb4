//! Fronts and workers, each on a thread of its own, over real sockets.

mod conformance;
mod equality;
mod losses;
mod meeting;
mod support;

/// A file that nobody names is a test that nobody runs.
#[test]
fn no_file_is_forgotten() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/worker");
    let main = include_str!("main.rs");
    for entry in std::fs::read_dir(folder).expect("this folder") {
        let name = entry.expect("readable").file_name().into_string().expect("plain names");
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        assert!(main.contains(&format!("mod {module};")), "{name} is not in main.rs");
    }
}
