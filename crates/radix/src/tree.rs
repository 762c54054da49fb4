//! The tree: matching, pinning, evicting.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use crate::node::{Node, Slab};
use crate::{NodeId, RadixError};

mod check;
mod store;

/// A radix tree over pages of `page_size` keys with one value a page. The crate's own page tells the story.
///
/// ```text
/// root ── [k0 k1 | k2 k3 | k4 k5] ──┬── [k6 k7]            one node: a run of pages without a branch
///            v0      v1      v2     └── [k8 k9 | k1 k1]    children differ somewhere in their first page
/// ```
///
/// A tree may have several roots ([`RadixTree::add_root`]): separate name spaces with one order of eviction.
#[derive(Clone, Debug)]
pub struct RadixTree<K, V> {
    page_size: usize,
    nodes: Slab<K, V>,
    /// Unpinned leaves, least recently used first. Holds exactly the evictable nodes.
    evictable: BTreeSet<(u64, NodeId)>,
    /// Counts uses; the order of uses is all that eviction asks about, so no clock is needed.
    ticks: u64,
    num_pages: usize,
    num_bytes: usize,
}

/// A pinned path, to be given back by [`RadixTree::unpin`] or moved on by [`RadixTree::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The node where the path ends.
    pub node: NodeId,
    /// Pages from the node where the search began to the path's end.
    pub num_pages: usize,
}

/// What [`RadixTree::evict`] took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted<V> {
    /// The values of the pages taken, in order of their keys.
    pub values: Vec<V>,
    /// A root that has neither children nor pins any more, if this left one: it may be removed.
    pub emptied_root: Option<NodeId>,
}

/// A node as iteration shows it.
#[derive(Debug)]
pub struct NodeView<'a, K, V> {
    /// Its id.
    pub node: NodeId,
    /// The node above; `None` for a root.
    pub parent: Option<NodeId>,
    /// The keys of its own pages; empty for a root.
    pub keys: &'a [K],
    /// The values of its own pages.
    pub values: &'a [V],
    /// Readers whose path ends at its end.
    pub pins: usize,
}

/// A place in the tree: so many pages into a node.
#[derive(Clone, Copy, Debug)]
struct Position {
    node: NodeId,
    pages: usize,
}

impl<K: Ord + Clone, V> RadixTree<K, V> {
    /// Makes a tree without roots.
    #[must_use]
    pub const fn new(page_size: NonZeroUsize) -> Self {
        Self {
            page_size: page_size.get(),
            nodes: Slab::new(),
            evictable: BTreeSet::new(),
            ticks: 0,
            num_pages: 0,
            num_bytes: 0,
        }
    }

    /// Returns the keys in a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the pages stored.
    #[must_use]
    pub const fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Returns the nodes, roots included.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the bytes that nodes, keys and values take, what values own elsewhere left out.
    #[must_use]
    pub const fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Adds a name space of its own.
    pub fn add_root(&mut self) -> NodeId {
        self.num_bytes += Node::<K, V>::num_bytes(0, self.page_size);
        self.nodes.insert(Node::new(None, Vec::new(), Vec::new(), 0))
    }

    /// Removes a root that has neither children nor pins.
    ///
    /// # Errors
    /// [`RadixError::InUse`] if it has, or is not a root; [`RadixError::StaleNode`].
    pub fn remove_root(&mut self, root: NodeId) -> Result<(), RadixError> {
        let node = self.nodes.get(root).ok_or(RadixError::StaleNode { node: root })?;
        if node.parent.is_some() || !node.children.is_empty() || node.pins > 0 {
            return Err(RadixError::InUse { node: root });
        }
        self.nodes.remove(root);
        self.num_bytes -= Node::<K, V>::num_bytes(0, self.page_size);
        Ok(())
    }

    /// Returns how many whole pages of `keys` are stored below `from`, and shows the value of each to `visit`, in order.
    ///
    /// Changes nothing: what is only looked at does not become recently used.
    ///
    /// # Errors
    /// [`RadixError::StaleNode`].
    pub fn longest_match(
        &self,
        from: NodeId,
        keys: &[K],
        mut visit: impl FnMut(&V),
    ) -> Result<usize, RadixError> {
        let (_, num_pages) = self.walk(from, keys, |node, pages| {
            node.values[..pages].iter().for_each(&mut visit);
        })?;
        Ok(num_pages)
    }

