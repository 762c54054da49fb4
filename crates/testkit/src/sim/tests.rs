use microserving_engine::Mutant;

use super::*;

#[test]
fn a_calm_run_answers_everything() {
    for seed in 0..5 {
        let report = run(seed, &SimOptions::calm());
        assert!(report.is_ok(), "{report}");
        let tally = report.tally;
        assert_eq!((tally.done, tally.failed, tally.cancelled), (24 + 8, 0, 0), "{report}");
        assert!(tally.sent_tokens > 100 && tally.matched_tokens > 0 && tally.tokens > 50, "{tally:?}");
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in [3, 4] {
        let options = SimOptions::swarm(seed);
        assert_eq!(run(seed, &options), run(seed, &options));
    }
    let options = SimOptions::swarm(3);
    assert_ne!(run(3, &options).trace_hash, run(4, &options).trace_hash);
}

#[test]
fn swarms_hold_every_invariant() {
    let mut sum = Tally::default();
    for seed in 0..60 {
        let report = run(seed, &SimOptions::swarm(seed));
        assert!(report.is_ok(), "{report}");
        sum.add(&report.tally);
    }
    let Tally { crashes, pauses, cuts, router_deaths, lost, duplicates, strangers_refused, retries, .. } =
        sum;
    for count in [crashes, pauses, cuts, router_deaths, lost, duplicates, strangers_refused, retries] {
        assert!(count > 5, "a kind of trouble is missing: {sum:?}");
    }
    let wanted = sum.done + sum.failed;
    assert!(sum.done * 10 > wanted * 7, "most requests are answered all the same: {sum:?}");
}

#[test]
fn wrong_hints_change_no_answer() {
    for seed in 100..115 {
        let options = SimOptions { poisoned_hints: 1.0, ..SimOptions::swarm(seed) };
        let report = run(seed, &options);
        assert!(report.is_ok(), "{report}");
    }
}

/// A mutant that no seed notices would say that the campaign cannot see what it is there to see; one that is noticed by
/// something else than what it breaks would say no more.
fn assert_killed(mutant: Mutant, by: &[Invariant]) {
    let killed_by = |seed| {
        let report = run(seed, &SimOptions::swarm(seed).with_mutant(mutant));
        report.violations.iter().any(|violation| by.contains(&violation.invariant))
    };
    assert!((0..200).any(killed_by), "{mutant:?} survives 200 seeds");
}

const WRONG_KV: [Invariant; 2] = [Invariant::TokensExact, Invariant::Uncontaminated];

#[test]
fn freeing_at_once_is_noticed() {
    assert_killed(Mutant::FreeAtOnce, &WRONG_KV);
}

#[test]
fn freeing_after_a_ttl_is_noticed() {
    assert_killed(Mutant::FreeAfterTtl, &WRONG_KV);
}

#[test]
fn taking_lower_attempts_is_noticed() {
    assert_killed(Mutant::NoAttemptCheck, &[Invariant::OneAttempt]);
}

#[test]
fn not_aborting_is_noticed() {
    assert_killed(Mutant::MissingAbort, &[Invariant::GivenUpStaysSo]);
}

#[test]
fn matching_a_page_too_much_is_noticed() {
    assert_killed(Mutant::OffByOnePage, &WRONG_KV);
}

/// A few requests, so that every place in the run can be tried.
fn small() -> SimOptions {
    SimOptions {
        num_requests: 6,
        fault_phase: Duration::from_millis(400),
        max_prompt: 24,
        max_output: 4,
        ..SimOptions::calm()
    }
}

fn assert_none(bad: &[Report]) {
    let bad: Vec<_> = bad.iter().map(ToString::to_string).collect();
    assert!(bad.is_empty(), "{} runs: {}", bad.len(), bad.join("\n"));
}

#[test]
fn a_death_at_any_point_is_survived() {
    for by_router in [0.0, 1.0] {
        // One engine dies of three: what the router serves is answered all the same, whatever had come by then.
        let (bad, num_runs) = run_every_point(1, &SimOptions { by_router, must_answer: true, ..small() });
        assert!(num_runs > 100, "{num_runs}");
        assert_none(&bad);
    }
}

#[test]
fn two_deaths_are_survived() {
    assert_none(&run_pairs_of_points(2, &small(), 100));
}
