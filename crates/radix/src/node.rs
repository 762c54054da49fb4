//! Nodes, and the slab they live in.

use std::collections::BTreeMap;
use std::mem::size_of;

/// Names a node of one tree.
///
/// While a node is pinned, its id denotes the same path (the keys from its root to its end), however the tree changes. The
/// id of an unpinned node may come to denote a longer or shorter path, or nothing: then it is stale, which is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    index: u32,
    version: u32,
}

/// A run of pages without a branch.
#[derive(Clone, Debug)]
pub(crate) struct Node<K, V> {
    /// The node above; `None` for a root.
    pub(crate) parent: Option<NodeId>,
    /// `values.len() * page_size` keys; empty for a root.
    pub(crate) keys: Vec<K>,
    /// One value a page.
    pub(crate) values: Vec<V>,
    /// The nodes below by their first page.
    pub(crate) children: BTreeMap<Box<[K]>, NodeId>,
    /// Readers whose path ends exactly at this node's end.
    pub(crate) pins: usize,
    /// When this node or anything that was ever below it was last used.
    pub(crate) last_used: u64,
}

impl<K, V> Node<K, V> {
    pub(crate) fn new(parent: Option<NodeId>, keys: Vec<K>, values: Vec<V>, last_used: u64) -> Self {
        Self { parent, keys, values, children: BTreeMap::new(), pins: 0, last_used }
    }

    /// Says whether eviction may take pages from this node's end.
    pub(crate) fn is_evictable(&self) -> bool {
        self.parent.is_some() && self.children.is_empty() && self.pins == 0
    }

    /// Returns the bytes of a node with `num_pages` pages: itself, its keys and values, and its entry in its parent.
    pub(crate) fn num_bytes(num_pages: usize, page_size: usize) -> usize {
        let entry = size_of::<(Box<[K]>, NodeId)>() + page_size * size_of::<K>();
        size_of::<Self>() + entry + num_pages * (page_size * size_of::<K>() + size_of::<V>())
    }
}

#[derive(Clone, Debug)]
struct Slot<K, V> {
    version: u32,
    node: Option<Node<K, V>>,
}

/// Nodes by id; a place that is used again gets a new version, so that an old id is noticed.
#[derive(Clone, Debug)]
pub(crate) struct Slab<K, V> {
    slots: Vec<Slot<K, V>>,
    vacant: Vec<u32>,
}

impl<K, V> Slab<K, V> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), vacant: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    pub(crate) fn insert(&mut self, node: Node<K, V>) -> NodeId {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index as usize];
            slot.node = Some(node);
            return NodeId { index, version: slot.version };
        }
        let index = u32::try_from(self.slots.len()).expect("a tree of 2^32 nodes does not fit into memory");
        self.slots.push(Slot { version: 0, node: Some(node) });
        NodeId { index, version: 0 }
    }

    pub(crate) fn remove(&mut self, id: NodeId) -> Option<Node<K, V>> {
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.version == id.version)?;
        let node = slot.node.take()?;
        slot.version = slot.version.wrapping_add(1);
        self.vacant.push(id.index);
        Some(node)
    }

    pub(crate) fn get(&self, id: NodeId) -> Option<&Node<K, V>> {
        self.slots.get(id.index as usize).filter(|slot| slot.version == id.version)?.node.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node<K, V>> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.version == id.version)?.node.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Node<K, V>)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let index = u32::try_from(index).ok()?;
            Some((NodeId { index, version: slot.version }, slot.node.as_ref()?))
        })
    }
}
