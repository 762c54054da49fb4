//! A measuring program: run to its end, its lines of JSON, and the most memory that it had.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::roofline::Shape;

/// How often the kernel is asked for the peak, which is the largest so far: only growth in the very last moments can be missed.
const LOOK: Duration = Duration::from_millis(5);

/// What one side did in a repeat.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Tokens a second by the test's name.
    pub(super) rates: BTreeMap<String, f64>,
    /// Of the process that ran first.
    pub(super) peak_rss_bytes: u64,
    pub(super) shape: Option<Shape>,
}

impl Seen {
    /// Adds what another process of the same side did.
    pub(super) fn extend(&mut self, other: Self) {
        self.rates.extend(other.rates);
        if self.peak_rss_bytes == 0 {
            self.peak_rss_bytes = other.peak_rss_bytes;
        }
        self.shape = self.shape.take().or(other.shape);
    }
}

/// Runs a program and returns the JSON objects that it printed, a line each, and its peak of resident memory in bytes.
pub(super) fn run(command: &mut Command) -> Result<(Vec<Value>, u64)> {
    let program = command.get_program().to_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let status_file = format!("/proc/{}/status", child.id());
    let (mut stdout, mut stderr) =
        (child.stdout.take().context("it is piped")?, child.stderr.take().context("it is piped")?);
    std::thread::scope(|scope| {
        let printed = scope.spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let complained = scope.spawn(move || {
            let mut text = Vec::new();
            // Only for a message.
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let mut peak = 0;
        let status = loop {
            peak = peak
                .max(std::fs::read_to_string(&status_file).ok().as_deref().and_then(peak_of).unwrap_or(0));
            if let Some(status) = child.try_wait()? {
                break status;
            }
            std::thread::sleep(LOOK);
        };
        let text =
            printed.join().expect("nothing in it panics").context("it printed something that is not text")?;
        if !status.success() {
            let complained = complained.join().expect("nothing in it panics");
            bail!("{} failed ({status}): {complained}", program.display());
        }
        let objects = text.lines().filter(|line| line.starts_with('{'));
        let objects =
            objects.map(|line| serde_json::from_str(line).with_context(|| format!("not JSON: {line}")));
        Ok((objects.collect::<Result<Vec<Value>>>()?, peak))
    })
}

/// Reads the largest resident size from a process's status, in bytes.
fn peak_of(status: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    rest.trim().trim_end_matches(" kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_json_are_kept_and_failures_carry_what_was_said() {
        let shell = |script: &str| run(Command::new("sh").args(["-c", script]));
        let (objects, peak) = shell("echo hello; echo '{\"a\": 1}'; sleep 0.1").expect("it runs");
        assert_eq!(objects, [serde_json::json!({"a": 1})]);
        assert!(peak > 0);
        assert!(shell("echo why >&2; exit 3").is_err_and(|error| error.to_string().contains("why")));
        assert!(shell("echo '{broken'").is_err());
    }
}
