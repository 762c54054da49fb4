//! What engines say of their caches attracts requests, also what no router sent there.

use std::time::Duration;

use anyhow::{Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::{Case, PAGE_SIZE, number, prompt, until};

const NUM_TOKENS: u32 = 20 * PAGE_SIZE;
/// The engine that each prompt is sent to directly; no order of turns is like that.
const HOLDERS: [usize; 6] = [1, 1, 0, 1, 0, 0];

fn case(number: u32, num_tokens: u32) -> Case {
    let salt = "one tenant".into();
    Case { prompt: prompt(num_tokens, 900 + number), max_tokens: 2, temperature: 0.0, seed: 0, salt }
}

/// Returns one of the router's metrics.
fn metric(cluster: &Cluster, name: &str) -> Result<u64> {
    let metrics = http::get(&format!("{}/metrics", cluster.router().url()))?.body;
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Ok(value.unwrap_or(0))
}

const REPORTED: &str = "microserving_router_index_pages{source=\"reported\"}";
const HINTED: &str = "microserving_router_index_hint_tokens_total{hint=\"hinted\"}";

#[test]
fn a_prompt_that_no_router_sent_attracts_the_next_one_until_its_engine_is_restarted() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(2))?;
    for (number, holder) in (0..).zip(HOLDERS) {
        case(number, NUM_TOKENS).send(cluster.engines()[holder].url(), None)?;
    }
    let all = u64::from(NUM_TOKENS / PAGE_SIZE) * HOLDERS.len() as u64;
    until("all pages are reported", || Ok(metric(&cluster, REPORTED)? >= all))?;
    let router = cluster.router().url().to_owned();
    for (number_of, holder) in (0..).zip(HOLDERS) {
        // The prompts have 10 tokens more now.
        let longer = Case {
            prompt: [case(number_of, NUM_TOKENS).prompt, prompt(10, number_of)].concat(),
            ..case(number_of, 1)
        };
        let answer = longer.send(&router, Some("data_parallel"))?;
        let engine = cluster.engines()[holder].url();
        ensure!(
            answer.stats["decode_engine"] == engine,
            "prompt {number_of} is held by {engine}: {}",
            answer.stats
        );
        ensure!(number(&answer.stats, "matched_tokens")? == u64::from(NUM_TOKENS), "{}", answer.stats);
    }
    ensure!(
        metric(&cluster, HINTED)? == u64::from(NUM_TOKENS) * HOLDERS.len() as u64,
        "every hint was right"
    );

    cluster.engines_mut()[1].restart(Duration::from_secs(30))?;
    let ready = format!("microserving_router_engine_ready{{engine=\"{}\"}}", cluster.engines()[1].url());
    until("the pages of the engine that was restarted are forgotten", || {
        Ok(metric(&cluster, &ready)? == 1 && metric(&cluster, REPORTED)? < all)
    })?;
    let mut on = Vec::new();
    for (number_of, _) in (0..).zip(HOLDERS).filter(|(_, holder)| *holder == 1) {
        let before = metric(&cluster, HINTED)?;
        let answer = case(number_of, NUM_TOKENS + 10).send(&router, Some("data_parallel"))?;
        ensure!(metric(&cluster, HINTED)? == before, "nobody is believed to hold prompt {number_of}");
        on.push(answer.stats["decode_engine"].clone());
    }
    ensure!(on.contains(&cluster.engines()[0].url().into()), "prompts still go where they were held: {on:?}");
    cluster.wait_idle(Duration::from_secs(10))
}
