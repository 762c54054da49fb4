//! Storing what is not there.

use super::{Pinned, Position, RadixTree};
use crate::node::Node;
use crate::{NodeId, RadixError};

impl<K: Ord + Clone, V: Clone> RadixTree<K, V> {
    /// Stores `keys` below `from`, one value a page, and returns how many pages of them were there already.
    ///
    /// What is there wins: the values of those pages are cloned into `values`, so that afterwards `values` says what the
    /// tree holds for `keys`. Counts as a use of the path.
    ///
    /// # Errors
    /// [`RadixError::WrongShape`] unless `keys` are `values.len()` whole pages; [`RadixError::StaleNode`].
    pub fn insert(&mut self, from: NodeId, keys: &[K], values: &mut [V]) -> Result<usize, RadixError> {
        self.nodes.get(from).ok_or(RadixError::StaleNode { node: from })?;
        self.check_shape(keys, values)?;
        let (end, num_matched) = self.store(from, keys, values);
        // What lies behind `keys` in the same node has not been used.
        let end = self.end_node_at(end);
        let tick = self.tick();
        let node = self.node_mut(end);
        let was = (node.last_used, end);
        node.last_used = tick;
        if self.evictable.remove(&was) {
            self.evictable.insert((tick, end));
        }
        Ok(num_matched)
    }

    /// Moves one pin from the end of `pinned` to the end of `keys` below it, storing what is not there; as
    /// [`RadixTree::insert`] otherwise. Returns the new pin (its `num_pages` are those of `keys`) and the pages that were
    /// there already.
    ///
    /// Costs what `keys` costs, however long the path above is, and a path that one reader extends page by page stays one
    /// node.
    ///
    /// # Errors
    /// [`RadixError::WrongShape`], [`RadixError::NotPinned`], [`RadixError::StaleNode`]; the pin stays where it is.
    pub fn advance(
        &mut self,
        pinned: NodeId,
        keys: &[K],
        values: &mut [V],
    ) -> Result<(Pinned, usize), RadixError> {
        self.check_shape(keys, values)?;
        self.take_pin(pinned)?;
        let (end, num_matched) = self.store(pinned, keys, values);
        let node = self.end_node_at(end);
        self.add_pin(node);
        Ok((Pinned { node, num_pages: values.len() }, num_matched))
    }

    fn check_shape(&self, keys: &[K], values: &[V]) -> Result<(), RadixError> {
        if values.len().checked_mul(self.page_size) == Some(keys.len()) {
            return Ok(());
        }
        Err(RadixError::WrongShape {
            num_keys: keys.len(),
            num_values: values.len(),
            page_size: self.page_size,
        })
    }

    /// Stores what is not there; returns the place where `keys` end and the pages that were there.
    fn store(&mut self, from: NodeId, keys: &[K], values: &mut [V]) -> (Position, usize) {
        let mut seen = 0;
        let (end, num_matched) = self
            .walk(from, keys, |node, pages| {
                values[seen..seen + pages].clone_from_slice(&node.values[..pages]);
                seen += pages;
            })
            .expect("the caller has looked the node up");
        let new_keys = &keys[num_matched * self.page_size..];
        let new_values = &values[num_matched..];
        if new_values.is_empty() {
            return (end, num_matched);
        }
        self.num_pages += new_values.len();
        self.num_bytes += new_values.len() * self.bytes_per_page();
        let above = self.end_node_at(end);
        let tick = self.tick();
        let node = self.node_mut(above);
        if node.is_evictable() {
            // Nobody else's path ends here: the run of pages just gets longer.
            let was = (node.last_used, above);
            node.keys.extend_from_slice(new_keys);
            node.values.extend_from_slice(new_values);
            node.last_used = tick;
            let pages = node.values.len();
            self.evictable.remove(&was);
            self.evictable.insert((tick, above));
            return (Position { node: above, pages }, num_matched);
        }
        let was = (node.last_used, above);
        let child = self.nodes.insert(Node::new(Some(above), new_keys.to_vec(), new_values.to_vec(), tick));
        self.num_bytes += Node::<K, V>::num_bytes(0, self.page_size);
        let first_page = new_keys[..self.page_size].into();
        self.node_mut(above).children.insert(first_page, child);
        self.evictable.remove(&was);
        self.evictable.insert((tick, child));
        (Position { node: child, pages: new_values.len() }, num_matched)
    }
}
