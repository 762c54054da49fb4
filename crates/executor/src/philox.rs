//! A counter-based random number generator: Philox4x32-10.
//!
//! After J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There
//! is no state to carry: the number at a counter is a function of key and counter alone. That is why a sequence that moves
//! to another engine, or is replayed after a crash, draws on exactly as if nothing had happened.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Returns the block of four numbers at `counter`.
fn block(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        }
        let [high0, low0] = multiply(MULTIPLIERS[0], counter[0]);
        let [high1, low1] = multiply(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// Returns the two halves of a product, high first.
fn multiply(a: u32, b: u32) -> [u32; 2] {
    let product = u64::from(a) * u64::from(b);
    [(product >> 32) as u32, product as u32]
}

/// Returns 64 random bits for one draw of one choice of a request.
pub(crate) fn draw(seed: u64, choice: u32, token_index: u32) -> u64 {
    let words = block([seed as u32, (seed >> 32) as u32], [token_index, choice, 0, 0]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The three vectors for `philox4x32 10` that the authors publish with their reference implementation.
    #[test]
    fn known_answers() {
        let check = |counter, key, expected| assert_eq!(block(key, counter), expected);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn draws_differ_in_every_argument() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in [0, 1, 1 << 32, u64::MAX] {
            for choice in 0..4 {
                for index in 0..100 {
                    assert!(seen.insert(draw(seed, choice, index)), "{seed} {choice} {index}");
                }
            }
        }
    }
}
