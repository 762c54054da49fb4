//! What CI checks beside the tests.

use anyhow::Result;

use crate::{configuration, gpu, kernels, layers, nvshmem, shell};

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
    let nvcc = kernels::run_in_ci()?;
    gpu::check_in_ci(nvcc.as_deref())?;
    nvshmem::run_if_fetched()?;
    shell::run(shell::cargo().args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    shell::run(shell::cargo().args(["test", "--workspace", "--doc"]))?;
    configuration::run(&configuration::Args::check())
}

/// Feature sets other than the default one, which everything above uses: no candle; the model hub with the stub
/// engine over gRPC; the kernels' and the GPU executor's tests on the CPU.
const FEATURES: &[&[&str]] = &[
    &["--no-default-features"],
    &["--examples", "--features", "microserving-engined/hub,microserving-examples/grpc"],
    &[
        "--tests",
        "--examples",
        "--features",
        "microserving-kernels/emulated,microserving-executor-cuda/emulated",
    ],
];
