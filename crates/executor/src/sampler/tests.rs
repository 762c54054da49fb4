use proptest::prelude::*;

use super::*;
use crate::TokenMask;

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, 0, &[])
}

fn draw(params: SamplingParams, logits: &[f32]) -> u32 {
    sampler(params).sample(&mut logits.to_vec()).expect("these logits can be sampled").token.0
}

/// Logits that depend on the step alone, as a model's would on its context.
fn logits_at(step: u32, vocab_size: u32) -> Vec<f32> {
    (0..vocab_size)
        .map(|token| {
            let bits = philox::draw(u64::from(step), token, 77);
            (bits % 4096) as f32 / 512.0 - 4.0
        })
        .collect()
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    assert_eq!(draw(SamplingParams::greedy(), &[1.0, 3.0, 3.0, 2.0]), 1);
}

#[test]
fn bias_comes_before_the_choice() {
    let mut params = SamplingParams::greedy();
    params.logit_bias = vec![(TokenId(0), 2.5), (TokenId(1), -1.0)];
    assert_eq!(draw(params.clone(), &[1.0, 3.0, 2.9]), 0);
    params.logit_bias = vec![(TokenId(3), 1.0)];
    let error = sampler(params).sample(&mut [1.0, 3.0, 2.9]).expect_err("there is no token 3");
    assert_eq!(error.to_string(), "logit_bias: token 3 is not in the vocabulary of 3");
}

#[test]
fn repetition_counts_prompt_and_output_the_others_output_only() {
    let mut params = SamplingParams::greedy();
    params.repetition_penalty = 2.0;
    params.logprobs = Some(4);
    let mut sampler = Sampler::new(params, 0, &tokens(&[0, 0, 1]));
    sampler.replay(TokenId(2)).expect("no grammar");
    let mut logits = [4.0, -1.0, 6.0, 1.0];
    sampler.sample(&mut logits).expect("fine");
    assert_eq!(logits, [2.0, -2.0, 3.0, 1.0]);

    let mut params = SamplingParams::greedy();
    (params.frequency_penalty, params.presence_penalty) = (0.5, 0.25);
    let mut sampler = Sampler::new(params, 0, &tokens(&[0]));
    for token in [1, 1, 2] {
        sampler.replay(TokenId(token)).expect("no grammar");
    }
    let mut logits = [1.0; 4];
    sampler.sample(&mut logits).expect("fine");
    assert_eq!(logits, [1.0, 1.0 - 1.0 - 0.25, 1.0 - 0.5 - 0.25, 1.0]);
}

#[test]
fn penalties_never_make_a_logit_infinite() {
    let mut params = SamplingParams::greedy();
    params.repetition_penalty = 1e-30;
    let mut sampler = Sampler::new(params, 0, &tokens(&[0, 1]));
    let token = sampler.sample(&mut [3e30, -3e30, 5.0]).expect("clamped").token;
    assert_eq!(token, TokenId(0));
}

#[test]
fn eos_is_masked_until_min_tokens() {
    let mut sampler = sampler(SamplingParams::greedy()).with_min_tokens(2, &tokens(&[2]));
    let drawn: Vec<_> = (0..3).map(|_| sampler.sample(&mut [0.0, 1.0, 9.0]).expect("fine").token.0).collect();
    assert_eq!(drawn, [1, 1, 2]);
    let mut broken = self::sampler(SamplingParams::greedy()).with_min_tokens(2, &tokens(&[0]));
    assert!(matches!(broken.sample(&mut [f32::NAN, 1.0]), Err(SampleError::NotFinite { .. })));
    assert_eq!(broken.sample(&mut [1.0]), Err(SampleError::NoToken));
}

#[test]
fn top_k_one_and_tiny_top_p_are_greedy() {
    let logits = logits_at(3, 500);
    let best = draw(SamplingParams::greedy(), &logits);
    for seed in 0..50 {
        let base = SamplingParams { seed, ..SamplingParams::default() };
        assert_eq!(draw(SamplingParams { top_k: 1, ..base.clone() }, &logits), best);
        assert_eq!(draw(SamplingParams { top_p: 1e-6, ..base.clone() }, &logits), best);
        assert_eq!(draw(SamplingParams { min_p: 1.0, ..base.clone() }, &logits), best);
        assert_eq!(draw(SamplingParams { temperature: 1e-30, ..base }, &logits), best);
    }
}

