//! Finding the largest logits and drawing among them, without sorting a whole vocabulary.
//!
//! Probabilities are kept as integers: `round(2^44 * e^((logit - max) / temperature))`. Integer sums do not depend on their
//! order, so cutting and drawing may use whatever order is quick, and still give the same token on every machine. A token
//! less probable than `2^-45` times the best one is never drawn.

use std::cmp::Ordering;

use microserving_protocol::TokenId;

use crate::numeric::exp_nonpositive;
use crate::{SampleError, TokenMask};

/// The logit of a token that must not be chosen. It is finite, so that masked tokens and broken logits stay apart; a model
/// whose own logit is this low means the same by it.
pub(crate) const MASKED: f32 = f32::MIN;

const WEIGHT_OF_BEST: f64 = (1u64 << 44) as f64;

/// Changes a logit, keeping it finite. One that is not finite is left for [`find_best`] to report.
pub(crate) fn adjust(logit: &mut f32, change: impl FnOnce(f32) -> f32) {
    if logit.is_finite() {
        *logit = change(*logit).clamp(MASKED, f32::MAX);
    }
}

/// Masks what the grammar forbids.
///
/// # Errors
/// [`SampleError::NotFinite`], as masking would hide it.
pub(crate) fn apply_mask(logits: &mut [f32], mask: &TokenMask) -> Result<(), SampleError> {
    for (word_index, chunk) in logits.chunks_mut(32).enumerate() {
        let allowed = mask.words().get(word_index).copied().unwrap_or(0);
        if let Some(place) = chunk.iter().position(|logit| !logit.is_finite()) {
            return Err(not_finite(word_index * 32 + place, chunk[place]));
        }
        match allowed {
            u32::MAX => {}
            0 => chunk.fill(MASKED),
            _ => {
                for (bit, logit) in chunk.iter_mut().enumerate() {
                    *logit = if allowed >> bit & 1 == 1 { *logit } else { MASKED };
                }
            }
        }
    }
    Ok(())
}

/// Returns the largest logit and the lowest token that has it, in one pass.
///
/// # Errors
/// [`SampleError::NotFinite`] if any logit is NaN or infinite; [`SampleError::NoToken`] if all are masked.
pub(crate) fn find_best(logits: &[f32]) -> Result<(usize, f32), SampleError> {
    const CHUNK: usize = 512;
    const LANES: usize = 16;
    const INFINITY_BITS: u32 = f32::INFINITY.to_bits();

    let (mut best, mut best_begin) = (MASKED, 0);
    for (chunk_index, chunk) in logits.chunks(CHUNK).enumerate() {
        let mut largest = [MASKED; LANES];
        let mut broken = [0u32; LANES];
        for group in chunk.chunks(LANES) {
            for ((largest, broken), &logit) in largest.iter_mut().zip(&mut broken).zip(group) {
                *largest = if logit > *largest { logit } else { *largest };
                *broken |= u32::from(logit.to_bits() & 0x7fff_ffff >= INFINITY_BITS);
            }
        }
        if broken.iter().any(|&broken| broken != 0) {
            let place = chunk.iter().position(|logit| !logit.is_finite()).unwrap_or(0);
            return Err(not_finite(chunk_index * CHUNK + place, chunk[place]));
        }
        let largest = largest.into_iter().fold(MASKED, f32::max);
        if largest > best {
            (best, best_begin) = (largest, chunk_index * CHUNK);
        }
    }
    let place = logits[best_begin..].iter().position(|&logit| logit == best && best > MASKED);
    place.map(|place| (best_begin + place, best)).ok_or(SampleError::NoToken)
}

fn not_finite(token: usize, value: f32) -> SampleError {
    SampleError::NotFinite { token: TokenId(token as u32), value }
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    weight: u64,
    token: u32,
}

impl Candidate {
    /// Most probable first, lowest token first among equals.
    fn order(&self, other: &Self) -> Ordering {
        other.weight.cmp(&self.weight).then(self.token.cmp(&other.token))
    }
}

/// How the distribution is cut before the draw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
}

/// Working memory for the draws of a thread; grows to the vocabulary once.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    weights: Vec<u64>,
    candidates: Vec<Candidate>,
    top: Vec<(f32, u32)>,
}

impl Scratch {
    /// Draws a token: temperature, `top_k`, `top_p`, `min_p`, then the candidate in whose share, in order of tokens, the
    /// random number falls.
    pub(crate) fn draw(&mut self, logits: &[f32], max: f32, cut: Cut, random: u64) -> u32 {
        let by_rank = cut.top_k > 0 && (cut.top_k as usize) < logits.len();
        if !by_rank && cut.top_p >= 1.0 && cut.min_p <= 0.0 {
            let scale = Scale { max: max.into(), temperature: cut.temperature.into() };
            scale.weigh_all(logits, &mut self.weights);
            return pick(self.weights.iter().copied().zip(0..), random);
        }
        self.cut(logits, max, cut);
        let least = least_weight(cut.min_p);
        self.candidates.retain(|candidate| candidate.weight >= least);
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        pick(self.candidates.iter().map(|candidate| (candidate.weight, candidate.token)), random)
    }

