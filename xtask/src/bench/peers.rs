//! Beside llama.cpp: the same files, the same threads, in turns.
//!
//! What is timed is what llama-bench and llama-batched-bench time; `executor-candle`'s example `like_llama_bench` does the same with our executor, in
//! process as theirs. docs/benchmarks/README.md says exactly what that is, and docs/performance.md what came of it.

mod candle;
mod llama;
mod ours;
mod process;
mod roofline;
mod servers;
mod test;

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::engine::percentile;
use super::row::Rows;
use crate::{model, table};

use process::Seen;
use roofline::Ceilings;
use test::{Kind, Test};

/// Options of `cargo xtask bench peers`.
#[derive(Debug, clap::Args)]
#[group(id = "peers_options")]
pub(crate) struct Options {
    /// For `peers`: models by their names in `cargo xtask model`, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = MODELS)]
    models: Vec<String>,
    /// For `peers`: numbers of threads, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// For `peers`: how often both are measured, in turns.
    #[arg(long, default_value = "5")]
    repeats: usize,
    /// For `peers`: which of pp512, pp2048, tg128, batched4, batched8, batched16 (other numbers are allowed) and server, separated by commas;
    /// all of these if not given.
    #[arg(long, value_delimiter = ',')]
    tests: Vec<String>,
    /// For `peers`: pp512, tg32 and batched8 only, three repeats.
    #[arg(long, conflicts_with_all = ["tests", "repeats"])]
    quick: bool,
}

/// Every form that people run, in the sizes that people try first.
const MODELS: &str = "demo,demo-q8_0,qwen3-0.6b-q8_0,qwen3-0.6b-q4_0,qwen3-0.6b-q4_k_m,qwen3-0.6b-bf16";
const TESTS: [&str; 7] = ["pp512", "pp2048", "tg128", "batched4", "batched8", "batched16", "server"];
const QUICK_TESTS: [&str; 3] = ["pp512", "tg32", "batched8"];
const QUICK_REPEATS: usize = 3;

/// Measures both sides, prints a table and says which cells miss their targets.
pub(crate) fn run(options: &Options, rows: &mut Rows) -> Result<()> {
    let names: Vec<&str> = match options.tests.as_slice() {
        [] if options.quick => QUICK_TESTS.to_vec(),
        [] => TESTS.to_vec(),
        names => names.iter().map(String::as_str).collect(),
    };
    let repeats = if options.quick { QUICK_REPEATS } else { options.repeats };
    ensure!(repeats > 0, "nothing is measured in 0 repeats");
    let (servers, names): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| *name == "server");
    let tests = names.into_iter().map(Test::named).collect::<Result<Vec<_>>>()?;
    let paths = options.models.iter().map(|name| model::named(name)).collect::<Result<Vec<_>>>()?;
    let (theirs, ours) = (llama::Llama::install()?, ours::Ours::build()?);
    let ceilings = ours.ceilings(&options.threads)?;
    for ceiling in ceilings.all() {
        rows.push("peers", json!({"what": "ceilings", "ceilings": ceiling}))?;
    }
    let mut lines = Vec::new();
    let mut memory = Vec::new();
    for (name, path) in options.models.iter().zip(&paths) {
        for &threads in &options.threads {
            if tests.is_empty() {
                continue;
            }
            let subject = Subject { name, kind: Kind::of(name), path, threads };
            let measured = measure(&subject, &tests, repeats, &theirs, &ours)?;
            for cell in measured.cells(&tests, &subject, &ceilings) {
                lines.push(cell.line());
                rows.push("peers", cell.row())?;
            }
            memory.push(measured.memory_line(&subject));
            rows.push("peers", measured.memory_row(&subject))?;
        }
    }
    if !lines.is_empty() {
        report(&ceilings, repeats, &lines, &memory);
    }
    if !servers.is_empty() {
        for (name, path) in options.models.iter().zip(&paths) {
            for &threads in &options.threads {
                let subject = Subject { name, kind: Kind::of(name), path, threads };
                servers::run(&subject, repeats, &theirs, rows)?;
            }
        }
    }
    Ok(())
}

/// What both sides run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    name: &'a str,
    kind: Kind,
    path: &'a Path,
    threads: usize,
}

fn report(ceilings: &Ceilings, repeats: usize, lines: &[Vec<String>], memory: &[Vec<String>]) {
    println!(
        "\npeers: llama.cpp ({}) and we in turns, {repeats} repeats; tokens a second, medians",
        llama::VERSION
    );
    for line in ceilings.lines() {
        println!("  {line}");
    }
    let header = [
        "model",
        "threads",
        "test",
        "llama.cpp",
        "ours",
        "ratio min",
        "median",
        "max",
        "target",
        "",
        "of roofline: llama.cpp",
        "ours",
    ];
    table::print(&header, lines);
    println!("\npeak resident memory while prefilling and decoding one sequence");
    table::print(&["model", "threads", "file MB", "llama.cpp MB", "ours MB", "ratio"], memory);
}

/// Runs both sides in turns, the first one changing, so that neither has the quiet moments for itself.
fn measure(
    subject: &Subject<'_>,
    tests: &[Test],
    repeats: usize,
    theirs: &llama::Llama,
    ours: &ours::Ours,
) -> Result<Measured> {
    let mut measured = Measured::default();
    let (single, batched): (Vec<Test>, Vec<Test>) =
        tests.iter().partition(|test| !matches!(test, Test::Batched(_)));
    for repeat in 0..repeats {
        println!("{} with {} threads: repeat {} of {repeats}", subject.name, subject.threads, repeat + 1);
        let mut take = Take::default();
        for part in [&single, &batched].into_iter().filter(|part| !part.is_empty()) {
            for turn in 0..2 {
                if (repeat + turn) % 2 == 0 {
                    take.theirs.extend(theirs.bench(subject, part)?);
                } else {
                    take.ours.extend(ours.bench(subject, part)?);
                }
            }
        }
        measured.takes.push(take);
    }
    Ok(measured)
}

