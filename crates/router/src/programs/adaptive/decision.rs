//! What a way of serving a request costs, and the one that costs least.
//!
//! For a prompt of *n* tokens whose last *m* are left to D, in seconds:
//!
//! ```text
//! J(m) = max(W_P + S_P, W_D) + sigma_D(m)                      until its first token
//!      + b_D sigma_D(m) + rate_D sigma_D(m)^2 / 2              the stall of those who decode on D, and of those who will
//!      + b_P sigma_P(n - m) + N_P S_P                          the stall of those who decode on P; the delay of P's queue
//!      + O [tau(b+1) / (1-u_D) + b (tau(b+1) - tau(b))]          its own decoding, and how it slows the others down
//!
//! S_P = max(a_P(n - m), t_kv)      N_P = rate_P (W_P + a_P(n)) / (1 - u_P): who comes later in P's busy period
//! W: seconds of queued prefill     b: sequences that decode     u: share of an engine's time that prefill took lately
//! ```
//!
//! *J* is nearly linear in *m*, with a price for beginning at all, so the best is mostly nothing or a big piece. That is why *m = n* (D alone,
//! P is skipped) is among the candidates: without it this is no better than a fixed ratio.

use crate::Outlook;

/// Shares of a prompt that may be left to D, beside all of it.
const SHARES: [f64; 8] = [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5];
/// A queue that is fuller than this would make later ones wait without bound.
const FULLEST: f64 = 0.9;
/// Tokens that a request is expected to generate if it may generate more.
const OUTPUT: u32 = 128;

/// What is to be decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    /// Tokens that may be generated.
    pub(super) output: Option<u32>,
    /// Tokens in a page: splits are at borders of pages.
    pub(super) page_size: u32,
    /// Requests a second that one decoder sees.
    pub(super) decoder_rate: f64,
    /// Requests a second that one prefiller sees.
    pub(super) prefiller_rate: f64,
}

/// An engine for one part of the work.
#[derive(Clone, Debug)]
pub(super) struct Side {
    /// What it takes and has to do.
    pub(super) outlook: Outlook,
    /// Tokens of the prompt that it probably holds.
    pub(super) matched: u32,
}

/// The way that costs least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    /// The decoder's place among those given.
    pub(super) decoder: usize,
    /// The prefiller's; none if the decoder does it all.
    pub(super) prefiller: Option<usize>,
    /// Where the decoder takes over from the prefiller.
    pub(super) split: u32,
}

/// Weighs every decoder alone and with every prefiller that may send to it, at every split; nothing if there is no decoder. `may_pair` is
/// asked with the places of a decoder and a prefiller.
pub(super) fn choose(
    question: &Question,
    decoders: &[Side],
    prefillers: &[Side],
    may_pair: impl Fn(usize, usize) -> bool,
) -> Option<Decision> {
    let mut best: Option<(f64, Decision)> = None;
    let mut weigh = |cost: f64, decision| {
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, decision));
        }
    };
    for (decoder, d) in decoders.iter().enumerate() {
        let decoding = decoding_cost(question, d);
        weigh(decoding + alone_cost(question, d), Decision { decoder, prefiller: None, split: 0 });
        for (prefiller, p) in prefillers.iter().enumerate() {
            if !may_pair(decoder, prefiller) {
                continue;
            }
            for share in SHARES {
                let Some(split) = split_at(question, d, share) else { continue };
                let cost = decoding + paired_cost(question, d, p, split);
                weigh(cost, Decision { decoder, prefiller: Some(prefiller), split });
            }
        }
    }
    best.map(|(_, decision)| decision)
}

/// Returns where D takes over if a share is left to it; none if it holds all that comes before.
fn split_at(question: &Question, d: &Side, share: f64) -> Option<u32> {
    let last = question.prompt.saturating_sub(1);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the prompt")]
    let start = ((1.0 - share) * f64::from(question.prompt)) as u32;
    let split = if start >= last { last } else { start - start % question.page_size.max(1) };
    (split > d.matched).then_some(split)
}

/// Returns what it costs that D prefills everything that it lacks.
fn alone_cost(question: &Question, d: &Side) -> f64 {
    let matched = d.matched.min(question.prompt.saturating_sub(1));
    let (new, cached) = (f64::from(question.prompt - matched), f64::from(matched));
    let riding = d.outlook.riding_seconds(new, cached);
    d.outlook.backlog_seconds() + riding + stall(question, d, riding)
}

/// Returns what it costs that P prefills up to the split and D the rest.
fn paired_cost(question: &Question, d: &Side, p: &Side, split: u32) -> f64 {
    let (prompt, taken) = (f64::from(question.prompt), f64::from(split));
    let cached = f64::from(p.matched.min(split));
    let computing = p.outlook.riding_seconds(taken - cached, cached) + p.outlook.decode_seconds(0.0, 0.0);
    let service = computing.max(p.outlook.transfer_seconds(taken - f64::from(d.matched.min(split))));
    let waiting = p.outlook.backlog_seconds();
    let riding = d.outlook.riding_seconds(prompt - taken, taken);
    let whole = p.outlook.prefill_seconds(prompt, 0.0);
    let busy = p.outlook.prefill_share.min(FULLEST);
    let behind = question.prefiller_rate * (waiting + whole) / (1.0 - busy);
    let until_first = (waiting + service).max(d.outlook.backlog_seconds()) + riding;
    until_first + stall(question, d, riding) + f64::from(p.outlook.decoding) * computing + behind * service
}

