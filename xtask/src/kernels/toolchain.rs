//! nvcc, from where it is or from PyPI.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{shell, wheels};

/// The compiler's version in these wheels.
const VERSION: &str = "13.0.88";

/// The wheels of one toolkit. Without the versions pip would take compiler parts that do not fit each other, and a newer PTX than
/// drivers of CUDA 13.0 know.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// Returns the path of nvcc: that of NVCC, else one installed into the target folder, once.
pub(crate) fn nvcc() -> Result<PathBuf> {
    if let Some(nvcc) = std::env::var_os("NVCC") {
        return Ok(nvcc.into());
    }
    let dir = shell::target_dir().join("nvcc").join(VERSION);
    let nvcc = dir.join("nvidia/cu13/bin/nvcc");
    wheels::install(&dir, &WHEELS)
        .context("nvcc cannot be installed; --no-nvcc does without, NVCC names another")?;
    if !nvcc.is_file() {
        bail!("the wheels brought no {}", nvcc.display());
    }
    Ok(nvcc)
}

/// Asks a compiler for its version: `13.0.88`.
pub(crate) fn version(nvcc: &Path) -> Result<String> {
    let said = shell::output(Command::new(nvcc).arg("--version"))?;
    let version =
        said.split_whitespace().filter_map(|word| word.strip_prefix('V')).find(|rest| rest.contains('.'));
    version.map(str::to_owned).with_context(|| format!("no version in what nvcc said: {said}"))
}
