//! The pattern changes under load, and an engine comes and goes: nothing fails, and no token differs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, Daemon, http};
use microserving_tests::{Case, number, programs, prompt, skip};
use serde_json::{Value, json};

const STREAMS: u32 = 64;
const CASES: u32 = 48;
/// Between two changes of the pattern.
const PERIOD: Duration = Duration::from_millis(100);

/// One of the requests that come again and again: lengths around pages, greedy and seeded.
fn case(index: u32) -> Case {
    Case {
        prompt: prompt(17 + 23 * (index % 12), 9000 + index),
        max_tokens: 12 + index % 9,
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: u64::from(index),
        salt: format!("switch-{}", index % 3),
    }
}

/// What one client saw.
#[derive(Default)]
struct Seen {
    by_pattern: BTreeMap<String, u32>,
    moved: u64,
    failures: Vec<String>,
}

/// Sends cases until told to stop.
fn client(number_of_client: u32, router: &str, wanted: &[Vec<u32>], stop: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    let mut index = number_of_client * 7;
    while !stop.load(Ordering::Relaxed) {
        index = (index + 5) % CASES;
        let outcome = case(index).send(router, None).and_then(|answer| {
            ensure!(
                answer.token_ids == wanted[index as usize],
                "case {index}: {:?} is not {:?}",
                answer.token_ids,
                wanted[index as usize]
            );
            let pattern = answer.stats["pattern"].as_str().context("no pattern")?.to_owned();
            Ok((pattern, number(&answer.stats, "sent_tokens")?))
        });
        match outcome {
            Ok((pattern, moved)) => {
                *seen.by_pattern.entry(pattern).or_default() += 1;
                seen.moved += moved;
            }
            Err(error) => seen.failures.push(format!("{error:#}")),
        }
    }
    seen
}

/// Changes the pattern again and again; returns how often.
fn switch(router: &str, patterns: &[Value], stop: &AtomicBool) -> Result<u32> {
    let start = Instant::now();
    let mut switches = 0;
    while !stop.load(Ordering::Relaxed) {
        let pattern = &patterns[switches as usize % patterns.len()];
        let answer = http::put(&format!("{router}/admin/v1/pattern"), pattern)?;
        ensure!(answer.status == 200, "{pattern}: {} {}", answer.status, answer.body);
        switches += 1;
        std::thread::sleep((PERIOD * switches).saturating_sub(start.elapsed()));
    }
    Ok(switches)
}

/// Lets one more engine join, and after a while drain and leave; says whether the router knows how.
fn come_and_go(router: &str, args: &[String], stay: Duration) -> Result<bool> {
    let binaries = microserving_harness::binary_dir()?;
    let mut engine = Daemon::spawn("guest", &binaries.join("engined"), args, Duration::from_secs(20))?;
    engine.wait_ready(Duration::from_secs(20))?;
    let engines = format!("{router}/admin/v1/engines");
    let answer = http::post(&engines, &[], &json!({"url": engine.url()}))?;
    if answer.status == 405 {
        return Ok(false);
    }
    ensure!(answer.status == 201, "join: {} {}", answer.status, answer.body);
    std::thread::sleep(stay);
    let id = member(router, engine.url())?["id"].as_u64().context("no id")?;
    let state: Value = http::get(&format!("{}/microserving/state", engine.url()))?.json()?;
    ensure!(number(&state["counters"], "decode_tokens")? > 0, "the guest got no request: {state}");
    let answer = http::post(&format!("{engines}/{id}/drain"), &[], &json!({}))?;
    ensure!(answer.status == 200, "drain: {} {}", answer.status, answer.body);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if member(router, engine.url())?["in_flight"] == 0 {
            break;
        }
        ensure!(Instant::now() < deadline, "the guest does not run empty");
        std::thread::sleep(Duration::from_millis(20));
    }
    let answer = http::delete(&format!("{engines}/{id}"))?;
    ensure!(answer.status == 200, "leave: {} {}", answer.status, answer.body);
    engine.stop(Duration::from_secs(10))?;
    Ok(true)
}

fn member(router: &str, url: &str) -> Result<Value> {
    let list: Value = http::get(&format!("{router}/admin/v1/engines"))?.json()?;
    let engines = list["engines"].as_array().context("no engines")?;
    engines
        .iter()
        .find(|engine| engine["engine"] == url)
        .cloned()
        .with_context(|| format!("{url} is not in {list}"))
}

/// `MICROSERVING_MATRIX` runs for 30 seconds instead of 6.
#[test]
fn patterns_change_and_an_engine_comes_and_goes_under_load() -> Result<()> {
    let whole = std::env::var_os("MICROSERVING_MATRIX").is_some();
    let duration = Duration::from_secs(if whole { 30 } else { 6 });
    let args = ["--transport", "shm", "--num-pages", "8192"];
    let mut cluster = Cluster::start(&ClusterOptions::toy(4).engine_args(args))?;
    let patterns = programs(cluster.router().url())?;
    let alone = cluster.engines()[0].url();
    let wanted: Vec<Vec<u32>> = (0..CASES)
        .map(|index| {
            let case = Case { salt: format!("alone-{index}"), ..case(index) };
            case.send(alone, None).map(|answer| answer.token_ids)
        })
        .collect::<Result<_>>()?;

    let stop = AtomicBool::new(false);
    let router = cluster.router().url();
    let mut guest = vec!["--model".to_owned(), "toy".into(), "--engine-id".into(), "guest".into()];
    guest.extend(args.map(str::to_owned));
    let (seen, switches, guest) = std::thread::scope(|scope| {
        let (stop, wanted, patterns) = (&stop, &wanted, &patterns);
        let clients: Vec<_> =
            (0..STREAMS).map(|number| scope.spawn(move || client(number, router, wanted, stop))).collect();
        let switcher = scope.spawn(move || switch(router, patterns, stop));
        let guest = scope.spawn(move || come_and_go(router, &guest, duration / 2));
        let start = Instant::now();
        let guest = guest.join().expect("does not panic");
        std::thread::sleep(duration.saturating_sub(start.elapsed()));
        stop.store(true, Ordering::Relaxed);
        let switches = switcher.join().expect("does not panic");
        let seen: Vec<Seen> =
            clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect();
        (seen, switches, guest)
    });
    let switches = switches?;
    if !guest? {
        skip("this router takes no engines while it runs");
    }
    let mut by_pattern: BTreeMap<String, u32> = BTreeMap::new();
    for (pattern, count) in seen.iter().flat_map(|seen| &seen.by_pattern) {
        *by_pattern.entry(pattern.clone()).or_default() += count;
    }
    let failures: Vec<&String> = seen.iter().flat_map(|seen| &seen.failures).collect();
    let moved: u64 = seen.iter().map(|seen| seen.moved).sum();
    println!(
        "switch: {switches} changes among {} patterns, {} requests over {STREAMS} streams, {} failed, {moved} tokens moved: {by_pattern:?}",
        patterns.len(),
        by_pattern.values().sum::<u32>(),
        failures.len()
    );
    ensure!(failures.is_empty(), "{} requests failed or differ, the first: {}", failures.len(), failures[0]);
    ensure!(switches as usize >= 2 * patterns.len(), "only {switches} changes of the pattern");
    ensure!(
        by_pattern.len() == patterns.len(),
        "{} patterns served of {}: {by_pattern:?}",
        by_pattern.len(),
        patterns.len()
    );
    ensure!(moved > 0, "no KV moved");
    cluster.wait_idle(Duration::from_secs(20))
}
