//! Attention against plain loops in f64 over the very numbers in the cache, and its two shapes against each other, bit for bit.

use half::{bf16, f16};
use microserving_protocol::KvDtype;

use super::super::tests::{Random, all_kernels};
use super::format::PlainPairs;
use super::*;

/// A cache of one KV head: pages in an order of their own, keys and values apart as in a page of several heads. What was not
/// written is NaN.
struct Cache {
    bytes: Vec<u64>,
    pages: Vec<PageId>,
    page_size: usize,
    head_dim: usize,
    dtype: KvDtype,
    /// `[positions][head_dim]`, as they were rounded.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    const HEADS: usize = 2;

    fn new(random: &mut Random, len: usize, page_size: usize, head_dim: usize, dtype: KvDtype) -> Self {
        let num_pages = len.div_ceil(page_size) + 1;
        let page_bytes = 2 * Self::HEADS * page_size * head_dim * dtype.num_bytes();
        let mut cache = Self {
            bytes: vec![u64::MAX; (num_pages * page_bytes).div_ceil(8)],
            pages: (1..num_pages).rev().map(|page| PageId(page as u32)).collect(),
            page_size,
            head_dim,
            dtype,
            keys: Vec::new(),
            values: Vec::new(),
        };
        let rounded = |x: f32| match dtype {
            KvDtype::F16 => f16::from_f32(x).to_f32(),
            KvDtype::Bf16 => bf16::from_f32(x).to_f32(),
            _ => x,
        };
        let kernels = Kernels::new(KernelLevel::Plain).unwrap();
        for position in 0..len {
            let (key, value) = (random.vec(head_dim), random.vec(head_dim));
            let at = cache.head().key_offset(position) + cache.offset();
            let to = cache.bytes.as_mut_ptr().cast::<u8>();
            // SAFETY: inside the bytes, aligned to the elements.
            unsafe {
                kernels.store_kv(&key, dtype, to.add(at));
                kernels.store_kv(&value, dtype, to.add(at + page_bytes / 2));
            }
            cache.keys.extend(key.into_iter().map(rounded));
            cache.values.extend(value.into_iter().map(rounded));
        }
        cache
    }

    /// Where the second head begins in a page.
    fn offset(&self) -> usize {
        self.page_size * self.head_dim * self.dtype.num_bytes()
    }

    fn head(&self) -> KvHead<'_> {
        let slot_bytes = self.head_dim * self.dtype.num_bytes();
        KvHead {
            base: self.bytes.as_ptr().cast::<u8>().wrapping_add(self.offset()),
            pages: &self.pages,
            page_size: self.page_size,
            page_bytes: 2 * Self::HEADS * self.page_size * slot_bytes,
            slot_bytes,
            to_values: Self::HEADS * self.page_size * slot_bytes,
            dtype: self.dtype,
        }
    }

    /// Attention of one query over the first `len` positions, and the sum of what was summed up without signs.
    fn exact(&self, query: &[f32], len: usize) -> Vec<(f64, f64)> {
        let dot = |key: &[f32]| -> f64 {
            query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>()
                / (self.head_dim as f64).sqrt()
        };
        let scores: Vec<f64> = self.keys.chunks_exact(self.head_dim).take(len).map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..self.head_dim)
            .map(|d| {
                let terms = weights
                    .iter()
                    .enumerate()
                    .map(|(position, w)| w / total * f64::from(self.values[position * self.head_dim + d]));
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
            })
            .collect()
    }
}

impl KvHead<'_> {
    fn key_offset(&self, position: usize) -> usize {
        let page = self.pages[position / self.page_size].0 as usize;
        page * self.page_bytes + position % self.page_size * self.slot_bytes
    }
}

fn queries<'a>(
    all: &'a Parts<'a, f32>,
    (group, head_dim): (usize, usize),
    num_tokens: usize,
    position: usize,
) -> Queries<'a> {
    // The middle one of three KV heads.
    Queries {
        all,
        first: group * head_dim,
        stride: 3 * group * head_dim,
        group,
        head_dim,
        num_tokens,
        position,
    }
}

/// Whose arithmetic is tested.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Under {
    Level(Kernels),
    /// Pairs of bf16 in portable code: all of the shapes but the instructions.
    PlainPairs,
}

impl Under {
    fn all(dtype: KvDtype) -> Vec<Self> {
        let levels = all_kernels().into_iter().map(Self::Level);
        levels.chain((dtype == KvDtype::Bf16).then_some(Self::PlainPairs)).collect()
    }

    unsafe fn wide(self, head: &KvHead<'_>, queries: &Queries<'_>, state: &mut WideState) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Level(kernels) => kernels.attend_wide(head, queries, state),
                Self::PlainPairs => wide::attend::<PlainPairs>(head, queries, state),
            }
        }
    }

    unsafe fn narrow(self, head: &KvHead<'_>, queries: &Queries<'_>, segment: usize, partial: &mut [f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Level(kernels) => kernels.attend_narrow(head, queries, segment, partial),
                Self::PlainPairs => narrow::attend::<PlainPairs>(head, queries, segment, partial),
            }
        }
    }

    unsafe fn merge(self, head: &KvHead<'_>, queries: &Queries<'_>, partials: &mut [f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::Level(kernels) => kernels.merge_narrow(head, queries, partials),
                Self::PlainPairs => narrow::merge::<PlainPairs>(head, queries, partials),
            }
        }
    }

    /// How far a result may be off, as a share of the sum of sizes.
    fn tolerance(self, dtype: KvDtype) -> f64 {
        match self {
            Self::Level(kernels) if kernels.level() != KernelLevel::Avx512Bf16 => 1e-5,
            Self::Level(_) if dtype != KvDtype::Bf16 => 1e-5,
            Self::Level(_) | Self::PlainPairs => 2e-2,
        }
    }
}

