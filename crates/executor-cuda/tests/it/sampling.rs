//! What is drawn is what the executor for the CPU draws, whatever the device finds of it.

use microserving_executor::{SampleError, Sampler};
use microserving_protocol::{SamplingParams, TokenId};

use crate::support::{Candle, Cuda, Item, PLAIN, candle, cuda, pages, tokens, write};
use crate::tiny::{Tiny, tiny};

/// A vocabulary of more tokens than the device hands out of a row.
fn model() -> tempfile::TempDir {
    let mut config = tiny("llama_tied").config;
    config["vocab_size"] = 603.into();
    write(&Tiny::new(config))
}

fn params(temperature: f32, top_k: u32, top_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, seed: 17, ..SamplingParams::default() }
}

fn kinds() -> Vec<SamplingParams> {
    vec![
        SamplingParams::greedy(),
        // Kept by rank, by share, by both, with min_p after.
        params(1.0, 5, 1.0),
        params(0.8, 0, 0.9),
        params(1.2, 40, 0.7),
        SamplingParams { min_p: 0.2, ..params(0.9, 0, 0.95) },
        // More is kept than is handed out.
        params(40.0, 0, 0.99),
        params(40.0, 400, 1.0),
        // All must be seen.
        params(1.0, 0, 1.0),
        SamplingParams { presence_penalty: 1.0, ..SamplingParams::greedy() },
        SamplingParams { logprobs: Some(3), ..params(0.7, 10, 1.0) },
        SamplingParams { logit_bias: vec![(TokenId(602), 3.0)], ..params(0.7, 0, 0.9) },
    ]
}

/// Steps of all sequences side by side: rows of logits are mixed.
fn together(
    mut step: impl FnMut(Vec<Item<'_>>) -> crate::support::Drawn,
    num_steps: usize,
) -> Vec<Vec<TokenId>> {
    let mut all: Vec<Vec<TokenId>> = (0..kinds().len() as u32).map(|at| tokens(at, 3 + at)).collect();
    let lens: Vec<usize> = all.iter().map(Vec::len).collect();
    let pages: Vec<_> = (0..all.len() as u32).map(|at| pages([2 * at, 2 * at + 1])).collect();
    let mut samplers: Vec<Sampler> =
        kinds().into_iter().zip(&all).map(|(params, prompt)| Sampler::new(params, 0, prompt)).collect();
    for turn in 0..num_steps {
        let items = all.iter().zip(&mut samplers).zip(&pages).map(|((all, sampler), pages)| {
            let position = if turn == 0 { 0 } else { all.len() - 1 };
            Item { tokens: &all[position..], position, pages, sampler: Some(sampler) }
        });
        let drawn = step(items.collect());
        for (all, sampled) in all.iter_mut().zip(drawn) {
            all.push(sampled.unwrap().unwrap().token);
        }
    }
    all.iter().zip(lens).map(|(all, len)| all[len..].to_vec()).collect()
}

#[test]
fn the_same_tokens_are_drawn() {
    let directory = model();
    let (mut ours, mut theirs): (Cuda, Candle) =
        (cuda(directory.path(), PLAIN, 24), candle(directory.path(), 24));
    let expected = together(|items| theirs.step(items), 10);
    let got = together(|items| ours.step(items), 10);
    for ((got, expected), params) in got.iter().zip(&expected).zip(kinds()) {
        assert_eq!(got, expected, "{params:?}");
    }
    assert!(expected[5].iter().any(|token| token.0 > 300), "hot tokens come from everywhere");
}

#[test]
fn logits_that_are_no_numbers_end_their_own_sequence() {
    let mut config = tiny("llama_tied").config;
    config["tie_word_embeddings"] = false.into();
    let mut model = Tiny::new(config);
    // The logit of token 7 overflows whatever the state is.
    let (shape, values) = model.tensors.get_mut("lm_head.weight").unwrap();
    let hidden = shape[1];
    values[7 * hidden..8 * hidden].fill(3e38);
    let directory = write(&model);
    let mut driver = cuda(directory.path(), PLAIN, 4);
    let prompt = tokens(1, 4);
    let (one, two, three) = (pages([0]), pages([1]), pages([2]));
    for params in [SamplingParams::greedy(), params(0.7, 5, 1.0), params(1.0, 0, 1.0)] {
        let mut broken = Sampler::new(params, 0, &prompt);
        let mut refused = Sampler::new(SamplingParams { top_p: 2.0, ..SamplingParams::greedy() }, 0, &prompt);
        let item = |pages, sampler| Item { tokens: &prompt, position: 0, pages, sampler };
        let drawn = driver.step(vec![
            item(&one, Some(&mut broken)),
            item(&two, None),
            item(&three, Some(&mut refused)),
        ]);
        let named = |error: &SampleError| matches!(error, SampleError::NotFinite { token: TokenId(7), value } if !value.is_finite());
        assert!(drawn[0].as_ref().unwrap().as_ref().is_err_and(named), "{:?}", drawn[0]);
        assert!(drawn[1].is_none());
        let refused = drawn[2].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(refused, SampleError::InvalidParam { field: "top_p", .. }), "{refused}");
    }
}
