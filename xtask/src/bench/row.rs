//! JSON rows with the machine and the commit.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::shell;

/// Where rows go: one file a benchmark, one line a row.
pub(crate) struct Rows {
    dir: PathBuf,
    machine: Value,
    commit: String,
    files: Vec<PathBuf>,
}

impl Rows {
    /// Kept rows go to docs/benchmarks, the others to the target folder.
    pub(crate) fn new(keep: bool) -> Result<Self> {
        let dir =
            if keep { shell::root().join("docs/benchmarks") } else { shell::target_dir().join("benchmarks") };
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self { dir, machine: machine(), commit: commit(), files: Vec::new() })
    }

    /// Appends one row of a benchmark.
    pub(crate) fn push(&mut self, bench: &str, result: Value) -> Result<()> {
        let path = self.dir.join(format!("{bench}.jsonl"));
        let time =
            SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
        let row = json!({"bench": bench, "unix_time": time, "commit": self.commit, "machine": self.machine, "result": result});
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "{row}").with_context(|| format!("cannot write {}", path.display()))?;
        if !self.files.contains(&path) {
            self.files.push(path);
        }
        Ok(())
    }

    /// Says where the rows are.
    pub(crate) fn report(&self) {
        for file in &self.files {
            println!("rows: {}", file.strip_prefix(shell::root()).unwrap_or(file).display());
        }
    }
}

fn machine() -> Value {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|rest| rest.split_once(": "));
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let known = ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni"];
    let has: Vec<&str> =
        known.into_iter().filter(|flag| flags.split_whitespace().any(|found| found == *flag)).collect();
    json!({
        "cpu": model.map_or("unknown", |(_, name)| name),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "features": has,
        "os": std::env::consts::OS,
    })
}

fn commit() -> String {
    let git = |args: &[&str]| {
        shell::output(Command::new("git").args(args).current_dir(shell::root())).unwrap_or_default()
    };
    let dirty = !git(&["status", "--porcelain", "--untracked-files=no"]).trim().is_empty();
    format!("{}{}", git(&["rev-parse", "--short=12", "HEAD"]).trim(), if dirty { "+changes" } else { "" })
}
