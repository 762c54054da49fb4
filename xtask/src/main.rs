//! `cargo xtask`: the project's own commands.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a command-line tool talks on stdout")]
#![allow(clippy::disallowed_types, reason = "real processes are measured; there is no clock to pause")]

mod bench;
mod ci;
mod configuration;
mod demo;
mod gpu;
mod kernels;
mod layers;
mod model;
mod nixl;
mod nvshmem;
mod shape;
mod shell;
mod table;
mod tests;
mod wheels;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Starts two engines and a router, and sends one chat through every pattern.
    Demo(demo::Args),
    /// Runs every test.
    Test(tests::Args),
    /// Runs what CI runs beside the tests: format, lints, docs, features, layers, generated files.
    Ci,
    /// Fetches or makes the models that the demo and the measurements use, and prints where they are.
    Model(model::Args),
    /// Measures, prints a table and writes JSON rows.
    Bench(bench::Args),
    /// Fetches NVSHMEM's packages, and checks what is built against them: bindings, loading, two processes that find each other.
    Nvshmem(nvshmem::Args),
    /// Fetches NIXL's package, and tests the transport over it.
    Nixl(nixl::Args),
    /// Compiles the kernels for GPUs, reports registers and spills, and runs every kernel on the CPU.
    Kernels(kernels::Args),
    /// Checks and measures what runs on a GPU, as one JSON row; on a machine without one, says so and exits with status 2.
    Gpu(gpu::Args),
    /// Checks the crates' dependencies against the drawing in ARCHITECTURE.md.
    Layers,
    /// Prints the sizes of files and functions, to talk about.
    Shape,
    /// Checks docs/configuration.md against the daemons' options, or rewrites it with --write.
    Configuration(configuration::Args),
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<gpu::NoGpu>() => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("Error: {error:?}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => tests::run(&args),
        Command::Ci => ci::run(),
        Command::Model(args) => model::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Nixl(args) => nixl::run(&args),
        Command::Nvshmem(args) => nvshmem::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Gpu(args) => gpu::run(&args),
        Command::Layers => layers::run(),
        Command::Shape => shape::run(),
        Command::Configuration(args) => configuration::run(&args),
    }
}

#[cfg(test)]
mod command_line {
    use clap::CommandFactory as _;

    #[test]
    fn every_command_can_be_parsed() {
        super::Args::command().debug_assert();
    }
}
