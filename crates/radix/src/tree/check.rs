//! What must always hold, for tests and invariants of others.

use std::collections::BTreeMap;

use super::RadixTree;
use crate::NodeId;
use crate::node::Node;

impl<K: Ord + Clone, V> RadixTree<K, V> {
    /// Checks that the tree is one: links agree in both directions, pages are whole, the order of eviction holds exactly
    /// the unpinned leaves, and the counters are right. Walks the whole tree.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let mut num_pages = 0;
        let mut num_bytes = 0;
        let mut num_evictable = 0;
        for (id, node) in self.nodes.iter() {
            num_pages += node.values.len();
            num_bytes += Node::<K, V>::num_bytes(node.values.len(), self.page_size);
            if node.keys.len() != node.values.len() * self.page_size {
                return Err(format!("{id:?} holds {} keys for {} pages", node.keys.len(), node.values.len()));
            }
            if node.parent.is_none() != node.values.is_empty() {
                return Err(format!("{id:?} is a root with pages or an empty node"));
            }
            if let Some(parent) = node.parent {
                let above = self.nodes.get(parent).ok_or_else(|| format!("{id:?} hangs on nothing"))?;
                if above.children.get(&node.keys[..self.page_size]) != Some(&id) {
                    return Err(format!("{parent:?} does not know its child {id:?}"));
                }
            }
            for (key, child) in &node.children {
                let below = self.nodes.get(*child).ok_or_else(|| format!("{id:?} has a dead child"))?;
                if below.parent != Some(id) || below.keys[..self.page_size] != **key {
                    return Err(format!("{id:?} and its child {child:?} disagree"));
                }
            }
            if node.is_evictable() {
                num_evictable += 1;
            }
            if node.is_evictable() != self.evictable.contains(&(node.last_used, id)) {
                return Err(format!(
                    "{id:?} is in the order of eviction but pinned or inner, or the reverse"
                ));
            }
        }
        if num_evictable != self.evictable.len() {
            return Err("the order of eviction holds a node twice or a dead one".into());
        }
        if (num_pages, num_bytes) != (self.num_pages, self.num_bytes) {
            return Err(format!(
                "counted {num_pages} pages and {num_bytes} bytes, kept count of {} and {}",
                self.num_pages, self.num_bytes
            ));
        }
        Ok(())
    }

    /// Counts, for every node, the pins at its end or anywhere below it: the readers of its pages.
    ///
    /// Walks the whole tree; meant for checks.
    #[must_use]
    pub fn readers(&self) -> BTreeMap<NodeId, usize> {
        let mut readers: BTreeMap<NodeId, usize> = self.nodes.iter().map(|(id, _)| (id, 0)).collect();
        for (id, node) in self.nodes.iter().filter(|(_, node)| node.pins > 0) {
            let mut at = Some(id);
            while let Some(here) = at {
                *readers.entry(here).or_default() += node.pins;
                at = self.node(here).parent;
            }
        }
        readers
    }
}
