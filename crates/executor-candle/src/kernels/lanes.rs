//! Sixteen lanes of f32 at each instruction level, and transposing them: what attention is written over, once.
//!
//! The methods are inlined into functions that were compiled for their level, so each is an instruction or a few. None of them has
//! a closure: a closure is a function of its own, compiled for any machine, into which no intrinsic can be inlined.

/// Sixteen f32 in registers.
///
/// # Safety
/// All methods ask for the same: the machine has the level's instructions, and what is loaded or stored is there. Addresses
/// need no alignment.
pub(super) trait Lanes: Copy {
    /// The lanes.
    type V: Copy;
    /// A choice of lanes.
    type Mask: Copy;

    /// There are registers for 12 by 2 accumulators; else 6 by 1 is what fits.
    const MANY_REGISTERS: bool;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Loads and widens half precision, exactly.
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Loads and widens bfloat16, exactly.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the level can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` if one is a NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The lanes whose count (sixteen of them) is more than `than`.
    unsafe fn more(counts: *const i32, than: i32) -> Self::Mask;
    unsafe fn select(mask: Self::Mask, then: Self::V, otherwise: Self::V) -> Self::V;
    /// Rounds to integers, halves to even; exact for sizes below 2^22.
    unsafe fn round(x: Self::V) -> Self::V;
    /// `p * 2^n` for an integer `n <= 0` and `p` in 0.7..1.5; 0 or a denormal number where that is too small.
    unsafe fn scale(p: Self::V, n: Self::V) -> Self::V;
    /// Asks for the line at an address, which may be anywhere, to be brought into the L2 cache.
    unsafe fn fetch(at: *const u8);
    /// Turns rows into columns.
    unsafe fn transpose(rows: &mut [Self::V; 16]);

    /// `2^x` for `x <= 0` to about one unit in the last place, `2^0 = 1` exactly, `2^-inf = 0`, a NaN stays one.
    ///
    /// The polynomial is that of Cephes' `exp2f`, over -0.5..0.5.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        const POLYNOMIAL: [f32; 6] =
            [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];
        // SAFETY: as the caller promises.
        unsafe {
            // Below that all is 0; the clamp keeps infinities from becoming NaNs. A NaN comes through, being `b`.
            let x = Self::max(Self::splat(-200.0), x);
            let n = Self::round(x);
            let f = Self::sub(x, n);
            let mut p = Self::splat(1.535_336_2e-4);
            for coefficient in POLYNOMIAL {
                p = Self::fma(p, f, Self::splat(coefficient));
            }
            Self::scale(p, n)
        }
    }

    /// Returns the lanes as an array.
    #[inline(always)]
    unsafe fn to_array(v: Self::V) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        // SAFETY: as the caller promises; the array has room.
        unsafe { Self::store(lanes.as_mut_ptr(), v) };
        lanes
    }
}

/// Portable lanes, the reference of the others.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Lanes for Plain {
    type V = [f32; 16];
    type Mask = [bool; 16];

    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 16] {
        [x; 16]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 16] {
        // SAFETY: there, as the caller promises.
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; 16]) {
        // SAFETY: there, as the caller promises.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(v) };
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [f32; 16] {
        // SAFETY: there, as the caller promises.
        unsafe { from.cast::<[u16; 16]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [f32; 16] {
        // SAFETY: there, as the caller promises.
        unsafe { from.cast::<[u16; 16]>().read_unaligned() }.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn max(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn more(counts: *const i32, than: i32) -> [bool; 16] {
        // SAFETY: there, as the caller promises.
        unsafe { counts.cast::<[i32; 16]>().read_unaligned() }.map(|count| count > than)
    }

    #[inline(always)]
    unsafe fn select(mask: [bool; 16], then: [f32; 16], otherwise: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if mask[i] { then[i] } else { otherwise[i] })
    }

    #[inline(always)]
    unsafe fn round(x: [f32; 16]) -> [f32; 16] {
        // Adding 1.5 * 2^23 leaves no bits for a fraction.
        x.map(|x| (x + 12_582_912.0) - 12_582_912.0)
    }

    #[inline(always)]
    unsafe fn scale(p: [f32; 16], n: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| {
            // The low bits of the sum are n as an integer; moving them to the exponent makes 2^n.
            let power = f32::from_bits(((n[i] + 12_582_912.0).to_bits() << 23).wrapping_add(0x3f80_0000));
            if n[i] < -126.0 { 0.0 } else { p[i] * power }
        })
    }

    #[inline(always)]
    unsafe fn fetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn transpose(rows: &mut [[f32; 16]; 16]) {
        *rows = std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]));
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Methods that are one expression of intrinsics.
    macro_rules! intrinsics {
        ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $value:expr;)+) => {
            $(
                #[inline(always)]
                unsafe fn $name($($arg: $ty),*) -> $ret {
                    // SAFETY: the machine has the instructions and what is addressed is there, as the caller promises.
                    unsafe { $value }
                }
            )+
        };
    }

    /// Lanes in one register.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512;

    impl Lanes for Avx512 {
        type V = __m512;
        type Mask = __mmask16;

        const MANY_REGISTERS: bool = true;

        intrinsics! {
            splat(x: f32) -> __m512 = _mm512_set1_ps(x);
            load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
            store(to: *mut f32, v: __m512) -> () = _mm512_storeu_ps(to, v);
            load_f16(from: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            load_bf16(from: *const u16) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))));
            add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
            sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
            mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
            fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
            max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
            more(counts: *const i32, than: i32) -> __mmask16 =
                _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(counts.cast()), _mm512_set1_epi32(than));
            select(mask: __mmask16, then: __m512, otherwise: __m512) -> __m512 =
                _mm512_mask_blend_ps(mask, otherwise, then);
            round(x: __m512) -> __m512 = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(x);
            scale(p: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(p, n);
            fetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(at.cast());
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [__m512; 16]) {
            // SAFETY: the machine has the instructions, as the caller promises.
            unsafe {
                // After two rounds of interleaving, lane L of `quads[4 g + c]` is column 4 L + c of the rows 4 g to 4 g + 3.
                let mut quads = [_mm512_setzero_pd(); 16];
                for g in 0..4 {
                    let [a, b, c, e] = [rows[4 * g], rows[4 * g + 1], rows[4 * g + 2], rows[4 * g + 3]];
                    let low = [_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, e)];
                    let high = [_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, e)];
                    let (low0, low1) = (_mm512_castps_pd(low[0]), _mm512_castps_pd(low[1]));
                    let (high0, high1) = (_mm512_castps_pd(high[0]), _mm512_castps_pd(high[1]));
                    quads[4 * g] = _mm512_unpacklo_pd(low0, low1);
                    quads[4 * g + 1] = _mm512_unpackhi_pd(low0, low1);
                    quads[4 * g + 2] = _mm512_unpacklo_pd(high0, high1);
                    quads[4 * g + 3] = _mm512_unpackhi_pd(high0, high1);
                }
                for c in 0..4 {
                    let [a, b, e, f] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
                    let ab_even = _mm512_shuffle_f64x2::<0x88>(a, b);
                    let ef_even = _mm512_shuffle_f64x2::<0x88>(e, f);
                    let ab_odd = _mm512_shuffle_f64x2::<0xdd>(a, b);
                    let ef_odd = _mm512_shuffle_f64x2::<0xdd>(e, f);
                    rows[c] = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0x88>(ab_even, ef_even));
                    rows[4 + c] = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0x88>(ab_odd, ef_odd));
                    rows[8 + c] = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0xdd>(ab_even, ef_even));
                    rows[12 + c] = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0xdd>(ab_odd, ef_odd));
                }
            }
        }
    }

    /// Lanes in two registers.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2;

    type Pair = [__m256; 2];

    impl Lanes for Avx2 {
        type V = Pair;
        type Mask = Pair;

        const MANY_REGISTERS: bool = false;

        intrinsics! {
            fetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(at.cast());
            splat(x: f32) -> Pair = [_mm256_set1_ps(x); 2];
            load(from: *const f32) -> Pair = [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))];
            store(to: *mut f32, v: Pair) -> () = {
                _mm256_storeu_ps(to, v[0]);
                _mm256_storeu_ps(to.add(8), v[1]);
            };
            load_f16(from: *const u16) -> Pair = [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            ];
            load_bf16(from: *const u16) -> Pair = {
                let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ]
            };
            add(a: Pair, b: Pair) -> Pair = [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
            sub(a: Pair, b: Pair) -> Pair = [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])];
            mul(a: Pair, b: Pair) -> Pair = [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])];
            div(a: Pair, b: Pair) -> Pair = [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])];
            fma(a: Pair, b: Pair, c: Pair) -> Pair =
                [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
            max(a: Pair, b: Pair) -> Pair = [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])];
            more(counts: *const i32, than: i32) -> Pair = {
                let (low, high) = (_mm256_loadu_si256(counts.cast()), _mm256_loadu_si256(counts.add(8).cast()));
                let than = _mm256_set1_epi32(than);
                [
                    _mm256_castsi256_ps(_mm256_cmpgt_epi32(low, than)),
                    _mm256_castsi256_ps(_mm256_cmpgt_epi32(high, than)),
                ]
            };
            select(mask: Pair, then: Pair, otherwise: Pair) -> Pair = [
                _mm256_blendv_ps(otherwise[0], then[0], mask[0]),
                _mm256_blendv_ps(otherwise[1], then[1], mask[1]),
            ];
            round(x: Pair) -> Pair = [
                _mm256_round_ps::<_MM_FROUND_TO_NEAREST_INT>(x[0]),
                _mm256_round_ps::<_MM_FROUND_TO_NEAREST_INT>(x[1]),
            ];
            scale(p: Pair, n: Pair) -> Pair = [scale_eight(p[0], n[0]), scale_eight(p[1], n[1])];
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [Pair; 16]) {
            // SAFETY: the machine has the instructions, as the caller promises.
            unsafe {
                let mut quarters = [[[_mm256_setzero_ps(); 8]; 2]; 2];
                for (i, row) in rows.iter().enumerate() {
                    for (half, &lanes) in row.iter().enumerate() {
                        quarters[i / 8][half][i % 8] = lanes;
                    }
                }
                for pair in &mut quarters {
                    for quarter in pair {
                        transpose_eight(quarter);
                    }
                }
                for i in 0..8 {
                    rows[i] = [quarters[0][0][i], quarters[1][0][i]];
                    rows[8 + i] = [quarters[0][1][i], quarters[1][1][i]];
                }
            }
        }
    }

    /// Turns eight rows into columns.
    ///
    /// # Safety
    /// The machine has AVX.
    #[inline(always)]
    unsafe fn transpose_eight(r: &mut [__m256; 8]) {
        // SAFETY: the machine has the instructions, as the caller promises.
        unsafe {
            let mut pairs = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            let mut quads = [_mm256_setzero_ps(); 8];
            for h in 0..2 {
                let [a, b, c, e] = [pairs[4 * h], pairs[4 * h + 1], pairs[4 * h + 2], pairs[4 * h + 3]];
                quads[4 * h] = _mm256_shuffle_ps::<0x44>(a, c);
                quads[4 * h + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                quads[4 * h + 2] = _mm256_shuffle_ps::<0x44>(b, e);
                quads[4 * h + 3] = _mm256_shuffle_ps::<0xee>(b, e);
            }
            for i in 0..4 {
                r[i] = _mm256_permute2f128_ps::<0x20>(quads[i], quads[4 + i]);
                r[4 + i] = _mm256_permute2f128_ps::<0x31>(quads[i], quads[4 + i]);
            }
        }
    }

    /// Half of `Lanes::scale`.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn scale_eight(p: __m256, n: __m256) -> __m256 {
        // SAFETY: the machine has the instructions, as the caller promises.
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            let power = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f80_0000)));
            // A NaN is not below, and makes the product one.
            let too_small = _mm256_cmp_ps::<_CMP_LT_OQ>(n, _mm256_set1_ps(-126.0));
            _mm256_andnot_ps(too_small, _mm256_mul_ps(p, power))
        }
    }
}