    /// Returns what `top_k` and `top_p` keep, with weights, in any order: what [`draw_kept`] draws from.
    pub(crate) fn keep(&mut self, logits: &[f32], max: f32, cut: Cut) -> Vec<(TokenId, u64)> {
        self.cut(logits, max, cut);
        self.candidates.iter().map(|candidate| (TokenId(candidate.token), candidate.weight)).collect()
    }

    /// Leaves in `candidates` what `top_k` and `top_p` keep.
    fn cut(&mut self, logits: &[f32], max: f32, cut: Cut) {
        let scale = Scale { max: max.into(), temperature: cut.temperature.into() };
        self.candidates.clear();
        if cut.top_k > 0 && (cut.top_k as usize) < logits.len() {
            self.find_top(logits, cut.top_k as usize);
            let kept =
                self.top.iter().map(|&(logit, token)| Candidate { weight: scale.weight(logit), token });
            self.candidates.extend(kept);
            if cut.top_p < 1.0 {
                let total = self.candidates.iter().map(|candidate| candidate.weight).sum();
                keep_nucleus(&mut self.candidates, share(cut.top_p, total));
            }
            return;
        }
        scale.weigh_all(logits, &mut self.weights);
        // All tokens below this together hold less than 1 - top_p, so the cut can never reach them.
        let total: u64 = self.weights.iter().sum();
        let least = ((1.0 - f64::from(cut.top_p)) * total as f64 / logits.len() as f64) as u64;
        for (token, &weight) in (0..).zip(&self.weights) {
            if weight > 0 && weight >= least {
                self.candidates.push(Candidate { weight, token });
            }
        }
        if cut.top_p < 1.0 {
            keep_nucleus(&mut self.candidates, share(cut.top_p, total));
        }
    }

    /// Returns the `k` largest logits with their tokens, largest first, lowest token first among equals. Masked tokens are
    /// left out.
    pub(crate) fn find_top(&mut self, logits: &[f32], k: usize) -> &[(f32, u32)] {
        let order = |a: &(f32, u32), b: &(f32, u32)| {
            b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
        };
        self.top.clear();
        if k == 0 {
            return &self.top;
        }
        // Collects what beats the k-th best of what was seen so far, and cuts back to k when twice as many have gathered:
        // each cut costs as much as the pushes that led to it.
        let room = k.saturating_mul(2).max(64);
        let mut least = MASKED;
        for (token, &logit) in (0..).zip(logits) {
            // An equal logit of a higher token loses against the k that are kept.
            if logit > least {
                self.top.push((logit, token));
                if self.top.len() >= room {
                    self.top.select_nth_unstable_by(k - 1, order);
                    self.top.truncate(k);
                    least = self.top[k - 1].0;
                }
            }
        }
        self.top.sort_unstable_by(order);
        self.top.truncate(k);
        &self.top
    }
}

/// From logits to integer probabilities.
#[derive(Clone, Copy)]
struct Scale {
    max: f64,
    temperature: f64,
}

impl Scale {
    #[inline]
    fn weight(self, logit: f32) -> u64 {
        // Adding 2^52 leaves the rounded integer in the low bits, which vectorises where a conversion would not.
        const ROUNDER: f64 = (1u64 << 52) as f64;
        let delta = (f64::from(logit) - self.max) / self.temperature;
        (exp_nonpositive(delta) * WEIGHT_OF_BEST + ROUNDER).to_bits() & ((1 << 52) - 1)
    }

    /// Weighs all tokens: a plain loop over slices, as that is what the compiler vectorises.
    fn weigh_all(self, logits: &[f32], weights: &mut Vec<u64>) {
        weights.resize(logits.len(), 0);
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = self.weight(logit);
        }
    }
}

/// Draws among tokens that were found elsewhere, with [`Scratch::draw`]'s last steps: `min_p`, then the token in whose share, in
/// order of tokens, the random number falls. `None` if there is no weight to draw by.
pub(crate) fn draw_kept(kept: &mut Vec<(TokenId, u64)>, min_p: f32, random: u64) -> Option<TokenId> {
    let least = least_weight(min_p);
    kept.retain(|&(_, weight)| weight >= least && weight > 0);
    kept.sort_unstable_by_key(|&(token, _)| token);
    let shares = kept.iter().map(|&(token, weight)| (weight, token.0));
    (!kept.is_empty()).then(|| TokenId(pick(shares, random)))
}

/// Returns the least weight that `min_p` keeps.
fn least_weight(min_p: f32) -> u64 {
    (f64::from(min_p) * WEIGHT_OF_BEST).ceil() as u64
}

