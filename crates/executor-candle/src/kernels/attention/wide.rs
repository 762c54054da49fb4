//! Some tokens: query rows in lanes.

use super::super::lanes::Lanes;
use super::{Format, KvHead, Queries, SEGMENT, TILE, Tile, WIDE_ROWS, merge_sums, merge_weights, quotient};

/// Query rows in lanes, and what the wide shape needs beside them; one per thread. Sizes are those of [`WIDE_ROWS`] and a head,
/// rounded up to sixteen.
#[derive(Debug)]
pub(crate) struct WideState {
    head_dim: usize,
    /// `[words][WIDE_ROWS]`.
    queries: Vec<f32>,
    /// `[TILE][words]`.
    keys: Vec<f32>,
    /// `[TILE or pairs][head_dim]` words.
    values: Vec<f32>,
    /// `[TILE][WIDE_ROWS]`, scores and then weights.
    scores: Vec<f32>,
    /// `[WIDE_ROWS][head_dim]`, rows on their way in and out.
    rows: Vec<f32>,
    /// Positions of the tile that each row sees.
    counts: [i32; WIDE_ROWS],
    /// Of the segment at hand.
    segment: Running,
    /// Of those before it.
    all: Running,
}

/// The running softmax of rows in lanes.
#[derive(Debug)]
struct Running {
    max: [f32; WIDE_ROWS],
    weight: [f32; WIDE_ROWS],
    /// `[head_dim][WIDE_ROWS]`.
    sums: Vec<f32>,
}

impl WideState {
    pub(crate) fn new(head_dim: usize) -> Self {
        let padded = head_dim.next_multiple_of(16);
        let running = || Running {
            max: [0.0; WIDE_ROWS],
            weight: [0.0; WIDE_ROWS],
            sums: vec![0.0; padded * WIDE_ROWS],
        };
        Self {
            head_dim,
            queries: vec![0.0; padded * WIDE_ROWS],
            keys: vec![0.0; TILE * padded],
            values: vec![0.0; TILE * padded],
            scores: vec![0.0; TILE * WIDE_ROWS],
            rows: vec![0.0; WIDE_ROWS * padded],
            counts: [0; WIDE_ROWS],
            segment: running(),
            all: running(),
        }
    }

