//! KV bytes between two processes.

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::row::Rows;
use crate::{shell, table};

/// Runs the transport's own measurement and keeps its figures.
pub(crate) fn run(rows: &mut Rows) -> Result<()> {
    let arguments = [
        "run",
        "--quiet",
        "--release",
        "--package",
        "microserving-transport-shm",
        "--example",
        "bandwidth",
        "--",
        "--json",
    ];
    let printed = shell::output(shell::cargo().args(arguments))?;
    let mut lines = Vec::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let result: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        let figure =
            |key: &str| result[key].as_f64().map_or_else(|| "?".into(), |value| format!("{value:.2}"));
        lines.push(vec![
            result["num_bytes"].to_string(),
            figure("put_gigabytes_per_second"),
            figure("memcpy_gigabytes_per_second"),
            figure("ratio"),
        ]);
        rows.push("transfer", result)?;
    }
    println!("\ntransfer over shared memory, two processes");
    table::print(&["bytes a put", "put GB/s", "memcpy GB/s", "ratio"], &lines);
    Ok(())
}
