//! Everything needed to serve the text of a model, as one document.

use std::path::Path;
use std::sync::Arc;

use microserving_protocol::TokenId;
use serde::{Deserialize, Serialize};

use crate::chat::ChatTemplate;
use crate::error::TextError;
use crate::gguf::{GgufMetadata, GgufTokenType, GgufVocab};
use crate::tokenizer::Tokenizer;

mod hf_dir;

/// The version of the document; a reader refuses others.
const VERSION: u32 = 1;

/// Names of control tokens that end a turn or a document, whatever the file calls its end-of-sequence token:
/// what a model says after one of them is no longer its answer.
const END_NAMES: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
];

/// The conversation format of the toy model.
const TOY_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// The text side of a model, as data: an engine serves it as JSON, and a router that has nothing but the
/// engine's address tokenizes exactly as the engine does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextBundle {
    /// The version of this document: 1.
    pub version: u32,
    /// The name the model is served under.
    pub model: String,
    /// The vocabulary.
    pub tokenizer: TokenizerSource,
    /// The conversation format, in Jinja; a model without one cannot chat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// The text of the beginning-of-sequence token: `bos_token` in the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    /// The text of the end-of-sequence token: `eos_token` in the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// The tokens that end an answer, sorted.
    pub eos_token_ids: Vec<TokenId>,
}

/// Where the vocabulary comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum TokenizerSource {
    /// The text of a `tokenizer.json`, unchanged.
    Hf {
        /// The file's contents.
        json: String,
    },
    /// A vocabulary embedded in a GGUF file.
    Gguf {
        /// What the file says.
        vocab: Box<GgufVocab>,
    },
    /// The built-in byte vocabulary.
    ToyBytes,
}

/// A bundle made ready: cheap to clone, shared by all requests.
#[derive(Clone, Debug)]
pub struct TextModel {
    /// The name the model is served under.
    pub name: Arc<str>,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The conversation format, if the model has one.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// The tokens that end an answer, sorted.
    pub eos_token_ids: Arc<[TokenId]>,
}

impl TextBundle {
    /// Loads whatever `path` is: a directory in the Hugging Face layout, a `.gguf` file, a `tokenizer.json`
    /// (with its neighbours), or a bundle saved as JSON.
    ///
    /// # Errors
    /// If nothing of the kind is there, or it is broken or asks for something unknown.
    pub fn load(path: &Path, model: &str) -> Result<Self, TextError> {
        if path.is_dir() {
            return Self::from_hf_dir(path, model);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gguf") => Self::from_gguf_file(path, model),
            Some("json") => {
                let json = read(path)?;
                if json_has_key(&json, "eos_token_ids") {
                    Ok(Self { model: model.to_owned(), ..Self::from_json(&json)? })
                } else {
                    hf_dir::load(path, path.parent().unwrap_or(Path::new(".")), model)
                }
            }
            _ => Err(TextError::unsupported(
                "tokenizer",
                path.display().to_string(),
                "give a model directory, a .gguf file or a tokenizer.json",
            )),
        }
    }

    /// Loads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`, `config.json` and
    /// `chat_template.jinja` of a directory; only the first must be there.
    ///
    /// # Errors
    /// If one that is there is broken.
    pub fn from_hf_dir(dir: &Path, model: &str) -> Result<Self, TextError> {
        hf_dir::load(&dir.join("tokenizer.json"), dir, model)
    }

    /// Loads the vocabulary and chat template of a GGUF file.
    ///
    /// # Errors
    /// If the file is broken or has no vocabulary.
    pub fn from_gguf_file(path: &Path, model: &str) -> Result<Self, TextError> {
        Self::from_gguf(GgufMetadata::open(path)?.vocab()?, model)
    }