#[test]
fn cuts_that_keep_everything_change_nothing() {
    let logits = logits_at(4, 300);
    for seed in 0..200 {
        let base = SamplingParams { seed, temperature: 0.8, ..SamplingParams::default() };
        let plain = draw(base.clone(), &logits);
        assert_eq!(draw(SamplingParams { top_k: 300, ..base.clone() }, &logits), plain);
        assert_eq!(draw(SamplingParams { top_k: 299, ..base.clone() }, &logits[..299]), {
            draw(base.clone(), &logits[..299])
        });
        assert_eq!(draw(SamplingParams { top_k: u32::MAX, ..base.clone() }, &logits), plain);
        assert_eq!(draw(SamplingParams { min_p: 1e-12, ..base.clone() }, &logits), plain);
        assert_eq!(draw(SamplingParams { top_p: 1.0 - f32::EPSILON / 2.0, ..base }, &logits), plain);
    }
}

#[test]
fn top_p_keeps_the_token_that_crosses_it() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [3.0, 2.0, 1.0, 1.0].map(|power: f32| power * std::f32::consts::LN_2);
    let reach = |top_p: f32| {
        let drawn =
            (0..400).map(|seed| draw(SamplingParams { seed, top_p, ..SamplingParams::default() }, &logits));
        drawn.max().expect("400 draws")
    };
    assert_eq!(reach(0.49), 0);
    assert_eq!(reach(0.51), 1);
    assert_eq!(reach(0.74), 1);
    assert_eq!(reach(0.76), 2, "of two equal tokens the lower one is kept");
    assert_eq!(reach(0.99), 3);
}

#[test]
fn top_p_is_taken_of_what_top_k_left() {
    // Of 0.4, 0.3, 0.3 the first two hold 0.7; after top_k 2 they hold everything, the first 4/7.
    let logits = [0.4f32.ln(), 0.3f32.ln(), 0.3f32.ln()];
    for seed in 0..200 {
        let base = SamplingParams { seed, top_p: 0.55, ..SamplingParams::default() };
        assert_eq!(draw(SamplingParams { top_k: 2, ..base }, &logits), 0);
    }
}

/// Chi-square of 20 000 draws against the exact distribution.
fn chi_square(params: SamplingParams, logits: &[f32], expected: &[f64]) -> f64 {
    const DRAWS: u32 = 20_000;
    let mut counts = vec![0u32; logits.len()];
    let mut sampler = sampler(params);
    for _ in 0..DRAWS {
        counts[sampler.sample(&mut logits.to_vec()).expect("fine").token.0 as usize] += 1;
    }
    let mut chi_square = 0.0;
    for (&count, &probability) in counts.iter().zip(expected) {
        let mean = probability * f64::from(DRAWS);
        if mean == 0.0 {
            assert_eq!(count, 0, "a token that was cut away was drawn");
        } else {
            chi_square += (f64::from(count) - mean).powi(2) / mean;
        }
    }
    chi_square
}

#[test]
fn draws_follow_the_distribution() {
    let probabilities = [0.35, 0.22, 0.15, 0.1, 0.08, 0.05, 0.03, 0.02];
    let logits = probabilities.map(|p: f64| p.ln() as f32 + 5.0);
    let with = |temperature: f32, top_k, top_p, min_p| SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        seed: 42,
        ..SamplingParams::default()
    };
    let cut = |temperature: f64, kept: usize| {
        let heated = probabilities.map(|p| p.powf(1.0 / temperature));
        let total: f64 = heated[..kept].iter().sum();
        let mut all = [0.0; 8];
        all[..kept].copy_from_slice(&heated[..kept]);
        all.map(|p| p / total)
    };
    // The 99.99 % points of chi-square with 7, 3, 4 and 3 degrees of freedom.
    assert!(chi_square(with(1.0, 0, 1.0, 0.0), &logits, &cut(1.0, 8)) < 29.9);
    assert!(chi_square(with(0.5, 0, 1.0, 0.0), &logits, &cut(0.5, 8)) < 29.9);
    assert!(chi_square(with(1.7, 4, 1.0, 0.0), &logits, &cut(1.7, 4)) < 21.1);
    assert!(chi_square(with(1.0, 0, 0.85, 0.0), &logits, &cut(1.0, 5)) < 23.5);
    assert!(chi_square(with(1.0, 0, 1.0, 0.25), &logits, &cut(1.0, 4)) < 21.1);
}

