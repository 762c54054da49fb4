//! Their side: llama.cpp, built for this machine from the tree that a Python package carries, and run by its own measuring programs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Daemon, http};
use serde_json::Value;

use super::process::{self, Seen};
use super::test::{BATCHED_PROMPT, BATCHED_STEPS, Test};
use super::{Subject, number};
use crate::{model, shell};

/// The package whose source carries llama.cpp under `vendor`.
const PACKAGE: &str = "llama-cpp-python";
/// Its version.
pub(super) const VERSION: &str = "0.3.36";
/// What builds it.
const TOOLS: [&str; 2] = ["cmake==3.31.10", "ninja==1.13.0"];
const PROGRAMS: [&str; 3] = ["llama-bench", "llama-batched-bench", "llama-server"];
/// Instructions of this machine, everything else as it comes: OpenMP, repacked weights and llamafile's kernels are on by default. The rest is left
/// out because none of the programs needs it.
///
/// Their kernels for AMX load the shapes of its registers from the stack, by an intrinsic that in GCC 12 does not tell that it reads all of them: what is
/// written before is left out as dead, and the first product faults. So stores are not left out.
const OPTIONS: [&str; 10] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
];
/// Tokens of the untimed prompt before the others, which touches all weights.
const WARM_UP: usize = 32;

/// The built programs.
#[derive(Debug)]
pub(super) struct Llama {
    bin: PathBuf,
}

impl Llama {
    /// Fetches and builds it on first use: some minutes.
    pub(super) fn install() -> Result<Self> {
        let dir = model::cache_dir()?.join(format!("llama.cpp-{VERSION}"));
        let bin = dir.join("build/bin");
        let stamp = dir.join("built");
        if !stamp.exists() {
            std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
            fetch(&dir)?;
            build(&dir)?;
            std::fs::write(&stamp, "")?;
        }
        Ok(Self { bin })
    }

    /// Runs some tests, all in one process.
    pub(super) fn bench(&self, subject: &Subject<'_>, tests: &[Test]) -> Result<Seen> {
        if tests.iter().all(|test| matches!(test, Test::Batched(_))) {
            self.batched_bench(subject, tests)
        } else {
            self.single_bench(subject, tests)
        }
    }

    /// llama-bench, which would run every prompt once before it is timed: one short one does.
    fn single_bench(&self, subject: &Subject<'_>, tests: &[Test]) -> Result<Seen> {
        let (mut prompts, mut outputs) = (vec![WARM_UP.to_string()], Vec::new());
        for test in tests {
            match test {
                Test::Prompt(size) => prompts.push(size.to_string()),
                Test::Generate(size) => outputs.push(size.to_string()),
                Test::Batched(_) => {}
            }
        }
        if outputs.is_empty() {
            outputs.push("0".to_owned());
        }
        let (prompts, outputs) = (prompts.join(","), outputs.join(","));
        let mut command = Command::new(self.bin.join("llama-bench"));
        command.arg("-m").arg(subject.path).args([
            "-t",
            &subject.threads.to_string(),
            "-r",
            "1",
            "--no-warmup",
        ]);
        command.args(["-p", &prompts, "-n", &outputs, "-o", "jsonl"]);
        let (objects, peak_rss_bytes) = process::run(&mut command)?;
        let mut seen = Seen { peak_rss_bytes, ..Seen::default() };
        for test in tests {
            let (prompt, output) = match *test {
                Test::Prompt(size) => (size, 0),
                Test::Generate(size) => (0, size),
                Test::Batched(_) => continue,
            };
            let fits = |object: &&Value| object["n_prompt"] == prompt && object["n_gen"] == output;
            let object = objects.iter().find(fits).with_context(|| format!("{} is missing", test.name()))?;
            seen.rates.insert(test.name(), number(object, "avg_ts")?);
        }
        Ok(seen)
    }

