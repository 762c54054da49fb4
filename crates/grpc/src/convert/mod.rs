//! From the protocol's types to messages and back.

mod answers;
mod calls;
mod completion;
mod views;

#[cfg(test)]
mod tests;

use microserving_protocol::TokenId;

use crate::wire;

/// A message of the other side that the protocol has no meaning for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadMessage(pub String);

impl std::fmt::Display for BadMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadMessage {}

fn ids(tokens: &[TokenId]) -> wire::TokenIds {
    wire::TokenIds { ids: tokens.iter().map(|token| token.0).collect() }
}

fn tokens(ids: Vec<u32>) -> Vec<TokenId> {
    ids.into_iter().map(TokenId).collect()
}
