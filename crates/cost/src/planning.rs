//! How much of each prompt a decoding engine should prefill, in the steady state.

use crate::Profile;

/// Shares that are tried.
const STEPS: u32 = 1000;

/// Returns the share of each prompt that should be left to the decoding engine, and the mean seconds of a request under it.
///
/// One engine prefills and one decodes; prompts of `prompt` tokens arrive at random, `rate` a second, and `output` tokens are generated
/// for each. The prefilling engine is a queue with one server and a fixed time of service (M/D/1); the decoding one is slowed down by
/// the share that rides along:
///
/// ```text
/// S = a_P((1-x) n)     rho = rate S     W = rho S / (2 (1 - rho))
/// J(x) = W + S + [tau + sigma(x n)] + tau / 2 + O tau(b) / (1 - rate sigma(x n)),     b = rate O tau(b) / (1 - rate sigma(x n))
/// ```
///
/// With several engines give the rate that one of them sees. None if no share can be sustained.
#[must_use]
pub fn planned_share(profile: &Profile, rate: f64, prompt: f64, output: f64) -> Option<(f64, f64)> {
    let shares = (0..STEPS).map(|step| f64::from(step) / f64::from(STEPS));
    let candidates = shares.filter_map(|x| Some((x, mean_seconds(profile, rate, prompt, output, x)?)));
    candidates.min_by(|a, b| a.1.total_cmp(&b.1))
}

fn mean_seconds(profile: &Profile, rate: f64, prompt: f64, output: f64, share: f64) -> Option<f64> {
    let left = share * prompt;
    let service = profile.prefill_seconds(prompt - left, 0.0);
    let busy = rate * service;
    if busy >= 1.0 {
        return None;
    }
    let wait = busy * service / (2.0 * (1.0 - busy));
    let context = prompt + output / 2.0;
    let mut batch = 1.0;
    let (mut step, mut riding, mut free) = (0.0, 0.0, 1.0);
    for _ in 0..64 {
        step = profile.decode_seconds(batch, batch * context);
        riding = profile.riding_seconds(left, prompt - left, batch);
        free = 1.0 - rate * riding;
        if free <= 0.0 {
            return None;
        }
        let next: f64 = rate * output * step / free;
        if (next - batch).abs() < 1e-6 {
            break;
        }
        batch = next.max(1.0);
    }
    Some(wait + service + step + riding + step / 2.0 + output * step / free)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HardwareProfile;

    /// Prompts of 3000 tokens and answers of 100 on two groups of four H100. The optimum is flat: what counts is that a published share is
    /// as good as the one found here, and that both begin at the same load.
    #[test]
    fn the_share_grows_with_the_load() {
        let profile = Profile::roofline(&HardwareProfile::llama3_70b_fp8_h100_tp4(), &[]);
        let published =
            [(1.6, 0.0), (2.4, 0.0), (3.2, 0.0), (4.0, 0.0), (4.8, 0.087), (5.6, 0.138), (6.4, 0.237)];
        let mut last = (0.0, 0.0);
        for (rate, share) in published {
            let found = planned_share(&profile, rate, 3000.0, 100.0).expect("sustained");
            assert!((found.0 - share).abs() <= 0.05, "{rate}: {found:?}, not {share}");
            assert_eq!(found.0 == 0.0, share == 0.0, "{rate}: {found:?}");
            let theirs = mean_seconds(&profile, rate, 3000.0, 100.0, share).expect("sustained");
            assert!(theirs <= found.1 * 1.02, "{rate}: {found:?}, {share} takes {theirs}");
            assert!(found.0 >= last.0 && found.1 > last.1, "{rate}: {found:?} after {last:?}");
            last = found;
        }
    }

    #[test]
    fn a_load_that_nothing_sustains_has_no_share() {
        let profile = Profile::roofline(&HardwareProfile::llama3_70b_fp8_h100_tp4(), &[]);
        assert_eq!(planned_share(&profile, 30.0, 3000.0, 100.0), None);
    }
}