#[test]
fn choices_and_seeds_draw_apart_and_names_do_not_matter() {
    let run = |seed, choice| {
        let params = SamplingParams { seed, ..SamplingParams::default() };
        let mut sampler = Sampler::new(params, choice, &[]);
        let drawn: Vec<_> =
            (0..20).map(|step| sampler.sample(&mut logits_at(step, 100)).expect("fine").token).collect();
        drawn
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(1, 1));
    assert_ne!(run(1, 0), run(2, 0));
}

#[test]
fn logprobs_are_of_the_shaped_distribution_at_temperature_one() {
    let mut params = SamplingParams::greedy();
    params.temperature = 0.3;
    params.logprobs = Some(2);
    params.logit_bias = vec![(TokenId(0), f32::ln(2.0))];
    let sampled = sampler(params).sample(&mut [0.0, 0.0, f32::ln(3.0)]).expect("fine");
    let logprob = sampled.logprob.expect("asked for");
    assert_eq!(logprob.token, sampled.token);
    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
    let expected = [2.0f32 / 6.0, 1.0 / 6.0, 3.0 / 6.0];
    close(logprob.logprob, expected[sampled.token.0 as usize].ln());
    assert_eq!(logprob.top.iter().map(|top| top.0.0).collect::<Vec<_>>(), [2, 0]);
    close(logprob.top[0].1, 0.5f32.ln());
    close(logprob.top[1].1, (1.0f32 / 3.0).ln());
}

#[test]
fn masked_tokens_are_no_alternatives() {
    let mut params = SamplingParams::greedy();
    params.logprobs = Some(5);
    let mut sampler = sampler(params).with_min_tokens(1, &tokens(&[1]));
    let logprob = sampler.sample(&mut [0.0, 5.0, 0.0]).expect("fine").logprob.expect("asked for");
    assert_eq!(logprob.top.len(), 2);
    assert!((logprob.logprob - 0.5f32.ln()).abs() < 1e-6);
}

#[test]
fn bad_parameters_are_named() {
    let check = |change: fn(&mut SamplingParams), field| {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = sampler(params).sample(&mut [1.0, 2.0]).expect_err(field);
        assert!(error.to_string().starts_with(field), "{error}");
    };
    check(|p| p.temperature = f32::NAN, "temperature");
    check(|p| p.temperature = -1.0, "temperature");
    check(|p| p.top_p = 0.0, "top_p");
    check(|p| p.top_p = f32::NAN, "top_p");
    check(|p| p.min_p = 1.5, "min_p");
    check(|p| p.repetition_penalty = 0.0, "repetition_penalty");
    check(|p| p.repetition_penalty = f32::INFINITY, "repetition_penalty");
    check(|p| p.frequency_penalty = 3.0, "frequency_penalty");
    check(|p| p.presence_penalty = f32::NEG_INFINITY, "presence_penalty");
    check(|p| p.logit_bias = vec![(TokenId(0), f32::NAN)], "logit_bias");
}

/// Allows tokens that do not repeat the one before, and ends after `left` of them.
#[derive(Debug)]
struct NoRepeat {
    last: Option<TokenId>,
    left: u32,
}

impl TokenConstraint for NoRepeat {
    fn mask(&mut self) -> Result<TokenMask, ConstraintError> {
        if self.left == 0 {
            return Err(ConstraintError { reason: "nothing may follow".into() });
        }
        let mut words = vec![u32::MAX; 4];
        if let Some(TokenId(last)) = self.last {
            words[last as usize / 32] &= !(1 << (last % 32));
        }
        Ok(TokenMask::from_words(words))
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        if self.last == Some(token) {
            return Err(ConstraintError { reason: "a token repeats".into() });
        }
        (self.last, self.left) = (Some(token), self.left - 1);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.left == 0
    }
}

