//! Three engines and a router in virtual time, under loss, delay, reordering, crashes and pauses.
//!
//! `MICROSERVING_SEEDS=1000..2000` runs other seeds; one that fails is printed with all that it takes to see it again.

use anyhow::{Context as _, Result, ensure};
use microserving_testkit::sim::{self, SimOptions};

fn seeds() -> Result<std::ops::Range<u64>> {
    let Ok(text) = std::env::var("MICROSERVING_SEEDS") else { return Ok(0..200) };
    let (begin, end) = text.split_once("..").context("MICROSERVING_SEEDS is not of the form BEGIN..END")?;
    Ok(begin.parse()?..end.parse()?)
}

#[test]
fn every_seed_keeps_the_invariants_and_ends() -> Result<()> {
    let mut failures = Vec::new();
    let seeds = seeds()?;
    for seed in seeds.clone() {
        let report = sim::run(seed, &SimOptions::swarm(seed));
        if !report.is_ok() {
            failures.push(report.to_string());
        }
    }
    ensure!(
        failures.is_empty(),
        "{} of {} seeds fail:\n{}",
        failures.len(),
        seeds.end - seeds.start,
        failures.join("\n")
    );
    Ok(())
}
