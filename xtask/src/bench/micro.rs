//! The criterion benches of the data structures.

use anyhow::Result;
use serde_json::{Value, json};

use super::row::Rows;
use crate::{shell, table};

/// Runs them and keeps criterion's point estimates.
pub(crate) fn run(rows: &mut Rows) -> Result<()> {
    shell::run(shell::cargo().args([
        "bench",
        "--package",
        "microserving-radix",
        "--package",
        "microserving-kvcache",
        "--package",
        "microserving-router",
        "--benches",
    ]))?;
    let mut found = Vec::new();
    collect(&shell::target_dir().join("criterion"), &mut Vec::new(), &mut found)?;
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let mut lines = Vec::new();
    for (name, nanoseconds) in found {
        lines.push(vec![name.clone(), format!("{nanoseconds:.1}")]);
        rows.push("micro", json!({"name": name, "median_nanoseconds": nanoseconds}))?;
    }
    println!("\ndata structures");
    table::print(&["operation", "median ns"], &lines);
    Ok(())
}

/// Finds `NAME/new/estimates.json` below the folder.
fn collect(dir: &std::path::Path, name: &mut Vec<String>, found: &mut Vec<(String, f64)>) -> Result<()> {
    let estimates = dir.join("new/estimates.json");
    if let Ok(text) = std::fs::read_to_string(&estimates) {
        let value: Value = serde_json::from_str(&text)?;
        if let Some(median) = value.pointer("/median/point_estimate").and_then(Value::as_f64) {
            found.push((name.join("/"), median));
        }
        return Ok(());
    }
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        name.push(entry.file_name().to_string_lossy().into_owned());
        collect(&entry.path(), name, found)?;
        name.pop();
    }
    Ok(())
}