    /// Wraps a vocabulary that was embedded in a GGUF file.
    ///
    /// # Errors
    /// If it contradicts itself.
    pub fn from_gguf(mut vocab: GgufVocab, model: &str) -> Result<Self, TextError> {
        vocab.check()?;
        let ends = vocab.tokens.iter().enumerate().filter(|(index, token)| {
            vocab.token_type(*index) == GgufTokenType::Control && END_NAMES.contains(&token.as_str())
        });
        let mut eos_token_ids: Vec<TokenId> = ends.map(|(index, _)| vocab.id(index)).collect();
        eos_token_ids.extend(vocab.eos);
        eos_token_ids.extend(&vocab.other_eos);
        eos_token_ids.sort_unstable();
        eos_token_ids.dedup();
        let text = |id: Option<TokenId>| id.and_then(|id| vocab.token(id)).map(str::to_owned);
        Ok(Self {
            version: VERSION,
            model: model.to_owned(),
            bos_token: text(vocab.bos),
            eos_token: text(vocab.eos),
            eos_token_ids,
            chat_template: vocab.chat_template.take(),
            tokenizer: TokenizerSource::Gguf { vocab: Box::new(vocab) },
        })
    }

    /// Returns the bundle of the toy model: bytes, and a plain conversation format.
    #[must_use]
    pub fn toy(model: &str) -> Self {
        let tokenizer = Tokenizer::toy_bytes();
        let text = |id: Option<TokenId>| id.map(|id| tokenizer.token_text(id));
        Self {
            version: VERSION,
            model: model.to_owned(),
            bos_token: text(tokenizer.bos()),
            eos_token: text(tokenizer.eos()),
            eos_token_ids: tokenizer.eos().into_iter().collect(),
            chat_template: Some(TOY_TEMPLATE.to_owned()),
            tokenizer: TokenizerSource::ToyBytes,
        }
    }

    /// Writes the bundle as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self)
            .expect("texts and finite numbers: the scores are checked when a bundle is made")
    }

    /// Reads a bundle written by [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`TextError::Malformed`] if it is not one, [`TextError::Unsupported`] if a later version of this
    /// program wrote it.
    pub fn from_json(json: &str) -> Result<Self, TextError> {
        let bundle: Self =
            serde_json::from_str(json).map_err(|error| TextError::malformed("text bundle", error))?;
        if bundle.version != VERSION {
            return Err(TextError::unsupported(
                "text bundle: version",
                bundle.version.to_string(),
                format!("this program reads version {VERSION}"),
            ));
        }
        Ok(bundle)
    }

    /// Makes the bundle ready for use.
    ///
    /// # Errors
    /// If the vocabulary or the template is broken or asks for something unknown, or an end token lies
    /// outside the vocabulary.
    pub fn build(&self) -> Result<TextModel, TextError> {
        let tokenizer = match &self.tokenizer {
            TokenizerSource::Hf { json } => Tokenizer::from_hf_json(json)?,
            TokenizerSource::Gguf { vocab } => Tokenizer::from_gguf(vocab)?,
            TokenizerSource::ToyBytes => Tokenizer::toy_bytes(),
        };
        // Its length, not its ids: some models end with ids that only the embedding has.
        if self.eos_token_ids.len() > tokenizer.num_tokens() {
            return Err(TextError::malformed("eos_token_ids", "there are more than tokens"));
        }
        let chat_template = match &self.chat_template {
            Some(source) => Some(Arc::new(ChatTemplate::new(
                source,
                self.bos_token.as_deref(),
                self.eos_token.as_deref(),
            )?)),
            None => None,
        };
        Ok(TextModel {
            name: self.model.as_str().into(),
            tokenizer: Arc::new(tokenizer),
            chat_template,
            eos_token_ids: self.eos_token_ids.as_slice().into(),
        })
    }
}

fn read(path: &Path) -> Result<String, TextError> {
    std::fs::read_to_string(path).map_err(|source| TextError::Read { path: path.to_owned(), source })
}

/// Says whether the text is a JSON object with this key, without keeping the rest of it.
fn json_has_key(json: &str, key: &str) -> bool {
    let object: Result<std::collections::BTreeMap<String, serde::de::IgnoredAny>, _> =
        serde_json::from_str(json);
    object.is_ok_and(|object| object.contains_key(key))
}

#[cfg(test)]
mod tests;
