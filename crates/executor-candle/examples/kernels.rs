//! Measures the matrix products against the machine: `cargo run --release -p microserving-executor-candle --example kernels --
//! [key=value ...]`.
//!
//! Keys: `threads` (default 1,2), `rows` (1,4,8,16,512), `forms` (all), `level`, `millis` (per figure). First come the ceilings,
//! how fast memory is read and how fast each form's innermost instructions can go without memory, then each form's
//! products with their share of whichever ceiling binds.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "the modules are the crate's, of which this uses the products alone"
)]

#[path = "../src/kernels/mod.rs"]
mod kernels;
#[path = "../src/pool.rs"]
mod pool;
#[path = "../src/products.rs"]
mod products;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[path = "../src/weights.rs"]
mod weights;

use std::error::Error;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Duration;

use kernels::{KernelLevel, Kernels, Quants};
use pool::Pool;
use products::{Inputs, cut, multiply};
use weights::{Arena, Form, Matrix, Plan};

/// Bytes of weights of a product: several times the largest cache.
const WEIGHT_BYTES: usize = 128 << 20;

/// Inputs of a product.
const K: usize = 2048;

/// Outputs of a product of many rows.
const MANY_OUTPUTS: usize = 512;

const FORMS: [Form; 8] = [
    Form::F32,
    Form::F16,
    Form::Bf16,
    Form::Quantised(Quants::Q8_0),
    Form::Quantised(Quants::Q4_0),
    Form::Quantised(Quants::Q4_1),
    Form::Quantised(Quants::Q4K),
    Form::Quantised(Quants::Q6K),
];

/// Repeats `work` for about `millis`, at least three times, after a first time that does not count; returns the shortest
/// time. Works are short, so that on a busy machine some of them are undisturbed.
#[allow(
    clippy::disallowed_types,
    reason = "a measurement wants the real clock, and the crate has no runtime"
)]
fn shortest(millis: u64, mut work: impl FnMut()) -> Duration {
    work();
    let begin = std::time::Instant::now();
    let (mut shortest, mut turns) = (Duration::MAX, 0);
    while turns < 3 || begin.elapsed() < Duration::from_millis(millis) {
        let turn = std::time::Instant::now();
        work();
        shortest = shortest.min(turn.elapsed());
        turns += 1;
    }
    shortest
}

/// Bytes a second that the threads read from memory, in the arena's pages.
fn read_rate(pool: &mut Pool, millis: u64) -> Result<f64, Box<dyn Error>> {
    let (n, k) = (WEIGHT_BYTES / 4 / K, K);
    let mut plan = Plan::default();
    Matrix::plan(&mut plan, Form::F32, n, k);
    let mut arena = Arena::new(&plan)?;
    let bytes = arena.bytes_mut();
    bytes.fill(1);
    let words = bytes.as_chunks::<8>().0;
    let pieces = 8 * pool.num_threads();
    let time = shortest(millis, || {
        pool.run(pieces, &|piece, _| {
            let mut sums = [0_u64; 16];
            for line in words[cut(words.len(), pieces, piece)].as_chunks::<16>().0 {
                for (sum, word) in sums.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
                }
            }
            black_box(sums);
        });
    });
    Ok((words.len() * 8) as f64 / time.as_secs_f64())
}

/// Operations a second of a form's innermost instructions, operands in registers.
fn arithmetic_rate(pool: &mut Pool, level: KernelLevel, form: Form, millis: u64) -> f64 {
    const TURNS: usize = 1 << 12;
    let threads = pool.num_threads();
    let mut operations = 0;
    let time = shortest(millis, || {
        let each = std::sync::atomic::AtomicUsize::new(0);
        pool.run(threads, &|_, _| {
            // SAFETY: the level is supported.
            let done = unsafe { peaks::run(level, form, TURNS) };
            each.store(done, std::sync::atomic::Ordering::Relaxed);
        });
        operations = threads * each.into_inner();
    });
    operations as f64 / time.as_secs_f64()
}

