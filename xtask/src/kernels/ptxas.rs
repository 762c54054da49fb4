//! What ptxas says of a kernel: `-Xptxas -v`.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// What one kernel needs on one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) kernel: String,
    /// As `sm_80`.
    pub(crate) architecture: String,
    pub(crate) registers: u32,
    /// Bytes that a thread keeps in memory instead of registers: spilled, or indexed where registers cannot be.
    pub(crate) spill_bytes: u32,
}

impl Usage {
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "kernel": self.kernel,
            "for": self.architecture,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
        })
    }
}

/// Reads all reports of a folder, sorted by kernel and architecture.
pub(crate) fn read_all(dir: &Path) -> Result<Vec<Usage>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "ptxas") {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            all.extend(read(&text).with_context(|| format!("cannot understand {}", path.display()))?);
        }
    }
    if all.is_empty() {
        bail!("no report of ptxas in {}", dir.display());
    }
    all.sort_by(|a, b| (&a.kernel, &a.architecture).cmp(&(&b.kernel, &b.architecture)));
    Ok(all)
}

/// Reads one report: for each kernel a line that names it, one with spills, and one with registers.
fn read(text: &str) -> Result<Vec<Usage>> {
    let mut all = Vec::new();
    let mut named = None;
    let mut spilled = None;
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let mut quoted = rest.split('\'');
            named = quoted.next().zip(quoted.nth(1));
            spilled = None;
        } else if line.contains("bytes spill stores") {
            // Frame and spilled stores: what is spilled lies in the frame, and may be stored more than once.
            let numbers: Vec<u32> = line.split(',').filter_map(first_number).take(2).collect();
            spilled = Some(numbers.into_iter().max().with_context(|| format!("no number in: {line}"))?);
        } else if let Some(rest) = line.split("Used ").nth(1) {
            let (kernel, architecture) =
                named.take().with_context(|| format!("of which kernel is: {line}"))?;
            all.push(Usage {
                kernel: kernel.to_owned(),
                architecture: architecture.to_owned(),
                registers: first_number(rest).with_context(|| format!("no number in: {line}"))?,
                spill_bytes: spilled.with_context(|| format!("nothing about spills before: {line}"))?,
            });
        }
    }
    Ok(all)
}

fn first_number(text: &str) -> Option<u32> {
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rms_norm_bf16' for 'sm_80'
ptxas info    : Function properties for rms_norm_bf16
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers, 392 bytes cmem[0]
ptxas info    : Compile time = 39.327 ms
ptxas info    : Compiling entry function 'other' for 'sm_90'
ptxas info    : Function properties for other
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
";
        let usage = |kernel: &str, architecture: &str, registers, spill_bytes| Usage {
            kernel: kernel.to_owned(),
            architecture: architecture.to_owned(),
            registers,
            spill_bytes,
        };
        let expected = [usage("rms_norm_bf16", "sm_80", 26, 0), usage("other", "sm_90", 255, 16)];
        assert_eq!(read(text).expect("a report"), expected);
        assert!(read("ptxas info    : Used 26 registers").is_err());
    }
}
