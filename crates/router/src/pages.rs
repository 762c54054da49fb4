//! The page hashes of one prompt, made once and only as far as somebody asks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::{PageHash, TokenId};

/// The chains of a prompt, one a page size. Clones share them; they follow from the prompt, so all are equal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chains(Arc<Mutex<Vec<Chain>>>);

#[derive(Debug)]
struct Chain {
    page_size: u32,
    hashes: Vec<PageHash>,
}

impl PartialEq for Chains {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Chains {
    /// Returns the chain of `tokens` for a page size.
    pub(crate) fn of<'a>(&'a self, tokens: &'a [TokenId], salt: &'a str, page_size: u32) -> Pages<'a> {
        let mut chains = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = chains.iter().position(|chain| chain.page_size == page_size).unwrap_or_else(|| {
            chains.push(Chain { page_size, hashes: Vec::new() });
            chains.len() - 1
        });
        Pages { chains, at, tokens, salt }
    }
}

/// One chain. Holds the prompt's chains while it lives.
#[derive(Debug)]
pub(crate) struct Pages<'a> {
    chains: MutexGuard<'a, Vec<Chain>>,
    at: usize,
    tokens: &'a [TokenId],
    salt: &'a str,
}

impl Pages<'_> {
    /// Returns the name of the page at `depth`; nothing behind the last full page.
    pub(crate) fn get(&mut self, depth: usize) -> Option<PageHash> {
        let chain = &mut self.chains[self.at];
        let page_size = chain.page_size as usize;
        if page_size == 0 {
            return None;
        }
        while chain.hashes.len() <= depth {
            let start = chain.hashes.len() * page_size;
            let page = self.tokens.get(start..start + page_size)?;
            let before = chain.hashes.last().copied().unwrap_or_else(|| PageHash::root(self.salt));
            chain.hashes.push(before.child(page));
        }
        Some(chain.hashes[depth])
    }
}

#[cfg(test)]
mod tests {
    use microserving_protocol::page_hashes;

    use super::*;

    #[test]
    fn pages_are_hashed_as_far_as_asked() {
        let tokens: Vec<_> = (0..70).map(TokenId).collect();
        let chains = Chains::default();
        for (page_size, asked, made) in
            [(16, 1, 2), (4, 16, 17), (16, 0, 2), (16, 9, 4), (0, 3, 0), (71, 0, 0)]
        {
            let mut pages = chains.of(&tokens, "salt", page_size);
            let whole = page_hashes("salt", &tokens, page_size);
            assert_eq!(pages.get(asked), whole.get(asked).copied(), "page {asked} of {page_size}");
            assert_eq!(pages.chains[pages.at].hashes, whole[..made]);
        }
    }
}
