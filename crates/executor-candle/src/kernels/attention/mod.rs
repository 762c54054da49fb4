//! The arithmetic of attention over a paged cache, written once over [`Lanes`] and compiled per level and element type.
//!
//! Two shapes compute the same numbers to the bit. [`wide`]: query rows sit in lanes, so that keys and values are broadcast straight
//! from the tile, nothing is transposed but the queries, once, and the softmax needs no sums across lanes. [`narrow`]: positions
//! sit in lanes for the scores and elements of a head for the sums, which keeps the lanes busy for the few rows of one token. What
//! both do per query row:
//!
//! - a score is one accumulator over the elements of a head, in order, of the scaled query times the key;
//! - positions are taken in tiles of [`TILE`], beginning at multiples of it; a tile's maximum and weights update the running ones
//!   (the online softmax of Milakov and Gimelshein, 2018, tiled as in FlashAttention), weights summed by position modulo sixteen
//!   and then as a tree;
//! - a weighted sum is one accumulator per element over the tile's positions, in order, begun with the rescaled sum so far;
//! - every [`SEGMENT`] positions the running state begins anew, and the segments are merged in order, so that several threads can
//!   share one token's context.
//!
//! A row meets exactly the positions up to its own: others have no part in its sums, not even as zeros.
//!
//! ```text
//! positions  0        64       128      192      256
//! tiles      [ tile 0 ][ tile 1 ][ tile 2 ][ tile 3 ][ tile 4
//! segments   [ segment 0                            ][ segment 1
//! query 140  [ whole   ][ whole   ][13 seen
//! ```
//!
//! [`Format`] says what is multiplied. f16 and f32 caches are widened and multiplied as f32. A bf16 cache is multiplied as it is
//! where the machine has instructions for it ([`Pairs`]), queries and weights rounded to bf16 as well: twice the rate.

mod format;
mod narrow;
mod wide;

use std::ops::Range;

use microserving_protocol::{KvDtype, PageId};

#[cfg(target_arch = "x86_64")]
use self::format::Pairs;
use self::format::{Bf16, F16, F32, Format, V};
pub(crate) use self::narrow::partial_len;
pub(crate) use self::wide::WideState;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Plain};
use super::{KernelLevel, Kernels};
use crate::pool::Parts;

/// Positions in a tile.
pub(crate) const TILE: usize = 64;

/// Positions after which the running state begins anew; whole tiles.
pub(crate) const SEGMENT: usize = 256;

/// Rows that the narrow shape takes at most.
const NARROW_ROWS: usize = 8;

/// Elements of the longest head that the narrow shape takes.
const NARROW_HEAD: usize = 256;

/// Rows that the wide shape takes at most.
pub(crate) const WIDE_ROWS: usize = 64;

/// One KV head of one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvHead<'a> {
    /// Where the head's key of slot 0 is in page 0.
    pub(crate) base: *const u8,
    /// The sequence's pages.
    pub(crate) pages: &'a [PageId],
    /// Positions in a page.
    pub(crate) page_size: usize,
    /// Bytes from a page to the next.
    pub(crate) page_bytes: usize,
    /// Bytes from a position to the next within a page.
    pub(crate) slot_bytes: usize,
    /// Bytes from a key to its value.
    pub(crate) to_values: usize,
    /// The elements' type.
    pub(crate) dtype: KvDtype,
}

/// The queries of consecutive tokens that share a KV head; the result of attention takes their places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries<'a> {
    /// `[tokens][num_heads][head_dim]` of the whole batch.
    pub(crate) all: &'a Parts<'a, f32>,
    /// Where the first token's heads are.
    pub(crate) first: usize,
    /// From a token to the next.
    pub(crate) stride: usize,
    /// Query heads that share the KV head.
    pub(crate) group: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Tokens.
    pub(crate) num_tokens: usize,
    /// The first token's position.
    pub(crate) position: usize,
}

impl Queries<'_> {
    /// Returns where the query heads of a token are; they are neighbours.
    fn token(&self, token: usize) -> Range<usize> {
        let first = self.first + token * self.stride;
        first..first + self.group * self.head_dim
    }

    /// What queries are multiplied by: weights are powers of two rather than of e, and the scaling of attention.
    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }
}

/// The keys of a tile.
#[derive(Clone, Copy, Debug)]
struct Tile {
    /// One address a position; those past the last repeat it.
    keys: [*const u8; TILE],
    /// Positions.
    len: usize,
    /// Bytes from a key to its value.
    to_values: usize,
}

impl Tile {
    /// Collects the addresses of positions `begin..end`, at most a tile.
    ///
    /// # Safety
    /// The pages lie inside one allocation with the head's base.
    unsafe fn new(head: &KvHead<'_>, begin: usize, end: usize) -> Self {
        let mut keys = [head.base; TILE];
        let len = end - begin;
        let (mut page, mut slot) = (begin / head.page_size, begin % head.page_size);
        let mut at = 0;
        while at < len {
            let count = (head.page_size - slot).min(len - at);
            let offset = head.pages[page].0 as usize * head.page_bytes + slot * head.slot_bytes;
            for (i, key) in keys[at..at + count].iter_mut().enumerate() {
                // SAFETY: inside the allocation, as the caller promises.
                *key = unsafe { head.base.add(offset + i * head.slot_bytes) };
            }
            at += count;
            (page, slot) = (page + 1, 0);
        }
        let last = keys[len - 1];
        keys[len..].fill(last);
        Self { keys, len, to_values: head.to_values }
    }

