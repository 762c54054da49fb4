//! The tree against a map from whole paths to values, over random runs of every verb.

#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use microserving_radix::{NodeId, RadixError, RadixTree};
use proptest::prelude::*;

/// Pages are named by one small number each, so that paths often share a beginning.
type Path = Vec<u8>;

#[derive(Clone, Debug)]
enum Op {
    Insert { root: bool, path: Path },
    Match { root: bool, path: Path, odd_keys: usize },
    Pin { root: bool, path: Path },
    PinAgain { which: usize },
    Unpin { which: usize },
    Advance { which: usize, path: Path },
    Update { root: bool, path: Path, add: u32 },
    Evict { max_pages: usize },
    RemoveLeaf { which: usize },
}

fn path(max: usize) -> impl Strategy<Value = Path> {
    prop::collection::vec(0..3_u8, 0..max)
}

fn op() -> impl Strategy<Value = Op> {
    let root = any::<bool>();
    prop_oneof![
        4 => (root, path(7)).prop_map(|(root, path)| Op::Insert { root, path }),
        2 => (root, path(7), 0..3_usize)
            .prop_map(|(root, path, odd_keys)| Op::Match { root, path, odd_keys }),
        4 => (root, path(7)).prop_map(|(root, path)| Op::Pin { root, path }),
        1 => (0..9_usize).prop_map(|which| Op::PinAgain { which }),
        4 => (0..9_usize).prop_map(|which| Op::Unpin { which }),
        5 => (0..9_usize, path(4)).prop_map(|(which, path)| Op::Advance { which, path }),
        // Adds so much that values stay different from each other.
        1 => (root, path(7), 1..9_u32).prop_map(|(root, path, add)| Op::Update { root, path, add: add << 20 }),
        3 => (0..6_usize).prop_map(|max_pages| Op::Evict { max_pages }),
        1 => (0..9_usize).prop_map(|which| Op::RemoveLeaf { which }),
    ]
}

#[derive(Debug)]
struct Entry {
    value: u32,
    last_used: u64,
}

/// The naive reading: every stored path with its value and its last use; pins as a list of paths.
#[derive(Debug, Default)]
struct Model {
    entries: BTreeMap<(bool, Path), Entry>,
    pins: Vec<(bool, Path, NodeId)>,
    ticks: u64,
}

impl Model {
    fn matched(&self, root: bool, path: &[u8]) -> usize {
        (1..=path.len()).take_while(|len| self.entries.contains_key(&(root, path[..*len].to_vec()))).count()
    }

    fn touch(&mut self, root: bool, path: &[u8]) {
        self.ticks += 1;
        for len in 1..=path.len() {
            if let Some(entry) = self.entries.get_mut(&(root, path[..len].to_vec())) {
                entry.last_used = self.ticks;
            }
        }
    }

    /// Stores and touches; returns the values of the path and how many were there.
    fn insert(&mut self, root: bool, path: &[u8], values: &[u32]) -> (Vec<u32>, usize) {
        let num_matched = self.matched(root, path);
        for len in num_matched + 1..=path.len() {
            let entry = Entry { value: values[len - 1], last_used: 0 };
            self.entries.insert((root, path[..len].to_vec()), entry);
        }
        self.touch(root, path);
        let all = (1..=path.len()).map(|len| self.entries[&(root, path[..len].to_vec())].value).collect();
        (all, num_matched)
    }

    fn is_evictable(&self, key: &(bool, Path)) -> bool {
        let below = |other: &(bool, Path)| other.0 == key.0 && other.1.starts_with(&key.1);
        !self.entries.keys().any(|other| below(other) && other != key)
            && !self.pins.iter().any(|(root, path, _)| below(&(*root, path.clone())))
    }

    /// The page to go first: of those that nothing depends on, the one unused for the longest time.
    fn victim(&self) -> Option<(bool, Path)> {
        let candidates = self.entries.iter().filter(|(key, _)| self.is_evictable(key));
        candidates.min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| key.clone())
    }
}

