//! Attention over paged KV.
//!
//! One unit of work is a run of queries of one item that share a KV head. It walks the context in tiles of [`TILE`]
//! positions, keeping a running maximum, sum and weighted value per query (the online softmax of Milakov and Gimelshein,
//! 2018, tiled as in FlashAttention). Tiles begin at multiples of `TILE` from position 0, whatever the chunk, the page size or the
//! pages; and K and V are read back from the cache, so a token meets the same rounded neighbours whether they were computed
//! in its own step or in an earlier one. Both together make the result independent of chunking and placement.
//!
//! ```text
//! positions  0        32        64        96
//! tiles      [ tile 0 ][ tile 1 ][ tile 2 ][
//! query 70   [ whole  ][ whole  ][7 valid.        positions past the query get no weight and are not even multiplied
//! ```

use std::ops::Range;

use microserving_protocol::{KvGeometry, LayerId, PageId};

use crate::kernels::{F32Product, Kernels, NR, Output};
use crate::pool::Parts;

/// Positions in a tile.
const TILE: usize = 32;

/// Query rows (tokens times heads of a group) that a unit aims for: enough to share the loading of K and V.
const UNIT_ROWS: usize = 48;

/// The shape of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) num_heads: usize,
    /// KV heads.
    pub(crate) num_kv_heads: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
}

impl Heads {
    /// Returns the query heads that share a KV head.
    const fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Returns the tokens of a unit.
    pub(crate) const fn tokens_per_unit(&self) -> usize {
        let tokens = UNIT_ROWS / self.group();
        if tokens == 0 { 1 } else { tokens }
    }
}

/// The attached KV region as addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvRegion<'a> {
    /// The first byte.
    pub(crate) base: *mut u8,
    /// Where everything lies.
    pub(crate) geometry: &'a KvGeometry,
}

// SAFETY: a plain address; who may access which pages when is the contract of the methods.
unsafe impl Send for KvRegion<'_> {}
// SAFETY: as above.
unsafe impl Sync for KvRegion<'_> {}

impl KvRegion<'_> {
    /// Writes the keys (`kv = 0`) or values (`kv = 1`) of one token: `row: [num_kv_heads][head_dim]`.
    ///
    /// # Safety
    /// Layer, page and slot lie inside the region, and no one else accesses that slot meanwhile.
    pub(crate) unsafe fn store(
        &self,
        kernels: Kernels,
        (layer, page, slot): (LayerId, PageId, u32),
        kv: u32,
        row: &[f32],
    ) {
        let layout = &self.geometry.layout;
        for (head, row) in row.chunks_exact(layout.head_dim as usize).enumerate() {
            let offset = self.geometry.slot_offset(layer, page, kv, head as u32, slot);
            // SAFETY: the slot lies inside the region; its bytes are aligned since the region and every slot size are;
            // exclusive as the caller promises.
            unsafe { kernels.store_kv(row, layout.dtype, self.base.add(offset)) };
        }
    }

    /// Asks the caches for positions `range` of one KV head. Pages lie apart, so the hardware's own prefetching ends with each.
    ///
    /// # Safety
    /// The pages lie inside the region.
    unsafe fn prefetch(&self, (layer, pages, head): (LayerId, &[PageId], u32), range: Range<u32>) {
        let layout = &self.geometry.layout;
        let mut at = range.start;
        while at < range.end {
            let slot = at % layout.page_size;
            let count = (layout.page_size - slot).min(range.end - at);
            let page = pages[(at / layout.page_size) as usize];
            for kv in 0..2 {
                // SAFETY: the page lies inside the region, as the caller promises.
                let from = unsafe { self.base.add(self.geometry.slot_offset(layer, page, kv, head, slot)) };
                prefetch_bytes(from, count as usize * layout.slot_bytes());
            }
            at += count;
        }
    }

    /// Reads positions `range` of one KV head into rows of `stride` elements.
    ///
    /// # Safety
    /// The pages lie inside the region, were written for these positions, and are not written meanwhile.
    unsafe fn load(
        &self,
        kernels: Kernels,
        (layer, pages, head): (LayerId, &[PageId], u32),
        kv: u32,
        range: Range<u32>,
        (rows, stride): (&mut [f32], usize),
    ) {
        let layout = &self.geometry.layout;
        let head_dim = layout.head_dim as usize;
        let mut at = range.start;
        while at < range.end {
            let slot = at % layout.page_size;
            let count = (layout.page_size - slot).min(range.end - at) as usize;
            let page = pages[(at / layout.page_size) as usize];
            // SAFETY: the page lies inside the region, as the caller promises.
            let from = unsafe { self.base.add(self.geometry.slot_offset(layer, page, kv, head, slot)) };
            let first = (at - range.start) as usize;
            if stride == head_dim {
                // SAFETY: the slots of a head follow each other in a page; written and not being written, as promised.
                unsafe { kernels.load_kv(from, layout.dtype, &mut rows[first * stride..][..count * stride]) };
            } else {
                for i in 0..count {
                    // SAFETY: as above, slot by slot.
                    unsafe {
                        let from = from.add(i * layout.slot_bytes());
                        kernels.load_kv(from, layout.dtype, &mut rows[(first + i) * stride..][..head_dim]);
                    }
                }
            }
            at += count as u32;
        }
    }
}

