//! Every token's bytes, in one flat table.

use microserving_protocol::TokenId;

/// More tokens than any vocabulary has: a table of a broken file must not eat the memory.
pub(crate) const MAX_TOKENS: usize = 1 << 22;

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Stands for text.
    Text,
    /// Steers the model (`<|im_end|>`); it is not part of the text it appears in.
    Special,
    /// A number of the vocabulary that no token has.
    Hole,
}

/// Bytes and kinds of all tokens.
///
/// Byte-level and SentencePiece vocabularies share one property: a token contributes the same bytes wherever
/// it stands, except for the space in front of the first one ([`LeadingSpace`]). So a table replaces the
/// decoder, and incremental decoding is concatenation.
#[derive(Debug, Default)]
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    kinds: Vec<TokenKind>,
    longest: usize,
}

impl TokenTable {
    /// Builds the table from one entry a token, in the order of ids.
    pub(crate) fn new(tokens: impl IntoIterator<Item = (Vec<u8>, TokenKind)>) -> Self {
        let mut table = Self::default();
        for (bytes, kind) in tokens {
            table.longest = table.longest.max(bytes.len());
            table.bytes.extend_from_slice(&bytes);
            table.ends.push(table.bytes.len());
            table.kinds.push(kind);
        }
        table
    }

    /// Returns the size of the vocabulary, holes included.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Returns a token's bytes (a special token's name), or `None` outside the vocabulary.
    pub(crate) fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        let index = token.0 as usize;
        let end = *self.ends.get(index)?;
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[begin..end])
    }

    /// Returns what a token is for; numbers outside the vocabulary are holes.
    pub(crate) fn kind(&self, token: TokenId) -> TokenKind {
        self.kinds.get(token.0 as usize).copied().unwrap_or(TokenKind::Hole)
    }

    /// Returns the bytes a token contributes to text: none for special tokens and holes.
    pub(crate) fn text_bytes(&self, token: TokenId) -> &[u8] {
        match self.kind(token) {
            TokenKind::Text => self.bytes(token).unwrap_or_default(),
            TokenKind::Special | TokenKind::Hole => &[],
        }
    }
}

/// What happens to the space that SentencePiece vocabularies put in front of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeadingSpace {
    /// It stays.
    Keep,
    /// So many spaces at most are taken off the front of the whole text.
    Strip(usize),
    /// All spaces of the first token that has text are dropped.
    DropInFirstToken,
}
