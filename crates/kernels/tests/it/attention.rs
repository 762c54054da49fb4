//! Attention over pages, plain and on tensor cores: by its formula, and what it must not depend on.

use microserving_kernels::{Arithmetic, DevicePtr, Dtype, KvType, Order, PagedAttention};

use crate::attention_reference::{Sequence, Shape, Way, run};
use crate::numbers::{from_bytes, rounding};
use crate::rig::{Rig, all, gpu, host};

fn shape(dtype: Dtype, kv_type: KvType, sizes: (usize, usize, usize, usize)) -> Shape {
    let (num_heads, num_kv_heads, head_dim, page_size) = sizes;
    Shape { num_heads, num_kv_heads, head_dim, page_size, dtype, kv_type }
}

/// The largest relative error of a head of a token, by the sum of squares over its elements.
fn error(shape: &Shape, out: &[u8], sequences: &[Sequence]) -> f64 {
    let expected: Vec<f64> = sequences.iter().flat_map(|sequence| sequence.reference(shape)).collect();
    let out = from_bytes(shape.dtype, out);
    assert_eq!(out.len(), expected.len());
    let heads = out.chunks(shape.head_dim).zip(expected.chunks(shape.head_dim));
    heads.fold(0.0, |worst, (out, expected)| {
        let difference: f64 =
            out.iter().zip(expected).map(|(&out, expected)| (f64::from(out) - expected).powi(2)).sum();
        let norm: f64 = expected.iter().map(|x| x * x).sum();
        let relative = (difference / norm).sqrt();
        // Also when it is not a number.
        if relative <= worst { worst } else { relative }
    })
}

/// (new tokens, context) of sequences at edges of pages, tiles and splits, and of none.
fn lengths(page: usize, split: usize) -> Vec<(usize, usize)> {
    vec![
        (1, 1),
        (0, 5),
        (1, page),
        (3, page + 1),
        (0, 0),
        (page + 1, page + 1),
        (2, split),
        (1, split + 1),
        (5, split + 3),
    ]
}

/// What of the batch must be the same to the bit, whatever is not the sequence itself.
fn check_invariances(
    rigs: &[Box<dyn Rig>],
    shape: &Shape,
    sequences: &[Sequence],
    arithmetic: Arithmetic,
) -> Vec<u8> {
    let whole = Way { arithmetic, is_split: false, stride: 1 };
    let split = Way { is_split: true, ..whole };
    let out = run(&*rigs[0], shape, sequences, whole);
    for rig in &rigs[1..] {
        assert!(run(&**rig, shape, sequences, whole) == out, "{shape:?}: {} differs", rig.name());
    }
    for rig in rigs {
        assert!(
            run(&**rig, shape, sequences, split) == out,
            "{shape:?}: splits by blocks differ on {}",
            rig.name()
        );
    }
    let rig = &*rigs[0];
    assert!(run(rig, shape, sequences, Way { stride: 7, ..whole }) == out, "{shape:?}: depends on pages");

    let mut at = 0;
    for sequence in sequences {
        let expected = &out[at..at + sequence.num_new * shape.row_bytes()];
        at += expected.len();
        if sequence.num_new == 0 {
            continue;
        }
        let alone = run(rig, shape, std::slice::from_ref(sequence), Way { stride: 3, ..whole });
        assert!(
            alone == expected,
            "{shape:?}: {} of {} depend on the batch",
            sequence.num_new,
            sequence.context
        );
    }
    out
}

/// The tokens of a prompt, computed at once, in chunks, and one by one.
fn check_chunks(rig: &dyn Rig, shape: &Shape, arithmetic: Arithmetic, context: usize, chunks: &[usize]) {
    let way = Way { arithmetic, is_split: false, stride: 1 };
    let first = context - chunks.iter().sum::<usize>();
    let whole = run(rig, shape, &[Sequence::new(shape, 99, context - first, context)], way);
    let mut at = first;
    let mut cut = Vec::new();
    for (number, &chunk) in chunks.iter().enumerate() {
        at += chunk;
        let sequence = Sequence::new(shape, 99, chunk, at);
        cut.extend(run(rig, shape, &[sequence], Way { is_split: number % 2 == 1, ..way }));
    }
    assert!(whole == cut, "{shape:?}: depends on chunks");
}

/// Sizes for plain arithmetic: head sizes of models, few and many heads a group, page sizes.
const PLAIN: [(usize, usize, usize, usize); 6] =
    [(3, 3, 8, 64), (4, 4, 64, 16), (8, 2, 128, 16), (6, 1, 80, 16), (2, 2, 256, 4), (7, 1, 96, 8)];

#[test]
fn plain_agrees_with_its_formula_and_depends_on_positions_alone() {
    let rigs = all();
    for sizes in PLAIN {
        let shape = shape(Dtype::F32, KvType::Same, sizes);
        let lengths = lengths(shape.page_size, Arithmetic::Plain.split_size() as usize);
        let sequences: Vec<Sequence> = (0..)
            .zip(lengths)
            .map(|(seed, (new, context))| Sequence::new(&shape, seed, new, context))
            .collect();
        let out = check_invariances(&rigs, &shape, &sequences, Arithmetic::Plain);
        let error = error(&shape, &out, &sequences);
        assert!(error < 1e-6, "{shape:?}: relative error {error:e}");
        eprintln!("plain {sizes:?}: relative error {error:.1e}");
    }
}

