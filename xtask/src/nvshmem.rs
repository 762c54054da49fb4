//! NVSHMEM without a GPU: its packages fetched, bindings made and checked, the library loaded and asked.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::{shell, wheels};

/// What is built against: the versions fit each other, and the CUDA 13.0 toolkit of driver 580. The compiler's library is for bindgen.
const PACKAGES: [&str; 5] = [
    "nvidia-nvshmem-cu13==3.4.5",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "libclang==18.1.1",
];
/// What lives behind the feature `nvshmem`.
const CRATES: [&str; 2] = ["nvshmem-sys", "microserving-transport-pgas"];

/// Options of `cargo xtask nvshmem`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only fetch headers and library, and print the environment that the feature `nvshmem` needs.
    #[arg(long)]
    fetch: bool,
}

/// Fetches, and unless that is all, lints and tests.
pub(crate) fn run(args: &Args) -> Result<()> {
    let home = Home::fetch()?;
    if args.fetch {
        for (name, value) in home.environment() {
            println!("export {name}={}", value.display());
        }
        return Ok(());
    }
    home.check()
}

/// As [`run`], but what cannot be fetched is said aloud and left out.
pub(crate) fn run_if_fetched() -> Result<()> {
    match Home::fetch() {
        Ok(home) => home.check(),
        Err(error) => {
            println!("SKIPPED: everything behind the feature `nvshmem` ({error:#})");
            Ok(())
        }
    }
}

/// The folder that the packages are in.
struct Home(PathBuf);

impl Home {
    /// Installs the packages below the target folder, unless they are there. Nothing of them is part of this repository.
    fn fetch() -> Result<Self> {
        let dir = shell::target_dir().join("nvshmem");
        wheels::install(&dir, &PACKAGES)?;
        let home = Self(dir);
        if !home.library().is_file() {
            bail!("the packages hold no {}", home.library().display());
        }
        Ok(home)
    }

    fn library(&self) -> PathBuf {
        self.0.join("nvidia/nvshmem/lib/libnvshmem_host.so.3")
    }

    fn environment(&self) -> [(&'static str, PathBuf); 4] {
        let below = |path: &str| self.0.join(Path::new(path));
        [
            ("NVSHMEM_HOME", below("nvidia/nvshmem")),
            ("CUDA_HOME", below("nvidia/cu13")),
            ("LIBCLANG_PATH", below("clang/native")),
            ("NVSHMEM_LIBRARY", self.library()),
        ]
    }

    fn check(&self) -> Result<()> {
        for name in CRATES {
            let cargo = |command: &str| {
                let mut cargo = shell::cargo();
                cargo.args([command, "--package", name, "--features", "nvshmem"]).envs(self.environment());
                cargo
            };
            shell::run(cargo("clippy").args(["--all-targets", "--", "-D", "warnings"]))?;
            shell::run(&mut cargo("test"))?;
        }
        let daemon =
            ["clippy", "--package", "microserving-engined", "--features", "nvshmem", "--", "-D", "warnings"];
        shell::run(shell::cargo().args(daemon).envs(self.environment()))
    }
}
