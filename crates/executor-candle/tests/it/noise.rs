//! Seeded numbers for models made in code.

/// Returns uniform numbers in -1..1 from SplitMix64, seeded by the FNV-1a hash of a name: the same wherever they are made.
pub(crate) fn uniform(name: &str) -> impl Iterator<Item = f64> {
    let seed = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    (1_u64..).map(move |i| {
        let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f64 / f64::from(1 << 23) - 1.0
    })
}
