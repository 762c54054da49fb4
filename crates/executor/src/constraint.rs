//! Grammars as the sampler sees them.

use std::fmt;

use microserving_protocol::TokenId;

/// The tokens a grammar allows next: one bit per vocabulary entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Wraps bits, token `t` being bit `t % 32` of word `t / 32`.
    #[must_use]
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// Says whether `token` is allowed; tokens past the end are not.
    #[must_use]
    pub fn allows(&self, token: TokenId) -> bool {
        self.words.get(token.0 as usize / 32).is_some_and(|word| word >> (token.0 % 32) & 1 == 1)
    }

    /// Returns the bits.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

/// A constraint could not go on: the output does not fit the grammar, or a limit of the grammar engine was reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("grammar failed: {reason}")]
pub struct ConstraintError {
    /// What the grammar engine said.
    pub reason: String,
}

/// A grammar's state along one sequence.
///
/// It is advanced by the sampler alone; a sequence that moves to another engine rebuilds it by replaying its tokens.
pub trait TokenConstraint: Send + fmt::Debug {
    /// Returns the tokens allowed next. Does not change the state.
    ///
    /// # Errors
    /// If the grammar engine gave up; the sequence then ends with an error.
    fn mask(&mut self) -> Result<TokenMask, ConstraintError>;

    /// Advances by one token.
    ///
    /// # Errors
    /// If the token was not allowed.
    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError>;

    /// Says whether the output is complete and nothing may follow.
    fn is_complete(&self) -> bool;
}
