//! What a sampler needs, against the sampler's own formulas.

use std::cmp::Ordering;

use microserving_kernels::{Dtype, NO_TOKEN, SamplingBest, SamplingCandidates, SamplingWeights};

use crate::numbers::{DTYPES, Numbers, from_bytes, rounded, to_bytes};
use crate::rig::{Rig, agreed};

const MASKED: f32 = f32::MIN;

/// How one row is drawn from.
#[derive(Clone, Copy, Debug)]
struct Draw {
    temperature: f32,
    top_k: u32,
    top_p: f32,
}

/// A row's candidates as (token, bits of its logit, weight), and how many are kept.
type Candidates = (Vec<(u32, u32, u64)>, u32);

/// What the kernels say of a batch.
#[derive(Debug, PartialEq)]
struct Found {
    best: Vec<(u32, u32, u32)>,
    weights: Vec<u64>,
    sums: Vec<u64>,
    candidates: Vec<Candidates>,
}

fn find(rig: &dyn Rig, dtype: Dtype, rows: &[Vec<f32>], draws: &[Draw], max_candidates: usize) -> Found {
    let (num_rows, vocab_size) = (rows.len(), rows[0].len());
    let row_stride = vocab_size + 3;
    let padded: Vec<f32> =
        rows.iter().flat_map(|row| row.iter().copied().chain([f32::INFINITY; 3])).collect();
    let logits = rig.upload(&to_bytes(dtype, &padded)).ptr;
    let (vocab_size, row_stride) = (vocab_size as u32, row_stride as u32);
    let [tokens, best, not_finite, counts, kept] = std::array::from_fn(|_| rig.unwritten(num_rows * 4));
    let [weights, sums] = std::array::from_fn(|_| rig.unwritten(num_rows * 8));
    let temperatures = rig.upload_f32(&draws.iter().map(|draw| draw.temperature).collect::<Vec<_>>()).ptr;
    let kernel = SamplingBest {
        logits,
        tokens: tokens.ptr,
        best: best.ptr,
        not_finite: not_finite.ptr,
        vocab_size,
        row_stride,
    };
    // SAFETY: the buffers are of these sizes and nobody else's.
    unsafe { kernel.launch(rig.device(), dtype, num_rows as u32) }.expect("a good launch");
    let (best, weights_on) = (best, weights);
    let kernel = SamplingWeights {
        logits,
        best: best.ptr,
        temperatures,
        weights: weights_on.ptr,
        sums: sums.ptr,
        vocab_size,
        row_stride,
    };
    // SAFETY: as above.
    unsafe { kernel.launch(rig.device(), dtype, num_rows as u32) }.expect("a good launch");
    let [chosen, chosen_logits] = std::array::from_fn(|_| rig.unwritten(num_rows * max_candidates * 4));
    let chosen_weights = rig.unwritten(num_rows * max_candidates * 8);
    let kernel = SamplingCandidates {
        logits,
        best: best.ptr,
        temperatures,
        top_ks: rig.upload_u32(&draws.iter().map(|draw| draw.top_k).collect::<Vec<_>>()).ptr,
        top_ps: rig.upload_f32(&draws.iter().map(|draw| draw.top_p).collect::<Vec<_>>()).ptr,
        total_weights: weights_on.ptr,
        tokens: chosen.ptr,
        candidate_logits: chosen_logits.ptr,
        weights: chosen_weights.ptr,
        counts: counts.ptr,
        kept: kept.ptr,
        vocab_size,
        row_stride,
        max_candidates: max_candidates as u32,
        reserved: 0,
    };
    // SAFETY: as above.
    unsafe { kernel.launch(rig.device(), dtype, num_rows as u32) }.expect("a good launch");

    let (tokens, best, not_finite) = (rig.words(&tokens), rig.words(&best), rig.words(&not_finite));
    let (counts, kept) = (rig.words(&counts), rig.words(&kept));
    let (chosen, logits) = (rig.words(&chosen), rig.words(&chosen_logits));
    let chosen_weights = rig.long_words(&chosen_weights);
    let candidates = (0..num_rows).map(|row| {
        let of_row = row * max_candidates..row * max_candidates + counts[row] as usize;
        (of_row.map(|at| (chosen[at], logits[at], chosen_weights[at])).collect(), kept[row])
    });
    Found {
        best: (0..num_rows).map(|row| (tokens[row], best[row], not_finite[row])).collect(),
        weights: rig.long_words(&weights),
        sums: rig.long_words(&sums),
        candidates: candidates.collect(),
    }
}

