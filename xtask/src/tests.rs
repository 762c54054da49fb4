//! Every test, with what it needs fetched or skipped aloud.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use microserving_harness::World;

use crate::{model, nixl, shell};

/// Options of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Make every skip a failure: the demo model, the Python clients, NIXL and the fixtures must be there. Only OpenSHMEM's launcher, a package of the
    /// system, may be missing; what is skipped then is said first.
    #[arg(long)]
    full: bool,
    /// Run the whole matrix of the demo model instead of the named sample.
    #[arg(long)]
    matrix: bool,
    /// Only tests whose name contains one of these.
    filters: Vec<String>,
}

/// Builds, fetches, runs.
pub(crate) fn run(args: &Args) -> Result<()> {
    // One build for all: the same features for daemons and tests, so that nothing is compiled twice.
    shell::run(shell::cargo().args(["build", "--workspace", "--all-targets"]))?;
    let demo_model = needed("the demo model", args.full, model::fetch_demo_model())?;
    let python = needed("the Python clients", args.full, python_clients())?;
    let nixl = needed("NIXL", args.full, nixl::library())?;

    if !World::can_start() {
        println!("SKIPPED: tests over OpenSHMEM (oshrun is not installed: openmpi-bin, libopenmpi-dev)");
    }

    let mut command = shell::cargo();
    if has_nextest() {
        command.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        command.args(&args.filters);
    } else {
        command.args(["test", "--workspace", "--all-targets", "--no-fail-fast", "--"]);
        command.args(&args.filters);
    }
    command.env("MICROSERVING_BIN_DIR", shell::target_dir().join("debug"));
    if let Some(path) = demo_model {
        command.env("MICROSERVING_DEMO_MODEL", path);
    }
    if let Some(path) = python {
        command.env("MICROSERVING_PYTHON", path);
    }
    if let Some(path) = nixl {
        command.env("NIXL_LIBRARY", path);
    }
    if args.full {
        command.env("MICROSERVING_FULL", "1");
    }
    if args.matrix {
        command.env("MICROSERVING_MATRIX", "1");
    }
    shell::run(&mut command)
}

/// A missing part is a failure under `--full`, and a line that says so otherwise.
fn needed(what: &str, full: bool, found: Result<PathBuf>) -> Result<Option<PathBuf>> {
    match found {
        Ok(path) => Ok(Some(path)),
        Err(error) if full => Err(error.context(format!("{what} cannot be had"))),
        Err(error) => {
            println!("SKIPPED: tests that need {what} ({error:#})");
            Ok(None)
        }
    }
}

fn has_nextest() -> bool {
    Command::new("cargo-nextest").arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Makes a virtual environment with the clients of tests/python, and returns its interpreter.
fn python_clients() -> Result<PathBuf> {
    let requirements = shell::root().join("tests/python/requirements.txt");
    let wanted =
        std::fs::read_to_string(&requirements).context("cannot read tests/python/requirements.txt")?;
    let venv = shell::target_dir().join("python");
    let python = venv.join("bin/python");
    let stamp = venv.join("requirements.txt");
    if python.exists() && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    shell::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
    shell::run(Command::new(&python).args(pip).arg(&requirements))?;
    if !python.exists() {
        bail!("the virtual environment has no interpreter");
    }
    std::fs::write(&stamp, wanted)?;
    Ok(python)
}
