//! `cargo xtask gpu`: what one GPU shows, and what CI sees of it without one.
//!
//! Never run to its end so far: no machine with a GPU was there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, http};
use serde_json::{Value, json};

use crate::bench::row::Rows;
use crate::kernels::toolchain;
use crate::{model, shell};

/// Options of `cargo xtask gpu`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Model to measure with: a name that `cargo xtask model` knows, or a path.
    #[arg(long, default_value = "qwen3-0.6b-bf16")]
    model: String,
    /// Append the row to docs/benchmarks/gpu.jsonl instead of target/benchmarks.
    #[arg(long)]
    keep: bool,
}

/// There is nothing to measure on: one line, and exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("gpu: none here ({reason})")]
pub(crate) struct NoGpu {
    reason: String,
}

/// Where a driver shows its GPUs: Linux, and Linux under Windows.
const DEVICE_FILES: [&str; 2] = ["nvidiactl", "dxg"];

/// Tokens of the prompt that is sent from one engine to the other.
const SENT_TOKENS: u32 = 2000;

/// Checks, measures, and writes one row.
pub(crate) fn run(args: &Args) -> Result<()> {
    look_for(Path::new("/dev"))?;
    let nvcc = toolchain::nvcc()?;
    let model =
        if Path::new(&args.model).exists() { args.model.clone().into() } else { model::named(&args.model)? };

    // Both the CPU and the GPU run every kernel; bits must agree where the arithmetic is plain.
    let kernels = ["test", "-p", "microserving-kernels", "--features", "cuda,emulated"];
    shell::run(shell::cargo().args(kernels).env("NVCC", &nvcc))?;
    let measured = measure(&["--features", "cuda"], &nvcc, &model, &[])?;
    ensure!(
        measured["tokens"]["f32"]["equal"] == measured["tokens"]["compared"],
        "in f32 the GPU's tokens are not the CPU's: {}",
        measured["tokens"]
    );
    let disaggregated = disaggregate(&nvcc, &model)?;
    let mut rows = Rows::new(args.keep)?;
    rows.push("gpu", json!({ "kernels": "equal", "executor": measured, "disaggregated": disaggregated }))?;
    rows.report();
    Ok(())
}

/// Looks for what a driver would have put into the folder of devices.
fn look_for(devices: &Path) -> Result<(), NoGpu> {
    if DEVICE_FILES.iter().any(|file| devices.join(file).exists()) {
        return Ok(());
    }
    let [linux, windows] = DEVICE_FILES.map(|file| devices.join(file).display().to_string());
    Err(NoGpu { reason: format!("there is neither {linux} nor {windows}") })
}

/// Runs the executor's own measurement.
fn measure(features: &[&str], nvcc: &Path, model: &Path, keys: &[&str]) -> Result<Value> {
    let mut command = shell::cargo();
    command.args(["run", "--quiet", "--release", "-p", "microserving-executor-cuda", "--example", "gpu"]);
    command.args(features).arg("--").arg(model).args(keys).env("NVCC", nvcc);
    let printed = shell::output(&mut command)?;
    let line = printed.lines().rev().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("the measurement printed no figures:\n{printed}"))?;
    serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))
}