    const fn padded(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Row `row` on its way in or out.
    fn row(&mut self, row: usize) -> &mut [f32] {
        let padded = self.padded();
        &mut self.rows[row * padded..][..self.head_dim]
    }
}

/// See `Kernels::attend_wide`.
///
/// # Safety
/// As there; the machine has the format's instructions.
#[inline(always)]
pub(super) unsafe fn attend<F: Format>(head: &KvHead<'_>, queries: &Queries<'_>, state: &mut WideState) {
    let (group, num_tokens, position) = (queries.group, queries.num_tokens, queries.position);
    let num_rows = num_tokens * group;
    assert!(num_rows <= WIDE_ROWS && state.head_dim == queries.head_dim, "not a wide shape");
    for token in 0..num_tokens {
        // SAFETY: as the caller promises; the borrow ends here.
        let heads = unsafe { queries.all.get(queries.token(token)) };
        for (i, query) in heads.chunks_exact(queries.head_dim).enumerate() {
            state.row(token * group + i).copy_from_slice(query);
        }
    }
    // SAFETY: as the caller promises.
    unsafe { begin::<F>(state, num_rows, queries.scale()) };
    let end = position + num_tokens;
    for segment in (0..end).step_by(SEGMENT) {
        state.segment.max.fill(f32::NEG_INFINITY);
        state.segment.weight.fill(0.0);
        state.segment.sums.fill(0.0);
        for first in (segment..(segment + SEGMENT).min(end)).step_by(TILE) {
            // SAFETY: as the caller promises.
            let tile = unsafe { Tile::new(head, first, (first + TILE).min(end)) };
            for (row, count) in state.counts.iter_mut().enumerate() {
                let seen = (position + row / group + 1).saturating_sub(first).min(tile.len);
                *count = if row < num_rows { seen as i32 } else { 0 };
            }
            // SAFETY: as the caller promises.
            unsafe { take_tile::<F>(state, num_rows, &tile) };
        }
        // SAFETY: as the caller promises.
        unsafe { end_segment::<F>(state, num_rows, segment == 0) };
    }
    // SAFETY: as the caller promises.
    unsafe { finish::<F>(state, num_rows) };
    for token in 0..num_tokens {
        // SAFETY: as the caller promises; the borrow ends here.
        let heads = unsafe { queries.all.get(queries.token(token)) };
        for (i, result) in heads.chunks_exact_mut(queries.head_dim).enumerate() {
            result.copy_from_slice(state.row(token * group + i));
        }
    }
}

/// Takes the first `num_rows` rows as queries, scaled by `scale`.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn begin<F: Format>(state: &mut WideState, num_rows: usize, scale: f32) {
    let padded = state.padded();
    let words = padded / F::PER_WORD;
    let lanes = num_rows.next_multiple_of(16);
    state.rows[num_rows * padded..lanes * padded].fill(0.0);
    for row in 0..lanes {
        let row = &mut state.rows[row * padded..][..padded];
        row[state.head_dim..].fill(0.0);
        for at in (0..padded).step_by(16) {
            // SAFETY: as the caller promises; words are no more than elements, so each is written after it was read.
            unsafe {
                let x = F::L::mul(F::L::load(row.as_ptr().add(at)), F::L::splat(scale));
                F::pack(x, row.as_mut_ptr().add(at / F::PER_WORD));
            }
        }
    }
    // Words past a multiple of sixteen (of pairs, where the head has an odd number of sixteens) are never looked at.
    let (rows, queries) = (state.rows.as_ptr(), state.queries.as_mut_ptr());
    for row in (0..num_rows).step_by(16) {
        for at in (0..words).step_by(16) {
            // SAFETY: as the caller promises; the buffers hold whole blocks of sixteen.
            unsafe {
                let mut block = [F::L::splat(0.0); 16];
                for (i, lanes) in block.iter_mut().enumerate() {
                    *lanes = F::L::load(rows.add((row + i) * padded + at));
                }
                F::L::transpose(&mut block);
                for (i, lanes) in block.into_iter().enumerate() {
                    F::L::store(queries.add((at + i) * WIDE_ROWS + row), lanes);
                }
            }
        }
    }
}

/// Takes a tile into the segment at hand: row `i` sees the first `counts[i]` of its positions.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn take_tile<F: Format>(state: &mut WideState, num_rows: usize, tile: &Tile) {
    let padded = state.padded();
    let lanes = num_rows.next_multiple_of(16);
    // SAFETY: as the caller promises; the buffers hold a tile.
    unsafe {
        load_keys::<F>(state, tile);
        load_values::<F>(state, tile);
    }
    let mut first = 0;
    while first < lanes {
        let vectors = if F::L::MANY_REGISTERS && lanes - first >= 32 { 2 } else { 1 };
        let counts = &state.counts[first..(first + 16 * vectors)];
        let rows = first..(first + 16 * vectors).min(num_rows);
        let seen = counts.iter().copied().max().unwrap_or(0) as usize;
        let all_see_all = state.counts[rows].iter().all(|&count| count as usize == tile.len);
        if seen > 0 {
            let segment = &mut state.segment;
            let block = Block {
                counts: counts.as_ptr(),
                len: seen,
                masked: !all_see_all,
                queries: state.queries.as_ptr().wrapping_add(first),
                keys: state.keys.as_ptr(),
                values: state.values.as_ptr(),
                scores: state.scores.as_mut_ptr().wrapping_add(first),
                max: segment.max.as_mut_ptr().wrapping_add(first),
                weight: segment.weight.as_mut_ptr().wrapping_add(first),
                sums: segment.sums.as_mut_ptr().wrapping_add(first),
                words: state.head_dim.div_ceil(F::PER_WORD),
                head_dim: state.head_dim,
                padded,
            };
            // SAFETY: as the caller promises; the block lies inside the state.
            unsafe {
                if F::L::MANY_REGISTERS {
                    if vectors == 2 {
                        take_block::<F, 2>(&block);
                    } else {
                        take_block::<F, 1>(&block);
                    }
                } else {
                    take_block::<F, 1>(&block);
                }
            }
        }
        first += 16 * vectors;
    }
}