struct Run {
    tree: RadixTree<u16, u32>,
    roots: [NodeId; 2],
    page_size: usize,
    model: Model,
    next_value: u32,
}

impl Run {
    fn new(page_size: usize) -> Self {
        let mut tree = RadixTree::new(NonZeroUsize::new(page_size).unwrap());
        let roots = [tree.add_root(), tree.add_root()];
        Self { tree, roots, page_size, model: Model::default(), next_value: 0 }
    }

    fn root(&self, root: bool) -> NodeId {
        self.roots[usize::from(root)]
    }

    /// Pages of one name differ from those of another only in their last key.
    fn keys(&self, path: &[u8]) -> Vec<u16> {
        path.iter()
            .flat_map(|name| {
                (1..=self.page_size).map(|at| if at == self.page_size { u16::from(*name) } else { 9 })
            })
            .collect()
    }

    fn fresh(&mut self, count: usize) -> Vec<u32> {
        (0..count)
            .map(|_| {
                self.next_value += 1;
                self.next_value
            })
            .collect()
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Insert { root, path } => {
                let mut values = self.fresh(path.len());
                let (all, num_matched) = self.model.insert(root, &path, &values);
                let keys = self.keys(&path);
                assert_eq!(self.tree.insert(self.root(root), &keys, &mut values), Ok(num_matched));
                assert_eq!(values, all);
            }
            Op::Match { root, path, odd_keys } => {
                let mut keys = self.keys(&path);
                keys.extend(vec![9; odd_keys.min(self.page_size - 1)]);
                let mut seen = Vec::new();
                let found = self.tree.longest_match(self.root(root), &keys, |value| seen.push(*value));
                assert_eq!(found, Ok(self.model.matched(root, &path)));
                let wanted =
                    (1..=seen.len()).map(|len| self.model.entries[&(root, path[..len].to_vec())].value);
                assert_eq!(seen, wanted.collect::<Vec<_>>());
            }
            Op::Pin { root, path } => {
                let num_pages = self.model.matched(root, &path);
                let mut seen = 0;
                let keys = self.keys(&path);
                let pinned = self.tree.pin_longest(self.root(root), &keys, |_| seen += 1).unwrap();
                assert_eq!((pinned.num_pages, seen), (num_pages, num_pages));
                self.model.touch(root, &path[..num_pages]);
                self.model.pins.push((root, path[..num_pages].to_vec(), pinned.node));
            }
            Op::PinAgain { which } => {
                if let Some((root, path, node)) = pick(&self.model.pins, which).cloned() {
                    self.tree.pin(node).unwrap();
                    self.model.touch(root, &path);
                    self.model.pins.push((root, path, node));
                }
            }
            Op::Unpin { which } => {
                if self.model.pins.is_empty() {
                    return;
                }
                let which = which % self.model.pins.len();
                let (root, path, node) = self.model.pins.swap_remove(which);
                self.tree.unpin(node).unwrap();
                self.model.touch(root, &path);
            }
            Op::Advance { which, path } => {
                if self.model.pins.is_empty() {
                    return;
                }
                let which = which % self.model.pins.len();
                let (root, begin, node) = self.model.pins.swap_remove(which);
                let whole: Path = [begin.clone(), path.clone()].concat();
                let mut values = self.fresh(path.len());
                let given = [vec![0; begin.len()], values.clone()].concat();
                let (all, num_matched) = self.model.insert(root, &whole, &given);
                let keys = self.keys(&path);
                let (pinned, found) = self.tree.advance(node, &keys, &mut values).unwrap();
                assert_eq!((pinned.num_pages, found), (path.len(), num_matched - begin.len()));
                assert_eq!(values, all[begin.len()..]);
                self.model.pins.push((root, whole, pinned.node));
            }
            Op::Update { root, path, add } => {
                let mut places = Vec::new();
                let keys = self.keys(&path);
                let root_id = self.root(root);
                let changed = self.tree.update_match(root_id, &keys, |place, value| {
                    places.push(place);
                    *value += add;
                });
                let num_pages = self.model.matched(root, &path);
                assert_eq!(changed, Ok(num_pages));
                places.sort_unstable();
                assert_eq!(places, (0..num_pages).collect::<Vec<_>>());
                for len in 1..=num_pages {
                    self.model.entries.get_mut(&(root, path[..len].to_vec())).unwrap().value += add;
                }
            }
            Op::Evict { max_pages } => {
                let Some(evicted) = self.tree.evict(max_pages) else {
                    assert!(max_pages == 0 || self.model.victim().is_none());
                    return;
                };
                assert!(!evicted.values.is_empty() && evicted.values.len() <= max_pages);
                // One by one, the naive reading picks the same pages in the same order: from the end.
                for value in evicted.values.iter().rev() {
                    let victim = self.model.victim().expect("the tree found one");
                    assert_eq!(self.model.entries.remove(&victim).map(|entry| entry.value), Some(*value));
                }
                let emptied = |root: bool| {
                    !self.model.entries.keys().any(|key| key.0 == root)
                        && !self.model.pins.iter().any(|pin| pin.0 == root)
                };
                if let Some(root) = evicted.emptied_root {
                    assert!(emptied(root == self.roots[1]));
                }
            }
            Op::RemoveLeaf { which } => {
                let nodes: Vec<_> = self.tree.iter().map(|node| (node.node, node.values.to_vec())).collect();
                let Some((node, values)) = pick(&nodes, which).cloned() else { return };
                let keys: Vec<_> = self
                    .model
                    .entries
                    .iter()
                    .filter(|(_, entry)| values.contains(&entry.value))
                    .map(|(key, _)| key.clone())
                    .collect();
                match self.tree.remove_leaf(node) {
                    Ok(evicted) => {
                        assert_eq!(evicted.values, values);
                        assert!(self.model.is_evictable(keys.last().expect("a leaf has pages")));
                        for key in keys {
                            self.model.entries.remove(&key);
                        }
                    }
                    Err(error) => {
                        assert_eq!(error, RadixError::InUse { node });
                        assert!(keys.last().is_none_or(|last| !self.model.is_evictable(last)));
                    }
                }
            }
        }
    }

    fn check(&self) {
        self.tree.check().unwrap();
        assert_eq!(self.tree.num_pages(), self.model.entries.len());
        let mut stored: Vec<u32> = self.tree.iter().flat_map(|node| node.values.to_vec()).collect();
        let mut wanted: Vec<u32> = self.model.entries.values().map(|entry| entry.value).collect();
        stored.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(stored, wanted);
        let pins: usize = self.tree.iter().map(|node| node.pins).sum();
        assert_eq!(pins, self.model.pins.len());
        let readers = self.tree.readers();
        let at_root = |root: bool| self.model.pins.iter().filter(|pin| pin.0 == root).count();
        assert_eq!(readers[&self.roots[0]], at_root(false));
        assert_eq!(readers[&self.roots[1]], at_root(true));
    }
}

fn pick<T>(all: &[T], which: usize) -> Option<&T> {
    all.get(which.checked_rem(all.len())?)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_naive_model(page_size in 1..4_usize, ops in prop::collection::vec(op(), 1..120)) {
        let mut run = Run::new(page_size);
        for op in ops {
            run.apply(op);
            run.check();
        }
        // Everything can be given back, and then nothing is left.
        for (_, _, node) in std::mem::take(&mut run.model.pins) {
            run.tree.unpin(node).unwrap();
        }
        while run.tree.evict(usize::MAX).is_some() {}
        run.tree.check().unwrap();
        prop_assert_eq!(run.tree.num_pages(), 0);
        for root in run.roots {
            run.tree.remove_root(root).unwrap();
        }
        prop_assert_eq!((run.tree.num_nodes(), run.tree.num_bytes()), (0, 0));
    }
}
