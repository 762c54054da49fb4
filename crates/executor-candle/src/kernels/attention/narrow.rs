//! One token: positions in lanes for the scores, elements of a head for the sums.

use super::super::lanes::Lanes;
use super::{
    Format, KvHead, NARROW_HEAD, NARROW_ROWS, Queries, SEGMENT, TILE, Tile, V, is_narrow, merge_sums,
    merge_weights, quotient,
};

/// Elements of what attention over one segment leaves behind: per query head its maximum, its sum of weights and its weighted sum.
pub(crate) const fn partial_len(group: usize, head_dim: usize) -> usize {
    group * (2 + head_dim)
}

/// See `Kernels::attend_narrow`.
///
/// # Safety
/// As there; the machine has the format's instructions.
#[inline(always)]
pub(super) unsafe fn attend<F: Format>(
    head: &KvHead<'_>,
    queries: &Queries<'_>,
    segment: usize,
    partial: &mut [f32],
) {
    let (group, head_dim) = (queries.group, queries.head_dim);
    let words = head_dim / F::PER_WORD;
    assert!(is_narrow(group, head_dim), "not a narrow shape");
    let mut packed = [0.0; NARROW_ROWS * NARROW_HEAD];
    // SAFETY: as the caller promises; words are no more than elements.
    unsafe {
        let (from, scale) = (queries.all.read(queries.token(0)).as_ptr(), F::L::splat(queries.scale()));
        for at in (0..group * head_dim).step_by(16) {
            let x = F::L::mul(F::L::load(from.add(at)), scale);
            F::pack(x, packed.as_mut_ptr().add(at / F::PER_WORD));
        }
    }
    let (max, rest) = partial[..partial_len(group, head_dim)].split_at_mut(group);
    let (weight, sums) = rest.split_at_mut(group);
    max.fill(f32::NEG_INFINITY);
    weight.fill(0.0);
    sums.fill(0.0);
    let begin = segment * SEGMENT;
    let end = (begin + SEGMENT).min(queries.position + 1);
    // SAFETY: as the caller promises.
    let tile_at = |begin: usize| unsafe { Tile::new(head, begin, (begin + TILE).min(end)) };
    let mut tile = tile_at(begin);
    for begin in (begin..end).step_by(TILE) {
        let next = if begin + TILE < end { tile_at(begin + TILE) } else { tile };
        let mut row = 0;
        macro_rules! rows {
            ($($rows:literal)+) => {
                $(while group - row >= $rows {
                    let rows = Rows {
                        queries: packed[row * words..].as_ptr(),
                        max: max[row..].as_mut_ptr(),
                        weight: weight[row..].as_mut_ptr(),
                        sums: sums[row * head_dim..].as_mut_ptr(),
                        head_dim,
                    };
                    // SAFETY: as the caller promises; the rows lie inside the buffers.
                    unsafe { tile_of_rows::<F, $rows>(&tile, &next, &rows) };
                    row += $rows;
                })+
            };
        }
        rows!(4 3 2 1);
        tile = next;
    }
}

/// Some query heads.
struct Rows {
    /// `[rows][words]`.
    queries: *const f32,
    max: *mut f32,
    weight: *mut f32,
    /// `[rows][head_dim]`.
    sums: *mut f32,
    head_dim: usize,
}

/// A head's keys and values lie in stretches with the other heads' between them, which no processor guesses: a position's value is asked for when
/// its key is used, and the next tile's key when its value is.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn tile_of_rows<F: Format, const R: usize>(tile: &Tile, next: &Tile, rows: &Rows) {
    const GROUPS: usize = TILE / 16;
    let words = rows.head_dim / F::PER_WORD;
    let groups = tile.len.div_ceil(16);
    // SAFETY: as the caller promises.
    unsafe {
        let mut scores = [[F::L::splat(f32::NEG_INFINITY); GROUPS]; R];
        for group in 0..groups {
            let mut acc = [F::L::splat(0.0); R];
            for word in (0..words).step_by(16) {
                let mut block = [F::L::splat(0.0); 16];
                for (i, lanes) in block.iter_mut().enumerate() {
                    let key = tile.keys.get_unchecked(16 * group + i).add(word * F::PER_WORD * F::ELEMENT);
                    *lanes = F::keys(key);
                    F::L::fetch(key.wrapping_add(tile.to_values));
                }
                F::L::transpose(&mut block);
                for (x, &column) in block.iter().enumerate() {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let query = F::L::splat(*rows.queries.add(r * words + word + x));
                        *acc = F::mac(*acc, column, query);
                    }
                }
            }
            for (scores, acc) in scores.iter_mut().zip(acc) {
                scores[group] = acc;
            }
        }
        if !tile.len.is_multiple_of(16) {
            let seen = F::L::more(DESCENDING.as_ptr(), 16 - (tile.len % 16) as i32);
            for scores in &mut scores {
                scores[groups - 1] = F::L::select(seen, scores[groups - 1], F::L::splat(f32::NEG_INFINITY));
            }
        }
        let mut weights = [[0.0; TILE]; R];
        let mut factors = [F::L::splat(0.0); R];
        for r in 0..R {
            factors[r] = softmax::<F>(&scores[r][..groups], rows, r, &mut weights[r]);
        }
        let mut d = 0;
        macro_rules! columns {
            ($($vectors:literal)+) => {
                $(while rows.head_dim - d >= 16 * $vectors {
                    weigh::<F, R, $vectors>(tile, next, rows, d, &weights, &factors);
                    d += 16 * $vectors;
                })+
            };
        }
        if F::L::MANY_REGISTERS {
            columns!(4 2);
        } else {
            columns!(2);
        }
    }
}