#[test]
fn a_grammar_masks_is_advanced_and_completes() {
    let grammar = NoRepeat { last: None, left: 3 };
    let mut sampler = sampler(SamplingParams::greedy()).with_constraint(Box::new(grammar));
    let logits = [0.0, 3.0, 2.0];
    let drawn: Vec<_> = (0..3).map(|_| sampler.sample(&mut logits.to_vec()).expect("allowed")).collect();
    let complete: Vec<_> = drawn.iter().map(|sampled| (sampled.token.0, sampled.grammar_complete)).collect();
    assert_eq!(complete, [(1, false), (2, false), (1, true)]);
    let error = sampler.sample(&mut logits.to_vec()).expect_err("complete");
    assert_eq!(error.to_string(), "grammar failed: nothing may follow");
    assert_eq!(sampler.num_outputs(), 3, "a failed draw is not recorded");
    assert!(sampler.replay(TokenId(1)).is_err());
    assert_eq!(sampler.num_outputs(), 3);
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    (
        prop_oneof![Just(0.0f32), 0.1f32..2.0],
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(0u32), 1u32..130],
        prop_oneof![Just(0.0f32), 0.0f32..0.5],
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        (-2.0f32..2.0, -2.0f32..2.0),
        any::<u64>(),
        prop_oneof![Just(None), (0u32..8).prop_map(Some)],
    )
        .prop_map(
            |(temperature, top_p, top_k, min_p, repetition, (frequency, presence), seed, logprobs)| {
                SamplingParams {
                    temperature,
                    top_p,
                    top_k,
                    min_p,
                    repetition_penalty: repetition,
                    frequency_penalty: frequency,
                    presence_penalty: presence,
                    logit_bias: vec![(TokenId(5), 1.5), (TokenId(100), -2.0)],
                    seed,
                    logprobs,
                }
            },
        )
}

proptest! {
    #[test]
    fn a_replayed_sampler_continues_as_the_first(
        params in any_params(),
        choice in 0u32..4,
        prompt in proptest::collection::vec(0u32..128, 0..20),
        cut in 0usize..16,
        constrained in any::<bool>(),
    ) {
        let prompt = tokens(&prompt);
        let begin = || {
            let sampler = Sampler::new(params.clone(), choice, &prompt).with_min_tokens(6, &tokens(&[3, 9]));
            if constrained {
                sampler.with_constraint(Box::new(NoRepeat { last: None, left: 100 }))
            } else {
                sampler
            }
        };
        let mut whole = begin();
        let all: Vec<_> = (0..16)
            .map(|step| whole.sample(&mut logits_at(step, 128)).expect("fine"))
            .collect();
        let mut resumed = begin();
        for sampled in &all[..cut] {
            resumed.replay(sampled.token).expect("was allowed before");
        }
        for (step, expected) in (0..).zip(&all).skip(cut) {
            let sampled = resumed.sample(&mut logits_at(step, 128)).expect("fine");
            prop_assert_eq!(&sampled, expected);
        }
    }

    #[test]
    fn a_drawn_token_was_kept_by_every_cut(params in any_params(), step in 0u32..1000) {
        let mut logits = logits_at(step, 128);
        let sampled = sampler(params.clone()).sample(&mut logits).expect("fine");
        let drawn = logits[sampled.token.0 as usize];
        let rank = logits.iter().filter(|&&logit| logit > drawn).count();
        if params.temperature == 0.0 {
            prop_assert_eq!(rank, 0);
        } else {
            prop_assert!(params.top_k == 0 || rank < params.top_k as usize);
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let ratio = (f64::from(drawn - max) / f64::from(params.temperature)).exp();
            prop_assert!(ratio >= f64::from(params.min_p) * (1.0 - 1e-6));
        }
    }
}

/// What a device would hand out: the tokens that `top_k` and `top_p` keep, by a full sort.
fn kept(logits: &[f32], temperature: f32, top_k: u32, top_p: f32) -> Vec<(TokenId, u64)> {
    let best = logits.iter().copied().fold(f32::MIN, f32::max);
    let weight = |logit: f32| {
        let exponent = (f64::from(logit) - f64::from(best)) / f64::from(temperature);
        (crate::numeric::exp_nonpositive(exponent) * (1_u64 << 44) as f64).round_ties_even() as u64
    };
    let mut ranked: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if top_k > 0 {
        ranked.truncate(top_k as usize);
    }
    let mut all: Vec<_> = ranked.into_iter().map(|(logit, token)| (TokenId(token), weight(logit))).collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let total: u64 = all.iter().map(|entry| entry.1).sum();
    let target = (f64::from(top_p) * total as f64).ceil() as u64;
    let mut sum = 0;
    all.retain(|entry| {
        let is_kept = top_p >= 1.0 || sum < target;
        sum += entry.1;
        is_kept
    });
    all
}

