//! What this machine can do at most: `cargo run --release -p microserving-executor-candle --example ceilings -- [THREADS ...]`
//!
//! Reads memory in huge pages as weights are read, and runs the instructions that multiply int8, bf16 and f32 on registers alone. Prints a JSON
//! object a number of threads. A kernel's share of these is a figure that other machines can be compared by; docs/performance.md has ours.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]
#![allow(clippy::disallowed_types, reason = "a measurement wants the real clock")]

#[cfg(target_arch = "x86_64")]
mod tiles;

use std::error::Error;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};
use serde_json::{Value, json};

/// Larger than any cache, and than what the lookaside buffers of small pages reach.
const READ_BYTES: usize = 512 << 20;
const REPEATS: usize = 7;
/// Rounds of a register kernel: some tens of milliseconds.
const ROUNDS: u64 = 8 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<Vec<usize>, _>>()?;
    let mut memory = MmapMut::map_anon(READ_BYTES)?;
    // Small pages work as well, only slower.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(Advice::HugePage);
    memory.fill(1);
    for threads in if threads.is_empty() { vec![1] } else { threads } {
        // Processors differ in whether they read faster when they are told what comes next; kernels do as suits each.
        let read =
            read_bandwidth::<0>(&memory, threads.max(1)).max(read_bandwidth::<4096>(&memory, threads.max(1)));
        let mut line = json!({"threads": threads.max(1), "read_gb_per_second": read / 1e9});
        for (what, kernel) in [("int8", int8_kernel()), ("bf16", bf16_kernel()), ("f32", f32_kernel())] {
            // A processor that is not known has no figure, rather than a wrong one.
            let Some(kernel) = kernel else { continue };
            line[format!("{what}_gop_per_second")] = Value::from(kernel.rate(threads.max(1)) / 1e9);
            line[format!("{what}_instruction")] = Value::from(kernel.instruction);
        }
        println!("{line}");
    }
    Ok(())
}

/// Runs `work(thread)` on all threads at once, and returns the median time of the slowest thread.
fn median_time(threads: usize, work: &(dyn Fn(usize) + Sync)) -> Duration {
    let barrier = Barrier::new(threads);
    let mut times: Vec<Duration> = (0..REPEATS)
        .map(|_| {
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..threads)
                    .map(|thread| {
                        let barrier = &barrier;
                        scope.spawn(move || {
                            barrier.wait();
                            let begin = Instant::now();
                            work(thread);
                            begin.elapsed()
                        })
                    })
                    .collect();
                all.into_iter()
                    .map(|thread| thread.join().expect("nothing in it panics"))
                    .max()
                    .unwrap_or_default()
            })
        })
        .collect();
    times.sort();
    times[REPEATS / 2]
}

/// Returns bytes a second, with hints so many bytes ahead if that is not 0.
fn read_bandwidth<const AHEAD: usize>(memory: &[u8], threads: usize) -> f64 {
    let share = memory.len() / threads / 64 * 64;
    let time = median_time(threads, &|thread| {
        let mut sums = [0_u64; 8];
        for line in memory[thread * share..][..share].as_chunks::<64>().0 {
            #[cfg(target_arch = "x86_64")]
            if AHEAD > 0 {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                // SAFETY: a hint may point anywhere.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
            }
            for (sum, bytes) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*bytes));
            }
        }
        black_box(sums);
    });
    (share * threads) as f64 / time.as_secs_f64()
}

/// A loop of twelve independent chains of one instruction (or the few that stand for it).
struct RegisterKernel {
    instruction: &'static str,
    /// Multiplications and additions of a round.
    operations: u64,
    run: fn(u64),
}

impl RegisterKernel {
    /// Returns operations a second.
    fn rate(&self, threads: usize) -> f64 {
        let time = median_time(threads, &|_| (self.run)(ROUNDS));
        (self.operations * ROUNDS) as f64 * threads as f64 / time.as_secs_f64()
    }
}

