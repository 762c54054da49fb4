//! What CI checks beside the tests.

use anyhow::Result;

use crate::{configuration, layers, shell};

/// Runs the checks, cheapest first.
pub(crate) fn run() -> Result<()> {
    shell::run(shell::cargo().args(["fmt", "--all", "--check"]))?;
    layers::run()?;
    shell::run(shell::cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    for (package, features) in FEATURES {
        let mut command = shell::cargo();
        command.args(["clippy", "--package", package, "--no-default-features"]);
        if !features.is_empty() {
            command.args(["--features", features]);
        }
        shell::run(command.args(["--", "-D", "warnings"]))?;
    }
    shell::run(shell::cargo().args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    shell::run(shell::cargo().args(["test", "--workspace", "--doc"]))?;
    configuration::run(&configuration::Args::check())
}

/// Feature sets other than the default one, which everything above uses.
const FEATURES: &[(&str, &str)] = &[("microserving-engined", "")];