/// Asks the caches for some bytes; a hint, so any address will do.
fn prefetch_bytes(from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(64) {
        // SAFETY: prefetching accesses nothing, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                from.wrapping_add(offset).cast(),
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}

/// A run of queries of one item that share a KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// The item's place in the batch.
    pub(crate) item: usize,
    /// The KV head.
    pub(crate) head: usize,
    /// The row of the batch that the first query is.
    pub(crate) first_row: usize,
    /// The queries' tokens.
    pub(crate) num_tokens: usize,
    /// The position of the first.
    pub(crate) position: u32,
}

/// What one thread needs to work on a unit; sized once for the model.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `[rows][head_dim]`, scaled queries.
    queries: Vec<f32>,
    /// `[TILE][head_dim]`.
    keys: Vec<f32>,
    /// `[head_dim][TILE]`.
    keys_t: Vec<f32>,
    /// `[TILE][padded head_dim]`; the padding stays zero.
    values: Vec<f32>,
    /// `[rows][TILE]`.
    scores: Vec<f32>,
    /// `[rows][padded head_dim]`, the weighted sums so far.
    sums: Vec<f32>,
    /// `[rows]`, the largest score so far.
    max: Vec<f32>,
    /// `[rows]`, the sum of weights so far.
    weight: Vec<f32>,
}

impl Scratch {
    /// Makes room for the units of a model.
    pub(crate) fn new(heads: &Heads) -> Self {
        let rows = heads.tokens_per_unit() * heads.group();
        let padded = heads.head_dim.next_multiple_of(NR);
        Self {
            queries: vec![0.0; rows * heads.head_dim],
            keys: vec![0.0; TILE * heads.head_dim],
            keys_t: vec![0.0; heads.head_dim * TILE],
            values: vec![0.0; TILE * padded],
            scores: vec![0.0; rows * TILE],
            sums: vec![0.0; rows * padded],
            max: vec![0.0; rows],
            weight: vec![0.0; rows],
        }
    }
}