    /// llama-batched-bench; the prompt is computed once and its KV copied to each sequence, which is not timed.
    fn batched_bench(&self, subject: &Subject<'_>, tests: &[Test]) -> Result<Seen> {
        let sizes: Vec<usize> = tests
            .iter()
            .filter_map(|test| if let Test::Batched(size) = test { Some(*size) } else { None })
            .collect();
        let most = sizes.iter().max().copied().unwrap_or(1);
        let list = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let threads = subject.threads.to_string();
        // A context that has room for the largest, in whole pages of 256 a sequence.
        let context = most * (BATCHED_PROMPT + BATCHED_STEPS).next_multiple_of(256);
        let mut command = Command::new(self.bin.join("llama-batched-bench"));
        command.arg("-m").arg(subject.path).args([
            "-t",
            &threads,
            "-tb",
            &threads,
            "-c",
            &context.to_string(),
            "-pps",
        ]);
        command.args([
            "-npp",
            &BATCHED_PROMPT.to_string(),
            "-ntg",
            &BATCHED_STEPS.to_string(),
            "-npl",
            &list,
        ]);
        command.args(["--output-format", "jsonl"]);
        let (objects, peak_rss_bytes) = process::run(&mut command)?;
        let mut seen = Seen { peak_rss_bytes, ..Seen::default() };
        for size in sizes {
            let object = objects.iter().find(|object| object["pl"] == size);
            let object = object.with_context(|| format!("{size} sequences are missing in {objects:?}"))?;
            seen.rates.insert(Test::Batched(size).name(), number(object, "speed_tg")?);
        }
        Ok(seen)
    }

    /// Starts llama-server with so many slots of so many tokens, and waits until it is ready.
    pub(super) fn serve(
        &self,
        subject: &Subject<'_>,
        slots: usize,
        tokens: usize,
        port: u16,
    ) -> Result<Daemon> {
        let threads = subject.threads.to_string();
        let mut command = Command::new(self.bin.join("llama-server"));
        command.arg("-m").arg(subject.path).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["-t", &threads, "-tb", &threads, "-np", &slots.to_string()]);
        command.args(["-c", &(slots * tokens).to_string()]);
        let is_up = |url: &str| http::status(&format!("{url}/health")).is_ok_and(|status| status == 200);
        Daemon::adopt("llama-server", command, port, is_up, Duration::from_secs(120))
    }
}

/// Fetches the package's source and unpacks llama.cpp.
fn fetch(dir: &Path) -> Result<()> {
    let source = dir.join("source");
    if source.exists() {
        return Ok(());
    }
    let wanted = format!("{PACKAGE}=={VERSION}");
    println!("fetching {wanted} (75 MB, once) into {}", dir.display());
    let download = dir.join("download");
    let pip = [
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-binary",
        PACKAGE,
        "--dest",
    ];
    shell::run(Command::new("python3").args(pip).arg(&download).arg(&wanted))
        .with_context(|| format!("{wanted} cannot be fetched"))?;
    let archive = download.join(format!("{}-{VERSION}.tar.gz", PACKAGE.replace('-', "_")));
    let unpacked = dir.join("unpacked");
    shell::run(Command::new("python3").args(["-m", "tarfile", "-e"]).arg(&archive).arg(&unpacked))?;
    let vendored = unpacked.join(format!("{}-{VERSION}/vendor/llama.cpp", PACKAGE.replace('-', "_")));
    ensure!(vendored.is_dir(), "{} carries no llama.cpp", archive.display());
    std::fs::rename(&vendored, &source).context("cannot move the source into place")?;
    // The source is in place; leftovers of the download are only in the way.
    let _ = std::fs::remove_dir_all(&download);
    let _ = std::fs::remove_dir_all(&unpacked);
    Ok(())
}

fn build(dir: &Path) -> Result<()> {
    let tools = dir.join("env");
    if !tools.join("bin/ninja").exists() {
        shell::run(Command::new("python3").args(["-m", "venv"]).arg(&tools))?;
        shell::run(
            Command::new(tools.join("bin/pip")).args(["install", "--quiet", "--no-input"]).args(TOOLS),
        )
        .context("the build tools cannot be installed")?;
    }
    let (source, build, cmake) = (dir.join("source"), dir.join("build"), tools.join("bin/cmake"));
    let mut ninja = std::ffi::OsString::from("-DCMAKE_MAKE_PROGRAM=");
    ninja.push(tools.join("bin/ninja"));
    let mut configure = Command::new(&cmake);
    configure.args(["-G", "Ninja", "-S"]).arg(&source).arg("-B").arg(&build).arg(ninja).args(OPTIONS);
    shell::run(&mut configure)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    shell::run(
        Command::new(&cmake)
            .arg("--build")
            .arg(&build)
            .args(["--parallel", &cores, "--target"])
            .args(PROGRAMS),
    )
}