#[cfg(target_arch = "x86_64")]
mod peaks {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{Form, KernelLevel, Quants, tiles};

    /// Repeats the innermost instructions of a form; returns the operations (two for each product and sum) done.
    ///
    /// # Safety
    /// The machine supports the level.
    pub(super) unsafe fn run(level: KernelLevel, form: Form, turns: usize) -> usize {
        // SAFETY: as the caller promises.
        unsafe {
            match (level, form) {
                (KernelLevel::Plain, _) => 0,
                (KernelLevel::Avx2, Form::F32 | Form::F16 | Form::Bf16) => avx2_floats(turns),
                (KernelLevel::Avx2, Form::Quantised(Quants::Q8_0)) => avx2_eight(turns),
                (KernelLevel::Avx2, Form::Quantised(_)) => avx2_four(turns),
                (KernelLevel::Avx512Bf16, Form::Bf16) => avx512_bf16(turns),
                (KernelLevel::Amx, Form::Bf16) => tiled(tiles::tdpbf16ps, turns),
                (KernelLevel::Amx, Form::Quantised(_)) => tiled(tiles::tdpbssd, turns),
                (KernelLevel::Avx512 | KernelLevel::Avx512Bf16, Form::Quantised(_)) => avx512_bytes(turns),
                (KernelLevel::Avx512 | KernelLevel::Avx512Bf16 | KernelLevel::Amx, _) => avx512_floats(turns),
            }
        }
    }

    fn tiled(kernel: fn(u64), turns: usize) -> usize {
        kernel(turns as u64);
        turns * tiles::OPERATIONS
    }

    #[target_feature(enable = "avx2,fma")]
    fn avx2_floats(turns: usize) -> usize {
        let (x, y) = (black_box(_mm256_set1_ps(1e-3)), black_box(_mm256_set1_ps(0.5)));
        let mut sums = [_mm256_setzero_ps(); 12];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(x, y, *sum);
            }
        }
        black_box(sums);
        turns * 12 * 16
    }

    #[target_feature(enable = "avx2")]
    fn avx2_four(turns: usize) -> usize {
        let (x, y) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(1)));
        let mut sums = [_mm256_setzero_si256(); 8];
        for _ in 0..turns {
            for sum in &mut sums {
                // Opaque, so that equal products are not computed once.
                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(black_box_register(x), y));
            }
        }
        black_box(sums);
        turns * 8 * 64
    }

    #[target_feature(enable = "avx2")]
    fn avx2_eight(turns: usize) -> usize {
        let (x, y, ones) =
            (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(1)), black_box(_mm256_set1_epi16(1)));
        let mut sums = [_mm256_setzero_si256(); 8];
        for _ in 0..turns {
            for sum in &mut sums {
                let signed = _mm256_sign_epi8(black_box_register(x), y);
                let products = _mm256_madd_epi16(_mm256_maddubs_epi16(y, signed), ones);
                *sum = _mm256_add_epi32(*sum, products);
            }
        }
        black_box(sums);
        turns * 8 * 64
    }

    /// Hides a value from the optimiser without moving it out of its register.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn black_box_register(x: __m256i) -> __m256i {
        let mut x = x;
        // SAFETY: no instruction at all.
        unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
        x
    }

    #[target_feature(enable = "avx512f")]
    fn avx512_floats(turns: usize) -> usize {
        let (x, y) = (black_box(_mm512_set1_ps(1e-3)), black_box(_mm512_set1_ps(0.5)));
        let mut sums = [_mm512_setzero_ps(); 12];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, y, *sum);
            }
        }
        black_box(sums);
        turns * 12 * 32
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn avx512_bf16(turns: usize) -> usize {
        let x = black_box(_mm512_set1_epi32(0x3f80_3f80));
        // SAFETY: both are vectors of 512 bits, plain data.
        let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(x) };
        let mut sums = [_mm512_setzero_ps(); 12];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
        turns * 12 * 64
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn avx512_bytes(turns: usize) -> usize {
        let (x, y) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(1)));
        let mut sums = [_mm512_setzero_si512(); 12];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, x, y);
            }
        }
        black_box(sums);
        turns * 12 * 128
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod peaks {
    use super::{Form, KernelLevel};

    /// No other machine has a level but the plain one, which has no peak of its own.
    ///
    /// # Safety
    /// None.
    pub(super) unsafe fn run(_: KernelLevel, _: Form, _: usize) -> usize {
        0
    }
}