    /// Returns the values of the word at `position`: its own, and the next one's if the format pairs them and there is one.
    #[inline(always)]
    fn values<F: Format>(&self, position: usize) -> (*const u8, Option<*const u8>) {
        let row = |position: usize| self.keys[position].wrapping_add(self.to_values);
        let is_paired = F::PER_WORD == 2 && position + 1 < self.len;
        (row(position), if is_paired { Some(row(position + 1)) } else { None })
    }
}

/// Says whether the narrow shape takes a token of `group` query heads.
pub(crate) const fn is_narrow(group: usize, head_dim: usize) -> bool {
    // Whole blocks of sixteen words in any format.
    group <= NARROW_ROWS && head_dim.is_multiple_of(32) && head_dim <= NARROW_HEAD
}

/// Compiles a function over formats once per level, and calls the one for a level and an element type.
macro_rules! per_format {
    ($(#[$meta:meta])* fn $name:ident($head:ident: $head_ty:ty, $($arg:ident: $ty:ty),* $(,)?) = $shape:ident::$body:ident;) => {
        impl Kernels {
            $(#[$meta])*
            pub(crate) unsafe fn $name(self, $head: $head_ty, $($arg: $ty),*) {
                unsafe fn plain<F: Format>($head: $head_ty, $($arg: $ty),*) {
                    // SAFETY: as the caller promises.
                    unsafe { $shape::$body::<F>($head, $($arg),*) };
                }

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2<F: Format>($head: $head_ty, $($arg: $ty),*) {
                    // SAFETY: as the caller promises.
                    unsafe { $shape::$body::<F>($head, $($arg),*) };
                }

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")]
                unsafe fn avx512<F: Format>($head: $head_ty, $($arg: $ty),*) {
                    // SAFETY: as the caller promises.
                    unsafe { $shape::$body::<F>($head, $($arg),*) };
                }

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")]
                unsafe fn pairs($head: $head_ty, $($arg: $ty),*) {
                    // SAFETY: as the caller promises.
                    unsafe { $shape::$body::<Pairs>($head, $($arg),*) };
                }

                // SAFETY: `Kernels` proves that the machine has the instructions; the rest is the caller's promise.
                unsafe {
                    match (self.level(), $head.dtype) {
                        (_, KvDtype::U64) => unreachable!("refused when the executor is loaded"),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx512Bf16, KvDtype::Bf16) => pairs($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx, KvDtype::F32) => avx512::<F32<Avx512>>($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx, KvDtype::F16) => avx512::<F16<Avx512>>($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx512 | KernelLevel::Amx, KvDtype::Bf16) => avx512::<Bf16<Avx512>>($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx2, KvDtype::F32) => avx2::<F32<Avx2>>($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx2, KvDtype::F16) => avx2::<F16<Avx2>>($head, $($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        (KernelLevel::Avx2, KvDtype::Bf16) => avx2::<Bf16<Avx2>>($head, $($arg),*),
                        (_, KvDtype::F32) => plain::<F32<Plain>>($head, $($arg),*),
                        (_, KvDtype::F16) => plain::<F16<Plain>>($head, $($arg),*),
                        (_, KvDtype::Bf16) => plain::<Bf16<Plain>>($head, $($arg),*),
                    }
                }
            }
        }
    };
}

per_format! {
    /// Computes the attention of some tokens over their whole context, at most [`WIDE_ROWS`] rows.
    ///
    /// # Safety
    /// - The head's pages lie inside one allocation and hold written keys and values up to the last token's position, which no
    ///   one writes meanwhile.
    /// - No one else uses the queries meanwhile.
    fn attend_wide(head: &KvHead<'_>, queries: &Queries<'_>, state: &mut WideState) = wide::attend;
}

per_format! {
    /// Computes the attention of one token, which [`is_narrow`], over one segment of its context: see [`partial_len`].
    ///
    /// # Safety
    /// As [`Self::attend_wide`], but others may read the queries.
    fn attend_narrow(head: &KvHead<'_>, queries: &Queries<'_>, segment: usize, partial: &mut [f32]) = narrow::attend;
}

per_format! {
    /// Merges the segments of one token, all of [`partial_len`], and puts the result in the queries' place.
    ///
    /// # Safety
    /// No one else uses the queries meanwhile.
    fn merge_narrow(head: &KvHead<'_>, queries: &Queries<'_>, partials: &mut [f32]) = narrow::merge;
}

/// A weighted sum over its sum of weights. Adding zero makes one zero of both, as a row that met a tile of others may have missed a
/// rescaling to the other.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn quotient<F: Format>(sum: V<F>, weight: V<F>) -> V<F> {
    // SAFETY: as the caller promises.
    unsafe { F::L::add(F::L::div(sum, weight), F::L::splat(0.0)) }
}

/// Joins the maximum and the sum of weights of a segment to those before it; returns the factors of the weighted sums.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn merge_weights<F: Format>(
    max: &mut V<F>,
    weight: &mut V<F>,
    (next_max, next_weight): (V<F>, V<F>),
) -> [V<F>; 2] {
    // SAFETY: as the caller promises.
    unsafe {
        let before = *max;
        *max = F::L::max(next_max, before);
        let factors = [F::L::exp2(F::L::sub(before, *max)), F::L::exp2(F::L::sub(next_max, *max))];
        *weight = merge_sums::<F>(factors, *weight, next_weight);
        factors
    }
}

/// Joins a sum of a segment to the one before it.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn merge_sums<F: Format>(factors: [V<F>; 2], before: V<F>, next: V<F>) -> V<F> {
    // SAFETY: as the caller promises.
    unsafe { F::L::fma(next, factors[1], F::L::mul(before, factors[0])) }
}

#[cfg(test)]
mod tests;
