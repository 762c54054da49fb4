//! What the tree promises and what it refuses, case by case.

#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::num::NonZeroUsize;

use microserving_radix::{NodeId, RadixError, RadixTree};

fn tree() -> (RadixTree<u32, char>, NodeId) {
    let mut tree = RadixTree::new(NonZeroUsize::new(2).unwrap());
    let root = tree.add_root();
    (tree, root)
}

#[test]
fn keys_must_be_whole_pages() {
    let (mut tree, root) = tree();
    let wrong = RadixError::WrongShape { num_keys: 3, num_values: 1, page_size: 2 };
    assert_eq!(tree.insert(root, &[1, 2, 3], &mut ['a']), Err(wrong));
    tree.pin(root).unwrap();
    assert_eq!(tree.advance(root, &[1, 2, 3], &mut ['a']), Err(wrong));
    assert_eq!(tree.get(root).unwrap().pins, 1, "the pin stays where it was");
    assert_eq!(wrong.to_string(), "3 keys are not 1 pages of 2");
}

#[test]
fn a_node_that_is_gone_is_noticed() {
    let (mut tree, root) = tree();
    tree.insert(root, &[1, 2], &mut ['a']).unwrap();
    let node = tree.iter().find(|node| node.parent.is_some()).unwrap().node;
    tree.evict(1).unwrap();
    // The place is used again by another node.
    tree.insert(root, &[3, 4], &mut ['b']).unwrap();
    let stale = RadixError::StaleNode { node };
    assert_eq!(tree.unpin(node), Err(stale));
    assert_eq!(tree.pin(node), Err(stale));
    assert_eq!(tree.remove_leaf(node), Err(stale));
    assert_eq!(tree.longest_match(node, &[], |_| ()), Err(stale));
    assert_eq!(tree.pin_longest(node, &[], |_| ()), Err(stale));
    assert_eq!(tree.update_match(node, &[], |_, _| ()), Err(stale));
    assert_eq!(tree.insert(node, &[], &mut []), Err(stale));
    assert_eq!(tree.advance(node, &[], &mut []), Err(stale));
    assert_eq!(tree.remove_root(node), Err(stale));
    assert!(tree.get(node).is_none());
    tree.check().unwrap();
}

#[test]
fn pins_are_given_back_once() {
    let (mut tree, root) = tree();
    tree.insert(root, &[1, 2], &mut ['a']).unwrap();
    let pinned = tree.pin_longest(root, &[1, 2], |_| ()).unwrap();
    tree.unpin(pinned.node).unwrap();
    assert_eq!(tree.unpin(pinned.node), Err(RadixError::NotPinned { node: pinned.node }));
    assert_eq!(tree.advance(pinned.node, &[], &mut []), Err(RadixError::NotPinned { node: pinned.node }));
    tree.check().unwrap();
}

#[test]
fn a_root_in_use_stays() {
    let (mut tree, root) = tree();
    tree.pin(root).unwrap();
    assert_eq!(tree.remove_root(root), Err(RadixError::InUse { node: root }));
    assert_eq!(tree.remove_leaf(root), Err(RadixError::InUse { node: root }));
    tree.insert(root, &[1, 2], &mut ['a']).unwrap();
    tree.unpin(root).unwrap();
    assert_eq!(tree.remove_root(root), Err(RadixError::InUse { node: root }));
    assert_eq!(tree.evict(9).unwrap().emptied_root, Some(root));
    tree.remove_root(root).unwrap();
}

#[test]
fn one_reader_that_grows_stays_one_node() {
    let (mut tree, root) = tree();
    tree.pin(root).unwrap();
    let mut pin = root;
    for at in 0..1000 {
        pin = tree.advance(pin, &[at, at], &mut ['x']).unwrap().0.node;
    }
    assert_eq!((tree.num_nodes(), tree.num_pages()), (2, 1000));
    assert_eq!(tree.get(pin).unwrap().values.len(), 1000);
    tree.check().unwrap();
}

#[test]
fn eviction_takes_the_longest_unused_from_its_end() {
    let (mut tree, root) = tree();
    tree.insert(root, &[0, 0, 1, 1, 2, 2], &mut ['a', 'b', 'c']).unwrap();
    tree.insert(root, &[0, 0, 7, 7], &mut ['-', 'd']).unwrap();
    // b and c are the least recently used; a goes last because d stands on it.
    let order: Vec<_> = std::iter::from_fn(|| tree.evict(1)).flat_map(|evicted| evicted.values).collect();
    assert_eq!(order, ['c', 'b', 'd', 'a']);
}

#[test]
fn storing_a_beginning_again_does_not_refresh_what_lies_behind_it() {
    let (mut tree, root) = tree();
    tree.insert(root, &[0, 0, 1, 1], &mut ['a', 'b']).unwrap();
    tree.insert(root, &[5, 5], &mut ['c']).unwrap();
    tree.insert(root, &[0, 0], &mut ['-']).unwrap();
    let order: Vec<_> = std::iter::from_fn(|| tree.evict(1)).flat_map(|evicted| evicted.values).collect();
    assert_eq!(order, ['b', 'c', 'a']);
}