/// Seconds of one product of `rows` rows, and its weights' bytes and number.
fn product(
    kernels: Kernels,
    pool: &mut Pool,
    form: Form,
    rows: usize,
    millis: u64,
) -> Result<(f64, usize, usize), Box<dyn Error>> {
    let bytes_each = {
        let mut plan = Plan::default();
        Matrix::plan(&mut plan, form, 16, K);
        Arena::new(&plan)?.num_bytes() / 16
    };
    let n = if rows > 16 { MANY_OUTPUTS } else { WEIGHT_BYTES / bytes_each / 32 * 32 };
    let mut plan = Plan::default();
    let matrix = Matrix::plan(&mut plan, form, n, K);
    let mut arena = Arena::new(&plan)?;
    // A small finite number in every form, integer or scale.
    arena.bytes_mut().fill(0x1a);
    let mut inputs = Inputs::default();
    let parts = inputs.parts(kernels, &matrix, rows);
    for row in 0..rows {
        let x: Vec<f32> = (0..K).map(|x| ((x * 37 + row * 11) % 101) as f32 - 50.0).collect();
        // SAFETY: one row after the other.
        unsafe { parts.put(kernels, row, &x) };
    }
    let mut outputs = Vec::new();
    let time = shortest(millis, || multiply(kernels, pool, &arena, &matrix, &inputs, rows, &mut outputs));
    Ok((time.as_secs_f64(), arena.num_bytes(), n * K))
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut threads, mut rows) = (vec![1, 2], vec![1, 4, 8, 16, 512]);
    let mut forms = FORMS.to_vec();
    let mut level = KernelLevel::detect();
    let mut millis = 300;
    let numbers = |value: &str| value.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
    for arg in std::env::args().skip(1) {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg} is not key=value"))?;
        match key {
            "threads" => threads = numbers(value)?,
            "rows" => rows = numbers(value)?,
            "forms" => forms.retain(|form| value.split(',').any(|name| name == form.name())),
            "level" => level = KernelLevel::from_name(value).ok_or("unknown level")?,
            "millis" => millis = value.parse()?,
            other => return Err(format!("unknown key {other}").into()),
        }
    }
    let kernels = Kernels::new(level).ok_or("this machine lacks the instructions of that level")?;
    for &count in &threads {
        let mut pool = Pool::new(NonZeroUsize::new(count).ok_or("threads must not be 0")?, false)?;
        let read = read_rate(&mut pool, millis)?;
        println!("{level}, {count} threads: memory is read at {:.1} GB/s", read / 1e9);
        for &form in &forms {
            let peak = arithmetic_rate(&mut pool, level, form, millis / 3);
            println!("  {}: at most {:.0} G operations a second", form.name(), peak / 1e9);
            for &rows in &rows {
                let (time, bytes, weights) = product(kernels, &mut pool, form, rows, millis)?;
                let operations = (2 * weights * rows) as f64;
                let (gb, gop) = (bytes as f64 / time / 1e9, operations / time / 1e9);
                // The least time that either ceiling allows, as a share of the time taken.
                let by_reading = if rows > 16 { 0.0 } else { bytes as f64 / read / time };
                let by_counting = if peak > 0.0 { operations / peak / time } else { 0.0 };
                println!(
                    "    {rows:4} rows: {gb:6.1} GB/s {gop:7.1} GOP/s  {:3.0} % of reading, {:3.0} % of counting",
                    100.0 * by_reading,
                    100.0 * by_counting
                );
            }
        }
    }
    Ok(())
}
