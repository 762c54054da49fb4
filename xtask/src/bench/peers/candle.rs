//! What candle does alone: a program of its own outside the workspace, so that nobody builds candle's models who does not measure them.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::process;
use super::servers::Served;
use super::{Subject, number};
use crate::shell;

/// Requests that are computed. All are as long and nothing is kept from one to the next, so the others take as long as these in turn: sixteen would
/// take minutes.
const COMPUTED: usize = 4;

/// The built program.
#[derive(Debug)]
pub(super) struct Candle {
    program: PathBuf,
}

impl Candle {
    pub(super) fn build() -> Result<Self> {
        let target = shell::target_dir().join("peers/candle");
        let manifest = shell::root().join("xtask/peers/candle/Cargo.toml");
        let mut command = shell::cargo();
        command.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest);
        shell::run(command.arg("--target-dir").arg(&target))?;
        Ok(Self { program: target.join("release/candle_alone") })
    }

    /// Serves the prompts as far as it can: one after the other, all waiting from the beginning whose turn a closed loop of eight clients would let
    /// wait. Nothing is kept from one to the next.
    pub(super) fn serve(
        &self,
        subject: &Subject<'_>,
        prompts: &[Vec<usize>],
        output: usize,
    ) -> Result<Served> {
        const CLIENTS: usize = 8;
        let mut command = Command::new(&self.program);
        command
            .arg(subject.path)
            .arg(output.to_string())
            .env("RAYON_NUM_THREADS", subject.threads.to_string());
        command.args(
            prompts
                .iter()
                .take(COMPUTED)
                .map(|prompt| prompt.iter().map(usize::to_string).collect::<Vec<_>>().join(",")),
        );
        let (objects, _) = process::run(&mut command)?;
        let computed = prompts.len().min(COMPUTED);
        ensure!(objects.len() == computed, "{} answers for {computed} prompts", objects.len());
        let mut now = 0.0;
        let mut ends = Vec::new();
        let mut answers = Vec::new();
        for (index, object) in objects.iter().cycle().take(prompts.len()).enumerate() {
            let (first, rest) = (number(object, "first_seconds")?, number(object, "rest_seconds")?);
            // A client sends when its last answer is whole.
            let sent = index.checked_sub(CLIENTS).map_or(0.0, |before| ends[before]);
            let ttft = Duration::try_from_secs_f64(now + first - sent).context("time went backwards")?;
            let tpot =
                Duration::try_from_secs_f64(rest / (output - 1) as f64).context("time went backwards")?;
            answers.push((ttft, tpot));
            now += first + rest;
            ends.push(now);
        }
        Ok(Served::of(&answers, Duration::try_from_secs_f64(now).context("time went backwards")?))
    }
}