/// Brings a tile's keys into rows of words.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn load_keys<F: Format>(state: &mut WideState, tile: &Tile) {
    let (head_dim, padded) = (state.head_dim, state.padded());
    for (&key, to) in tile.keys[..tile.len].iter().zip(state.keys.chunks_exact_mut(padded)) {
        for at in (0..head_dim).step_by(16 * F::PER_WORD) {
            let left = (head_dim - at).min(16 * F::PER_WORD);
            let mut copy = [0; 64];
            // SAFETY: inside the row, as the caller promises, and inside the buffer, whose rows hold whole blocks of words.
            unsafe {
                let mut from = key.add(at * F::ELEMENT);
                if left < 16 * F::PER_WORD {
                    from.copy_to_nonoverlapping(copy.as_mut_ptr(), left * F::ELEMENT);
                    from = copy.as_ptr();
                }
                F::L::store(to.as_mut_ptr().add(at / F::PER_WORD), F::keys(from));
            }
        }
    }
}

/// Brings a tile's values into rows of words.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn load_values<F: Format>(state: &mut WideState, tile: &Tile) {
    let (head_dim, padded) = (state.head_dim, state.padded());
    for (word, to) in state.values.chunks_exact_mut(padded).take(tile.len.div_ceil(F::PER_WORD)).enumerate() {
        let (first, second) = tile.values::<F>(word * F::PER_WORD);
        for at in (0..head_dim).step_by(16) {
            let left = (head_dim - at).min(16);
            let mut copies = [[0; 64]; 2];
            // SAFETY: inside the rows, as the caller promises, and inside the buffer, whose rows are of whole sixteens.
            unsafe {
                let mut first = first.add(at * F::ELEMENT);
                let mut second = second.map_or(ZEROS.as_ptr(), |second| second.add(at * F::ELEMENT));
                if left < 16 {
                    first.copy_to_nonoverlapping(copies[0].as_mut_ptr(), left * F::ELEMENT);
                    second.copy_to_nonoverlapping(copies[1].as_mut_ptr(), left * F::ELEMENT);
                    (first, second) = (copies[0].as_ptr(), copies[1].as_ptr());
                }
                F::L::store(to.as_mut_ptr().add(at), F::values(first, second));
            }
        }
    }
}

/// What stands for the row after an odd number of them.
pub(super) static ZEROS: [u8; 64] = [0; 64];

/// Some lanes of a wide tile.
struct Block {
    counts: *const i32,
    /// Positions that any of the rows sees.
    len: usize,
    /// Some row sees less than the tile.
    masked: bool,
    queries: *const f32,
    keys: *const f32,
    values: *const f32,
    scores: *mut f32,
    max: *mut f32,
    weight: *mut f32,
    sums: *mut f32,
    words: usize,
    head_dim: usize,
    padded: usize,
}

/// # Safety
/// As [`attend`]; the block lies inside the state.
#[inline(always)]
unsafe fn take_block<F: Format, const NV: usize>(b: &Block) {
    let mut factors = [0.0; 32];
    let factors = factors.as_mut_ptr();
    let scores = Product {
        rows: b.len,
        a: b.keys,
        a_row: b.padded,
        a_step: 1,
        k: b.words,
        w: b.queries,
        c: b.scores,
        scale: std::ptr::null(),
        counts: std::ptr::null(),
    };
    let sums = Product {
        rows: b.head_dim,
        a: b.values,
        a_row: 1,
        a_step: b.padded,
        k: b.len.div_ceil(F::PER_WORD),
        w: b.scores,
        c: b.sums,
        scale: factors,
        counts: if b.masked { b.counts } else { std::ptr::null() },
    };
    // One place for both products: everything is inlined, and a loop compiles in half the time.
    for (which, p) in [scores, sums].iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe {
            if which == 1 {
                for v in 0..NV {
                    softmax::<F>(b, 16 * v, factors.add(16 * v));
                }
            }
            product::<F, NV>(p);
        }
    }
}