/// Checks the last `num_tokens` of `len` positions.
fn check(random: &mut Random, cache: &Cache, group: usize, num_tokens: usize, len: usize) {
    let head_dim = cache.head_dim;
    let stride = 3 * group * head_dim;
    // Scores of some size, so that weights differ.
    let before: Vec<f32> = random.vec(num_tokens * stride).iter().map(|x| x * 6.0).collect();
    let first = len - num_tokens;
    for under in Under::all(cache.dtype) {
        let name = format!(
            "{under:?} {} page {} group {group} head {head_dim}: {num_tokens} of {len}",
            cache.dtype, cache.page_size
        );
        let mut wide = before.clone();
        let mut state = WideState::new(head_dim);
        {
            let parts = Parts::new(&mut wide);
            let queries = queries(&parts, (group, head_dim), num_tokens, first);
            // SAFETY: the cache holds the positions, and no one else has it or the queries.
            unsafe { under.wide(&cache.head(), &queries, &mut state) };
        }
        for token in 0..num_tokens {
            for head in 0..3 * group {
                let at = token * stride + head * head_dim;
                let (query, got) = (&before[at..][..head_dim], &wide[at..][..head_dim]);
                if head / group != 1 {
                    assert_eq!(got, query, "{name}: another head was changed");
                    continue;
                }
                for (d, (sum, size)) in cache.exact(query, first + token + 1).into_iter().enumerate() {
                    let off = (f64::from(got[d]) - sum).abs();
                    let most = under.tolerance(cache.dtype) * size + 1e-6;
                    assert!(off <= most, "{name}, token {token} head {head} element {d}: off by {off}");
                }
            }
        }
        if !is_narrow(group, head_dim) {
            continue;
        }
        for token in [0, num_tokens / 2, num_tokens - 1] {
            let mut narrow = before.clone();
            let part = partial_len(group, head_dim);
            let num_segments = (first + token + 1).div_ceil(SEGMENT);
            let mut partials = vec![f32::NAN; num_segments * part];
            {
                let parts = Parts::new(&mut narrow);
                let mut queries = queries(&parts, (group, head_dim), 1, first + token);
                queries.first += token * stride;
                // SAFETY: as above.
                unsafe {
                    for (segment, partial) in partials.chunks_exact_mut(part).enumerate().rev() {
                        under.narrow(&cache.head(), &queries, segment, partial);
                    }
                    under.merge(&cache.head(), &queries, &mut partials);
                }
            }
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let own = token * stride..(token + 1) * stride;
            assert_eq!(bits(&narrow[own.clone()]), bits(&wide[own]), "{name}: shapes differ at {token}");
        }
    }
}

#[test]
fn around_the_edges_of_tiles_segments_and_pages() {
    let mut random = Random(11);
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
        for len in [1, 2, 15, 16, 17, 31, 63, 64, 65, 80, 128, 129, 255, 256, 257, 300, 512, 513, 600] {
            let cache = Cache::new(&mut random, len, 16, 32, dtype);
            for num_tokens in [1, 2, 7, 16, 21, 32] {
                if num_tokens <= len {
                    check(&mut random, &cache, 2, num_tokens, len);
                }
            }
        }
        for page_size in [1, 3, 5, 64, 100, 1000] {
            let cache = Cache::new(&mut random, 333, page_size, 64, dtype);
            check(&mut random, &cache, 3, 21, 333);
            check(&mut random, &cache, 3, 1, 333);
        }
    }
}

#[test]
fn all_shapes_of_heads() {
    let mut random = Random(12);
    for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
        for head_dim in [2, 6, 12, 16, 24, 48, 64, 80, 96, 128, 256] {
            let cache = Cache::new(&mut random, 290, 16, head_dim, dtype);
            for group in [1, 2, 3, 4, 5, 7, 8, 9, 16, 64] {
                check(&mut random, &cache, group, (64 / group).min(9), 290);
            }
        }
    }
}

/// Whatever stands at positions that a row does not see: nothing of it may leak, not even a NaN.
#[test]
fn what_is_not_seen_does_not_leak() {
    for dtype in [KvDtype::F32, KvDtype::F16] {
        let (head_dim, group, len) = (32, 2, 130);
        let mut random = Random(13);
        let cache = Cache::new(&mut random, len, 16, head_dim, dtype);
        let mut broken = Cache::new(&mut Random(13), len, 16, head_dim, dtype);
        let offset = broken.head().key_offset(len - 1) + broken.offset();
        let (page_bytes, bytes) = (broken.head().page_bytes, broken.bytes.as_mut_ptr().cast::<u8>());
        for at in [offset, offset + page_bytes / 2] {
            // SAFETY: the last position's key and value.
            unsafe { bytes.add(at).write_bytes(0xff, head_dim * dtype.num_bytes()) };
        }
        let before = random.vec(20 * 3 * group * head_dim);
        for kernels in all_kernels() {
            let results = [&cache, &broken].map(|cache| {
                let mut all = before.clone();
                let parts = Parts::new(&mut all);
                let queries = queries(&parts, (group, head_dim), 20, len - 20);
                // SAFETY: the cache holds the positions, and no one else has it or the queries.
                unsafe { kernels.attend_wide(&cache.head(), &queries, &mut WideState::new(head_dim)) };
                all
            });
            let whole = 19 * 3 * group * head_dim;
            assert!(results[0][..whole] == results[1][..whole], "{kernels:?} {dtype}");
            assert!(results[1][whole..].iter().any(|x| x.is_nan()));
        }
    }
}
