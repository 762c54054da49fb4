//! From pages to bytes: which runs of two regions hold a range of token positions.
//!
//! ```text
//! positions      .....|begin .............. end|.....
//! pages          [ p0 ][ p1 ][ p2 ][ p3 ]          p1, p2 whole: one run each, one in all if they are neighbours
//!                  ^^          ^^^^                p0, p3 in part: one run per (k|v, head), for the range's slots only
//! ```
//!
//! A page of a layer holds its slots head by head, so the slots of a range that covers only part of a page are not
//! contiguous. They are cut out one by one: the slots beside them may belong to another writer.

use microserving_protocol::{KvGeometry, KvRange, LayerId, PageId};

use crate::{ByteRun, PutRun};

/// Why a range cannot be turned into bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The pages of the two sides are not of one shape.
    #[error("a page of a layer has another shape here than there")]
    ShapesDiffer,
    /// The layer does not exist.
    #[error("layer {layer} is not below {num_layers}")]
    NoSuchLayer {
        /// The layer asked for.
        layer: LayerId,
        /// How many there are.
        num_layers: u32,
    },
    /// The range reaches over a page that the list does not hold.
    #[error("range {range} needs page {index} of the {side} sequence, which is not in the list")]
    PageMissing {
        /// The range.
        range: KvRange,
        /// Which page, counted from position 0 of the sequence.
        index: usize,
        /// Whose list lacks it.
        side: Side,
    },
    /// A page lies outside the region.
    #[error("page {page} of the {side} sequence is not below {num_pages}")]
    NoSuchPage {
        /// The page.
        page: PageId,
        /// How many there are.
        num_pages: u32,
        /// Whose list names it.
        side: Side,
    },
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Ours.
    Local,
    /// The peer's.
    Remote,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Remote => "remote",
        })
    }
}

/// Returns the copies that bring one layer's KV of `range` from local to remote pages, and touch nothing else.
///
/// `local_pages[0]` holds position 0 of the sequence; `remote_pages[0]` is the page of index `remote_first_page`, so it
/// holds position `remote_first_page * page_size`. Whole pages are one run each, neighbours in both regions are joined.
///
/// # Errors
/// [`PlanError`] if the shapes differ or a page is missing or lies outside its region; nothing is assumed about lists that
/// came over the wire.
pub fn plan_layer(
    local: &KvGeometry,
    local_pages: &[PageId],
    remote: &KvGeometry,
    remote_pages: &[PageId],
    remote_first_page: u32,
    layer: LayerId,
    range: KvRange,
) -> Result<Vec<PutRun>, PlanError> {
    if !same_shape(local, remote) {
        return Err(PlanError::ShapesDiffer);
    }
    check_layer(local, layer)?;
    let source = Pages { geometry: local, pages: local_pages, first_page: 0, side: Side::Local };
    let target =
        Pages { geometry: remote, pages: remote_pages, first_page: remote_first_page, side: Side::Remote };
    let mut runs = Vec::new();
    let mut failure = None;
    local.for_each_page(range, |slot, num_slots, index| {
        if failure.is_some() {
            return;
        }
        match (source.page(range, index), target.page(range, index)) {
            (Ok(from), Ok(to)) => each_piece(local, slot, num_slots, |in_page, num_bytes| {
                push_put(
                    &mut runs,
                    PutRun {
                        local_offset: local.page_offset(layer, from) + in_page,
                        remote_offset: remote.page_offset(layer, to) + in_page,
                        num_bytes,
                    },
                );
            }),
            (Err(error), _) | (_, Err(error)) => failure = Some(error),
        }
    });
    failure.map_or(Ok(runs), Err)
}

/// Returns where the bytes of `range` lie in all layers of a region: what a [`Grant`](crate::Grant) allows.
///
/// `pages[0]` is the page of index `first_page` of the sequence. The runs are sorted, joined and do not overlap, if no page
/// is listed twice.
///
/// # Errors
/// [`PlanError`] if a page is missing or lies outside the region.
pub fn grant_runs(
    geometry: &KvGeometry,
    pages: &[PageId],
    first_page: u32,
    range: KvRange,
) -> Result<Vec<ByteRun>, PlanError> {
    let target = Pages { geometry, pages, first_page, side: Side::Local };
    let mut runs = Vec::new();
    let mut failure = None;
    for layer in (0..geometry.layout.num_layers).map(LayerId) {
        geometry.for_each_page(range, |slot, num_slots, index| match target.page(range, index) {
            Ok(page) => each_piece(geometry, slot, num_slots, |in_page, num_bytes| {
                runs.push(ByteRun { offset: geometry.page_offset(layer, page) + in_page, num_bytes });
            }),
            Err(error) => failure = Some(error),
        });
        if let Some(error) = failure {
            return Err(error);
        }
    }
    runs.sort_unstable_by_key(|run| run.offset);
    runs.dedup_by(|next, kept| {
        let adjacent = kept.offset + kept.num_bytes == next.offset;
        if adjacent {
            kept.num_bytes += next.num_bytes;
        }
        adjacent
    });
    Ok(runs)
}

/// A sequence's pages on one side, checked on every look.
struct Pages<'a> {
    geometry: &'a KvGeometry,
    pages: &'a [PageId],
    first_page: u32,
    side: Side,
}

impl Pages<'_> {
    fn page(&self, range: KvRange, index: usize) -> Result<PageId, PlanError> {
        let page = index
            .checked_sub(self.first_page as usize)
            .and_then(|place| self.pages.get(place))
            .copied()
            .ok_or(PlanError::PageMissing { range, index, side: self.side })?;
        if page.0 < self.geometry.num_pages {
            Ok(page)
        } else {
            Err(PlanError::NoSuchPage { page, num_pages: self.geometry.num_pages, side: self.side })
        }
    }
}

/// Calls `each` with `(offset in the page, num_bytes)` for every contiguous piece that the slots occupy in a page.
fn each_piece(geometry: &KvGeometry, slot: u32, num_slots: u32, mut each: impl FnMut(usize, usize)) {
    let layout = &geometry.layout;
    if num_slots == layout.page_size {
        each(0, layout.page_bytes());
        return;
    }
    let slot_bytes = layout.slot_bytes();
    for row in 0..2 * layout.num_kv_heads as usize {
        let first = row * layout.page_size as usize + slot as usize;
        each(first * slot_bytes, num_slots as usize * slot_bytes);
    }
}

/// Appends a copy, joining it to the last one if both ends continue it.
fn push_put(runs: &mut Vec<PutRun>, run: PutRun) {
    if let Some(last) = runs.last_mut()
        && last.local_offset + last.num_bytes == run.local_offset
        && last.remote_offset + last.num_bytes == run.remote_offset
    {
        last.num_bytes += run.num_bytes;
    } else {
        runs.push(run);
    }
}

fn same_shape(a: &KvGeometry, b: &KvGeometry) -> bool {
    let shape = |g: &KvGeometry| {
        (g.layout.page_size, g.layout.num_layers, g.layout.num_kv_heads, g.layout.head_dim, g.layout.dtype)
    };
    shape(a) == shape(b)
}

fn check_layer(geometry: &KvGeometry, layer: LayerId) -> Result<(), PlanError> {
    let num_layers = geometry.layout.num_layers;
    if layer.0 < num_layers { Ok(()) } else { Err(PlanError::NoSuchLayer { layer, num_layers }) }
}

#[cfg(test)]
mod tests;