/// `c[i][lane] = (scale[lane] * c[i][lane] +) sum over x < k of a[i * a_row + x * a_step] * w[x][lane]`, rows of `w` and `c` being
/// [`WIDE_ROWS`] apart; word `x` only for lanes whose count is past its first element.
struct Product {
    /// Rows of `c`.
    rows: usize,
    a: *const f32,
    a_row: usize,
    a_step: usize,
    k: usize,
    w: *const f32,
    c: *mut f32,
    scale: *const f32,
    counts: *const i32,
}

/// # Safety
/// As [`attend`]; everything the product touches lies inside the state.
#[inline(always)]
unsafe fn product<F: Format, const NV: usize>(p: &Product) {
    let mut i = 0;
    macro_rules! blocks {
        ($($mr:literal)+) => {
            $(while p.rows - i >= $mr {
                // SAFETY: as the caller promises.
                unsafe {
                    if p.counts.is_null() {
                        product_block::<F, $mr, NV, false>(p, i);
                    } else {
                        product_block::<F, $mr, NV, true>(p, i);
                    }
                }
                i += $mr;
            })+
        };
    }
    if F::L::MANY_REGISTERS {
        blocks!(12 4 1);
    } else {
        blocks!(6 2 1);
    }
}

/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn product_block<F: Format, const MR: usize, const NV: usize, const MASKED: bool>(
    p: &Product,
    i: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut acc = [[F::L::splat(0.0); NV]; MR];
        if !p.scale.is_null() {
            for (r, row) in acc.iter_mut().enumerate() {
                for (v, lanes) in row.iter_mut().enumerate() {
                    let before = F::L::load(p.c.add((i + r) * WIDE_ROWS + 16 * v));
                    *lanes = F::L::mul(before, F::L::load(p.scale.add(16 * v)));
                }
            }
        }
        let a = p.a.add(i * p.a_row);
        for x in 0..p.k {
            let mut w = [F::L::splat(0.0); NV];
            for (v, lanes) in w.iter_mut().enumerate() {
                *lanes = F::L::load(p.w.add(x * WIDE_ROWS + 16 * v));
            }
            for (r, row) in acc.iter_mut().enumerate() {
                let left = F::L::splat(*a.add(r * p.a_row + x * p.a_step));
                for (v, lanes) in row.iter_mut().enumerate() {
                    let sum = F::mac(*lanes, left, w[v]);
                    *lanes = if MASKED {
                        let mask = F::L::more(p.counts.add(16 * v), (x * F::PER_WORD) as i32);
                        F::L::select(mask, sum, *lanes)
                    } else {
                        sum
                    };
                }
            }
        }
        for (r, row) in acc.iter().enumerate() {
            for (v, &lanes) in row.iter().enumerate() {
                F::L::store(p.c.add((i + r) * WIDE_ROWS + 16 * v), lanes);
            }
        }
    }
}