/// Computes a unit: reads its queries from `q` and puts the attention's output in their place. `q: [tokens][num_heads][head_dim]`.
///
/// # Safety
/// - `pages` lie inside the region and hold the item's KV up to the unit's last query, which no one writes meanwhile.
/// - No one else accesses the unit's heads of its rows of `q`.
pub(crate) unsafe fn attend(
    kernels: Kernels,
    heads: &Heads,
    kv: KvRegion<'_>,
    (layer, pages): (LayerId, &[PageId]),
    unit: &Unit,
    q: &Parts<'_, f32>,
    scratch: &mut Scratch,
) {
    let (group, head_dim) = (heads.group(), heads.head_dim);
    let padded = head_dim.next_multiple_of(NR);
    let num_rows = unit.num_tokens * group;
    let scale = 1.0 / (head_dim as f32).sqrt();
    // The heads of a group are neighbours, so a token's rows are one run.
    let run = |token: usize| {
        let first = ((unit.first_row + token) * heads.num_heads + unit.head * group) * head_dim;
        first..first + group * head_dim
    };
    for token in 0..unit.num_tokens {
        // SAFETY: exclusively this unit's, as the caller promises; the borrow ends here.
        let from = unsafe { q.get(run(token)) };
        let to = &mut scratch.queries[token * group * head_dim..][..group * head_dim];
        for (to, &from) in to.iter_mut().zip(&*from) {
            *to = from * scale;
        }
    }
    scratch.sums[..num_rows * padded].fill(0.0);
    scratch.max[..num_rows].fill(f32::NEG_INFINITY);
    scratch.weight[..num_rows].fill(0.0);

    let end = unit.position + unit.num_tokens as u32;
    let mut tile = 0;
    while tile < end {
        let tile_end = (tile + TILE as u32).min(end);
        let place = (layer, pages, unit.head as u32);
        // SAFETY: these positions lie before the unit's end, so they are written, as the caller promises.
        unsafe {
            kv.prefetch(place, tile_end..(tile_end + TILE as u32).min(end));
            kv.load(kernels, place, 0, tile..tile_end, (&mut scratch.keys, head_dim));
            kv.load(kernels, place, 1, tile..tile_end, (&mut scratch.values, padded));
        }
        let loaded = (tile_end - tile) as usize;
        kernels.transpose(&scratch.keys, (loaded, head_dim), &mut scratch.keys_t, TILE);
        // Queries before the tile have nothing to do with it.
        let first_token = tile.saturating_sub(unit.position) as usize;
        let rows = first_token * group..num_rows;
        let product = F32Product {
            a: &scratch.queries,
            lda: head_dim,
            w: &scratch.keys_t,
            tile: NR,
            ldw: TILE,
            k: head_dim,
            accumulate: false,
        };
        // SAFETY: the scratch is this thread's.
        unsafe {
            kernels.f32_product(&product, rows, 0..TILE / NR, Output::new(&mut scratch.scores, TILE));
        }
        // Queries that see the whole tile share one product; the others go one token at a time, each summing over exactly the
        // positions that it sees.
        let first_whole =
            ((tile + TILE as u32 - 1).saturating_sub(unit.position) as usize).min(unit.num_tokens);
        for token in first_token..unit.num_tokens {
            let valid = ((unit.position + token as u32 + 1 - tile) as usize).min(TILE);
            for row in token * group..(token + 1) * group {
                kernels.softmax_step(
                    &mut scratch.scores[row * TILE..][..TILE],
                    valid,
                    &mut scratch.max[row],
                    &mut scratch.weight[row],
                    &mut scratch.sums[row * padded..][..padded],
                );
            }
            if token < first_whole {
                weigh(kernels, scratch, token * group..(token + 1) * group, valid, padded);
            }
        }
        weigh(kernels, scratch, first_whole.max(first_token) * group..num_rows, TILE, padded);
        tile += TILE as u32;
    }
    for token in 0..unit.num_tokens {
        // SAFETY: exclusively this unit's, as the caller promises; the borrow ends here.
        let to = unsafe { q.get(run(token)) };
        for (i, to) in to.chunks_exact_mut(head_dim).enumerate() {
            let row = token * group + i;
            let factor = 1.0 / scratch.weight[row];
            for (to, &sum) in to.iter_mut().zip(&scratch.sums[row * padded..]) {
                *to = sum * factor;
            }
        }
    }
}

/// Adds the values of a tile's first `valid` positions, weighted by the rows' scores.
fn weigh(kernels: Kernels, scratch: &mut Scratch, rows: Range<usize>, valid: usize, padded: usize) {
    let product = F32Product {
        a: &scratch.scores,
        lda: TILE,
        w: &scratch.values,
        tile: NR,
        ldw: padded,
        k: valid,
        accumulate: true,
    };
    // SAFETY: the scratch is this thread's.
    unsafe { kernels.f32_product(&product, rows, 0..padded / NR, Output::new(&mut scratch.sums, padded)) };
}
