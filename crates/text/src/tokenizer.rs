//! The tokenizer of a model, wherever its vocabulary came from.

use std::fmt;

use microserving_protocol::TokenId;

use crate::error::TextError;
use crate::gguf::GgufVocab;
use crate::token_table::{LeadingSpace, TokenKind, TokenTable};
use segments::Segments;

mod byte_level;
mod ggml_bpe;
mod hf;
mod pre;
mod segments;
mod special;
mod spm;
mod toy;

/// A normaliser may shorten a text before it is cut into tokens; none that we know shortens it by more than this.
const NORMALISER_SLACK: usize = 4;

/// Turns text into tokens and back.
///
/// Special tokens written out in a text (`<|im_start|>`) become the special tokens, as in every serving
/// system: that is how a rendered chat template reaches the model.
pub struct Tokenizer {
    encoder: Encoder,
    /// The tokens of texts seen lately, if the encoder is of a kind for which they can be put together.
    segments: Option<Segments>,
    table: TokenTable,
    leading: LeadingSpace,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
}

/// What the kinds of vocabularies do differently.
enum Encoder {
    /// The `tokenizers` library, whose post-processor knows what to put around a text, and so do we if it is one token on either side.
    Hf { model: Box<tokenizers::Tokenizer>, around: Option<Around> },
    /// The same library as a model only, with the tokens to put around a text.
    Bpe { model: Box<tokenizers::Tokenizer>, around: Around },
    /// SentencePiece by scores.
    Spm { model: Box<spm::SpmEncoder>, around: Around },
    /// A byte a token.
    ToyBytes,
}

/// The tokens put in front of and behind a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Around {
    bos: Option<TokenId>,
    eos: Option<TokenId>,
}