/// One repeat: what each side did.
#[derive(Debug, Default)]
struct Take {
    theirs: Seen,
    ours: Seen,
}

/// All repeats of a subject.
#[derive(Debug, Default)]
struct Measured {
    takes: Vec<Take>,
}

impl Measured {
    fn cells<'a>(
        &'a self,
        tests: &'a [Test],
        subject: &'a Subject<'a>,
        ceilings: &'a Ceilings,
    ) -> Vec<Cell<'a>> {
        tests.iter().map(|&test| Cell::new(self, test, subject, ceilings)).collect()
    }

    /// Returns the peaks of both sides' first process, medians.
    fn memory(&self) -> (f64, f64) {
        let median = |of: &dyn Fn(&Take) -> u64| {
            let bytes: Vec<f64> = self.takes.iter().map(|take| of(take) as f64).collect();
            percentile(&bytes, 50.0)
        };
        (median(&|take| take.theirs.peak_rss_bytes), median(&|take| take.ours.peak_rss_bytes))
    }

    fn memory_line(&self, subject: &Subject<'_>) -> Vec<String> {
        let (theirs, ours) = self.memory();
        let megabytes = |bytes: f64| format!("{:.0}", bytes / 1e6);
        vec![
            subject.name.to_owned(),
            subject.threads.to_string(),
            megabytes(file_bytes(subject.path)),
            megabytes(theirs),
            megabytes(ours),
            format!("{:.2}", ours / theirs),
        ]
    }

    fn memory_row(&self, subject: &Subject<'_>) -> Value {
        let (theirs, ours) = self.memory();
        json!({
            "what": "memory", "model": subject.name, "threads": subject.threads, "file_bytes": file_bytes(subject.path),
            "llama_cpp_peak_rss_bytes": theirs, "ours_peak_rss_bytes": ours, "ratio": ours / theirs,
        })
    }
}

fn file_bytes(path: &Path) -> f64 {
    std::fs::metadata(path).map_or(0.0, |meta| meta.len() as f64)
}

/// A test of a subject over all repeats.
struct Cell<'a> {
    test: Test,
    subject: &'a Subject<'a>,
    theirs: Vec<f64>,
    ours: Vec<f64>,
    /// Of the tokens a second that the machine's ceilings allow, theirs and ours.
    shares: Option<(f64, f64)>,
}

impl<'a> Cell<'a> {
    fn new(measured: &Measured, test: Test, subject: &'a Subject<'a>, ceilings: &Ceilings) -> Self {
        let name = test.name();
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for take in &measured.takes {
            // `bench` has seen to it that all tests are there.
            theirs.extend(take.theirs.rates.get(&name));
            ours.extend(take.ours.rates.get(&name));
        }
        let shape = measured.takes.iter().find_map(|take| take.ours.shape.as_ref());
        let allowed =
            shape.and_then(|shape| ceilings.tokens_per_second(test, shape, subject.kind, subject.threads));
        let shares =
            allowed.map(|allowed| (percentile(&theirs, 50.0) / allowed, percentile(&ours, 50.0) / allowed));
        Self { test, subject, theirs, ours, shares }
    }

    /// Ours over theirs, repeat by repeat.
    fn ratios(&self) -> Vec<f64> {
        self.ours.iter().zip(&self.theirs).map(|(ours, theirs)| ours / theirs).collect()
    }

    fn line(&self) -> Vec<String> {
        let ratios = self.ratios();
        let (target, median) = (self.test.target(self.subject.kind), percentile(&ratios, 50.0));
        let mark = match target {
            _ if median < 1.0 => "SLOWER",
            Some(target) if median < target => "below",
            _ => "",
        };
        let percent =
            |share: Option<f64>| share.map_or("–".to_owned(), |share| format!("{:.0} %", share * 100.0));
        vec![
            self.subject.name.to_owned(),
            self.subject.threads.to_string(),
            self.test.name(),
            format!("{:.1}", percentile(&self.theirs, 50.0)),
            format!("{:.1}", percentile(&self.ours, 50.0)),
            format!("{:.2}", percentile(&ratios, 0.0)),
            format!("{median:.2}"),
            format!("{:.2}", percentile(&ratios, 100.0)),
            target.map_or("–".to_owned(), |target| format!("{target:.1}")),
            mark.to_owned(),
            percent(self.shares.map(|shares| shares.0)),
            percent(self.shares.map(|shares| shares.1)),
        ]
    }

    fn row(&self) -> Value {
        let ratios = self.ratios();
        let repeats = |values: &[f64]| json!({"median": percentile(values, 50.0), "repeats": values});
        json!({
            "what": "rate", "model": self.subject.name, "threads": self.subject.threads, "test": self.test.name(),
            "llama_cpp_version": llama::VERSION,
            "llama_cpp_tokens_per_second": repeats(&self.theirs), "ours_tokens_per_second": repeats(&self.ours),
            "ratio": {"min": percentile(&ratios, 0.0), "median": percentile(&ratios, 50.0), "max": percentile(&ratios, 100.0)},
            "target": self.test.target(self.subject.kind),
            "llama_cpp_share_of_roofline": self.shares.map(|shares| shares.0),
            "ours_share_of_roofline": self.shares.map(|shares| shares.1),
        })
    }
}

/// Finds a number in what a program printed.
fn number(value: &Value, key: &str) -> Result<f64> {
    value[key].as_f64().with_context(|| format!("no {key} in {value}"))
}
