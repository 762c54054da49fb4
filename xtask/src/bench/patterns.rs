//! Patterns under one load, on modelled hardware in virtual time.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::row::Rows;
use crate::{shell, table};

/// Runs the simulation and keeps its figures.
pub(crate) fn run(rows: &mut Rows) -> Result<()> {
    let arguments =
        ["run", "--quiet", "--release", "--package", "microserving-testkit", "--example", "patterns"];
    let printed = shell::output(shell::cargo().args(arguments))?;
    let mut lines = Vec::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let result: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        lines.push(table_line(&result)?);
        rows.push("patterns", result)?;
    }
    ensure!(!lines.is_empty(), "the simulation printed no figures:\n{printed}");
    println!("\npatterns: prompts of 3000 tokens, answers of 100, two engines of four H100 each, modelled");
    let header = ["pattern", "req/s", "mean s", "p99 s", "TTFT s", "p99 TTFT s", "TPOT ms", "failed"];
    table::print(&header, &lines);
    Ok(())
}

fn table_line(result: &Value) -> Result<Vec<String>> {
    let figure = |key: &str| result[key].as_f64().with_context(|| format!("no figure {key} in {result}"));
    Ok(vec![
        result["pattern"].as_str().context("no pattern")?.to_owned(),
        figure("rate")?.to_string(),
        format!("{:.3}", figure("mean_seconds")?),
        format!("{:.3}", figure("p99_seconds")?),
        format!("{:.3}", figure("mean_ttft_seconds")?),
        format!("{:.3}", figure("p99_ttft_seconds")?),
        format!("{:.2}", figure("mean_tpot_seconds")? * 1e3),
        figure("failed")?.to_string(),
    ])
}