/// Whether special tokens are written out in decoded text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// They are left out: the text a client sees.
    #[default]
    Skip,
    /// They are written out by name: the text as the model sees it.
    Show,
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`. Truncation and padding rules in it are ignored: they are
    /// meant for training.
    ///
    /// # Errors
    /// If it is broken, or uses a decoder whose tokens have no bytes of their own (WordPiece, CTC).
    pub fn from_hf_json(json: &str) -> Result<Self, TextError> {
        hf::build(json)
    }

    /// Builds the tokenizer of a vocabulary embedded in a GGUF file.
    ///
    /// # Errors
    /// If it is inconsistent, or of a model or pre-tokenizer this crate does not know (named in the error).
    pub fn from_gguf(vocab: &GgufVocab) -> Result<Self, TextError> {
        vocab.check()?;
        match vocab.model.as_str() {
            "gpt2" => ggml_bpe::build(vocab),
            "llama" => spm::build(vocab),
            other => {
                Err(TextError::unsupported("tokenizer.ggml.model", other, "known are `gpt2` and `llama`"))
            }
        }
    }

    /// Returns the built-in tokenizer whose tokens are the 256 bytes, beginning (256) and end (257) of
    /// sequence, and padding (258). It puts nothing around a text, so a prompt has as many tokens as bytes.
    #[must_use]
    pub fn toy_bytes() -> Self {
        toy::build()
    }

    /// Turns a prompt into tokens, with what the model wants in front of it (a beginning-of-sequence token,
    /// say).
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer gives up.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        match &self.encoder {
            Encoder::Hf { model, around: None } => hf::encode(model, text, true),
            Encoder::Hf { around: Some(around), .. }
            | Encoder::Bpe { around, .. }
            | Encoder::Spm { around, .. } => {
                let body = self.encode_bare(text)?;
                Ok(around.bos.into_iter().chain(body).chain(around.eos).collect())
            }
            Encoder::ToyBytes => self.encode_bare(text),
        }
    }

    /// Turns a text into tokens and puts nothing around it: for a rendered chat template, which says itself
    /// what it begins with.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer gives up.
    pub fn encode_bare(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        match &self.encoder {
            Encoder::Hf { model, .. } | Encoder::Bpe { model, .. } => {
                let encode = |text: &str| hf::encode(model, text, false);
                let known = self.segments.as_ref().and_then(|segments| segments.encode(text, encode));
                known.unwrap_or_else(|| encode(text))
            }
            Encoder::Spm { model, .. } => model.encode(text),
            Encoder::ToyBytes => Ok(toy::encode(text)),
        }
    }

    /// Turns tokens into text; what is not UTF-8 becomes replacement characters.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`] for an id outside the vocabulary.
    pub fn decode(&self, tokens: &[TokenId], specials: Specials) -> Result<String, TextError> {
        let mut bytes = Vec::new();
        let mut first = true;
        for &token in tokens {
            let kind = self.table.kind(token);
            if kind == TokenKind::Hole {
                return Err(TextError::UnknownToken { token, num_tokens: self.num_tokens() });
            }
            let piece = match specials {
                Specials::Skip => self.table.text_bytes(token),
                Specials::Show => self.table.bytes(token).unwrap_or_default(),
            };
            let drop_spaces = first && self.leading == LeadingSpace::DropInFirstToken;
            first &= piece.is_empty();
            bytes.extend(piece.iter().filter(|&&byte| !(drop_spaces && byte == b' ')));
        }
        let spaces = match self.leading {
            LeadingSpace::Strip(limit) => bytes.iter().take(limit).take_while(|&&byte| byte == b' ').count(),
            LeadingSpace::Keep | LeadingSpace::DropInFirstToken => 0,
        };
        Ok(String::from_utf8_lossy(&bytes[spaces..]).into_owned())
    }

    /// Returns the bytes a token stands for, a special token's being its name; `None` outside the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        match self.table.kind(token) {
            TokenKind::Hole => None,
            TokenKind::Text | TokenKind::Special => self.table.bytes(token),
        }
    }

    /// Returns a token as text for log-probabilities; bytes that are no characters become replacement
    /// characters, and an id outside the vocabulary has no text.
    #[must_use]
    pub fn token_text(&self, token: TokenId) -> String {
        String::from_utf8_lossy(self.token_bytes(token).unwrap_or_default()).into_owned()
    }

    /// Says whether a token steers the model and is no text.
    #[must_use]
    pub fn is_special(&self, token: TokenId) -> bool {
        self.table.kind(token) == TokenKind::Special
    }

    /// Returns the size of the vocabulary: one more than the largest id. A model's logits may be wider.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.table.len()
    }

    /// Returns the bytes that the text of `num_tokens` tokens can have at most: a longer one need not be cut to be refused.
    #[must_use]
    pub fn max_text_bytes(&self, num_tokens: u32) -> usize {
        (num_tokens as usize).saturating_mul(self.table.longest().max(1) * NORMALISER_SLACK)
    }

    /// Returns the beginning-of-sequence token, if the vocabulary itself names one.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Returns the end-of-sequence token, if the vocabulary itself names one.
    #[must_use]
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// Finds the special or added token of this name.
    #[must_use]
    pub fn special_id(&self, name: &str) -> Option<TokenId> {
        match &self.encoder {
            Encoder::Hf { model, .. } | Encoder::Bpe { model, .. } => model.token_to_id(name).map(TokenId),
            Encoder::Spm { model, .. } => model.special_id(name),
            Encoder::ToyBytes => toy::special_id(name),
        }
    }

    pub(crate) fn table(&self) -> &TokenTable {
        &self.table
    }

    pub(crate) fn leading_space(&self) -> LeadingSpace {
        self.leading
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.encoder {
            Encoder::Hf { .. } => "tokenizer.json",
            Encoder::Bpe { .. } => "gguf gpt2",
            Encoder::Spm { .. } => "gguf llama",
            Encoder::ToyBytes => "toy-bytes",
        };
        f.debug_struct("Tokenizer")
            .field("kind", &kind)
            .field("num_tokens", &self.num_tokens())
            .field("leading", &self.leading)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish()
    }
}

#[cfg(test)]
pub(crate) use byte_level::alphabet as byte_level_alphabet;

#[cfg(test)]
mod tests;