/// Returns `ceil(p * total)`, at least 1 and at most `total`.
fn share(p: f32, total: u64) -> u64 {
    ((f64::from(p) * total as f64).ceil() as u64).clamp(1, total.max(1))
}

/// Keeps the smallest set of most probable candidates that together weigh `target`: a quickselect by weight.
fn keep_nucleus(candidates: &mut Vec<Candidate>, target: u64) {
    const SORT_BELOW: usize = 32;
    // candidates[..low] are kept and weigh `target - missing`; the cut lies in [low, high).
    let (mut low, mut high, mut missing) = (0, candidates.len(), target);
    while high - low > SORT_BELOW {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, Candidate::order);
        let left: u64 = candidates[low..middle].iter().map(|candidate| candidate.weight).sum();
        if left >= missing {
            high = middle;
        } else {
            missing -= left;
            low = middle;
        }
    }
    candidates[low..high].sort_unstable_by(Candidate::order);
    while low < high && missing > 0 {
        missing = missing.saturating_sub(candidates[low].weight);
        low += 1;
    }
    candidates.truncate(low);
}

/// Returns the token in whose share `random / 2^64` of the total falls.
fn pick(shares: impl Iterator<Item = (u64, u32)> + Clone, random: u64) -> u32 {
    let total: u64 = shares.clone().map(|(weight, _)| weight).sum();
    let mut left = ((u128::from(random) * u128::from(total)) >> 64) as u64;
    for (weight, token) in shares {
        if left < weight {
            return token;
        }
        left -= weight;
    }
    unreachable!(
        "a number below the sum of all weights lies below some partial sum; the best token weighs 2^44"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(logits: &[f32]) -> Result<(usize, f32), SampleError> {
        find_best(logits)
    }

    #[test]
    fn the_best_is_the_lowest_of_equals_wherever_it_stands() {
        for len in [1usize, 15, 16, 17, 511, 512, 513, 1500] {
            for place in [0, len / 2, len - 1] {
                let mut logits = vec![-7.5; len];
                logits[place] = 2.5;
                if place + 1 < len {
                    logits[len - 1] = 2.5;
                }
                assert_eq!(best(&logits), Ok((place, 2.5)), "{len} {place}");
            }
        }
        assert_eq!(best(&[-0.0, 0.0]).map(|best| best.0), Ok(0));
    }

    #[test]
    fn broken_logits_are_named() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 20, 599] {
                let mut logits = vec![1.0; 600];
                logits[place] = value;
                let is_named = |error| match error {
                    SampleError::NotFinite { token, .. } => token.0 as usize == place,
                    _ => false,
                };
                assert!(best(&logits).is_err_and(is_named));
                let none = TokenMask::from_words(vec![0; 19]);
                assert!(apply_mask(&mut logits, &none).is_err_and(is_named));
            }
        }
        assert_eq!(best(&[]), Err(SampleError::NoToken));
        assert_eq!(best(&[MASKED, MASKED]), Err(SampleError::NoToken));
    }

    #[test]
    fn a_mask_shorter_than_the_vocabulary_forbids_the_rest() {
        let mut logits = vec![1.0; 70];
        apply_mask(&mut logits, &TokenMask::from_words(vec![u32::MAX, 0b101])).expect("finite");
        let allowed: Vec<_> = (0..70).filter(|&t| logits[t] > MASKED).collect();
        let expected: Vec<_> = (0..32).chain([32, 34]).collect();
        assert_eq!(allowed, expected);
    }

    proptest::proptest! {
        #[test]
        fn top_agrees_with_a_full_sort(
            levels in proptest::collection::vec(0u8..40, 1..700), k in 0usize..700,
        ) {
            let logits: Vec<f32> = levels.iter().map(|&level| f32::from(level)).collect();
            let mut all: Vec<_> = logits.iter().copied().zip(0u32..).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            all.truncate(k);
            let mut scratch = Scratch::default();
            proptest::prop_assert_eq!(scratch.find_top(&logits, k), &all[..]);
        }

        #[test]
        fn the_nucleus_agrees_with_a_full_sort(
            weights in proptest::collection::vec(1u64..50, 1..400), p in 0.01f32..1.0,
        ) {
            let mut all: Vec<_> =
                weights.iter().zip(0..).map(|(&weight, token)| Candidate { weight, token }).collect();
            let target = share(p, weights.iter().sum());
            let mut quick = all.clone();
            keep_nucleus(&mut quick, target);
            all.sort_by(Candidate::order);
            let mut sum = 0;
            let expected: Vec<_> = all.iter().take_while(|candidate| {
                let before = sum;
                sum += candidate.weight;
                before < target
            }).map(|candidate| candidate.token).collect();
            quick.sort_by(Candidate::order);
            let quick: Vec<_> = quick.iter().map(|candidate| candidate.token).collect();
            proptest::prop_assert_eq!(quick, expected);
        }
    }
}
