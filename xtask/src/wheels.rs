//! Packages of PyPI in a folder of their own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::shell;

/// Installs packages into `dir`, without what they depend on, unless exactly these are there already.
pub(crate) fn install(dir: &Path, packages: &[&str]) -> Result<()> {
    let stamp = dir.join("packages");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot clear {}", dir.display()))?;
    }
    let pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
        "--target",
    ];
    shell::run(Command::new("python3").args(pip).arg(dir).args(packages))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}