    /// Finds the longest match of whole pages of `keys` below `from`, pins it, and shows the value of each page.
    ///
    /// The pinned path stays, and stays where it is, until the pin is given back. It ends at a node of its own: a match that
    /// ends inside a node splits it. Counts as a use of the path.
    ///
    /// # Errors
    /// [`RadixError::StaleNode`].
    pub fn pin_longest(
        &mut self,
        from: NodeId,
        keys: &[K],
        mut visit: impl FnMut(&V),
    ) -> Result<Pinned, RadixError> {
        let (end, num_pages) = self.walk(from, keys, |node, pages| {
            node.values[..pages].iter().for_each(&mut visit);
        })?;
        let node = self.end_node_at(end);
        self.add_pin(node);
        Ok(Pinned { node, num_pages })
    }

    /// Pins a node once more.
    ///
    /// # Errors
    /// [`RadixError::StaleNode`].
    pub fn pin(&mut self, node: NodeId) -> Result<(), RadixError> {
        self.nodes.get(node).ok_or(RadixError::StaleNode { node })?;
        self.add_pin(node);
        Ok(())
    }

    /// Gives one pin back. Counts as a use of the path.
    ///
    /// # Errors
    /// [`RadixError::NotPinned`], [`RadixError::StaleNode`].
    pub fn unpin(&mut self, node: NodeId) -> Result<(), RadixError> {
        self.take_pin(node)?;
        let tick = self.tick();
        let this = self.node_mut(node);
        this.last_used = tick;
        if this.is_evictable() {
            self.evictable.insert((tick, node));
        }
        Ok(())
    }

    /// Changes the values of the longest match of whole pages of `keys` below `from`; returns the number of its pages.
    ///
    /// `change` gets each page's place, counted from `from`, and its value. Not a use of the path.
    ///
    /// # Errors
    /// [`RadixError::StaleNode`].
    pub fn update_match(
        &mut self,
        from: NodeId,
        keys: &[K],
        mut change: impl FnMut(usize, &mut V),
    ) -> Result<usize, RadixError> {
        let mut path = Vec::new();
        let (end, num_pages) = self.walk(from, keys, |_, pages| path.push(pages))?;
        // The path is walked again from its end, because a node cannot be borrowed mutably during the walk down.
        let mut at = end.node;
        let mut next = num_pages;
        for pages in path.into_iter().rev() {
            let node = self.node_mut(at);
            for (index, value) in node.values[..pages].iter_mut().enumerate() {
                change(next - pages + index, value);
            }
            next -= pages;
            if let Some(parent) = node.parent {
                at = parent;
            }
        }
        Ok(num_pages)
    }

    /// Removes an unpinned leaf and returns its values.
    ///
    /// # Errors
    /// [`RadixError::InUse`] if it is pinned, has children or is a root; [`RadixError::StaleNode`].
    pub fn remove_leaf(&mut self, node: NodeId) -> Result<Evicted<V>, RadixError> {
        let this = self.nodes.get(node).ok_or(RadixError::StaleNode { node })?;
        if !this.is_evictable() {
            return Err(RadixError::InUse { node });
        }
        let num_pages = this.values.len();
        Ok(self.cut(node, num_pages))
    }

    /// Takes up to `max_pages` pages from the end of the leaf that has been unused for the longest time.
    ///
    /// `None` if every leaf is pinned, or `max_pages` is 0. Takes fewer pages than asked for if the leaf is shorter: call it
    /// again for more. Pages are taken from the end because the beginning of a context is what others are likely to share.
    pub fn evict(&mut self, max_pages: usize) -> Option<Evicted<V>> {
        if max_pages == 0 {
            return None;
        }
        let &(_, node) = self.evictable.first()?;
        let num_pages = self.node(node).values.len().min(max_pages);
        Some(self.cut(node, num_pages))
    }