/// Two engine processes on one GPU, KV through host memory: the same text as one engine gives, and what the transfer shows of itself.
fn disaggregate(nvcc: &Path, model: &Path) -> Result<Value> {
    let binaries = build(&["--release"], nvcc)?;
    shell::run(shell::cargo().args(["build", "--release", "-p", "microserving-routerd"]))?;
    let mut options = ClusterOptions::model(2, &model.display().to_string()).engine_args([
        "--device",
        "cuda",
        "--transport",
        "shm",
    ]);
    options.binaries = Some(binaries);
    let cluster = Cluster::start(&options)?;
    let url = format!("{}/v1/completions", cluster.router().url());
    let mut results = Vec::new();
    for (turn, pattern) in ["data_parallel", "prefill_decode"].into_iter().cycle().take(4).enumerate() {
        // The first turn of each pays for what comes once; the second has a prompt of its own, that no cache knows.
        let tokens: Vec<u32> = (0..SENT_TOKENS).map(|at| (at * 7 + turn as u32 / 2) % 256).collect();
        let body = json!({"prompt": tokens, "max_tokens": 32, "temperature": 0, "ignore_eos": true});
        let timed = http::timed_stream(&url, &[("x-microserving-pattern", pattern)], &body, |_| ())?;
        results.push((pattern, timed));
    }
    let [_, _, (_, alone), (_, apart)] = &results[..] else { unreachable!("four turns") };
    ensure!(alone.text == apart.text, "two engines answer otherwise than one");
    let states: Vec<Value> = (0..2).map(|engine| cluster.engine_state(engine)).collect::<Result<_>>()?;
    Ok(json!({
        "kv_path": "device, host memory, device",
        "prompt_tokens": SENT_TOKENS,
        "data_parallel_ttft_seconds": alone.ttft.as_secs_f64(),
        "prefill_decode_ttft_seconds": apart.ttft.as_secs_f64(),
        "engines": states,
    }))
}

/// Builds the engine for GPUs and returns where it is.
fn build(profile: &[&str], nvcc: &Path) -> Result<PathBuf> {
    let engined = ["build", "-p", "microserving-engined", "--features", "cuda"];
    shell::run(shell::cargo().args(engined).args(profile).env("NVCC", nvcc))?;
    let folder = if profile.contains(&"--release") { "release" } else { "debug" };
    Ok(shell::target_dir().join(folder))
}

/// What CI sees without a GPU: the GPU's code is linted, the executor runs on the emulated device, and an engine that has it starts without
/// a driver. Without nvcc there are no kernels in it, which is enough for the first and the last.
pub(crate) fn check_in_ci(nvcc: Option<&Path>) -> Result<()> {
    let nvcc = nvcc.unwrap_or(Path::new("none"));
    let packages = ["microserving-kernels", "microserving-executor-cuda", "microserving-engined"]
        .map(|name| ["-p", name]);
    let features = [
        "--features",
        "microserving-kernels/emulated,microserving-executor-cuda/emulated,microserving-engined/cuda",
    ];
    let mut lint = shell::cargo();
    lint.arg("clippy")
        .args(packages.concat())
        .args(["--all-targets"])
        .args(features)
        .args(["--", "-D", "warnings"]);
    shell::run(lint.env("NVCC", nvcc))?;
    let emulated = ["test", "-p", "microserving-executor-cuda", "--features", "emulated"];
    shell::run(shell::cargo().args(emulated))?;
    says_what_is_missing(&build(&[], nvcc)?.join("engined"))
}

/// On a machine without a GPU an engine that could use one says so in one line, with status 2, and not by failing to start.
fn says_what_is_missing(engined: &Path) -> Result<()> {
    if look_for(Path::new("/dev")).is_ok() {
        println!("SKIPPED: this machine has a GPU, so no engine says that it has none");
        return Ok(());
    }
    let output = Command::new(engined).args(["--model", "toy", "--device", "cuda"]).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_clear =
        said.trim().lines().count() == 1 && said.contains("cuda: not available (there is no libcuda");
    ensure!(output.status.code() == Some(2) && is_clear, "status {:?}: {said}", output.status);
    println!("{}", said.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_told_by_name() {
        let folder = std::env::temp_dir().join(format!("microserving-devices-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let said = look_for(&folder).expect_err("an empty folder").to_string();
        assert!(
            said.starts_with("gpu: none here (there is neither ") && said.contains("nvidiactl"),
            "{said}"
        );
        std::fs::write(folder.join("nvidiactl"), "").expect("a file");
        assert!(look_for(&folder).is_ok());
        std::fs::remove_dir_all(&folder).expect("it was there");
    }
}
