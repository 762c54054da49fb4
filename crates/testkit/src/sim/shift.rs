//! Two topics, history and science, each with a long prefix of its own, and a mix that shifts from one to the other.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use microserving_protocol::{SamplingParams, TokenId};

use super::request::{Pattern, Request};
use super::world::World;
use super::{Report, SimOptions, simulate_load};
use crate::Dice;

/// Tokens of each topic's prefix.
const PREFIX: u64 = 400;
/// How long requests come; in the middle third the mix shifts.
const LOAD: Duration = Duration::from_secs(60);
const NUM_REQUESTS: u32 = 600;

fn topics(dice: &Dice) -> [Vec<TokenId>; 2] {
    [1, 2].map(|topic| {
        let mut dice = dice.split(topic);
        (0..PREFIX).map(|_| TokenId(dice.below(256) as u32)).collect()
    })
}

/// Draws a request: of science nine times in ten at the end of the load, once in ten at its beginning.
fn draw(world: &World, dice: &mut Dice, topics: &[Vec<TokenId>; 2], number: u32) -> Request {
    // The first two are alone, one of each topic: before a context is known to be anywhere, many that ask for it go everywhere.
    let arrives = match number {
        0 | 1 => Duration::from_millis(50 + 1500 * u64::from(number)),
        _ => dice.time(Duration::from_secs(4), LOAD),
    };
    let progress = arrives.as_secs_f64() / LOAD.as_secs_f64();
    let science = number == 1 || (number > 1 && dice.chance(((progress - 1.0 / 3.0) * 3.0).clamp(0.1, 0.9)));
    let mut prompt = topics[usize::from(science)].clone();
    prompt.extend((0..dice.range(6, 16)).map(|_| TokenId(dice.below(256) as u32)));
    let (sampling, max_output) = (SamplingParams::greedy(), dice.range(4, 16) as u32);
    let mut oracle = world.oracle.lock().unwrap_or_else(PoisonError::into_inner);
    let reference = Arc::new(oracle.run(&prompt, &sampling, max_output, ""));
    Request {
        name: format!("question-{number}"),
        prompt: prompt.into(),
        sampling,
        max_output,
        salt: "".into(),
        pattern: Pattern::DataParallel,
        by_router: true,
        arrives,
        leaves_after: None,
        reference,
    }
}

fn run(seed: u64, contexts_move: bool) -> Report {
    let options = SimOptions {
        num_requests: NUM_REQUESTS,
        by_router: 1.0,
        fault_phase: LOAD,
        num_pages: 240,
        max_batch_tokens: 64,
        max_running: 4,
        lease: Duration::from_secs(5),
        step_time: Duration::from_millis(100),
        max_prompt: PREFIX as u32 + 16,
        max_output: 16,
        must_answer: true,
        contexts_move,
        ..SimOptions::calm()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO needs nothing from the system");
    runtime.block_on(simulate_load(seed, options, |world, dice| {
        let topics = topics(dice);
        (0..NUM_REQUESTS).map(|number| draw(world, dice, &topics, number)).collect()
    }))
}

/// Contexts that follow the mix are copied and not computed again, and requests wait less. Each run also checks every answer's tokens, every page
/// that can be matched, and that nothing is left.
#[test]
fn contexts_follow_the_mix() {
    let (mut computed, mut waited) = ([0; 2], [Duration::ZERO; 2]);
    // Of these seeds the router places by prefix.
    for seed in [2, 5] {
        for moves in [false, true] {
            let report = run(seed, moves);
            assert!(report.is_ok(), "moves {moves}: {report}");
            let tally = report.tally;
            println!(
                "seed {seed}, moves {moves}: {} of {} prompt tokens computed, {} sent, first tokens after {:?}",
                tally.prompt_tokens - tally.cached_tokens,
                tally.prompt_tokens,
                tally.sent_tokens,
                tally.first_token / NUM_REQUESTS
            );
            computed[usize::from(moves)] += tally.prompt_tokens - tally.cached_tokens;
            waited[usize::from(moves)] += tally.first_token / NUM_REQUESTS;
        }
    }
    println!("computed {computed:?}, first token {waited:?}");
    assert!(computed[1] < computed[0], "prompt tokens computed without and with: {computed:?}");
}
