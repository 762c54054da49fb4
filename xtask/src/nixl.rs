//! NIXL: its package fetched, and the transport over it tested.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::{shell, wheels};

/// The library with its C interface, UCX and all that these need; what else the package depends on is for Python.
const PACKAGE: &str = "nixl-cu13==1.5.1";

/// Options of `cargo xtask nixl`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only fetch the library, and print the environment that tests find it by.
    #[arg(long)]
    fetch: bool,
}

/// Fetches, and unless that is all, tests.
pub(crate) fn run(args: &Args) -> Result<()> {
    let library = library()?;
    if args.fetch {
        println!("export NIXL_LIBRARY={}", library.display());
        return Ok(());
    }
    let test = ["test", "--package", "microserving-transport-nixl"];
    shell::run(shell::cargo().args(test).env("NIXL_LIBRARY", &library).env("MICROSERVING_FULL", "1"))
}

/// Installs the package below the target folder, unless it is there, and returns the library. Nothing of it is part of this repository.
pub(crate) fn library() -> Result<PathBuf> {
    let dir = shell::target_dir().join("nixl");
    wheels::install(&dir, &[PACKAGE])?;
    let library = dir.join(".nixl_cu13.mesonpy.libs/libnixl_capi.so");
    if !library.is_file() {
        bail!("the package holds no {}", library.display());
    }
    Ok(library)
}
