//! What CI checks beside the tests.

use anyhow::Result;

use crate::{configuration, kernels, layers, nvshmem, shell};

/// Runs the checks, cheapest first.
pub(crate) fn run() -> Result<()> {
    shell::run(shell::cargo().args(["fmt", "--all", "--check"]))?;
    layers::run()?;
    shell::run(shell::cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    for features in FEATURES {
        shell::run(
            shell::cargo().args(["clippy", "--workspace"]).args(*features).args(["--", "-D", "warnings"]),
        )?;
    }
    kernels::run_in_ci()?;
    nvshmem::run_if_fetched()?;
    shell::run(shell::cargo().args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    shell::run(shell::cargo().args(["test", "--workspace", "--doc"]))?;
    configuration::run(&configuration::Args::check())
}

/// Feature sets other than the default one, which everything above uses: no candle; the model hub with the stub
/// engine over gRPC; the kernels' tests on the CPU.
const FEATURES: &[&[&str]] = &[
    &["--no-default-features"],
    &["--examples", "--features", "microserving-engined/hub,microserving-examples/grpc"],
    &["--tests", "--features", "microserving-kernels/emulated"],
];
