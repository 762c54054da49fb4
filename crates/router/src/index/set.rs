//! A set of engines that is almost always small.

/// An engine's place in the index: small, dense, and used again after its engine has left.
pub(crate) type Slot = u16;

/// Engines that fit into an entry without a pointer.
const FEW: usize = 7;
/// A spilled set comes back only well below that, so that one engine that comes and goes does not move it each time.
const FEW_AGAIN: usize = 4;

/// Engines by slot; 16 bytes, and a bitmap beside it from the eighth engine on.
#[derive(Clone, Debug)]
pub(super) enum EngineSet {
    /// The first `len` of `slots`, in no order.
    Few { len: u8, slots: [Slot; FEW] },
    /// A bit a slot.
    Many(Box<Bits>),
}

#[derive(Clone, Debug)]
pub(super) struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Default for EngineSet {
    fn default() -> Self {
        Self::Few { len: 0, slots: [0; FEW] }
    }
}

impl EngineSet {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few { len, .. } => usize::from(*len),
            Self::Many(bits) => bits.len,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn contains(&self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots } => slots[..usize::from(*len)].contains(&slot),
            Self::Many(bits) => bits.contains(slot),
        }
    }

    /// Adds an engine; says whether it is new.
    pub(super) fn insert(&mut self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots } => {
                let count = usize::from(*len);
                if slots[..count].contains(&slot) {
                    return false;
                }
                if count < FEW {
                    slots[count] = slot;
                    *len += 1;
                } else {
                    let mut bits = Bits { words: Vec::new(), len: 0 };
                    for slot in slots.iter().copied().chain([slot]) {
                        bits.insert(slot);
                    }
                    *self = Self::Many(Box::new(bits));
                }
                true
            }
            Self::Many(bits) => bits.insert(slot),
        }
    }

    /// Takes an engine out; says whether it was there.
    pub(super) fn remove(&mut self, slot: Slot) -> bool {
        match self {
            Self::Few { len, slots } => {
                let count = usize::from(*len);
                let Some(place) = slots[..count].iter().position(|held| *held == slot) else { return false };
                slots[place] = slots[count - 1];
                *len -= 1;
                true
            }
            Self::Many(bits) => {
                if !bits.remove(slot) {
                    return false;
                }
                if bits.len <= FEW_AGAIN {
                    let mut few = Self::default();
                    bits.for_each(|slot| {
                        few.insert(slot);
                    });
                    *self = few;
                }
                true
            }
        }
    }

    pub(super) fn for_each(&self, mut f: impl FnMut(Slot)) {
        match self {
            Self::Few { len, slots } => slots[..usize::from(*len)].iter().copied().for_each(f),
            Self::Many(bits) => bits.for_each(&mut f),
        }
    }

    /// Calls `f` with each engine, beginning anywhere that `start` says, until it returns false; says whether it never did.
    pub(super) fn each_from(&self, start: usize, mut f: impl FnMut(Slot) -> bool) -> bool {
        match self {
            Self::Few { len, slots } => {
                let count = usize::from(*len);
                (0..count).all(|i| f(slots[(start + i) % count]))
            }
            Self::Many(bits) => {
                let count = bits.words.len();
                (0..count).all(|i| {
                    let place = (start + i) % count;
                    Bits::slots(place, bits.words[place]).all(&mut f)
                })
            }
        }
    }

    /// Adds what `other` and `within` have in common; all of `other` if there is no `within`.
    pub(super) fn add_common(&mut self, other: &Self, within: Option<&Self>) {
        let Some(within) = within else {
            if self.is_empty() {
                *self = other.clone();
            } else {
                other.for_each(|slot| {
                    self.insert(slot);
                });
            }
            return;
        };
        // Walking the smaller of the two is what keeps a lookup from depending on the number of engines.
        let (walked, asked) = if other.len() < within.len() { (other, within) } else { (within, other) };
        walked.for_each(|slot| {
            if asked.contains(slot) {
                self.insert(slot);
            }
        });
    }

    /// Returns the bytes that it takes beside its own 16.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::Many(bits) => size_of::<Bits>() + bits.words.capacity() * size_of::<u64>(),
        }
    }
}

impl Bits {
    const fn place(slot: Slot) -> (usize, u64) {
        (slot as usize / 64, 1 << (slot % 64))
    }

    fn contains(&self, slot: Slot) -> bool {
        let (word, bit) = Self::place(slot);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    fn insert(&mut self, slot: Slot) -> bool {
        let (word, bit) = Self::place(slot);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.len += usize::from(new);
        new
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let (word, bit) = Self::place(slot);
        let Some(bits) = self.words.get_mut(word).filter(|bits| **bits & bit != 0) else { return false };
        *bits &= !bit;
        self.len -= 1;
        true
    }

    fn for_each(&self, mut f: impl FnMut(Slot)) {
        for (place, word) in self.words.iter().enumerate() {
            Self::slots(place, *word).for_each(&mut f);
        }
    }

    fn slots(place: usize, word: u64) -> impl Iterator<Item = Slot> {
        let lowest = |left: u64| (left != 0).then_some(left);
        std::iter::successors(lowest(word), move |left| lowest(left & (left - 1))).map(move |left| {
            let slot = place * 64 + left.trailing_zeros() as usize;
            Slot::try_from(slot).expect("only slots were put in")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn sorted(set: &EngineSet) -> Vec<Slot> {
        let mut slots = Vec::new();
        set.for_each(|slot| slots.push(slot));
        slots.sort_unstable();
        slots
    }

    #[test]
    fn it_is_as_small_as_it_should_be() {
        assert_eq!(size_of::<EngineSet>(), 16);
        let mut set = EngineSet::default();
        for slot in 0..7 {
            assert!(set.insert(slot * 100));
        }
        assert_eq!(set.heap_bytes(), 0);
        assert!(set.insert(9));
        assert!(set.heap_bytes() > 0);
        for slot in [9, 0, 100, 200] {
            assert!(set.remove(slot));
        }
        assert_eq!((set.heap_bytes(), sorted(&set)), (0, vec![300, 400, 500, 600]));
    }

    proptest! {
        #[test]
        fn it_is_a_set(changes in prop::collection::vec((any::<bool>(), 0u16..200), 0..120), others in prop::collection::vec(0u16..200, 0..40)) {
            let (mut set, mut model) = (EngineSet::default(), BTreeSet::new());
            for (add, slot) in changes {
                if add {
                    prop_assert_eq!(set.insert(slot), model.insert(slot));
                } else {
                    prop_assert_eq!(set.remove(slot), model.remove(&slot));
                }
                prop_assert_eq!(set.contains(slot), add);
                prop_assert_eq!(set.len(), model.len());
            }
            prop_assert_eq!(sorted(&set), model.iter().copied().collect::<Vec<_>>());
            let mut seen = Vec::new();
            let whole = set.each_from(17, |slot| {
                seen.push(slot);
                true
            });
            prop_assert!(whole);
            seen.sort_unstable();
            prop_assert_eq!(seen, sorted(&set));
            prop_assert_eq!(set.each_from(3, |_| false), set.is_empty());
            let mut other = EngineSet::default();
            for slot in &others {
                other.insert(*slot);
            }
            let mut common = EngineSet::default();
            common.add_common(&set, Some(&other));
            let expected: Vec<_> = model.iter().copied().filter(|slot| others.contains(slot)).collect();
            prop_assert_eq!(sorted(&common), expected);
            common.add_common(&set, None);
            prop_assert_eq!(sorted(&common), model.into_iter().collect::<Vec<_>>());
        }
    }
}
