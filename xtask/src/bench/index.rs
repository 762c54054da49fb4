//! The memory of the router's index while engines come and go.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::row::Rows;
use crate::{shell, table};

/// Runs the router's own measurement and keeps its figures.
pub(crate) fn run(rows: &mut Rows) -> Result<()> {
    let arguments =
        ["run", "--quiet", "--release", "--package", "microserving-router", "--example", "index_churn"];
    let printed = shell::output(shell::cargo().args(arguments))?;
    let mut lines = Vec::new();
    let mut equal = false;
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let result: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        if result["equal_to_rebuilt"] == true {
            equal = true;
        } else {
            lines.push(table_line(&result)?);
        }
        rows.push("index", result)?;
    }
    ensure!(equal && !lines.is_empty(), "the measurement printed no figures:\n{printed}");
    println!("\nindex of held prefixes, engines joining and leaving; equal to a rebuilt one at the end");
    table::print(&["registrations", "page events", "pages", "counted MiB", "RSS MiB", "ns an event"], &lines);
    Ok(())
}

fn table_line(result: &Value) -> Result<Vec<String>> {
    let figure = |key: &str| result[key].as_f64().with_context(|| format!("no figure {key} in {result}"));
    let mib = |key: &str| Ok::<_, anyhow::Error>(format!("{:.1}", figure(key)? / f64::from(1 << 20)));
    Ok(vec![
        format!("{}", figure("registrations")?),
        format!("{}", figure("page_events")?),
        format!("{}", figure("index_pages")?),
        mib("index_bytes")?,
        mib("rss_bytes")?,
        format!("{:.0}", figure("seconds")? * 1e9 / figure("page_events")?),
    ])
}
