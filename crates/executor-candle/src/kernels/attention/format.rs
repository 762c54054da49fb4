//! What attention multiplies: words of 32 bits that hold an f32, or a pair of bf16.

use std::marker::PhantomData;

use super::super::lanes::Lanes;

/// The lanes of a format.
pub(super) type V<F> = <<F as Format>::L as Lanes>::V;

/// How cached elements become words, and words products. Words are passed around as f32; those that are pairs are never computed
/// with as such.
///
/// # Safety
/// All methods ask for the same: the machine has the level's instructions, and what is loaded or stored is there.
pub(super) trait Format {
    /// The level.
    type L: Lanes;

    /// Elements in a word.
    const PER_WORD: usize;

    /// Bytes of a cached element.
    const ELEMENT: usize;

    /// `acc + a * b`; over pairs, both products.
    unsafe fn mac(acc: V<Self>, a: V<Self>, b: V<Self>) -> V<Self>;

    /// Sixteen words of a cached row.
    unsafe fn keys(from: *const u8) -> V<Self>;

    /// Sixteen elements of a cached row, or of two paired.
    unsafe fn values(first: *const u8, second: *const u8) -> V<Self>;

    /// Lanes as words, or two paired.
    unsafe fn join(first: V<Self>, second: V<Self>) -> V<Self>;

    /// Stores sixteen elements as words.
    unsafe fn pack(x: V<Self>, to: *mut f32);
}

/// Formats whose words are f32.
macro_rules! widened {
    ($($(#[$meta:meta])* $name:ident of $element:ty: $load:ident;)+) => {
        $(
            $(#[$meta])*
            #[derive(Debug)]
            pub(super) struct $name<L>(PhantomData<L>);

            impl<L: Lanes> Format for $name<L> {
                type L = L;

                const PER_WORD: usize = 1;
                const ELEMENT: usize = size_of::<$element>();

                #[inline(always)]
                unsafe fn mac(acc: L::V, a: L::V, b: L::V) -> L::V {
                    // SAFETY: as the caller promises.
                    unsafe { L::fma(a, b, acc) }
                }

                #[inline(always)]
                unsafe fn keys(from: *const u8) -> L::V {
                    // SAFETY: as the caller promises.
                    unsafe { L::$load(from.cast::<$element>()) }
                }

                #[inline(always)]
                unsafe fn values(first: *const u8, _: *const u8) -> L::V {
                    // SAFETY: as the caller promises.
                    unsafe { L::$load(first.cast::<$element>()) }
                }

                #[inline(always)]
                unsafe fn join(first: L::V, _: L::V) -> L::V {
                    first
                }

                #[inline(always)]
                unsafe fn pack(x: L::V, to: *mut f32) {
                    // SAFETY: as the caller promises.
                    unsafe { L::store(to, x) };
                }
            }
        )+
    };
}

widened! {
    /// An f32 cache.
    F32 of f32: load;
    /// An f16 cache.
    F16 of u16: load_f16;
    /// A bf16 cache, on machines that cannot multiply it.
    Bf16 of u16: load_bf16;
}

/// [`Pairs`] in portable code: what its indices are tested with on machines without the instructions.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct PlainPairs;

#[cfg(test)]
impl Format for PlainPairs {
    type L = super::super::lanes::Plain;

    const PER_WORD: usize = 2;
    const ELEMENT: usize = 2;

    unsafe fn mac(acc: V<Self>, a: V<Self>, b: V<Self>) -> V<Self> {
        let low = |word: f32| f32::from_bits(word.to_bits() << 16);
        let high = |word: f32| f32::from_bits(word.to_bits() & 0xffff_0000);
        std::array::from_fn(|i| acc[i] + high(a[i]) * high(b[i]) + low(a[i]) * low(b[i]))
    }

    unsafe fn keys(from: *const u8) -> V<Self> {
        // SAFETY: as the caller promises.
        unsafe { from.cast::<V<Self>>().read_unaligned() }
    }

    unsafe fn values(first: *const u8, second: *const u8) -> V<Self> {
        // SAFETY: as the caller promises.
        let [first, second] = [first, second].map(|row| unsafe { row.cast::<[u16; 16]>().read_unaligned() });
        std::array::from_fn(|i| f32::from_bits(u32::from(first[i]) | u32::from(second[i]) << 16))
    }

    unsafe fn join(first: V<Self>, second: V<Self>) -> V<Self> {
        let bits = |x: f32| u32::from(super::super::bf16_bits(x));
        std::array::from_fn(|i| f32::from_bits(bits(first[i]) | bits(second[i]) << 16))
    }

    unsafe fn pack(x: V<Self>, to: *mut f32) {
        let bits = x.map(super::super::bf16_bits);
        // SAFETY: as the caller promises.
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) };
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use pairs::Pairs;

#[cfg(target_arch = "x86_64")]
mod pairs {
    use std::arch::x86_64::*;

    use super::super::super::lanes::Avx512;
    use super::Format;

    /// A bf16 cache, multiplied as it is.
    #[derive(Debug)]
    pub(in super::super) struct Pairs;

    /// # Safety
    /// The machine has AVX-512 BF16 and VL.
    #[inline(always)]
    unsafe fn rounded(x: __m512) -> __m256i {
        // SAFETY: as the caller promises; both are vectors of 256 bits, plain data.
        unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x)) }
    }

    /// Interleaves two vectors of sixteen 16-bit elements, the first ones in the low halves.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[inline(always)]
    unsafe fn interleaved(first: __m256i, second: __m256i) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let (low, high) = (_mm512_cvtepu16_epi32(first), _mm512_cvtepu16_epi32(second));
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
        }
    }

    impl Format for Pairs {
        type L = Avx512;

        const PER_WORD: usize = 2;
        const ELEMENT: usize = 2;

        #[inline(always)]
        unsafe fn mac(acc: __m512, a: __m512, b: __m512) -> __m512 {
            // SAFETY: as the caller promises; all are vectors of 512 bits, plain data.
            unsafe {
                let (a, b) =
                    (std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b));
                _mm512_dpbf16_ps(acc, a, b)
            }
        }

        #[inline(always)]
        unsafe fn keys(from: *const u8) -> __m512 {
            // SAFETY: as the caller promises.
            unsafe { _mm512_loadu_ps(from.cast()) }
        }

        #[inline(always)]
        unsafe fn values(first: *const u8, second: *const u8) -> __m512 {
            // SAFETY: as the caller promises.
            unsafe { interleaved(_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(second.cast())) }
        }

        #[inline(always)]
        unsafe fn join(first: __m512, second: __m512) -> __m512 {
            // SAFETY: as the caller promises.
            unsafe { interleaved(rounded(first), rounded(second)) }
        }

        #[inline(always)]
        unsafe fn pack(x: __m512, to: *mut f32) {
            // SAFETY: as the caller promises.
            unsafe { _mm256_storeu_si256(to.cast(), rounded(x)) };
        }
    }
}
