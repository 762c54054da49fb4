use microserving_engine::Mutant;

use super::*;

#[test]
fn a_calm_run_answers_everything() {
    for seed in 0..5 {
        let report = run(seed, &SimOptions::calm());
        assert!(report.is_ok(), "{report}");
        let tally = report.tally;
        assert_eq!((tally.done, tally.failed, tally.cancelled), (24 + 5, 0, 0), "{report}");
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
    let mut tally = Tally::default();
    for seed in 0..40 {
        let report = run(seed, &SimOptions::swarm(seed));
        assert!(report.is_ok(), "{report}");
        tally.crashes += report.tally.crashes;
        tally.pauses += report.tally.pauses;
        tally.cuts += report.tally.cuts;
        tally.router_deaths += report.tally.router_deaths;
        tally.lost += report.tally.lost;
        tally.duplicates += report.tally.duplicates;
        tally.done += report.tally.done;
        tally.retries += report.tally.retries;
    }
    let Tally { crashes, pauses, cuts, router_deaths, lost, duplicates, done, retries, .. } = tally;
    for count in [crashes, pauses, cuts, router_deaths, lost, duplicates, done, retries] {
        assert!(count > 5, "a kind of trouble is missing: {tally:?}");
    }
}

/// A mutant that no seed notices would say that the campaign cannot see what it is there to see.
#[test]
fn mutants_are_killed() {
    let mutants = [
        Mutant::FreeAtOnce,
        Mutant::FreeAfterTtl,
        Mutant::NoAttemptCheck,
        Mutant::MissingAbort,
        Mutant::OffByOnePage,
    ];
    for mutant in mutants {
        let killer = (0..200).find(|&seed| !run(seed, &SimOptions::swarm(seed).with_mutant(mutant)).is_ok());
        eprintln!("{mutant:?} killed by {killer:?}");
        assert!(killer.is_some(), "{mutant:?} survives 200 seeds");
    }
}

#[test]
fn a_death_at_any_point_is_survived() {
    let options = SimOptions {
        num_requests: 3,
        fault_phase: Duration::from_millis(200),
        max_prompt: 24,
        max_output: 4,
        ..SimOptions::calm()
    };
    let (bad, num_runs) = run_every_point(1, &options);
    assert!(num_runs > 100, "{num_runs}");
    let bad: Vec<_> = bad.iter().map(ToString::to_string).collect();
    assert!(bad.is_empty(), "{} of {num_runs} runs: {}", bad.len(), bad.join("\n"));
}
