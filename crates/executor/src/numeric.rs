//! `exp` and `ln` in plain IEEE arithmetic.
//!
//! The standard library's come from the platform's mathematical library and may differ in the last bit from one machine to
//! the next; a draw that falls on such a bit would differ too. These use additions, multiplications and divisions only, in a
//! fixed order, and vectorise.

const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Added and subtracted again, it rounds a small `f64` to an integer that then stands in its low bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
const LOWEST: f64 = -700.0;

/// Returns `e^x` for `x <= 0`, to within two units in the last place; below -700 it returns `e^-700`.
#[inline]
pub(crate) fn exp_nonpositive(x: f64) -> f64 {
    // x = n ln 2 + r with |r| <= ln 2 / 2; e^x = 2^n e^r; e^r by its series, whose 14th term is below 2^-57.
    let x = if x > LOWEST { x } else { LOWEST };
    let shifted = x * std::f64::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut series = 1.0 / 6_227_020_800.0;
    series = series * r + 1.0 / 479_001_600.0;
    series = series * r + 1.0 / 39_916_800.0;
    series = series * r + 1.0 / 3_628_800.0;
    series = series * r + 1.0 / 362_880.0;
    series = series * r + 1.0 / 40_320.0;
    series = series * r + 1.0 / 5_040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    series = series * r + 1.0;
    series = series * r + 1.0;
    // The low bits of `shifted` hold n in two's complement; the exponent field takes n + 1023.
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    series * power
}

/// Returns the natural logarithm of a finite `x >= 1`.
pub(crate) fn ln(x: f64) -> f64 {
    // x = 2^e m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)).
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 1023 << 52);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for odd in (1..=23).rev().step_by(2) {
        series = series * square + 1.0 / f64::from(odd);
    }
    let exponent = exponent as f64;
    exponent * LN_2_HIGH + (exponent * LN_2_LOW + 2.0 * s * series)
}

/// Returns `ln(sum(e^(logit - max)))`: eight running sums, added in a fixed order.
pub(crate) fn ln_sum_exp(logits: &[f32], max: f32) -> f64 {
    const LANES: usize = 8;
    let max = f64::from(max);
    let mut sums = [0.0; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, &logit) in sums.iter_mut().zip(chunk) {
            *sum += exp_nonpositive(f64::from(logit) - max);
        }
    }
    for (sum, &logit) in sums.iter_mut().zip(chunks.remainder()) {
        *sum += exp_nonpositive(f64::from(logit) - max);
    }
    ln(sums.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_platform() {
        let mut x = 0.0;
        while x > -690.0 {
            let (ours, theirs) = (exp_nonpositive(x), f64::exp(x));
            assert!((ours - theirs).abs() <= theirs * 5e-16, "exp({x}) = {ours:e}, not {theirs:e}");
            x -= 0.0371;
        }
        assert_eq!(exp_nonpositive(0.0).to_bits(), 1.0f64.to_bits());
        for x in [-1e3, -1e300, f64::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x).to_bits(), exp_nonpositive(LOWEST).to_bits());
        }
    }

    #[test]
    fn ln_agrees_with_the_platform() {
        let mut x = 1.0;
        while x < 1e7 {
            let (ours, theirs) = (ln(x), f64::ln(x));
            assert!((ours - theirs).abs() <= 4e-16 * theirs.max(0.5), "ln({x}) = {ours}, not {theirs}");
            x *= 1.000_37;
        }
        assert_eq!(ln(1.0).to_bits(), 0.0f64.to_bits());
    }

    #[test]
    fn ln_sum_exp_of_equal_logits_is_the_log_of_their_number() {
        for len in [1usize, 7, 8, 9, 1000] {
            let sum = ln_sum_exp(&vec![-3.25; len], -3.25);
            assert!((sum - (len as f64).ln()).abs() < 1e-14);
        }
    }
}
