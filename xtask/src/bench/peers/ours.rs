//! Our side: the executor in process, by examples of its crate.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::process::{self, Seen};
use super::roofline::{Ceilings, shape_in};
use super::test::{BATCHED_PROMPT, BATCHED_STEPS, Test};
use super::{Subject, number};
use crate::shell;

/// The measuring programs.
#[derive(Debug)]
pub(super) struct Ours {
    examples: PathBuf,
}

impl Ours {
    pub(super) fn build() -> Result<Self> {
        let package = ["--package", "microserving-executor-candle"];
        let examples = ["--example", "like_llama_bench", "--example", "ceilings"];
        shell::run(shell::cargo().args(["build", "--release"]).args(package).args(examples))?;
        Ok(Self { examples: shell::target_dir().join("release/examples") })
    }

    /// Measures the machine.
    pub(super) fn ceilings(&self, threads: &[usize]) -> Result<Ceilings> {
        let mut command = Command::new(self.examples.join("ceilings"));
        command.args(threads.iter().map(usize::to_string));
        Ok(Ceilings::new(process::run(&mut command)?.0))
    }

    /// Runs some tests, all in one process.
    pub(super) fn bench(&self, subject: &Subject<'_>, tests: &[Test]) -> Result<Seen> {
        let (mut pp, mut tg, mut batched) = (Vec::new(), Vec::new(), Vec::new());
        for test in tests {
            match test {
                Test::Prompt(size) => pp.push(size.to_string()),
                Test::Generate(size) => tg.push(size.to_string()),
                Test::Batched(size) => batched.push(size.to_string()),
            }
        }
        let mut command = Command::new(self.examples.join("like_llama_bench"));
        command.arg(subject.path).arg(format!("threads={}", subject.threads));
        for (key, sizes) in [("pp", pp), ("tg", tg), ("batched", batched)] {
            if !sizes.is_empty() {
                command.arg(format!("{key}={}", sizes.join(",")));
            }
        }
        command.arg(format!("npp={BATCHED_PROMPT}")).arg(format!("ntg={BATCHED_STEPS}"));
        let (objects, peak_rss_bytes) = process::run(&mut command)?;
        let mut seen = Seen { peak_rss_bytes, shape: Some(shape_in(&objects)?), ..Seen::default() };
        for test in tests.iter().map(|test| test.name()) {
            let object = objects.iter().find(|object| object["test"] == test.as_str());
            let object = object.with_context(|| format!("{test} is missing in {objects:?}"))?;
            seen.rates.insert(test, number(object, "tokens_per_second")?);
        }
        Ok(seen)
    }
}
