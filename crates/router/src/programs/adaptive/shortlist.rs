//! Which engines are worth weighing.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::{Engine, Request};

/// So many engines are all weighed.
const ALL: usize = 8;
/// Of more, so many that hold most of the prompt, and so many that have least to do.
const BEST: usize = 2;

/// Returns the places of engines worth weighing: all of a few; of many the best by cache, the best by load, and one by chance, which is how
/// a router that believes something wrong finds out.
pub(super) fn shortlist(engines: &[Arc<Engine>], matched: &[u32], request: &Request) -> Vec<usize> {
    if engines.len() <= ALL {
        return (0..engines.len()).collect();
    }
    let mut chosen = Vec::with_capacity(2 * BEST + 1);
    chosen.extend(least(engines.len(), |index| (Reverse(matched[index]), engines[index].number())));
    chosen.extend(least(engines.len(), |index| {
        let load = engines[index].load();
        (load.queued_tokens, load.requests, engines[index].number())
    }));
    let mut hasher = DefaultHasher::new();
    request.seq_id().as_str().hash(&mut hasher);
    let length = engines.len() as u64;
    chosen.push(usize::try_from(hasher.finish() % length).unwrap_or(0));
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Returns the places with the smallest keys.
fn least<K: Ord>(length: usize, key: impl Fn(usize) -> K) -> impl Iterator<Item = usize> {
    let mut best: [Option<(K, usize)>; BEST] = [const { None }; BEST];
    for index in 0..length {
        let mut next = Some((key(index), index));
        for place in &mut best {
            if place.is_none()
                || next.as_ref().is_some_and(|new| place.as_ref().is_some_and(|old| new.0 < old.0))
            {
                std::mem::swap(place, &mut next);
            }
        }
    }
    best.into_iter().flatten().map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_keys_are_found() {
        let keys = [5, 3, 9, 1, 4, 1];
        assert_eq!(least(keys.len(), |index| (keys[index], index)).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(least(1, |index| index).collect::<Vec<_>>(), [0]);
    }
}
