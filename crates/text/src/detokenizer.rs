//! From tokens to text, one token at a time.

use std::sync::Arc;

use microserving_protocol::TokenId;

use crate::token_table::LeadingSpace;
use crate::tokenizer::Tokenizer;

/// Turns a stream of tokens into text, giving out only what later tokens cannot change.
///
/// Whatever the split into calls, the pieces put together equal [`Tokenizer::decode`] of all the tokens: a
/// character whose bytes are spread over several tokens comes out with its last byte, and a replacement
/// character stands only for bytes that can no longer become a character. Special tokens and ids outside the
/// vocabulary contribute nothing.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The first bytes of a character whose rest is still to come; at most three.
    pending: Vec<u8>,
    /// What is left to be done about the space in front; `Keep` once it is done.
    leading: LeadingSpace,
    num_chars: usize,
}

/// What one token added to the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// The characters that became complete.
    pub text: String,
    /// Where the token's first byte belongs, in characters from the start of the text: `text_offset` of the
    /// legacy log-probabilities.
    pub offset: usize,
}

impl Detokenizer {
    /// Begins a text: the space that SentencePiece vocabularies put in front of a text is taken off, as by a
    /// decode of the whole.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let leading = tokenizer.leading_space();
        Self { tokenizer, pending: Vec::new(), leading, num_chars: 0 }
    }

    /// Continues a text that already has the tokens of `prompt`: a space in front of the first word belongs
    /// to the text, so that prompt and output put together read as one.
    #[must_use]
    pub fn after(tokenizer: Arc<Tokenizer>, prompt: &[TokenId]) -> Self {
        let mut this = Self::new(tokenizer);
        if prompt.iter().any(|&token| !this.tokenizer.table().text_bytes(token).is_empty()) {
            this.leading = LeadingSpace::Keep;
        }
        this
    }

    /// Adds a token and returns the text that became certain.
    pub fn push(&mut self, token: TokenId) -> TextPiece {
        let tokenizer = Arc::clone(&self.tokenizer);
        let bytes = tokenizer.table().text_bytes(token);
        if bytes.is_empty() {
            return TextPiece { text: String::new(), offset: self.num_chars };
        }
        let (rest, stripped);
        match self.leading {
            LeadingSpace::Keep => rest = bytes,
            LeadingSpace::Strip(limit) => {
                let count = bytes.iter().take(limit).take_while(|&&byte| byte == b' ').count();
                rest = &bytes[count..];
                self.leading = match limit - count {
                    0 => LeadingSpace::Keep,
                    left if rest.is_empty() => LeadingSpace::Strip(left),
                    _ => LeadingSpace::Keep,
                };
            }
            LeadingSpace::DropInFirstToken => {
                stripped = bytes.iter().copied().filter(|&byte| byte != b' ').collect::<Vec<_>>();
                rest = &stripped;
                self.leading = LeadingSpace::Keep;
            }
        }
        self.push_bytes(rest)
    }

    /// Ends the text: a character left incomplete becomes one replacement character.
    pub fn finish(&mut self) -> String {
        if self.pending.is_empty() {
            return String::new();
        }
        self.pending.clear();
        self.num_chars += 1;
        char::REPLACEMENT_CHARACTER.to_string()
    }

    /// Returns how many characters have been given out.
    #[must_use]
    pub fn num_chars(&self) -> usize {
        self.num_chars
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> TextPiece {
        let offset = match bytes.first() {
            // The token's first byte does not continue the waiting character, so a replacement character
            // comes before it.
            Some(&first) if !self.pending.is_empty() && !continues(&self.pending, first) => {
                self.num_chars + 1
            }
            _ => self.num_chars,
        };
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("checked up to here"));
                    rest = after;
                    if let Some(invalid) = error.error_len() {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[invalid..];
                        continue;
                    }
                }
            }
            break;
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        self.num_chars += text.chars().count();
        TextPiece { text, offset }
    }
}

/// Says whether `byte` may follow the beginning of a character.
fn continues(pending: &[u8], byte: u8) -> bool {
    let mut both = pending.to_vec();
    both.push(byte);
    match std::str::from_utf8(&both) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none(),
    }
}

#[cfg(test)]
mod tests;