/// The sampler's exponential (`microserving_executor`, `numeric.rs`), for `x <= 0`.
fn exponential(x: f64) -> f64 {
    let x = if x > -700.0 { x } else { -700.0 };
    let shifted = x * std::f64::consts::LOG2_E + 6_755_399_441_055_744.0;
    let n = shifted - 6_755_399_441_055_744.0;
    let r = (x - n * 6.931_471_803_691_238e-1) - n * 1.908_214_929_270_587_7e-10;
    let mut series = 1.0 / 6_227_020_800.0;
    for divisor in [
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5_040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
        1.0,
    ] {
        series = series * r + 1.0 / divisor;
    }
    series * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

fn weight(logit: f32, best: f32, temperature: f32) -> u64 {
    let delta = (f64::from(logit) - f64::from(best)) / f64::from(temperature);
    (exponential(delta) * (1_u64 << 44) as f64).round_ties_even() as u64
}

/// What the sampler would keep of a row: sorted (token, weight), and the sum that it draws from.
fn kept_by_sampler(row: &[f32], draw: Draw) -> Vec<(u32, u64)> {
    let best = row.iter().copied().fold(MASKED, f32::max);
    let mut ranked: Vec<(f32, u32)> =
        row.iter().copied().zip(0..).filter(|&(logit, _)| logit > MASKED).collect();
    ranked.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1)));
    if draw.top_k > 0 {
        ranked.truncate(draw.top_k as usize);
    }
    let mut weighed: Vec<(u32, u64)> =
        ranked.iter().map(|&(logit, token)| (token, weight(logit, best, draw.temperature))).collect();
    weighed.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let total: u64 = weighed.iter().map(|candidate| candidate.1).sum();
    if draw.top_p < 1.0 {
        let target = ((f64::from(draw.top_p) * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut sum = 0;
        weighed.retain(|candidate| {
            let is_kept = sum < target;
            sum += candidate.1;
            is_kept
        });
    }
    weighed
}

/// Rows with ties, masked logits, and zeros of both signs.
fn rows(dtype: Dtype, vocab_size: usize) -> Vec<Vec<f32>> {
    let mut numbers = Numbers::new(vocab_size as u64);
    let spread: Vec<f32> = numbers.take(vocab_size).iter().map(|x| x * 6.0).collect();
    // Steps of a half, so that many are equal.
    let tied: Vec<f32> = numbers.take(vocab_size).iter().map(|x| (x * 4.0).round() / 2.0).collect();
    // The lowest number of f32 means masked; narrower types have none.
    let mut masked = spread.clone();
    if dtype == Dtype::F32 {
        for (_, logit) in masked.iter_mut().enumerate().filter(|(at, _)| at % 3 != 1) {
            *logit = MASKED;
        }
    }
    let zeros: Vec<f32> = (0..vocab_size).map(|at| if at % 2 == 0 { -0.0 } else { 0.0 }).collect();
    [spread, tied, masked, zeros].iter().map(|row| rounded(dtype, row)).collect()
}

const DRAWS: [Draw; 7] = [
    Draw { temperature: 1.0, top_k: 0, top_p: 1.0 },
    Draw { temperature: 0.7, top_k: 1, top_p: 1.0 },
    Draw { temperature: 0.3, top_k: 0, top_p: 0.9 },
    Draw { temperature: 1.3, top_k: 20, top_p: 0.8 },
    Draw { temperature: 0.1, top_k: 5, top_p: 0.01 },
    Draw { temperature: 2.0, top_k: 33, top_p: 1.0 },
    Draw { temperature: 0.05, top_k: 0, top_p: 0.5 },
];

#[test]
fn candidates_are_what_the_sampler_keeps() {
    for dtype in DTYPES {
        for vocab_size in [1, 40, 513, 1301] {
            let rows = rows(dtype, vocab_size);
            for (number, draw) in DRAWS.into_iter().enumerate() {
                let draws = vec![draw; rows.len()];
                let max_candidates = [64, 33, 48][number % 3];
                let what = format!("{dtype:?}, {vocab_size} logits, {draw:?}");
                let found = agreed(&what, |rig| find(rig, dtype, &rows, &draws, max_candidates));
                for (at, row) in rows.iter().enumerate() {
                    check_row(&format!("{what}, row {at}"), row, draw, &found, at, max_candidates);
                }
            }
        }
    }
}

fn check_row(what: &str, row: &[f32], draw: Draw, found: &Found, at: usize, max_candidates: usize) {
    let eligible: Vec<(f32, u32)> =
        row.iter().copied().zip(0..).filter(|&(logit, _)| logit > MASKED).collect();
    let best = row.iter().copied().fold(MASKED, f32::max);
    let first = row.iter().position(|&logit| logit == best).expect("a best one") as u32;
    assert_eq!(found.best[at].0, first, "{what}: best");
    assert_eq!(f32::from_bits(found.best[at].1), best, "{what}: best logit");
    assert_eq!(found.best[at].2, NO_TOKEN, "{what}: all are finite");

    let weights: u64 = row.iter().map(|&logit| weight(logit, best, draw.temperature)).sum();
    assert_eq!(found.weights[at], weights, "{what}: sum of weights");
    let sum: f64 = row.iter().map(|&logit| exponential(f64::from(logit) - f64::from(best))).sum();
    let got = f64::from_bits(found.sums[at]);
    assert!((got - sum).abs() < 1e-12 * sum, "{what}: sum {got}, not {sum}");

    let (candidates, kept) = &found.candidates[at];
    let asked =
        if draw.top_k > 0 && (draw.top_k as usize) < row.len() { draw.top_k as usize } else { row.len() };
    assert_eq!(candidates.len(), asked.min(max_candidates).min(eligible.len()), "{what}: how many");
    let wanted = kept_by_sampler(row, draw);
    let pairs: Vec<(u32, u64)> = candidates.iter().map(|&(token, _, weight)| (token, weight)).collect();
    for &(token, logit, _) in candidates {
        assert_eq!(f32::from_bits(logit), row[token as usize], "{what}: logit of {token}");
    }
    if *kept == NO_TOKEN {
        // Only where the candidates may not be enough.
        let is_close = wanted.len() >= candidates.len().min(max_candidates)
            || wanted.last().map(|last| last.1) == pairs.last().map(|last| last.1);
        assert!(is_close && asked.min(eligible.len()) > max_candidates, "{what}: gave up");
    } else {
        assert_eq!(&pairs[..*kept as usize], wanted, "{what}: kept");
    }
}

#[test]
fn logits_that_are_not_finite_are_named() {
    let draws = [DRAWS[0]; 4];
    let mut rows: Vec<Vec<f32>> = vec![Numbers::new(5).take(700); 4];
    rows[0][600] = f32::NAN;
    rows[0][650] = f32::INFINITY;
    rows[1][0] = f32::NEG_INFINITY;
    rows[2].fill(f32::NAN);
    let found = agreed("not finite", |rig| find(rig, Dtype::F32, &rows, &draws, 8));
    let not_finite: Vec<u32> = found.best.iter().map(|best| best.2).collect();
    assert_eq!(not_finite, [600, 0, 0, NO_TOKEN]);
    assert_eq!(found.best[2].0, NO_TOKEN);
    for row in [0, 1, 3] {
        let best = rows[row].iter().copied().filter(|logit| logit.is_finite()).fold(f32::MIN, f32::max);
        assert_eq!(rows[row][found.best[row].0 as usize], best);
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let rows = rows(Dtype::Bf16, 1301);
    let draw = DRAWS[3];
    let together = agreed("batch", |rig| find(rig, Dtype::Bf16, &rows, &vec![draw; rows.len()], 64));
    for (at, row) in rows.iter().enumerate() {
        let alone = agreed("alone", |rig| find(rig, Dtype::Bf16, std::slice::from_ref(row), &[draw], 64));
        assert_eq!(alone.best[0], together.best[at]);
        assert_eq!((alone.weights[0], alone.sums[0]), (together.weights[at], together.sums[at]));
        assert_eq!(alone.candidates[0], together.candidates[at]);
    }
    assert_eq!(from_bytes(Dtype::Bf16, &to_bytes(Dtype::Bf16, &rows[0])), rows[0]);
}
