//! Measurements: one table on the terminal, one JSON row a figure.

mod engine;
mod index;
mod load;
mod micro;
mod patterns;
mod peers;
mod router;
pub(crate) mod row;
mod switch;
mod transports;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::{model, shell};

/// Options of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to measure; everything but `peers`, which takes long, if not given.
    #[arg(value_enum)]
    what: Vec<What>,
    /// The model for `engine` and `transports`; the demo model if not given.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    router: router::Options,
    /// Seconds that `switch` changes patterns, and as long again without.
    #[arg(long, default_value = "15")]
    seconds: u64,
    #[command(flatten)]
    beside: peers::Options,
    /// Append the rows to docs/benchmarks instead of target/benchmarks.
    #[arg(long)]
    keep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Prefill 512 and decode 128 tokens at batches 1, 4, 8 and 16, over HTTP.
    Engine,
    /// A hop through the router: added latency, requests a second, CPU a request, over stub engines.
    Router,
    /// Changing the pattern under load: time to the first request under the new one, and TPOT meanwhile.
    Switch,
    /// KV bytes between two processes, against memcpy in the same run; what of a transfer a long prompt waits for, through real engines.
    Transports,
    /// Memory of the router's index of held prefixes while engines come and go.
    Index,
    /// radix, kvcache and the router's choosing, by criterion.
    Micro,
    /// Patterns under the same load, on modelled hardware in virtual time.
    Patterns,
    /// The CPU executor beside llama.cpp on the same files, and engined beside llama-server.
    Peers,
}

/// Measures what was asked for.
pub(crate) fn run(args: &Args) -> Result<()> {
    let all = [
        What::Engine,
        What::Router,
        What::Switch,
        What::Transports,
        What::Index,
        What::Micro,
        What::Patterns,
    ];
    let chosen = if args.what.is_empty() { all.to_vec() } else { args.what.clone() };
    let mut rows = row::Rows::new(args.keep)?;
    for what in chosen {
        match what {
            What::Engine => {
                let model = chosen_model(args)?;
                engine::run(&release(&["microserving-engined", "microserving-routerd"])?, &model, &mut rows)?;
            }
            What::Router => router::run(&mut rows, &args.router)?,
            What::Switch => {
                let binaries = release(&["microserving-engined", "microserving-routerd"])?;
                switch::run(&binaries, &mut rows, args.seconds)?;
            }
            What::Transports => {
                let model = chosen_model(args)?;
                transports::run(
                    &release(&["microserving-engined", "microserving-routerd"])?,
                    &model,
                    &mut rows,
                )?;
            }
            What::Index => index::run(&mut rows)?,
            What::Micro => micro::run(&mut rows)?,
            What::Patterns => patterns::run(&mut rows)?,
            What::Peers => peers::run(&args.beside, &mut rows)?,
        }
    }
    rows.report();
    Ok(())
}

fn chosen_model(args: &Args) -> Result<String> {
    match &args.model {
        Some(model) => Ok(model.clone()),
        None => Ok(model::fetch_demo_model()?.display().to_string()),
    }
}

/// Builds packages as users run them, and returns where the binaries are.
fn release(packages: &[&str]) -> Result<PathBuf> {
    let mut command = shell::cargo();
    command.args(["build", "--release"]);
    for package in packages {
        command.args(["--package", package]);
    }
    shell::run(&mut command)?;
    Ok(shell::target_dir().join("release"))
}
