//! What transports carry: bytes between two processes against `memcpy`, and what of a transfer a request waits for.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Timed};
use microserving_harness::{Cluster, ClusterOptions, World};
use serde_json::{Value, json};

use super::engine::percentile;
use super::row::Rows;
use crate::{nixl, shell, table};

/// Tokens of the prompt whose transfer is looked at.
const PROMPT_TOKENS: u32 = 2000;
const REQUESTS: u32 = 5;
/// Symmetric memory of an element: more than any region here.
const HEAP_BYTES: u64 = 1 << 30;

/// Measures the transports that there are on this machine.
pub(crate) fn run(binaries: &Path, model: &str, rows: &mut Rows) -> Result<()> {
    let launcher = World::can_start();
    if !launcher {
        println!("SKIPPED: openshmem (oshrun is not installed: openmpi-bin, libopenmpi-dev)");
    }
    let nixl = nixl::library();
    if let Err(error) = &nixl {
        println!("SKIPPED: nixl ({error:#})");
    }
    let there = There { launcher, nixl: nixl.ok() };
    bandwidth(&there, rows)?;
    exposed(binaries, model, &there, rows)
}

/// What there is beside shared memory.
struct There {
    /// OpenSHMEM's.
    launcher: bool,
    /// The library.
    nixl: Option<PathBuf>,
}

/// Runs the transports' own measurements.
fn bandwidth(there: &There, rows: &mut Rows) -> Result<()> {
    let examples = shell::target_dir().join("release/examples");
    let build = |package: &str, example: &str| {
        let arguments = ["build", "--quiet", "--release", "--package", package, "--example", example];
        shell::run(shell::cargo().args(arguments))
    };
    build("microserving-transport-shm", "bandwidth")?;
    let mut printed = shell::output(&mut Command::new(examples.join("bandwidth")))?;
    if there.launcher {
        build("microserving-transport-pgas", "pgas_bandwidth")?;
        let mut command = Command::new("oshrun");
        command.args([
            "--oversubscribe",
            "--mca",
            "btl",
            "^uct",
            "-x",
            "SHMEM_SYMMETRIC_HEAP_SIZE",
            "-np",
            "2",
        ]);
        command.arg(examples.join("pgas_bandwidth")).env("SHMEM_SYMMETRIC_HEAP_SIZE", HEAP_BYTES.to_string());
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        printed += &shell::output(&mut command)?;
    }
    if let Some(library) = &there.nixl {
        build("microserving-transport-nixl", "nixl_bandwidth")?;
        printed += &shell::output(Command::new(examples.join("nixl_bandwidth")).arg(library))?;
    }
    let mut lines = Vec::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let result: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        lines.push(bandwidth_line(&result)?);
        rows.push("transports", result)?;
    }
    ensure!(!lines.is_empty(), "the measurements printed no figures:\n{printed}");
    println!("\ntransports: rounds of 64 MiB between two processes, or two threads (loopback)");
    table::print(
        &["transport", "mode", "KiB a put", "put GB/s", "writing GB/s", "memcpy GB/s", "put/memcpy"],
        &lines,
    );
    Ok(())
}

fn bandwidth_line(result: &Value) -> Result<Vec<String>> {
    let figure = |key: &str| result[key].as_f64().with_context(|| format!("no figure {key} in {result}"));
    let text =
        |key: &str| result[key].as_str().map(str::to_owned).with_context(|| format!("no {key} in {result}"));
    Ok(vec![
        text("transport")?,
        text("mode")?,
        format!("{}", figure("put_bytes")? / 1024.0),
        format!("{:.2}", figure("put_gb_per_second")?),
        figure("busy_gb_per_second").map_or_else(|_| "–".to_owned(), |busy| format!("{busy:.2}")),
        format!("{:.2}", figure("memcpy_gb_per_second")?),
        format!("{:.2}", figure("ratio")?),
    ])
}

