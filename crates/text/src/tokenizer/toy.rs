//! The tokenizer that needs no file.

use microserving_protocol::TokenId;

use super::{Encoder, Tokenizer};
use crate::token_table::{LeadingSpace, TokenKind, TokenTable};

const SPECIALS: [(&str, TokenId); 3] =
    [("<bos>", TokenId(256)), ("<eos>", TokenId(257)), ("<pad>", TokenId(258))];

pub(super) fn build() -> Tokenizer {
    let bytes = (0..=255).map(|byte| (vec![byte], TokenKind::Text));
    let specials = SPECIALS.iter().map(|(name, _)| (name.as_bytes().to_vec(), TokenKind::Special));
    Tokenizer {
        encoder: Encoder::ToyBytes,
        segments: None,
        table: TokenTable::new(bytes.chain(specials)),
        leading: LeadingSpace::Keep,
        bos: Some(SPECIALS[0].1),
        eos: Some(SPECIALS[1].1),
    }
}

/// Turns each byte into a token. Names of special tokens are ordinary text here, so that the number of tokens
/// is always the number of bytes.
pub(super) fn encode(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
}

pub(super) fn special_id(name: &str) -> Option<TokenId> {
    SPECIALS.iter().find(|(special, _)| *special == name).map(|&(_, id)| id)
}
