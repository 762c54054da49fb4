//! Models from the Hugging Face hub (feature `hub`).

#[cfg(feature = "hub")]
mod client {
    use std::path::PathBuf;

    use anyhow::{Context, Result, anyhow, bail};
    use hf_hub::api::sync::ApiBuilder;
    use tracing::info;

    /// Files of a repository that a model is loaded from; everything else stays where it is.
    fn is_needed(name: &str) -> bool {
        let small = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];
        small.contains(&name)
            || name == "chat_template.jinja"
            || name == "model.safetensors.index.json"
            || (name.ends_with(".safetensors") && !name.contains('/'))
    }

    /// Fetches what a model is loaded from, unless the hub's cache of this user has it, and returns the folder.
    ///
    /// # Errors
    /// If the repository is not there, cannot be reached, or holds no model in safetensors form.
    pub(crate) fn fetch(repository: &str) -> Result<PathBuf> {
        let api = ApiBuilder::from_env().build().context("the hub's client cannot be made")?;
        let repository = api.model(repository.to_owned());
        // The client's own text says all of its causes already.
        let info = repository.info().map_err(|error| anyhow!("the repository cannot be read: {error}"))?;
        let names: Vec<_> =
            info.siblings.iter().map(|file| file.rfilename.as_str()).filter(|name| is_needed(name)).collect();
        if !names.contains(&"config.json") || !names.iter().any(|name| name.ends_with(".safetensors")) {
            bail!("the repository holds no model in safetensors form");
        }
        let mut folder = None;
        for name in names {
            info!(name, "fetching");
            let path = repository.get(name).map_err(|error| anyhow!("{name} cannot be fetched: {error}"))?;
            if name == "config.json" {
                folder = path.parent().map(ToOwned::to_owned);
            }
        }
        folder.context("the hub's cache has no folder")
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn only_what_a_model_is_loaded_from_is_fetched() {
            for name in ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"] {
                assert!(is_needed(name), "{name}");
            }
            for name in ["README.md", "pytorch_model.bin", "onnx/model.safetensors", "model.gguf"] {
                assert!(!is_needed(name), "{name}");
            }
        }
    }
}

#[cfg(feature = "hub")]
pub(crate) use client::fetch;

/// Says that this build cannot fetch.
#[cfg(not(feature = "hub"))]
pub(crate) fn fetch(_: &str) -> anyhow::Result<std::path::PathBuf> {
    anyhow::bail!("this build has no client of the hub: build with the feature `hub`")
}