/// Disaggregates long prompts over two real engines, and asks what of the time to the first token was waiting for a transfer.
fn exposed(binaries: &Path, model: &str, there: &There, rows: &mut Rows) -> Result<()> {
    let mut lines = Vec::new();
    for transport in ["shm", "nixl", "openshmem"] {
        let engine_args = [
            "--threads",
            "1",
            "--transport",
            transport,
            "--num-pages",
            "400",
            "--max-step-milliseconds",
            "0",
        ];
        let nixl = there.nixl.as_ref().filter(|_| transport == "nixl");
        let answers = if transport == "shm" || nixl.is_some() {
            let mut options = ClusterOptions::model(2, model).engine_args(engine_args);
            if let Some(library) = nixl {
                options = options.engine_args(["--nixl-library", &library.to_string_lossy()]);
            }
            options.binaries = Some(binaries.to_path_buf());
            answers(Cluster::start(&options)?.router().url())?
        } else if transport == "openshmem" && there.launcher {
            let args: Vec<String> =
                ["--model", model].iter().chain(&engine_args).map(|&arg| arg.to_owned()).collect();
            let engines = [args.clone(), args];
            let patience = Duration::from_secs(120);
            let world = World::start(Some(binaries.to_path_buf()), &engines, HEAP_BYTES, &[], patience)?;
            answers(world.router().url())?
        } else {
            continue;
        };
        let (line, result) = exposed_row(transport, model, &answers)?;
        lines.push(line);
        rows.push("transports_exposed", result)?;
    }
    println!(
        "\ntransports: prompts of {PROMPT_TOKENS} tokens, prefilled on one engine and generated on another, {model}"
    );
    table::print(&["transport", "TTFT p50 ms", "transfer ms", "exposed ms", "exposed/TTFT"], &lines);
    Ok(())
}

fn answers(router: &str) -> Result<Vec<Timed>> {
    (0..REQUESTS)
        .map(|request| {
            let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|at| 40 + (at * 7 + request * 13) % 200).collect();
            let body = json!({
                "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
                "cache_salt": request.to_string(),
            });
            let headers = [("x-microserving-pattern", "prefill_decode"), ("x-microserving-stats", "1")];
            let answer = http::timed_stream(&format!("{router}/v1/completions"), &headers, &body, |_| ())?;
            let sent = answer.stats["sent_tokens"].as_u64();
            ensure!(sent == Some(u64::from(PROMPT_TOKENS) - 1), "the prompt was not sent: {}", answer.stats);
            Ok(answer)
        })
        .collect()
}

fn exposed_row(transport: &str, model: &str, answers: &[Timed]) -> Result<(Vec<String>, Value)> {
    let figures = |key: &str| {
        let figure = |answer: &Timed| answer.stats[key].as_f64();
        let all = answers.iter().map(figure).collect::<Option<Vec<f64>>>();
        all.map(|all| percentile(&all, 50.0)).with_context(|| format!("no {key} in an answer"))
    };
    let ttft: Vec<f64> = answers.iter().map(|answer| answer.ttft.as_secs_f64()).collect();
    let ttft = percentile(&ttft, 50.0);
    let (transfer, exposed) = (figures("transfer_seconds")?, figures("exposed_transfer_seconds")?);
    let name = Path::new(model).file_name().map_or(model.into(), |name| name.to_string_lossy());
    let result = json!({
        "transport": transport, "model": name, "prompt_tokens": PROMPT_TOKENS, "requests": REQUESTS,
        "ttft_p50_seconds": ttft, "transfer_p50_seconds": transfer, "exposed_p50_seconds": exposed,
        "exposed_share": exposed / ttft,
    });
    let millis = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let line = vec![
        transport.to_owned(),
        millis(ttft),
        millis(transfer),
        millis(exposed),
        format!("{:.2} %", exposed / ttft * 100.0),
    ];
    Ok((line, result))
}
