//! A vocabulary embedded in a GGUF file.

use microserving_protocol::TokenId;
use serde::{Deserialize, Serialize};

use super::{GgufMetadata, GgufValue};
use crate::error::TextError;
use crate::token_table::MAX_TOKENS;

/// What the `tokenizer.*` keys of a GGUF file say. Whoever has read the file already fills this in;
/// [`GgufMetadata::vocab`] does it for those who have not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// `tokenizer.ggml.pre`: how `gpt2` vocabularies cut words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`, in the order of ids.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: one a token, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: one a token, or none (then all are normal).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub token_types: Vec<u8>,
    /// `tokenizer.ggml.merges`, best first: pairs joined by a space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id` and `eom_token_id`: other ends of a turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_eos: Vec<TokenId>,
    /// `tokenizer.ggml.unknown_token_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unk: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`; absent, it depends on the vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`; absent, it is no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`; absent, `llama` vocabularies put a space in front of a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
}

/// What a GGUF file calls the type of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufTokenType {
    /// Text (1).
    Normal,
    /// Stands for what has no token (2).
    Unknown,
    /// Steers the model (3).
    Control,
    /// Text that is never cut (4).
    UserDefined,
    /// Not in use (5).
    Unused,
    /// A single byte (6).
    Byte,
}

impl GgufVocab {
    pub(super) fn from_metadata(metadata: &GgufMetadata) -> Result<Self, TextError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let id = |name: &str| Ok::<_, TextError>(metadata.u32(&key(name))?.map(TokenId));
        let model = metadata.string(&key("model"))?;
        let tokens = metadata.typed(&key("tokens"), "a list of texts", |value| match value {
            GgufValue::Strings(tokens) => Some(tokens.clone()),
            _ => None,
        })?;
        let merges = metadata.typed(&key("merges"), "a list of texts", |value| match value {
            GgufValue::Strings(merges) => Some(merges.clone()),
            _ => None,
        })?;
        #[expect(clippy::cast_possible_truncation, reason = "the file holds them as f32")]
        let scores = metadata.typed(&key("scores"), "a list of numbers", |value| match value {
            GgufValue::Floats(scores) => Some(scores.iter().map(|&score| score as f32).collect()),
            _ => None,
        })?;
        let token_types =
            metadata.typed(&key("token_type"), "a list of small numbers", |value| match value {
                GgufValue::Integers(types) => types.iter().map(|&kind| u8::try_from(kind).ok()).collect(),
                _ => None,
            })?;
        let missing = |name: &str| TextError::malformed(key(name), "it is missing");
        let vocab = Self {
            model: model.ok_or_else(|| missing("model"))?.to_owned(),
            pre: metadata.string(&key("pre"))?.map(str::to_owned),
            tokens: tokens.ok_or_else(|| missing("tokens"))?,
            scores: scores.unwrap_or_default(),
            token_types: token_types.unwrap_or_default(),
            merges: merges.unwrap_or_default(),
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            other_eos: id("eot_token_id")?.into_iter().chain(id("eom_token_id")?).collect(),
            unk: id("unknown_token_id")?,
            add_bos: metadata.bool(&key("add_bos_token"))?,
            add_eos: metadata.bool(&key("add_eos_token"))?,
            add_space_prefix: metadata.bool(&key("add_space_prefix"))?,
            chat_template: metadata.string("tokenizer.chat_template")?.map(str::to_owned),
        };
        vocab.check()?;
        Ok(vocab)
    }

    /// Checks that the lists agree with each other and the ids lie inside the vocabulary.
    ///
    /// # Errors
    /// [`TextError::Malformed`] naming the key.
    pub fn check(&self) -> Result<(), TextError> {
        let num_tokens = self.tokens.len();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        if num_tokens == 0 || num_tokens > MAX_TOKENS {
            return Err(TextError::malformed(
                key("tokens"),
                format!("1 to {MAX_TOKENS} tokens, not {num_tokens}"),
            ));
        }
        for (name, length) in [("scores", self.scores.len()), ("token_type", self.token_types.len())] {
            if length != 0 && length != num_tokens {
                return Err(TextError::malformed(
                    key(name),
                    format!("it has {length} entries for {num_tokens} tokens"),
                ));
            }
        }
        if let Some(index) = self.token_types.iter().position(|kind| !(1..=6).contains(kind)) {
            let kind = self.token_types[index];
            return Err(TextError::malformed(
                key("token_type"),
                format!("entry {index} is {kind}, not 1 to 6"),
            ));
        }
        if let Some(index) = self.scores.iter().position(|score| score.is_nan()) {
            return Err(TextError::malformed(key("scores"), format!("entry {index} is not a number")));
        }
        let ids = [("bos_token_id", self.bos), ("eos_token_id", self.eos), ("unknown_token_id", self.unk)];
        let others = self.other_eos.iter().map(|&id| ("eot_token_id", Some(id)));
        for (name, id) in ids.into_iter().chain(others) {
            if id.is_some_and(|id| id.0 as usize >= num_tokens) {
                return Err(TextError::malformed(
                    key(name),
                    format!("{} is outside the {num_tokens} tokens", id.unwrap_or_default()),
                ));
            }
        }
        Ok(())
    }

    /// Returns the type of a token.
    #[must_use]
    pub fn token_type(&self, index: usize) -> GgufTokenType {
        match self.token_types.get(index) {
            Some(2) => GgufTokenType::Unknown,
            Some(3) => GgufTokenType::Control,
            Some(4) => GgufTokenType::UserDefined,
            Some(5) => GgufTokenType::Unused,
            Some(6) => GgufTokenType::Byte,
            _ => GgufTokenType::Normal,
        }
    }

    /// Returns the text of a token.
    #[must_use]
    pub fn token(&self, id: TokenId) -> Option<&str> {
        self.tokens.get(id.0 as usize).map(String::as_str)
    }

    pub(crate) fn id(&self, index: usize) -> TokenId {
        TokenId(u32::try_from(index).expect("check() bounds the vocabulary"))
    }
}