/// Defines a kernel: the lines of one chain, `#` standing for the chain's register. Operands are zero: integer units take as long for any
/// value, and floating-point ones for any that is no denormal.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    ($name:ident, $($before:literal # $after:literal),+) => {
        fn $name(rounds: u64) {
            // SAFETY: the callers have seen that the processor has the instructions; registers alone are touched, and they are named.
            unsafe {
                std::arch::asm!(
                    "vzeroall",
                    "2:",
                    $(concat!($before, "0", $after),)+ $(concat!($before, "1", $after),)+
                    $(concat!($before, "2", $after),)+ $(concat!($before, "3", $after),)+
                    $(concat!($before, "4", $after),)+ $(concat!($before, "5", $after),)+
                    $(concat!($before, "6", $after),)+ $(concat!($before, "7", $after),)+
                    $(concat!($before, "8", $after),)+ $(concat!($before, "9", $after),)+
                    $(concat!($before, "10", $after),)+ $(concat!($before, "11", $after),)+
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                    out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nomem, nostack)
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    kernel!(vpdpbusd_zmm, "vpdpbusd zmm" # ", zmm14, zmm15");
    kernel!(vpdpbusd_ymm, "{{vex}} vpdpbusd ymm" # ", ymm14, ymm15");
    // Products in pairs, pairs in fours, sums: what takes the place of vpdpbusd before it.
    kernel!(maddubs, "vpmaddubsw ymm12, ymm14, ymm15 \n vpmaddwd ymm12, ymm12, ymm13 \n vpaddd ymm" # ", ymm12, ymm12");
    kernel!(vdpbf16ps, "vdpbf16ps zmm" # ", zmm14, zmm15");
    kernel!(fma_zmm, "vfmadd231ps zmm" # ", zmm14, zmm15");
    kernel!(fma_ymm, "vfmadd231ps ymm" # ", ymm14, ymm15");

    use super::RegisterKernel;
    use super::tiles;

    const fn tile_kernel(instruction: &'static str, run: fn(u64)) -> Option<RegisterKernel> {
        Some(RegisterKernel { instruction, operations: tiles::OPERATIONS as u64, run })
    }

    const fn kernel(instruction: &'static str, operations: u64, run: fn(u64)) -> Option<RegisterKernel> {
        Some(RegisterKernel { instruction, operations: 12 * operations, run })
    }

    pub(super) fn int8() -> Option<RegisterKernel> {
        if tiles::is_available() {
            tile_kernel("tdpbssd over 32 inputs", tiles::tdpbssd)
        } else if is_x86_feature_detected!("avx512vnni") {
            kernel("vpdpbusd, 512 bits", 128, vpdpbusd_zmm)
        } else if is_x86_feature_detected!("avxvnni") {
            kernel("vpdpbusd, 256 bits", 64, vpdpbusd_ymm)
        } else if is_x86_feature_detected!("avx2") {
            kernel("vpmaddubsw + vpmaddwd + vpaddd, 256 bits", 64, maddubs)
        } else {
            None
        }
    }

    pub(super) fn bf16() -> Option<RegisterKernel> {
        if tiles::is_available() {
            tile_kernel("tdpbf16ps", tiles::tdpbf16ps)
        } else if is_x86_feature_detected!("avx512bf16") {
            kernel("vdpbf16ps, 512 bits", 64, vdpbf16ps)
        } else {
            // Widened, they are multiplied as f32.
            f32()
        }
    }

    pub(super) fn f32() -> Option<RegisterKernel> {
        if is_x86_feature_detected!("avx512f") {
            kernel("vfmadd231ps, 512 bits", 32, fma_zmm)
        } else if is_x86_feature_detected!("fma") {
            kernel("vfmadd231ps, 256 bits", 16, fma_ymm)
        } else {
            None
        }
    }
}

#[cfg(target_arch = "x86_64")]
use x86::{bf16 as bf16_kernel, f32 as f32_kernel, int8 as int8_kernel};

#[cfg(not(target_arch = "x86_64"))]
fn int8_kernel() -> Option<RegisterKernel> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_kernel() -> Option<RegisterKernel> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn f32_kernel() -> Option<RegisterKernel> {
    None
}
