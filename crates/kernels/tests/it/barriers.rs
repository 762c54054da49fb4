//! Every barrier and every wait is needed, and a test would notice if one were missing.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::rig::SKIP_VARIABLE;

/// The sources with barriers, and the tests that must fail without one of them.
const SUITES: [(&str, &str); 6] = [
    ("rms_norm.cu", "rows::rms_norm_"),
    ("matmul.cu", "matmul::plain_"),
    ("matmul_mma.cu", "matmul::tensor_core_"),
    ("paged_attention.cu", "attention::plain_"),
    ("paged_attention_mma.cu", "attention::tensor_core_"),
    ("sampling.cu", "sampling::"),
];

/// Longer than any suite takes; a kernel that loops for ever without a barrier has been noticed, too.
const PATIENCE: Duration = Duration::from_secs(120);

fn kernels_dir() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels")
}

fn barriers(source: &str) -> Vec<usize> {
    let text = std::fs::read_to_string(kernels_dir().join(source)).expect("a kernel's source");
    let is_barrier = |line: &&str| {
        let code = line.trim_start();
        ["__syncthreads();", "__syncwarp();", "WAIT_COPIES("].iter().any(|barrier| code.starts_with(barrier))
    };
    (1..).zip(text.lines()).filter(|(_, line)| is_barrier(line)).map(|(number, _)| number).collect()
}

fn start(filter: &str, skip: &str) -> Child {
    let program = std::env::current_exe().expect("this test's own program");
    let mut command = Command::new(program);
    command
        .args([filter, "--test-threads", "1"])
        .env(SKIP_VARIABLE, skip)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().expect("this test's own program starts")
}

/// Waits, and returns whether the tests failed.
fn has_failed(mut child: Child) -> bool {
    let step = Duration::from_millis(20);
    for _ in 0..PATIENCE.as_millis() / step.as_millis() {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return !status.success();
        }
        sleep(step);
    }
    child.kill().and_then(|()| child.wait().map(drop)).expect("a child of ours");
    true
}

#[test]
fn a_missing_barrier_is_noticed() {
    let mutants: Vec<(String, &str)> = SUITES
        .into_iter()
        .flat_map(|(source, filter)| {
            let lines = barriers(source);
            assert!(!lines.is_empty(), "{source} has no barriers");
            lines.into_iter().map(move |line| (format!("{source}:{line}"), filter))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((skip, filter)) = mutants.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if !has_failed(start(filter, skip)) {
                        missed.lock().expect("no panic").push(skip);
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().expect("no panic");
    assert!(missed.is_empty(), "without these barriers all tests pass: {missed:?}");
    eprintln!("{} barriers and waits, each noticed when it is missing", mutants.len());
}

#[test]
fn every_source_with_barriers_has_a_suite() {
    for entry in std::fs::read_dir(kernels_dir()).expect("the kernels' folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("a plain name");
        let is_listed = SUITES.iter().any(|(source, _)| *source == name);
        if name.ends_with(".cu") || name.ends_with(".h") {
            assert_eq!(!barriers(&name).is_empty(), is_listed, "{name}");
        }
    }
}
