//! The crates' dependencies against the drawing.
//!
//! ARCHITECTURE.md holds a fenced block marked `layers`, one line a crate: `engine -> executor, kvcache, protocol, transport`.
//! Every normal or build dependency between crates of the workspace must be an arrow of it, and every arrow a dependency.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::shell;

type Arrows = BTreeMap<String, BTreeSet<String>>;

/// Compares and reports every difference.
pub(crate) fn run() -> Result<()> {
    let text = std::fs::read_to_string(shell::root().join("ARCHITECTURE.md"))
        .context("cannot read ARCHITECTURE.md")?;
    let drawn = drawn_arrows(&text)?;
    let metadata = shell::output(shell::cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let real = real_arrows(
        &serde_json::from_str(&metadata).context("cargo metadata printed something else than JSON")?,
    )?;
    let problems = differences(&drawn, &real);
    if !problems.is_empty() {
        bail!("the crates and the drawing in ARCHITECTURE.md differ:\n  {}", problems.join("\n  "));
    }
    println!(
        "layers: {} crates, {} arrows, as drawn",
        real.len(),
        real.values().map(BTreeSet::len).sum::<usize>()
    );
    Ok(())
}

fn drawn_arrows(text: &str) -> Result<Arrows> {
    let block = text
        .split_once("```layers\n")
        .and_then(|(_, rest)| rest.split_once("```"))
        .context("ARCHITECTURE.md has no block marked `layers`")?
        .0;
    let mut arrows = Arrows::new();
    for line in block.lines().filter(|line| !line.trim().is_empty()) {
        let (from, to) = line.split_once("->").with_context(|| format!("not an arrow: {line}"))?;
        let to = to.split(',').map(str::trim).filter(|name| !name.is_empty() && *name != "-");
        arrows.entry(from.trim().to_owned()).or_default().extend(to.map(str::to_owned));
    }
    Ok(arrows)
}

/// Drops the common prefix: the folder's name is the short name.
fn short(name: &str) -> &str {
    name.strip_prefix("microserving-").unwrap_or(name)
}

fn real_arrows(metadata: &Value) -> Result<Arrows> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let names: BTreeSet<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut arrows = Arrows::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let to = arrows.entry(short(name).to_owned()).or_default();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().context("a dependency without a name")?;
            if dependency["kind"] != "dev" && names.contains(target) {
                to.insert(short(target).to_owned());
            }
        }
    }
    Ok(arrows)
}

fn differences(drawn: &Arrows, real: &Arrows) -> Vec<String> {
    let empty = BTreeSet::new();
    let mut problems = Vec::new();
    for from in drawn.keys().chain(real.keys()).collect::<BTreeSet<_>>() {
        let (wanted, found) = (drawn.get(from), real.get(from));
        match (wanted, found) {
            (None, _) => problems.push(format!("{from} is not in the drawing")),
            (_, None) => problems.push(format!("{from} is drawn, but is no crate")),
            _ => {}
        }
        let (wanted, found) = (wanted.unwrap_or(&empty), found.unwrap_or(&empty));
        problems.extend(
            found
                .difference(wanted)
                .map(|to| format!("{from} depends on {to}: the drawing has no such arrow")),
        );
        problems.extend(
            wanted.difference(found).map(|to| format!("{from} -> {to} is drawn, but is no dependency")),
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrows(lines: &str) -> Arrows {
        drawn_arrows(&format!("text\n```layers\n{lines}\n```\nmore")).expect("arrows")
    }

    #[test]
    fn a_dependency_that_is_not_drawn_is_reported() {
        let drawn = arrows("protocol -> -\nengine -> protocol");
        assert_eq!(differences(&drawn, &drawn), Vec::<String>::new());
        let real = arrows("protocol -> -\nengine -> protocol, server\nserver -> -");
        assert_eq!(
            differences(&drawn, &real),
            ["engine depends on server: the drawing has no such arrow", "server is not in the drawing"]
        );
        let real = arrows("protocol -> -\nengine -> -");
        assert_eq!(differences(&drawn, &real), ["engine -> protocol is drawn, but is no dependency"]);
    }

    #[test]
    fn dev_dependencies_are_free() {
        let metadata = serde_json::json!({"packages": [
            {"name": "microserving-a", "dependencies": [{"name": "microserving-b", "kind": null}, {"name": "serde", "kind": null}]},
            {"name": "microserving-b", "dependencies": [{"name": "microserving-a", "kind": "dev"}]},
        ]});
        assert_eq!(real_arrows(&metadata).expect("arrows"), arrows("a -> b\nb -> -"));
    }
}