/// Turns the scores of sixteen rows into weights; `factors` become what their sums so far are to be rescaled by.
///
/// # Safety
/// As [`take_block`].
#[inline(always)]
unsafe fn softmax<F: Format>(b: &Block, lane: usize, factors: *mut f32) {
    // SAFETY: as the caller promises.
    unsafe {
        let scores = b.scores.add(lane);
        let counts = b.counts.add(lane);
        let none = F::L::splat(f32::NEG_INFINITY);
        let before = F::L::load(b.max.add(lane));
        let mut max = before;
        for position in 0..b.len {
            let at = scores.add(position * WIDE_ROWS);
            let mut score = F::L::load(at);
            if b.masked {
                score = F::L::select(F::L::more(counts, position as i32), score, none);
                F::L::store(at, score);
            }
            max = F::L::max(score, max);
        }
        // A row that has seen nothing yet has no largest score; any number will do in its place.
        let base = F::L::max(max, F::L::splat(f32::MIN));
        let factor = F::L::exp2(F::L::sub(before, base));
        let mut sums = [F::L::splat(0.0); 16];
        for begin in (0..b.len).step_by(16) {
            let count = (b.len - begin).min(16);
            let mut weights = [F::L::splat(0.0); 16];
            for i in 0..count {
                let score = F::L::load(scores.add((begin + i) * WIDE_ROWS));
                weights[i] = F::L::exp2(F::L::sub(score, base));
                sums[i] = F::L::add(sums[i], weights[i]);
            }
            // Words are no more than positions, so nothing is overwritten before it was read.
            for word in 0..count.div_ceil(F::PER_WORD) {
                let first = word * F::PER_WORD;
                let joined = F::join(weights[first], weights[first + F::PER_WORD - 1]);
                F::L::store(scores.add((begin / F::PER_WORD + word) * WIDE_ROWS), joined);
            }
        }
        let mut width = 16;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                sums[i] = F::L::add(sums[i], sums[i + width]);
            }
        }
        let weight = b.weight.add(lane);
        F::L::store(weight, F::L::fma(F::L::load(weight), factor, sums[0]));
        F::L::store(b.max.add(lane), max);
        F::L::store(factors, factor);
    }
}

/// Ends a segment: merges it with those before it, if there are any.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn end_segment<F: Format>(state: &mut WideState, num_rows: usize, is_first: bool) {
    let WideState { segment, all, head_dim, .. } = state;
    if is_first {
        std::mem::swap(segment, all);
        return;
    }
    for lane in (0..num_rows).step_by(16) {
        // SAFETY: as the caller promises; the lanes lie inside the states.
        unsafe {
            let (max_at, weight_at) = (all.max.as_mut_ptr().add(lane), all.weight.as_mut_ptr().add(lane));
            let (mut max, mut weight) = (F::L::load(max_at), F::L::load(weight_at));
            let next =
                (F::L::load(segment.max.as_ptr().add(lane)), F::L::load(segment.weight.as_ptr().add(lane)));
            let factors = merge_weights::<F>(&mut max, &mut weight, next);
            F::L::store(max_at, max);
            F::L::store(weight_at, weight);
            for d in 0..*head_dim {
                let at = d * WIDE_ROWS + lane;
                let sum = all.sums.as_mut_ptr().add(at);
                let next = F::L::load(segment.sums.as_ptr().add(at));
                F::L::store(sum, merge_sums::<F>(factors, F::L::load(sum), next));
            }
        }
    }
}

/// Divides by the sums of weights and turns the lanes back into rows.
///
/// # Safety
/// The machine has the format's instructions.
#[inline(always)]
unsafe fn finish<F: Format>(state: &mut WideState, num_rows: usize) {
    let padded = state.padded();
    let (sums, rows) = (state.all.sums.as_ptr(), state.rows.as_mut_ptr());
    for row in (0..num_rows).step_by(16) {
        // SAFETY: as the caller promises; the buffers hold whole blocks of sixteen.
        unsafe {
            let weight = F::L::load(state.all.weight.as_ptr().add(row));
            for at in (0..padded).step_by(16) {
                let mut block = [F::L::splat(0.0); 16];
                for (i, lanes) in block.iter_mut().enumerate() {
                    *lanes = quotient::<F>(F::L::load(sums.add((at + i) * WIDE_ROWS + row)), weight);
                }
                F::L::transpose(&mut block);
                for (i, lanes) in block.into_iter().enumerate() {
                    F::L::store(rows.add((row + i) * padded + at), lanes);
                }
            }
        }
    }
}
