//! What can go wrong between text and tokens.

use std::io;
use std::path::PathBuf;

use microserving_protocol::TokenId;

/// An error of this crate, sorted by who can mend it.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file, or a part of one, is broken.
    #[error("{what} is malformed: {reason}")]
    Malformed {
        /// The file, key or field.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A model asks for something this crate does not do.
    #[error("{field} `{value}` is not supported: {hint}")]
    Unsupported {
        /// The key that asks for it.
        field: String,
        /// What it says.
        value: String,
        /// What would be accepted, or what to do instead.
        hint: String,
    },
    /// A field of a request is not acceptable; the client can mend it.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field, with indices: `messages[1].content[0].type`.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer refused a text.
    #[error("cannot tokenize the text: {reason}")]
    Encode {
        /// What the tokenizer said.
        reason: String,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {token} is not in the vocabulary of {num_tokens} tokens")]
    UnknownToken {
        /// The id.
        token: TokenId,
        /// The size of the vocabulary.
        num_tokens: usize,
    },
    /// The chat template refused the conversation, or is broken itself.
    #[error("chat template: {reason}")]
    Template {
        /// What the template engine, or the template's `raise_exception`, said.
        reason: String,
    },
    /// The grammar engine gave up, or a token did not fit.
    #[error("grammar: {reason}")]
    Grammar {
        /// What the grammar engine said.
        reason: String,
    },
}

impl TextError {
    /// Returns the field of the request that caused the error, if it was the request.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::InvalidField { field, .. } => Some(field),
            _ => None,
        }
    }

    pub(crate) fn malformed(what: impl Into<String>, reason: impl ToString) -> Self {
        Self::Malformed { what: what.into(), reason: reason.to_string() }
    }

    pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidField { field: field.into(), reason: reason.into() }
    }

    pub(crate) fn unsupported(
        field: impl Into<String>,
        value: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self::Unsupported { field: field.into(), value: value.into(), hint: hint.into() }
    }
}
