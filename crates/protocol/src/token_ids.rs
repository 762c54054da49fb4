//! A list of tokens that many hold and nobody changes.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde::{Serialize, Serializer};

use crate::TokenId;

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

/// Writes the array. Prompts have thousands of ids, so their digits come in groups of three from a table.
fn write(ids: &[TokenId]) -> Vec<u8> {
    let longest = ids.iter().map(|id| id.0).max().unwrap_or(0).checked_ilog10().unwrap_or(0) as usize + 1;
    // A group is put down as four bytes, of which the next one covers what is too much.
    let mut text = vec![0; 2 + ids.len() * (longest + 1) + GROUP];
    text[0] = b'[';
    let mut at = 1;
    for id in ids {
        at = put(&mut text, at, id.0);
    }
    // Where the last comma is.
    at -= usize::from(!ids.is_empty());
    text[at] = b']';
    text.truncate(at + 1);
    text
}

/// Bytes of a group: three digits and a comma.
const GROUP: usize = 4;

/// The numbers below a thousand in three digits, and a comma behind them; the first digit is the lowest byte.
static GROUPS: [u32; 1000] = groups();

/// How many zeros each of them begins with. Looked up, because a branch would be guessed wrong for every third id.
static ZEROS: [u8; 1000] = zeros();

const fn zeros() -> [u8; 1000] {
    let mut zeros = [0; 1000];
    let mut number = 0;
    while number < 100 {
        zeros[number] = if number < 10 { 2 } else { 1 };
        number += 1;
    }
    zeros
}

const fn groups() -> [u32; 1000] {
    let mut groups = [0; 1000];
    let mut number = 0;
    while number < 1000 {
        let n = number as u32;
        let digits = [n / 100, n / 10 % 10, n % 10];
        groups[number] = b'0' as u32 * 0x01_01_01 + (digits[0] | digits[1] << 8 | digits[2] << 16);
        groups[number] |= (b',' as u32) << 24;
        number += 1;
    }
    groups
}

/// Puts an id and a comma at `at`, and returns where the next one goes.
#[inline]
fn put(text: &mut [u8], at: usize, id: u32) -> usize {
    if id < 1000 {
        put_first(text, at, id)
    } else if id < 1_000_000 {
        let at = put_first(text, at, id / 1000);
        put_next(text, at, id % 1000)
    } else {
        put_long(text, at, id)
    }
}

/// As [`put`], for ids that no vocabulary has.
#[cold]
fn put_long(text: &mut [u8], at: usize, id: u32) -> usize {
    let millions = id / 1_000_000;
    let at = if millions < 1000 {
        put_first(text, at, millions)
    } else {
        let at = put_first(text, at, millions / 1000);
        put_next(text, at, millions % 1000)
    };
    let at = put_next(text, at, id / 1000 % 1000);
    put_next(text, at, id % 1000)
}

/// Puts the first group of an id, which has no zeros in front.
#[inline]
fn put_first(text: &mut [u8], at: usize, group: u32) -> usize {
    let zeros = ZEROS[group as usize];
    text[at..at + GROUP].copy_from_slice(&(GROUPS[group as usize] >> (8 * zeros)).to_le_bytes());
    at + GROUP - zeros as usize
}

/// Puts a group where the comma behind the one before is.
#[inline]
fn put_next(text: &mut [u8], at: usize, group: u32) -> usize {
    text[at - 1..at - 1 + GROUP].copy_from_slice(&GROUPS[group as usize].to_le_bytes());
    at - 1 + GROUP
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
        let edges = (0..32).flat_map(|bit| [(1 << bit) - 1, 1 << bit]);
        let tens = (0..10).flat_map(|n| [10_u32.pow(n) - 1, 10_u32.pow(n), 10_u32.pow(n) + 1]);
        let some = vec![u32::MAX, 7, 10, 99, 100, 1_000_007, 1_007_000, 4_000_000_000];
        for ids in [vec![], vec![0], some, edges.collect(), tens.collect(), (0..2000).collect()] {
            let ids: Vec<_> = ids.into_iter().map(TokenId).collect();
            let shared = TokenIds::from(ids.clone());
            assert_eq!(shared.json(), serde_json::to_vec(&ids).unwrap());
            assert_eq!(serde_json::to_vec(&shared).unwrap(), serde_json::to_vec(&ids).unwrap());
            assert_eq!(shared.json().as_ptr(), shared.clone().json().as_ptr(), "written once");
            assert_eq!(shared.clone().into_vec(), ids);
        }
    }
}
