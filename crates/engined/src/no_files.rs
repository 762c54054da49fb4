//! A build without models from files.

use std::path::Path;

use anyhow::{Result, bail};
use microserving_server::ModelText;

use crate::device::Chosen;
use crate::model::LoadedModel;
use crate::options::Options;

/// The text side of nothing.
pub(crate) enum TextFiles {}

impl TextFiles {
    pub(crate) fn named(self, _: &str) -> Result<ModelText> {
        match self {}
    }
}

pub(crate) fn files(
    _: (&Options, &Chosen),
    path: &Path,
    _: Option<&str>,
    _: &(dyn Fn(&str) + Sync),
) -> Result<LoadedModel> {
    bail!("{}: this build has only the toy model", path.display())
}

pub(crate) fn text_of(path: &Path, _: &(dyn Fn(&str) + Sync)) -> Result<TextFiles> {
    bail!("{}: this build has only the toy model", path.display())
}
