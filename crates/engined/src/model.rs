//! From `--model` to an executor and its text side.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use microserving_daemon::Refused;
use microserving_executor::{Executor, ToyConfig, ToyExecutor};
use microserving_server::ModelText;

use crate::device::{self, Chosen};
use crate::options::Options;

/// What loading yields.
pub(crate) struct LoadedModel {
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) text: ModelText,
}

/// Where the model comes from.
#[derive(Debug, PartialEq)]
enum Source<'a> {
    Toy,
    Hub(&'a str),
    Files(&'a str),
}

fn source(model: &str) -> Source<'_> {
    match model.strip_prefix("hf:") {
        Some(repository) => Source::Hub(repository),
        None if model == "toy" => Source::Toy,
        None => Source::Files(model),
    }
}

/// Returns how long a step should take at most. The toy takes what it is told to.
pub(crate) fn max_step(options: &Options) -> Option<Duration> {
    let usual = if source(&options.model) == Source::Toy { 0 } else { 100 };
    let milliseconds = options.max_step_milliseconds.unwrap_or(usual);
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds.into()))
}

/// Refuses options that do not go together, before anything is loaded, and returns what is to compute.
pub(crate) fn check(options: &Options) -> Result<Chosen> {
    check_source(options)?;
    device::choose(options, source(&options.model) == Source::Toy)
}

/// As [`check`], where another process has the device.
pub(crate) fn check_source(options: &Options) -> Result<()> {
    let toy = source(&options.model) == Source::Toy;
    let wrong = [
        (toy && options.dtype.is_some(), "dtype: the toy model has no weights"),
        (toy && options.kv_dtype.is_some(), "kv_dtype: the toy model keeps words of its own"),
        (toy && options.pin_threads, "pin_threads: the toy model computes on one thread"),
        (!toy && options.toy_step_ms.is_some(), "toy_step_ms: only for the toy model"),
        (
            !toy && !cfg!(feature = "candle"),
            "model: this build has only the toy model; build with the feature `candle`",
        ),
        (
            matches!(source(&options.model), Source::Hub(_)) && !cfg!(feature = "hub"),
            "model: hf: needs a build with the feature `hub`; or give a GGUF file or a directory",
        ),
    ];
    match wrong.iter().find(|(holds, _)| *holds) {
        Some((_, reason)) => Err(Refused((*reason).to_owned()).into()),
        None => Ok(()),
    }
}

/// Loads the model onto a device, telling how far it has come. Blocks.
pub(crate) fn load(options: &Options, device: &Chosen, tell: &(dyn Fn(&str) + Sync)) -> Result<LoadedModel> {
    match source(&options.model) {
        Source::Toy => toy(options),
        Source::Hub(repository) => {
            let folder = fetch(repository, tell)?;
            files((options, device), &folder, Some(repository), tell)
        }
        Source::Files(path) => files((options, device), Path::new(path), None, tell),
    }
}

/// Loads the text side alone, for an engine that computes in another process. Blocks.
pub(crate) fn load_text(options: &Options, tell: &(dyn Fn(&str) + Sync)) -> Result<TextSide> {
    match source(&options.model) {
        Source::Toy => Ok(TextSide::Toy),
        Source::Hub(repository) => text_of(&fetch(repository, tell)?, tell).map(TextSide::Files),
        Source::Files(path) => text_of(Path::new(path), tell).map(TextSide::Files),
    }
}

/// The text side of a model whose name is not known yet.
pub(crate) enum TextSide {
    Toy,
    Files(TextFiles),
}

impl TextSide {
    /// Gives it the name that the executor goes by.
    pub(crate) fn named(self, model: &str) -> Result<ModelText> {
        match self {
            Self::Toy => Ok(ModelText::toy()),
            Self::Files(files) => files.named(model),
        }
    }
}

fn fetch(repository: &str, tell: &(dyn Fn(&str) + Sync)) -> Result<PathBuf> {
    tell(&format!("downloading {repository}"));
    crate::hub::fetch(repository).with_context(|| format!("cannot get {repository} from the hub"))
}

fn toy(options: &Options) -> Result<LoadedModel> {
    let usual = ToyConfig::default();
    let executor = ToyExecutor::new(ToyConfig {
        page_size: options.page_size,
        max_context: options.max_context.unwrap_or(usual.max_context),
        step_time: Duration::from_millis(u64::from(options.toy_step_ms.unwrap_or(0))),
        ..usual
    })?;
    Ok(LoadedModel { executor: Box::new(executor), text: ModelText::toy() })
}

#[cfg(feature = "candle")]
use crate::files::{TextFiles, files, text_of};

#[cfg(not(feature = "candle"))]
use crate::no_files::{TextFiles, files, text_of};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_apart() {
        assert_eq!(source("toy"), Source::Toy);
        assert_eq!(source("hf:owner/name"), Source::Hub("owner/name"));
        assert_eq!(source("./toy"), Source::Files("./toy"));
    }
}
