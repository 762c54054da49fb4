//! The models that the demo, tests and measurements use: fetched or made once, kept in the user's cache folder.

mod demo;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::shell;

pub(crate) use demo::fetch_demo_model;

/// Options of `cargo xtask model`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which models; all of them if not given. `demo` is the demo model as it was published, `demo-q8_0` the same requantised; the others have
    /// random weights: `qwen3-0.6b-TYPE` and `llama-3.2-1b-TYPE`, where TYPE is q8_0, q4_0, q4_1, q4_k_m or bf16.
    names: Vec<String>,
}

/// Shapes that random weights are made in, with the names that their files begin with.
const SHAPES: [(&str, &str); 2] =
    [("qwen3-0.6b", "Qwen3-0.6B-random"), ("llama-3.2-1b", "Llama-3.2-1B-random")];
/// Types of weights that can be made.
const TYPES: [&str; 5] = ["q8_0", "q4_0", "q4_1", "q4_k_m", "bf16"];

/// Makes sure that the models are there and prints where.
pub(crate) fn run(args: &Args) -> Result<()> {
    let names = if args.names.is_empty() { all() } else { args.names.clone() };
    for name in names {
        let path = named(&name)?;
        println!("{name}: {}", path.display());
    }
    Ok(())
}

/// Returns the names of all models.
fn all() -> Vec<String> {
    let random = SHAPES.iter().flat_map(|(shape, _)| TYPES.iter().map(move |kind| format!("{shape}-{kind}")));
    ["demo".to_owned(), "demo-q8_0".to_owned()].into_iter().chain(random).collect()
}

/// Returns the path of a model, fetching or making it on first use.
pub(crate) fn named(name: &str) -> Result<PathBuf> {
    if name == "demo" {
        return fetch_demo_model();
    }
    let dir = cache_dir()?;
    if let Some(kind) = name.strip_prefix("demo-").filter(|kind| *kind == "q8_0") {
        let published = fetch_demo_model()?;
        let path = dir.join("SmolLM2-135M-Instruct.Q8_0.gguf");
        return make(["requantise".as_ref(), published.as_path(), kind.as_ref()], path);
    }
    for (shape, file) in SHAPES {
        let kind = name.strip_prefix(shape).and_then(|rest| rest.strip_prefix('-'));
        if let Some(kind) = kind.filter(|kind| TYPES.contains(kind)) {
            let path = dir.join(format!("{file}.{}.gguf", kind.to_uppercase()));
            return make(["random".as_ref(), shape.as_ref(), kind.as_ref()], path);
        }
    }
    bail!("there is no model {name}; there are: {}", all().join(", "));
}

/// Runs the model maker unless the file is there, which is whole if it is.
fn make(args: [&Path; 3], path: PathBuf) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path);
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let arguments = [
        "run",
        "--quiet",
        "--release",
        "--package",
        "microserving-executor-candle",
        "--example",
        "make_model",
        "--",
    ];
    shell::run(shell::cargo().args(arguments).args(args).arg(&path))?;
    Ok(path)
}

/// Returns the user's cache folder for this project.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = var("MICROSERVING_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join("microserving")))
        .or_else(|| var("HOME").map(|dir| dir.join(".cache").join("microserving")))
        .context("no cache folder: set MICROSERVING_CACHE, XDG_CACHE_HOME or HOME")?;
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_and_type_has_a_name_of_its_own() {
        let names = all();
        assert_eq!(names.len(), 2 + SHAPES.len() * TYPES.len());
        assert!(names.contains(&"llama-3.2-1b-q4_k_m".to_owned()));
    }

    #[test]
    fn what_cannot_be_made_is_refused() {
        for name in ["", "demo-q4_0", "qwen3-0.6b", "qwen3-0.6b-q2_k", "mistral-q8_0"] {
            assert!(named(name).is_err_and(|error| error.to_string().contains("there are: demo")), "{name}");
        }
    }
}
