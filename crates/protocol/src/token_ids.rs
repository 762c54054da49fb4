//! A list of tokens that many hold and nobody changes.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde::{Serialize, Serializer};

use crate::TokenId;

/// The most digits that a token id has, and what stands between two.
const LONGEST: usize = "4294967295,".len();

/// Tokens shared by whoever works on one prompt. Clones are cheap, and so is every text of them after the first: a prompt goes to engines
/// several times, and writing its digits is most of the work of a call.
#[derive(Clone, Default)]
pub struct TokenIds(Arc<Shared>);

#[derive(Default)]
struct Shared {
    ids: Vec<TokenId>,
    json: OnceLock<Bytes>,
}

impl TokenIds {
    /// Returns them as a JSON array of numbers, without spaces.
    #[must_use]
    pub fn json(&self) -> Bytes {
        self.0.json.get_or_init(|| write(&self.0.ids).into()).clone()
    }

    /// Returns a list of one's own, without copying if nobody else holds this one.
    #[must_use]
    pub fn into_vec(self) -> Vec<TokenId> {
        match Arc::try_unwrap(self.0) {
            Ok(shared) => shared.ids,
            Err(shared) => shared.ids.clone(),
        }
    }
}

fn write(ids: &[TokenId]) -> Vec<u8> {
    let mut text = Vec::with_capacity(ids.len() * LONGEST / 2 + 2);
    let mut digits = itoa::Buffer::new();
    text.push(b'[');
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            text.push(b',');
        }
        text.extend_from_slice(digits.format(id.0).as_bytes());
    }
    text.push(b']');
    text
}

impl Deref for TokenIds {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        &self.0.ids
    }
}

impl From<Vec<TokenId>> for TokenIds {
    fn from(ids: Vec<TokenId>) -> Self {
        Self(Arc::new(Shared { ids, json: OnceLock::new() }))
    }
}

impl From<&[TokenId]> for TokenIds {
    fn from(ids: &[TokenId]) -> Self {
        ids.to_vec().into()
    }
}

impl PartialEq for TokenIds {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || **self == **other
    }
}

impl Eq for TokenIds {}

impl fmt::Debug for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Serialize for TokenIds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_that_of_the_list() {
        for ids in [vec![], vec![0], vec![u32::MAX, 7, 10, 99, 100], (0..1000).collect()] {
            let ids: Vec<_> = ids.into_iter().map(TokenId).collect();
            let shared = TokenIds::from(ids.clone());
            assert_eq!(shared.json(), serde_json::to_vec(&ids).unwrap());
            assert_eq!(serde_json::to_vec(&shared).unwrap(), serde_json::to_vec(&ids).unwrap());
            assert_eq!(shared.json().as_ptr(), shared.clone().json().as_ptr(), "written once");
            assert_eq!(shared.clone().into_vec(), ids);
        }
    }
}
