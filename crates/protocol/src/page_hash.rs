//! Hash chains: a page named by everything from the beginning of its context to its own last token.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_128;

use crate::TokenId;

/// The name of one page's content: `h_i = H(h_(i-1), tokens of page i)`, `h_(-1) = H(salt)`.
///
/// Two pages have the same name when they hold the same tokens behind the same context of the same tenant. It is a hint for
/// a router's index and no proof: the cache itself always compares tokens. The hash is XXH3's 128 bits over little-endian
/// numbers, so that every process computes the same. As text it is 32 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub u128);

impl PageHash {
    /// Returns the start of a tenant's chains.
    #[must_use]
    pub fn root(salt: &str) -> Self {
        let mut bytes = b"microserving kv page v1\0".to_vec();
        bytes.extend_from_slice(salt.as_bytes());
        Self(xxh3_128(&bytes))
    }

    /// Returns the name of the page that holds `tokens` behind this one.
    #[must_use]
    pub fn child(self, tokens: &[TokenId]) -> Self {
        let len = 16 + 4 * tokens.len();
        // Pages of usual sizes need no allocation, of which a router would make one for each page of each prompt.
        if tokens.len() <= 16 {
            return self.hash_in(&mut [0; 16 + 4 * 16][..len], tokens);
        }
        if tokens.len() <= 64 {
            return self.hash_in(&mut [0; 16 + 4 * 64][..len], tokens);
        }
        self.hash_in(&mut vec![0; len], tokens)
    }

    /// Hashes what precedes a page and its tokens, put together in `bytes`.
    fn hash_in(self, bytes: &mut [u8], tokens: &[TokenId]) -> Self {
        let (context, page) = bytes.split_at_mut(16);
        context.copy_from_slice(&self.0.to_le_bytes());
        for (bytes, token) in page.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.0.to_le_bytes());
        }
        Self(xxh3_128(bytes))
    }
}

impl fmt::Display for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for PageHash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
        number.map(Self).ok_or_else(|| format!("{text:?} is not a page hash of 32 hex digits"))
    }
}

/// Returns the names of the full pages of `tokens`, first page first.
///
/// A `page_size` of 0 has no pages.
#[must_use]
pub fn page_hashes(salt: &str, tokens: &[TokenId], page_size: u32) -> Vec<PageHash> {
    if page_size == 0 {
        return Vec::new();
    }
    let mut hash = PageHash::root(salt);
    let pages = tokens.chunks_exact(page_size as usize);
    pages
        .map(|page| {
            hash = hash.child(page);
            hash
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(numbers: &[u32]) -> Vec<TokenId> {
        numbers.iter().copied().map(TokenId).collect()
    }

    #[test]
    fn a_page_is_named_by_all_that_precedes_it() {
        let a = page_hashes("", &tokens(&[1, 2, 3, 4, 5]), 2);
        let b = page_hashes("", &tokens(&[9, 2, 3, 4]), 2);
        assert_eq!(a.len(), 2, "the last token fills no page");
        assert_ne!(a[1], b[1], "same tokens, another context");
        assert_eq!(a[..1], page_hashes("", &tokens(&[1, 2, 3]), 2));
    }

    #[test]
    fn salts_and_page_borders_separate() {
        let all = tokens(&[1, 2, 3, 4]);
        assert_ne!(page_hashes("a", &all, 2), page_hashes("b", &all, 2));
        assert_ne!(page_hashes("", &all, 4).last(), page_hashes("", &all, 2).last());
        assert!(page_hashes("", &all, 0).is_empty());
    }

    #[test]
    fn text_goes_both_ways() {
        for hash in [PageHash(0), PageHash(u128::MAX), PageHash::root("x")] {
            assert_eq!(hash.to_string().parse(), Ok(hash));
        }
        for bad in ["", "0", "+0000000000000000000000000000001", "g0000000000000000000000000000000"] {
            assert!(bad.parse::<PageHash>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_hash_is_the_same_on_every_machine() {
        // Routers and engines of different builds must agree: a change here is a change of the wire.
        let hash = PageHash::root("tenant").child(&tokens(&[1, 2, 3, 4]));
        expect_test::expect!["92962c230b2df3ee6da8374cf1a8e2c6"].assert_eq(&hash.to_string());
        // Small and large pages are hashed as the same bytes.
        for len in [0_u32, 1, 63, 64, 65, 300] {
            let page: Vec<_> = (0..len).map(TokenId).collect();
            let mut bytes = hash.0.to_le_bytes().to_vec();
            page.iter().for_each(|token| bytes.extend_from_slice(&token.0.to_le_bytes()));
            assert_eq!(hash.child(&page), PageHash(xxh3_128(&bytes)), "{len} tokens");
        }
    }
}
