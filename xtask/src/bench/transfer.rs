//! KV bytes between two processes.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::row::Rows;
use crate::{shell, table};

/// Runs the transport's own measurement and keeps its figures.
pub(crate) fn run(rows: &mut Rows) -> Result<()> {
    let arguments =
        ["run", "--quiet", "--release", "--package", "microserving-transport-shm", "--example", "bandwidth"];
    let printed = shell::output(shell::cargo().args(arguments))?;
    let mut lines = Vec::new();
    for line in printed.lines().filter(|line| line.starts_with('[')) {
        let results: Vec<Value> = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        for result in results {
            lines.push(table_line(&result)?);
            rows.push("transfer", result)?;
        }
    }
    ensure!(!lines.is_empty(), "the measurement printed no figures:\n{printed}");
    println!("\ntransfer over shared memory, two processes");
    table::print(&["mode", "KiB a put", "put GB/s", "memcpy GB/s", "ratio"], &lines);
    Ok(())
}

fn table_line(result: &Value) -> Result<Vec<String>> {
    let figure = |key: &str| result[key].as_f64().with_context(|| format!("no figure {key} in {result}"));
    let (put, memcpy) = (figure("put_gb_per_second")?, figure("memcpy_gb_per_second")?);
    Ok(vec![
        result["mode"].as_str().context("no mode")?.to_owned(),
        format!("{}", figure("put_bytes")? / 1024.0),
        format!("{put:.2}"),
        format!("{memcpy:.2}"),
        format!("{:.2}", put / memcpy),
    ])
}