/// Sixteen counts of which the first `n` are more than `16 - n`.
static DESCENDING: [i32; 16] = [16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1];

/// Turns the scores of row `r` into weights; returns what its sum so far is to be rescaled by.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn softmax<F: Format>(scores: &[V<F>], rows: &Rows, r: usize, weights: &mut [f32; TILE]) -> V<F> {
    // SAFETY: as the caller promises.
    unsafe {
        let mut lanes = F::L::splat(f32::NEG_INFINITY);
        for &scores in scores {
            lanes = F::L::max(scores, lanes);
        }
        let largest =
            F::L::to_array(lanes).iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
        let before = F::L::splat(*rows.max.add(r));
        let max = F::L::max(F::L::splat(largest), before);
        let base = F::L::max(max, F::L::splat(f32::MIN));
        let factor = F::L::exp2(F::L::sub(before, base));
        let mut sums = F::L::splat(0.0);
        for (group, &scores) in scores.iter().enumerate() {
            let lanes = F::L::exp2(F::L::sub(scores, base));
            sums = F::L::add(sums, lanes);
            F::pack(lanes, weights.as_mut_ptr().add(16 * group / F::PER_WORD));
        }
        let mut sums = F::L::to_array(sums);
        let mut width = 16;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                sums[i] += sums[i + width];
            }
        }
        let weight = F::L::splat(*rows.weight.add(r));
        *rows.weight.add(r) = F::L::to_array(F::L::fma(weight, factor, F::L::splat(sums[0])))[0];
        *rows.max.add(r) = F::L::to_array(max)[0];
        factor
    }
}

/// Rescales `NV` vectors of the sums from element `d` on, and adds the tile's values.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn weigh<F: Format, const R: usize, const NV: usize>(
    tile: &Tile,
    next: &Tile,
    rows: &Rows,
    d: usize,
    weights: &[[f32; TILE]; R],
    factors: &[V<F>; R],
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = [[F::L::splat(0.0); NV]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                let before = F::L::load(rows.sums.add(r * rows.head_dim + d + 16 * v));
                *acc = F::L::mul(before, factors[r]);
            }
        }
        for word in 0..tile.len.div_ceil(F::PER_WORD) {
            let (first, second) = tile.values::<F>(word * F::PER_WORD);
            for position in F::PER_WORD * word..F::PER_WORD * (word + 1) {
                let key = next.keys.get_unchecked(position).wrapping_add(d * F::ELEMENT);
                for line in 0..(16 * NV * F::ELEMENT).div_ceil(64) {
                    F::L::fetch(key.wrapping_add(64 * line));
                }
            }
            let mut values = [F::L::splat(0.0); NV];
            for (v, values) in values.iter_mut().enumerate() {
                let at = (d + 16 * v) * F::ELEMENT;
                *values = F::values(
                    first.add(at),
                    second.map_or(super::wide::ZEROS.as_ptr(), |second| second.add(at)),
                );
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let weight = F::L::splat(*weights.as_ptr().cast::<f32>().add(r * TILE + word));
                for (acc, &values) in acc.iter_mut().zip(&values) {
                    *acc = F::mac(*acc, values, weight);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (v, &acc) in acc.iter().enumerate() {
                F::L::store(rows.sums.add(r * rows.head_dim + d + 16 * v), acc);
            }
        }
    }
}

/// See `Kernels::merge_narrow`.
///
/// # Safety
/// As there; the machine has the format's instructions.
#[inline(always)]
pub(super) unsafe fn merge<F: Format>(_: &KvHead<'_>, queries: &Queries<'_>, partials: &mut [f32]) {
    let (group, head_dim) = (queries.group, queries.head_dim);
    let len = partial_len(group, head_dim);
    let (all, others) = partials.split_at_mut(len);
    for r in 0..group {
        // SAFETY: as the caller promises; everything lies inside the partials, `head_dim` being a multiple of sixteen.
        unsafe {
            let (mut max, mut weight) = (F::L::splat(all[r]), F::L::splat(all[group + r]));
            let first = 2 * group + r * head_dim;
            for next in others.chunks_exact(len) {
                let of_next = (F::L::splat(next[r]), F::L::splat(next[group + r]));
                let factors = merge_weights::<F>(&mut max, &mut weight, of_next);
                for d in (first..first + head_dim).step_by(16) {
                    let at = all.as_mut_ptr().add(d);
                    F::L::store(
                        at,
                        merge_sums::<F>(factors, F::L::load(at), F::L::load(next.as_ptr().add(d))),
                    );
                }
            }
            let out = queries.all.get(queries.token(0))[r * head_dim..][..head_dim].as_mut_ptr();
            for d in (0..head_dim).step_by(16) {
                F::L::store(out.add(d), quotient::<F>(F::L::load(all.as_ptr().add(first + d)), weight));
            }
        }
    }
}