#[test]
fn what_a_device_finds_draws_the_same_tokens() {
    for (temperature, top_k, top_p, min_p) in [
        (0.0, 0, 1.0, 0.0),
        (1.0, 20, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 33, 0.8, 0.05),
        (0.2, 0, 0.5, 0.2),
    ] {
        let params =
            SamplingParams { temperature, top_k, top_p, min_p, seed: 11, ..SamplingParams::default() };
        let (mut whole, mut reduced) = (sampler(params.clone()), sampler(params.clone()));
        let mut apart = sampler(params);
        for step in 0..100 {
            let logits = logits_at(step, 300);
            let expected = whole.sample(&mut logits.clone()).expect("fine");
            let found = match reduced.need(300) {
                LogitNeed::Best => {
                    let best = logits.iter().copied().fold(f32::MIN, f32::max);
                    let token = logits.iter().position(|&logit| logit == best).expect("there is one");
                    reduced.take_best(TokenId(token as u32))
                }
                LogitNeed::Kept { temperature, top_k, top_p } => {
                    reduced.draw_kept(&mut kept(&logits, temperature, top_k, top_p))
                }
                LogitNeed::All => panic!("these need no more than is kept"),
            };
            assert_eq!(found.as_ref(), Ok(&expected), "temperature {temperature}, step {step}");
            let mut noted = NotedSampler::new(apart.need(300));
            noted.as_sampler().sample(&mut logits.clone()).expect("fine");
            let found = noted.found().expect("it was asked").expect("fine");
            assert!(!matches!(found, Found::All(_)), "no more than is needed");
            assert_eq!(apart.draw(found), Ok(expected), "temperature {temperature}, step {step}, apart");
        }
        assert_eq!(whole.num_outputs(), reduced.num_outputs());
    }
    assert_eq!(sampler(SamplingParams::default()).draw_kept(&mut Vec::new()), Err(SampleError::NoToken));
}

#[test]
fn a_stand_in_notes_what_is_wrong_with_logits_and_draws_nothing() {
    for need in [LogitNeed::Best, LogitNeed::Kept { temperature: 1.0, top_k: 2, top_p: 1.0 }] {
        let mut noted = NotedSampler::new(need);
        assert!(noted.as_sampler().sample(&mut [0.0, f32::NAN]).is_err());
        let found = noted.found().expect("it was asked");
        assert!(matches!(found, Err(SampleError::NotFinite { token: TokenId(1), .. })), "{found:?}");
    }
    let mut noted = NotedSampler::new(LogitNeed::All);
    noted.as_sampler().sample(&mut [0.0, 1.0]).expect("fine");
    assert_eq!(noted.as_sampler().num_outputs(), 0);
    assert_eq!(noted.found(), Some(Ok(Found::All(vec![0.0, 1.0]))));
    assert_eq!(NotedSampler::new(LogitNeed::Best).found(), None, "nobody asked");
}

#[test]
fn whatever_changes_logits_needs_all_of_them() {
    let greedy = SamplingParams::greedy;
    let all = |sampler: Sampler| sampler.need(300) == LogitNeed::All;
    assert!(!all(sampler(greedy())));
    assert!(all(sampler(SamplingParams { logprobs: Some(0), ..greedy() })));
    assert!(all(sampler(SamplingParams { logit_bias: vec![(TokenId(0), 1.0)], ..greedy() })));
    assert!(all(sampler(SamplingParams { repetition_penalty: 1.5, ..greedy() })));
    assert!(all(sampler(SamplingParams { presence_penalty: 0.5, ..greedy() })));
    assert!(all(sampler(SamplingParams { top_p: 2.0, ..greedy() })), "what is invalid is reported");
    assert!(all(sampler(greedy()).with_min_tokens(1, &tokens(&[2]))));
    let uncut = SamplingParams { temperature: 1.0, top_p: 1.0, top_k: 300, ..greedy() };
    assert!(all(sampler(uncut)), "every token may be drawn");
}
