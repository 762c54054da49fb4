//! Which contexts are in which pages.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use microserving_protocol::{PageId, TokenId};
use microserving_radix::{NodeId, NodeView, RadixTree};

use crate::events::EventLog;
use crate::{KvChange, KvError, KvEvent, KvSnapshot, PageHash};

/// Contexts by their tokens, separated by salt: a radix tree with one root a tenant and one page a value.
///
/// Only full pages that are completely written are in it, and they do not change while they are. Read-only to others:
/// [`crate::KvCache`] alone changes it, together with the pool.
#[derive(Clone, Debug)]
pub struct PrefixCache {
    tree: RadixTree<TokenId, PageId>,
    /// A tenant's root exists while something is below it or pinned at it.
    roots: BTreeMap<Arc<str>, NodeId>,
    tenants: BTreeMap<NodeId, (Arc<str>, PageHash)>,
    /// The name of each page that is in the tree.
    hashes: Vec<Option<PageHash>>,
    events: EventLog,
}

/// What a commit did.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The pin at the new end.
    pub(crate) pin: NodeId,
    /// How many of the pages were in the tree before; the given pages now name those of the tree.
    pub(crate) num_matched: usize,
}

impl PrefixCache {
    pub(crate) fn new(page_size: NonZeroUsize, num_pages: u32, event_capacity: usize) -> Self {
        Self {
            tree: RadixTree::new(page_size),
            roots: BTreeMap::new(),
            tenants: BTreeMap::new(),
            hashes: vec![None; num_pages as usize],
            events: EventLog::new(event_capacity),
        }
    }

    /// Returns the pages that can be matched.
    #[must_use]
    pub fn num_pages(&self) -> usize {
        self.tree.num_pages()
    }

    /// Returns the runs of pages without a branch, tenants' roots included.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.tree.num_nodes()
    }

    /// Returns the tenants that have something cached or in use.
    #[must_use]
    pub fn num_tenants(&self) -> usize {
        self.roots.len()
    }

    /// Returns the host memory that the index itself takes, in bytes; the pages are elsewhere.
    #[must_use]
    pub const fn index_bytes(&self) -> usize {
        self.tree.num_bytes()
    }

    /// Returns the name of a page's content if the page can be matched.
    #[must_use]
    pub fn hash(&self, page: PageId) -> Option<PageHash> {
        self.hashes.get(page.0 as usize).copied().flatten()
    }

    /// Returns how many full pages of `tokens` could be matched.
    #[must_use]
    pub fn peek(&self, salt: &str, tokens: &[TokenId]) -> usize {
        let root = self.roots.get(salt);
        root.and_then(|root| self.tree.longest_match(*root, tokens, |_| ()).ok()).unwrap_or(0)
    }

    pub(crate) fn pin_longest(&mut self, salt: &str, tokens: &[TokenId]) -> (NodeId, Vec<PageId>) {
        let root = self.root(salt);
        let mut pages = Vec::new();
        let pinned = self.tree.pin_longest(root, tokens, |page| pages.push(*page));
        (pinned.expect("a root in the map is in the tree").node, pages)
    }

    pub(crate) fn pin(&mut self, node: NodeId) {
        self.tree.pin(node).expect("the caller holds a pin on the node");
    }

    pub(crate) fn unpin(&mut self, node: NodeId) {
        self.tree.unpin(node).expect("the caller holds a pin on the node");
        self.forget_if_empty(node);
    }

    /// Stores full pages of `tokens` below a pin, and moves the pin to their end.
    pub(crate) fn advance(
        &mut self,
        pin: NodeId,
        last_shared: Option<PageId>,
        tokens: &[TokenId],
        pages: &mut [PageId],
    ) -> Result<Stored, KvError> {
        let parent = match last_shared {
            Some(page) => self.hash(page),
            None => self.tenants.get(&pin).map(|(_, hash)| *hash),
        };
        let mut hash =
            parent.expect("a pin is on a tenant's root, or at the end of pages that are in the tree");
        let (pinned, num_matched) =
            self.tree.advance(pin, tokens, pages).expect("the caller holds the pin and gives whole pages");
        let mut stored = Vec::new();
        let mut parent = hash;
        for (index, chunk) in tokens.chunks_exact(self.tree.page_size()).enumerate() {
            let Some(page) = pages.get(index) else { break };
            hash = hash.child(chunk);
            if index < num_matched {
                parent = hash;
                continue;
            }
            self.hashes[page.0 as usize] = Some(hash);
            stored.push(hash);
        }
        if !stored.is_empty() {
            self.events.push(KvChange::Stored { parent, pages: stored });
        }
        Ok(Stored { pin: pinned.node, num_matched })
    }

    /// Returns the tokens of the page at whose end a pin stands; `None` at a root.
    pub(crate) fn last_page_tokens(&self, pin: NodeId) -> Option<&[TokenId]> {
        self.tree.get(pin)?.keys.rchunks_exact(self.tree.page_size()).next()
    }

    /// Takes up to `max_pages` pages that nobody uses out of the tree, the least recently used first.
    pub(crate) fn evict(&mut self, max_pages: usize) -> Vec<PageId> {
        let pages = self.take_out(max_pages);
        if !pages.is_empty() {
            let hashes = pages.iter().filter_map(|page| self.hashes[page.0 as usize].take()).collect();
            self.events.push(KvChange::Removed { pages: hashes });
        }
        pages
    }

    /// Takes every page that nobody uses out of the tree.
    pub(crate) fn clear(&mut self) -> Vec<PageId> {
        let pages = self.take_out(usize::MAX);
        let hashes: Vec<_> = pages.iter().filter_map(|page| self.hashes[page.0 as usize].take()).collect();
        if self.tree.num_pages() == 0 {
            self.events.push(KvChange::Cleared);
        } else if !hashes.is_empty() {
            self.events.push(KvChange::Removed { pages: hashes });
        }
        pages
    }

    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.take()
    }

    pub(crate) fn snapshot(&self) -> KvSnapshot {
        KvSnapshot {
            next_seq: self.events.next_seq(),
            pages: self.hashes.iter().copied().flatten().collect(),
        }
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeView<'_, TokenId, PageId>> {
        self.tree.iter()
    }

    pub(crate) const fn tree(&self) -> &RadixTree<TokenId, PageId> {
        &self.tree
    }

    pub(crate) fn tenant_hash(&self, root: NodeId) -> Option<PageHash> {
        self.tenants.get(&root).map(|(_, hash)| *hash)
    }

    fn take_out(&mut self, max_pages: usize) -> Vec<PageId> {
        let mut pages = Vec::new();
        while let Some(evicted) = self.tree.evict(max_pages - pages.len()) {
            pages.extend(evicted.values);
            if let Some(root) = evicted.emptied_root {
                self.forget_if_empty(root);
            }
        }
        pages
    }

    fn root(&mut self, salt: &str) -> NodeId {
        if let Some(root) = self.roots.get(salt) {
            return *root;
        }
        let root = self.tree.add_root();
        let salt: Arc<str> = salt.into();
        self.tenants.insert(root, (salt.clone(), PageHash::root(&salt)));
        self.roots.insert(salt, root);
        root
    }

    /// Forgets a tenant of whom nothing is left; salts come from outside and must not pile up.
    fn forget_if_empty(&mut self, node: NodeId) {
        if self.tenants.contains_key(&node)
            && self.tree.remove_root(node).is_ok()
            && let Some((salt, _)) = self.tenants.remove(&node)
        {
            self.roots.remove(&salt);
        }
    }
}