/// Returns what a prefill that rides along costs those who decode on D, now and soon.
fn stall(question: &Question, d: &Side, riding: f64) -> f64 {
    f64::from(d.outlook.decoding) * riding + question.decoder_rate * riding * riding / 2.0
}

/// Returns what it costs to decode on D.
fn decoding_cost(question: &Question, d: &Side) -> f64 {
    let output = f64::from(question.output.unwrap_or(OUTPUT).min(OUTPUT));
    let (before, with) =
        (d.outlook.decode_seconds(0.0, 0.0), d.outlook.decode_seconds(1.0, question.prompt.into()));
    let others = f64::from(d.outlook.decoding) * (with - before).max(0.0);
    output * (with / (1.0 - d.outlook.prefill_share.min(FULLEST)) + others)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use microserving_cost::{HardwareProfile, Profile};

    use super::*;

    fn question(rate: f64) -> Question {
        Question { prompt: 3000, output: Some(100), page_size: 16, decoder_rate: rate, prefiller_rate: rate }
    }

    /// An engine of four H100 with so many prompt tokens queued and so many sequences of 3000 tokens decoding.
    fn side(queued_tokens: u64, decoding: u32) -> Side {
        let profile =
            Profile::roofline(&HardwareProfile::llama3_70b_fp8_h100_tp4(), &[("link", 5e-6, 100e9)]);
        let idle = Outlook::idle(Arc::new(profile));
        let decoding_tokens = u64::from(decoding) * 3000;
        Side { outlook: Outlook { queued_tokens, decoding, decoding_tokens, ..idle }, matched: 0 }
    }

    fn share_left(rate: f64, d: Side, p: Side) -> f64 {
        let decision = choose(&question(rate), &[d], &[p], |_, _| true).expect("there is a decoder");
        1.0 - f64::from(decision.split) / 3000.0
    }

    #[test]
    fn an_idle_prefiller_takes_everything_but_the_last_token() {
        for rate in [1.6, 2.4, 3.2, 4.0] {
            let left = share_left(rate, side(0, 6), side(0, 0));
            assert!(left < 0.001, "{rate}: {left}");
        }
    }

    #[test]
    fn what_is_left_to_the_decoder_grows_with_the_prefillers_queue() {
        let busy = |queued| {
            let mut p = side(queued, 0);
            p.outlook.prefill_share = 0.7;
            share_left(5.6, side(0, 6), p)
        };
        let shares: Vec<_> = [0, 3000, 6000, 12000, 30000].map(busy).into();
        assert!(shares.is_sorted(), "{shares:?}");
        assert!(shares[0] < 0.2 && shares[4] == 1.0, "{shares:?}");
        // Not while many decode there, whom it would stall.
        assert!(share_left(5.6, side(0, 60), side(3000, 0)) < 0.2);
    }

    #[test]
    fn what_the_decoder_holds_is_not_sent_and_little_is_not_worth_sending() {
        let mut d = side(0, 6);
        d.matched = 2944;
        let decision = choose(&question(3.2), &[d.clone()], &[side(0, 0)], |_, _| true).expect("a decoder");
        assert_eq!(
            (decision.prefiller, decision.split),
            (None, 0),
            "56 tokens are computed where they are needed"
        );
        d.matched = 512;
        let decision = choose(&question(3.2), &[d], &[side(0, 0)], |_, _| true).expect("a decoder");
        assert_eq!((decision.prefiller, decision.split), (Some(0), 2999));
    }

    #[test]
    fn a_cached_prefix_draws_both_parts() {
        let mut holds = side(0, 6);
        holds.matched = 2944;
        let sides = [side(0, 6), holds.clone(), side(0, 6)];
        let decision = choose(&question(3.2), &sides, &[], |_, _| true).expect("a decoder");
        assert_eq!((decision.decoder, decision.prefiller), (1, None));
        let prefillers = [side(0, 0), holds];
        let decision = choose(&question(3.2), &[side(0, 6)], &prefillers, |_, _| true).expect("a decoder");
        assert_eq!(decision.prefiller, Some(1), "it only sends");
    }

    #[test]
    fn load_is_spread_and_pairs_that_may_not_be_are_not() {
        let decoders = [side(0, 30), side(0, 3), side(0, 20)];
        let prefillers = [side(9000, 0), side(0, 0)];
        let decision = choose(&question(3.2), &decoders, &prefillers, |_, _| true).expect("a decoder");
        assert_eq!((decision.decoder, decision.prefiller), (1, Some(1)));
        let decision =
            choose(&question(3.2), &decoders, &prefillers, |d, p| (d, p) != (1, 1)).expect("a decoder");
        assert_ne!((decision.decoder, decision.prefiller), (1, Some(1)));
        assert_eq!(choose(&question(3.2), &[], &prefillers, |_, _| true), None);
        let alone = choose(&question(3.2), &decoders, &[], |_, _| true).expect("a decoder");
        assert_eq!((alone.decoder, alone.prefiller), (1, None));
    }

    #[test]
    fn short_prompts_have_splits_too() {
        for prompt in 1..40 {
            let question = Question { prompt, ..question(5.6) };
            let decision =
                choose(&question, &[side(0, 6)], &[side(6000, 0)], |_, _| true).expect("a decoder");
            assert!(decision.split < prompt, "{prompt}: {decision:?}");
            assert_eq!(decision.prefiller.is_none(), decision.split == 0, "{prompt}: {decision:?}");
        }
    }
}