    /// Shows all nodes, roots included, in no particular order that means anything, but the same in every run.
    pub fn iter(&self) -> impl Iterator<Item = NodeView<'_, K, V>> {
        self.nodes.iter().map(|(id, node)| NodeView {
            node: id,
            parent: node.parent,
            keys: &node.keys,
            values: &node.values,
            pins: node.pins,
        })
    }

    /// Shows one node.
    #[must_use]
    pub fn get(&self, node: NodeId) -> Option<NodeView<'_, K, V>> {
        self.nodes.get(node).map(|this| NodeView {
            node,
            parent: this.parent,
            keys: &this.keys,
            values: &this.values,
            pins: this.pins,
        })
    }

    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    fn node(&self, id: NodeId) -> &Node<K, V> {
        self.nodes.get(id).expect("links and the order of eviction name live nodes only")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node<K, V> {
        self.nodes.get_mut(id).expect("links and the order of eviction name live nodes only")
    }

    /// Follows `keys` down from the end of `from` as far as whole pages match. Shows each node passed, without `from`
    /// itself, and how many of its pages match; returns where the match ends and its pages.
    fn walk<'a>(
        &'a self,
        from: NodeId,
        keys: &[K],
        mut visit: impl FnMut(&'a Node<K, V>, usize),
    ) -> Result<(Position, usize), RadixError> {
        let mut node = self.nodes.get(from).ok_or(RadixError::StaleNode { node: from })?;
        let mut end = Position { node: from, pages: node.values.len() };
        let mut num_pages = 0;
        let mut rest = &keys[..keys.len() / self.page_size * self.page_size];
        while !rest.is_empty() && end.pages == node.values.len() {
            let Some(&child) = node.children.get(&rest[..self.page_size]) else { break };
            node = self.node(child);
            let pages = rest
                .chunks_exact(self.page_size)
                .zip(node.keys.chunks_exact(self.page_size))
                .take_while(|(wanted, stored)| wanted == stored)
                .count();
            visit(node, pages);
            end = Position { node: child, pages };
            num_pages += pages;
            rest = &rest[pages * self.page_size..];
        }
        Ok((end, num_pages))
    }

    /// Makes the place the end of a node, by splitting the node there if it goes on. The lower part keeps the id, because
    /// pins mean a node's end.
    fn end_node_at(&mut self, at: Position) -> NodeId {
        let page_size = self.page_size;
        let lower = self.node_mut(at.node);
        if at.pages == lower.values.len() {
            return at.node;
        }
        let lower_keys = lower.keys.split_off(at.pages * page_size);
        let upper_keys = std::mem::replace(&mut lower.keys, lower_keys);
        let lower_values = lower.values.split_off(at.pages);
        let upper_values = std::mem::replace(&mut lower.values, lower_values);
        let lower_first: Box<[K]> = lower.keys[..page_size].into();
        let upper_first: Box<[K]> = upper_keys[..page_size].into();
        let parent = lower.parent;
        let mut upper = Node::new(parent, upper_keys, upper_values, lower.last_used);
        upper.children.insert(lower_first, at.node);
        let upper = self.nodes.insert(upper);
        self.node_mut(at.node).parent = Some(upper);
        if let Some(parent) = parent {
            self.node_mut(parent).children.insert(upper_first, upper);
        }
        self.num_bytes += Node::<K, V>::num_bytes(0, page_size);
        upper
    }

    fn add_pin(&mut self, id: NodeId) {
        let tick = self.tick();
        let node = self.node_mut(id);
        let was = (node.last_used, id);
        node.pins += 1;
        node.last_used = tick;
        self.evictable.remove(&was);
    }

    /// Takes a pin away without letting eviction see the node: the caller decides what becomes of it.
    fn take_pin(&mut self, node: NodeId) -> Result<(), RadixError> {
        let this = self.nodes.get_mut(node).ok_or(RadixError::StaleNode { node })?;
        this.pins = this.pins.checked_sub(1).ok_or(RadixError::NotPinned { node })?;
        Ok(())
    }

    /// Takes pages from the end of an evictable node; removes it, and tells its parent, when none is left.
    fn cut(&mut self, id: NodeId, num_pages: usize) -> Evicted<V> {
        let page_size = self.page_size;
        self.num_pages -= num_pages;
        self.num_bytes -= num_pages * self.bytes_per_page();
        let node = self.node_mut(id);
        let keep = node.values.len() - num_pages;
        let values = node.values.split_off(keep);
        if keep > 0 {
            node.keys.truncate(keep * page_size);
            return Evicted { values, emptied_root: None };
        }
        let last_used = node.last_used;
        self.evictable.remove(&(last_used, id));
        let node = self.nodes.remove(id).expect("it was borrowed a moment ago");
        self.num_bytes -= Node::<K, V>::num_bytes(0, page_size);
        let mut emptied_root = None;
        if let Some(parent) = node.parent {
            let above = self.node_mut(parent);
            above.children.remove(&node.keys[..page_size]);
            // Whoever used the child used the parent too; saying so only now keeps every use O(1) in the depth.
            above.last_used = above.last_used.max(last_used);
            if above.is_evictable() {
                let entry = (above.last_used, parent);
                self.evictable.insert(entry);
            } else if above.parent.is_none() && above.children.is_empty() && above.pins == 0 {
                emptied_root = Some(parent);
            }
        }
        Evicted { values, emptied_root }
    }

    fn bytes_per_page(&self) -> usize {
        Node::<K, V>::num_bytes(1, self.page_size) - Node::<K, V>::num_bytes(0, self.page_size)
    }
}
