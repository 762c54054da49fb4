//! Attention over paged KV: how it is cut into units for the threads. The arithmetic is [`crate::kernels`]'.
//!
//! K and V are read back from the cache, so a token meets the same rounded neighbours whether they were computed in its own step or
//! in an earlier one; and tiles and segments begin at absolute positions. Both together make the result independent of chunking
//! and placement.
//!
//! A prompt's chunk is cut into runs of queries that share a KV head, longest context first so that the threads end together. A
//! single token, whose context is all there is to share out, is cut into the segments of its context, which are merged in order
//! when all are done.

use microserving_protocol::{KvGeometry, LayerId, PageId};

use crate::kernels::{Kernels, KvHead, Queries, SEGMENT, WIDE_ROWS, WideState, is_narrow, partial_len};
use crate::pool::{Parts, Pool};

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

    /// Returns the tokens whose queries make a wide unit.
    const fn tokens_per_unit(&self) -> usize {
        WIDE_ROWS / self.group()
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

    /// Returns one KV head of one sequence.
    ///
    /// # Safety
    /// Layer, head and pages lie inside the region.
    unsafe fn head<'a>(&self, layer: LayerId, head: usize, pages: &'a [PageId]) -> KvHead<'a> {
        let layout = &self.geometry.layout;
        let key = self.geometry.slot_offset(layer, PageId(0), 0, head as u32, 0);
        let value = self.geometry.slot_offset(layer, PageId(0), 1, head as u32, 0);
        KvHead {
            // SAFETY: inside the region, as the caller promises.
            base: unsafe { self.base.add(key) },
            pages,
            page_size: layout.page_size as usize,
            page_bytes: layout.page_bytes(),
            slot_bytes: layout.slot_bytes(),
            to_values: value - key,
            dtype: layout.dtype,
        }
    }
}

/// Some queries of one item that share a KV head.
#[derive(Clone, Copy, Debug)]
struct Unit {
    /// Where the item's pages begin in [`Units::pages`], and end.
    pages: (usize, usize),
    /// The KV head.
    head: usize,
    /// The row of the batch that the first query is.
    first_row: usize,
    /// The queries' tokens.
    num_tokens: usize,
    /// The position of the first.
    position: usize,
    /// What of the context; all of it if the unit is wide.
    share: Share,
}

#[derive(Clone, Copy, Debug)]
enum Share {
    /// All of it, rows in lanes.
    Wide,
    /// One segment, whose result is the `partial`th; `is_only` says that there is no other.
    Segment { segment: usize, partial: usize, is_only: bool },
}

/// The units of one step, and the memory for what segments leave behind; both are kept for their memory.
#[derive(Debug, Default)]
pub(crate) struct Units {
    units: Vec<Unit>,
    /// The pages of all items, one after the other.
    pages: Vec<PageId>,
    /// Tokens whose segments are to be merged: the unit of the first, and their number.
    merges: Vec<(usize, usize)>,
    num_partials: usize,
    partials: Vec<f32>,
}

impl Units {
    /// Begins a step.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
        self.pages.clear();
        self.merges.clear();
        self.num_partials = 0;
    }

    /// Adds the queries of an item: `num_tokens` rows of the batch from `first_row` on, the first at `position`.
    pub(crate) fn add(
        &mut self,
        heads: &Heads,
        pages: &[PageId],
        (first_row, num_tokens, position): (usize, usize, usize),
    ) {
        let first_page = self.pages.len();
        self.pages.extend_from_slice(pages);
        let pages = (first_page, self.pages.len());
        for head in 0..heads.num_kv_heads {
            let unit = Unit { pages, head, first_row, num_tokens, position, share: Share::Wide };
            if num_tokens == 1 && is_narrow(heads.group(), heads.head_dim) {
                let num_segments = (position + 1).div_ceil(SEGMENT);
                let is_only = num_segments == 1;
                if !is_only {
                    self.merges.push((self.units.len(), num_segments));
                }
                for segment in 0..num_segments {
                    let share = Share::Segment { segment, partial: self.num_partials, is_only };
                    self.units.push(Unit { share, ..unit });
                    self.num_partials += 1;
                }
                continue;
            }
            let per_unit = heads.tokens_per_unit();
            for first in (0..num_tokens).step_by(per_unit).rev() {
                self.units.push(Unit {
                    first_row: first_row + first,
                    num_tokens: per_unit.min(num_tokens - first),
                    position: position + first,
                    ..unit
                });
            }
        }
    }
}

/// Computes the units of a step: reads queries from `q` and puts attention's outputs in their places.
/// `q: [rows][num_heads][head_dim]`, `states` are one a thread.
///
/// # Safety
/// The items' pages lie inside the region and hold their KV up to their last queries, which no one writes meanwhile.
pub(crate) unsafe fn attend(
    (kernels, pool): (Kernels, &mut Pool),
    heads: &Heads,
    (kv, layer): (KvRegion<'_>, LayerId),
    units: &mut Units,
    q: &mut [f32],
    states: &mut [WideState],
) {
    let Units { units, pages, merges, num_partials, partials } = units;
    let (group, head_dim) = (heads.group(), heads.head_dim);
    let len = partial_len(group, head_dim);
    partials.resize(partials.len().max(*num_partials * len), 0.0);
    let q = Parts::new(q);
    let partials = Parts::new(partials);
    let states = Parts::new(states);
    // SAFETY: the caller promises that the pages lie inside the region.
    let head = |unit: &Unit| unsafe { kv.head(layer, unit.head, &pages[unit.pages.0..unit.pages.1]) };
    let queries = |unit: &Unit| Queries {
        all: &q,
        first: (unit.first_row * heads.num_heads + unit.head * group) * head_dim,
        stride: heads.num_heads * head_dim,
        group,
        head_dim,
        num_tokens: unit.num_tokens,
        position: unit.position,
    };
    pool.run(units.len(), &|at, thread| {
        let unit = &units[at];
        match unit.share {
            // SAFETY: units share no heads of a row, and threads no state; KV is as the caller promises.
            Share::Wide => unsafe {
                kernels.attend_wide(&head(unit), &queries(unit), &mut states.get(thread..thread + 1)[0]);
            },
            // SAFETY: segments of a token only read its queries, and have a partial each; KV is as the caller promises.
            Share::Segment { segment, partial, is_only } => unsafe {
                let partial = partials.get(partial * len..(partial + 1) * len);
                kernels.attend_narrow(&head(unit), &queries(unit), segment, partial);
                if is_only {
                    kernels.merge_narrow(&head(unit), &queries(unit), partial);
                }
            },
        }
    });
    pool.run(merges.len(), &|at, _| {
        let (first, num_segments) = merges[at];
        let unit = &units[first];
        let Share::Segment { partial, .. } = unit.share else { unreachable!("only segments are merged") };
        // SAFETY: each token's heads are merged once, after all their segments.
        unsafe {
            let partials = partials.get(partial * len..(partial + num_segments) * len);
            kernels.merge_narrow(&head(unit), &queries(unit), partials);
        }
    });
}
