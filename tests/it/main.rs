//! One binary for all end-to-end tests, so that they link once.

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "real processes are measured; there is no clock to pause")]

mod answers;
mod bad_input;
mod calibration;
mod control;
mod equality;
mod kills;
mod migration;
mod mixed_load;
mod nixl;
mod openshmem;
mod operations;
mod peer_death;
mod prefix_events;
mod python_clients;
mod relay;
mod scripts;
mod simulation;
mod switch;
mod two_routers;
mod wires;
mod workers;

/// A file that is not listed above would silently not run.
#[test]
fn no_test_file_is_forgotten() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("it");
    let main = include_str!("main.rs");
    for entry in std::fs::read_dir(dir).expect("the folder of this file") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(
            stem == "main" || main.contains(&format!("mod {stem};")),
            "it/{stem}.rs is not listed in it/main.rs"
        );
    }
}
