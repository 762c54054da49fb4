//! Sizes of files and functions: figures to talk about, not limits.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::shell;
use crate::table;

/// Prints medians, tails and the longest of both.
pub(crate) fn run() -> Result<()> {
    let mut files = Vec::new();
    for dir in ["crates", "examples", "tests", "xtask"] {
        collect(&shell::root().join(dir), &mut files)?;
    }
    let mut sizes = Vec::new();
    let mut functions = Vec::new();
    for path in files {
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.strip_prefix(shell::root()).unwrap_or(&path).display().to_string();
        let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        sizes.push((code.lines().count(), name.clone()));
        functions.extend(
            function_lengths(code).into_iter().map(|(len, function)| (len, format!("{name}: {function}"))),
        );
    }
    summary("files (lines without inline tests)", &mut sizes);
    summary("functions (lines)", &mut functions);
    Ok(())
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns the length of every function, found by the indentation of its closing brace (the code is formatted).
fn function_lengths(code: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let Some(at) = trimmed.find("fn ").filter(|&at| {
            at == 0
                || trimmed[..at].split_whitespace().all(|word| {
                    word.starts_with("pub")
                        || ["async", "const", "unsafe", "extern", "crate)", "super)"].contains(&word)
                })
        }) else {
            continue;
        };
        let indent = line.len() - trimmed.len();
        let close = format!("{}}}", " ".repeat(indent));
        let name = trimmed[at + 3..].split(['(', '<']).next().unwrap_or_default().to_owned();
        let body = lines[start..]
            .iter()
            .take_while(|line| !line.trim_end().ends_with(';') || line.starts_with(&" ".repeat(indent + 4)));
        if let Some(len) = body.clone().position(|line| line.trim_end() == close) {
            found.push((len + 1, name));
        }
    }
    found
}

fn summary(title: &str, items: &mut [(usize, String)]) {
    items.sort_unstable_by(|a, b| b.cmp(a));
    let at = |share: usize| items.get(items.len() * share / 100).map_or(0, |item| item.0);
    println!("{title}: {} in all, median {}, p90 {}, p99 {}", items.len(), at(50), at(10), at(1));
    let rows: Vec<Vec<String>> =
        items.iter().take(8).map(|(len, name)| vec![name.clone(), len.to_string()]).collect();
    table::print(&["longest", "lines"], &rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_measured_from_signature_to_brace() {
        let code = "impl A {\n    pub(crate) async fn one(&self) {\n        two();\n    }\n}\n\nfn two() {\n}\n\ntrait B {\n    fn none();\n}\n";
        assert_eq!(function_lengths(code), [(3, "one".to_owned()), (2, "two".to_owned())]);
    }
}