#[test]
fn plain_takes_every_type() {
    let rigs = [host(Order::Forward), host(Order::Shuffled)];
    let types = [
        (Dtype::F16, KvType::Same),
        (Dtype::Bf16, KvType::Same),
        (Dtype::F16, KvType::E4m3),
        (Dtype::Bf16, KvType::E4m3),
    ];
    for (dtype, kv_type) in types {
        for sizes in [(4, 1, 64, 16), (2, 2, 80, 4)] {
            let shape = shape(dtype, kv_type, sizes);
            let sequences = [Sequence::new(&shape, 1, 3, 20), Sequence::new(&shape, 2, 1, 259)];
            let out = check_invariances(&rigs, &shape, &sequences, Arithmetic::Plain);
            let error = error(&shape, &out, &sequences);
            assert!(error < rounding(dtype), "{shape:?}: relative error {error:e}");
        }
    }
}

#[test]
fn plain_does_not_depend_on_chunks() {
    let shape = shape(Dtype::F32, KvType::Same, (4, 2, 64, 16));
    let rig = host(Order::Forward);
    check_chunks(&*rig, &shape, Arithmetic::Plain, 270, &[1, 12, 1, 7]);
    check_chunks(&*rig, &shape, Arithmetic::Plain, 40, &[17, 1, 1, 21]);
}

/// Sizes for tensor cores.
const TENSOR_CORE: [(usize, usize, usize, usize); 5] =
    [(4, 4, 64, 16), (8, 1, 80, 16), (6, 2, 96, 8), (8, 2, 128, 16), (2, 1, 256, 4)];

#[test]
fn tensor_core_agrees_with_its_formula_and_depends_on_positions_alone() {
    // A GPU's products are rounded in their own way, so it is compared with itself.
    let mut sets: Vec<Vec<Box<dyn Rig>>> =
        vec![vec![host(Order::Forward), host(Order::Backward), host(Order::Shuffled)]];
    sets.extend(gpu().map(|gpu| vec![gpu]));
    for (dtype, all_sizes) in [(Dtype::Bf16, &TENSOR_CORE[..]), (Dtype::F16, &TENSOR_CORE[..1])] {
        for &sizes in all_sizes {
            let shape = shape(dtype, KvType::Same, sizes);
            // The two ways of keeping what the splits made are crossed; for the others tiles are enough.
            let longest = if sizes == TENSOR_CORE[0] || sizes == TENSOR_CORE[4] { 515 } else { 130 };
            let lengths = [(1, 1), (0, 3), (17, 17), (6, 66), (1, 64), (1, longest)];
            let sequences: Vec<Sequence> = (0..)
                .zip(lengths)
                .map(|(seed, (new, context))| Sequence::new(&shape, seed, new, context))
                .collect();
            for rigs in &sets {
                let out = check_invariances(rigs, &shape, &sequences, Arithmetic::TensorCore);
                let error = error(&shape, &out, &sequences);
                // Weights are rounded to the type, and so is the output.
                assert!(error < 1.5 * rounding(dtype), "{shape:?}: relative error {error:e}");
                eprintln!(
                    "tensor cores {dtype:?} {sizes:?}: relative error {error:.1e} on {}",
                    rigs[0].name()
                );
            }
        }
    }
}

#[test]
fn tensor_core_does_not_depend_on_chunks() {
    let shape = shape(Dtype::Bf16, KvType::Same, (4, 2, 64, 16));
    let rig = host(Order::Forward);
    check_chunks(&*rig, &shape, Arithmetic::TensorCore, 520, &[1, 12, 1, 7]);
    check_chunks(&*rig, &shape, Arithmetic::TensorCore, 70, &[17, 1, 1, 41, 10]);
}

#[test]
fn what_is_not_compiled_or_out_of_bounds_is_refused() {
    let ptr = DevicePtr(16);
    let good = PagedAttention {
        out: ptr,
        partials: ptr,
        query: ptr,
        kv: ptr,
        page_table: ptr,
        query_starts: ptr,
        context_lens: ptr,
        num_heads: 8,
        num_kv_heads: 2,
        head_dim: 128,
        page_size: 16,
        max_pages: 64,
        num_splits: 0,
        scale: 1.0,
        k_scale: 1.0,
        v_scale: 1.0,
        reserved: 0,
    };
    let plan = |attention: PagedAttention, arithmetic, types| attention.plan(arithmetic, types, (3, 100));
    let (plain, mma) = (Arithmetic::Plain, Arithmetic::TensorCore);
    let bf16 = (Dtype::Bf16, KvType::Same);
    let launch = plan(good, mma, bf16).expect("a good shape");
    assert_eq!((launch.kernel, launch.grid), ("paged_attention_mma_bf16_d128", [2 * 7, 1, 3]));
    let launch = plan(PagedAttention { num_splits: 4, ..good }, plain, bf16).expect("a good shape");
    assert_eq!((launch.kernel, launch.grid), ("paged_attention_bf16_r8", [2 * 50, 4, 3]));

    let message = |attention, arithmetic, types| {
        plan(attention, arithmetic, types).expect_err("out of bounds").to_string()
    };
    let splits = PagedAttention { num_splits: 3, ..good };
    assert_eq!(
        message(splits, plain, bf16),
        "paged_attention: num_splits is 3, must be 0 or enough for max_pages * page_size positions"
    );
    assert!(message(PagedAttention { num_kv_heads: 3, ..good }, plain, bf16).contains("num_heads is 8"));
    assert!(message(PagedAttention { head_dim: 264, ..good }, plain, bf16).contains("head_dim is 264"));
    assert!(
        message(PagedAttention { head_dim: 72, ..good }, mma, bf16).contains("head_dim 72 on tensor cores")
    );
    assert!(message(good, mma, (Dtype::F32, KvType::Same)).contains("none for F32"));
    assert!(message(good, plain, (Dtype::F32, KvType::E4m3)).contains("f32 with e4m3"));
    assert!(message(PagedAttention { k_scale: 0.5, ..good }, plain, bf16).contains("k_scale"));
}
