//! `cargo xtask kernels`: compiles the kernels for GPUs, reports what they need, and runs them on the CPU.

mod ptxas;
mod samples;
pub(crate) mod toolchain;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::bench::row::Rows;
use crate::{shell, table};
use ptxas::Usage;

/// Eight registers: what attention on tensor cores over heads of 256 elements spills on sm_90. Nothing else spills.
const MAX_SPILL_BYTES: u32 = 32;

/// Options of `cargo xtask kernels`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not compile for GPUs: only run the kernels on the CPU.
    #[arg(long)]
    no_nvcc: bool,
    /// Append the report to docs/benchmarks/kernels.jsonl instead of target/benchmarks.
    #[arg(long)]
    keep: bool,
}

/// Compiles, reports and tests.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.no_nvcc {
        println!("SKIPPED: the kernels are not compiled for a GPU");
        return test(&mut cargo(&["test"], "emulated"));
    }
    let started = Instant::now();
    let nvcc = toolchain::nvcc()?;
    let install_seconds = started.elapsed().as_secs_f64();

    let started = Instant::now();
    let reports = compile(&nvcc)?;
    let compile_seconds = started.elapsed().as_secs_f64();
    let usage = ptxas::read_all(&reports)?;
    print(&usage);

    let started = Instant::now();
    test(cargo(&["test"], "cuda,emulated").env("NVCC", &nvcc))?;
    let test_seconds = started.elapsed().as_secs_f64();

    let mut rows = Rows::new(args.keep)?;
    rows.push(
        "kernels",
        json!({
            "nvcc": toolchain::version(&nvcc)?,
            "kernels": usage.iter().map(Usage::to_json).collect::<Vec<Value>>(),
            "install_seconds": install_seconds,
            "compile_seconds": compile_seconds,
            "test_seconds": test_seconds,
        }),
    )?;
    rows.report();
    let spilling: Vec<String> = usage
        .iter()
        .filter(|usage| usage.spill_bytes > MAX_SPILL_BYTES)
        .map(|usage| format!("{} on {}: {} bytes", usage.kernel, usage.architecture, usage.spill_bytes))
        .collect();
    if !spilling.is_empty() {
        bail!("kernels spill more than {MAX_SPILL_BYTES} bytes:\n  {}", spilling.join("\n  "));
    }
    Ok(())
}

/// As [`run`], but where nvcc cannot be installed that is said aloud, and the kernels are only run on the CPU. Returns nvcc, if it is
/// there.
pub(crate) fn run_in_ci() -> Result<Option<PathBuf>> {
    let found = toolchain::nvcc();
    if let Err(error) = &found {
        println!("there is no nvcc: {error:#}");
    }
    run(&Args { no_nvcc: found.is_err(), keep: false })?;
    Ok(found.ok())
}

fn cargo(command: &[&str], features: &str) -> Command {
    let mut cargo = shell::cargo();
    cargo.args(command).args(["-p", "microserving-kernels", "--features", features]);
    cargo
}

fn test(command: &mut Command) -> Result<()> {
    // What each test measured is part of the report.
    shell::run(command.args(["--", "--nocapture"]))
}

/// Builds the crate for GPUs and returns the folder with what ptxas said of each source.
fn compile(nvcc: &Path) -> Result<PathBuf> {
    let mut build = cargo(&["build", "--message-format", "json-render-diagnostics"], "cuda,emulated");
    println!("compiling the kernels for GPUs");
    let messages = shell::output(build.env("NVCC", nvcc))?;
    let mut dirs = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_ours = message["reason"] == "build-script-executed"
            && message["package_id"].as_str()?.contains("/crates/kernels#");
        is_ours.then(|| message["out_dir"].as_str().map(PathBuf::from))?
    });
    dirs.next_back().context("cargo did not say where the kernels were built")
}

fn print(usage: &[Usage]) {
    let shared = samples::shared_bytes();
    let rows: Vec<Vec<String>> = usage
        .iter()
        .map(|usage| {
            let shared = shared.get(usage.kernel.as_str());
            vec![
                usage.kernel.clone(),
                usage.architecture.clone(),
                usage.registers.to_string(),
                usage.spill_bytes.to_string(),
                shared.map_or_else(|| "-".to_owned(), u32::to_string),
            ]
        })
        .collect();
    table::print(&["kernel", "for", "registers", "spilled bytes", "shared bytes"], &rows);
    println!("  shared bytes: hidden 4096, head size 128 where it is open, 256 candidates");
}
