//! Changing the pattern under load: how soon the new one serves, and what the change costs those who are being served.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, http};
use serde_json::json;

use super::engine::percentile;
use super::row::Rows;
use crate::table;

const STREAMS: u32 = 64;
const PROMPT_TOKENS: u32 = 200;
const OUTPUT_TOKENS: u32 = 32;
const PERIOD: Duration = Duration::from_millis(100);
const PATTERNS: [&str; 2] = ["data_parallel", "prefill_decode"];

/// One answer: when it began to arrive, under which pattern, and its time per output token.
struct Answered {
    at: Instant,
    pattern: String,
    tpot: Duration,
}

/// Measures with a change every 100 ms, and the same load without any, half of it under each pattern.
pub(crate) fn run(binaries: &Path, rows: &mut Rows, seconds: u64) -> Result<()> {
    let duration = Duration::from_secs(seconds);
    let mut options = ClusterOptions::toy(4);
    options.binaries = Some(binaries.to_path_buf());
    let cluster = Cluster::start(&options.engine_args(["--transport", "shm", "--num-pages", "8192"]))?;
    let router = cluster.router().url();
    let changing = measure(router, duration, Some(PERIOD))?;
    let steady = measure(router, duration, None)?;

    let mut until_first = Vec::new();
    let mut unseen = 0;
    for (index, (put, pattern)) in changing.puts.iter().enumerate() {
        let end = changing.puts.get(index + 1).map_or(*put + PERIOD, |next| next.0);
        let first = changing.answers.iter().filter(|answer| answer.at > *put && answer.at < end);
        match first.filter(|answer| answer.pattern == *pattern).map(|answer| answer.at).min() {
            Some(at) => until_first.push((at - *put).as_secs_f64()),
            None => unseen += 1,
        }
    }
    ensure!(!until_first.is_empty(), "no change of the pattern was seen");
    let tpot = |run: &Run| run.answers.iter().map(|answer| answer.tpot.as_secs_f64()).collect::<Vec<_>>();
    let (during, without) = (tpot(&changing), tpot(&steady));
    let result = json!({
        "streams": STREAMS, "engines": 4, "period_seconds": PERIOD.as_secs_f64(), "changes": changing.puts.len(),
        "changes_without_a_request": unseen,
        "put_to_first_request_p50_seconds": percentile(&until_first, 50.0),
        "put_to_first_request_p99_seconds": percentile(&until_first, 99.0),
        "tpot_p50_changing_seconds": percentile(&during, 50.0), "tpot_p50_steady_seconds": percentile(&without, 50.0),
        "tpot_p99_changing_seconds": percentile(&during, 99.0), "tpot_p99_steady_seconds": percentile(&without, 99.0),
        "requests_changing": changing.answers.len(), "requests_steady": steady.answers.len(),
        "failed": changing.failed + steady.failed,
    });
    println!(
        "\nswitch: {STREAMS} streams over 4 toy engines, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, {} changes",
        changing.puts.len()
    );
    let millis = |values: &[f64], p: f64| format!("{:.2}", percentile(values, p) * 1e3);
    let line = |name: &str, values: &[f64]| vec![name.to_owned(), millis(values, 50.0), millis(values, 99.0)];
    table::print(
        &["", "p50 ms", "p99 ms"],
        &[
            line("PUT to first request", &until_first),
            line("TPOT while changing", &during),
            line("TPOT without", &without),
        ],
    );
    rows.push("switch", result)
}

struct Run {
    answers: Vec<Answered>,
    puts: Vec<(Instant, &'static str)>,
    failed: usize,
}

/// Serves the load for a while; changes the pattern each `period`, or once in the middle.
fn measure(router: &str, duration: Duration, period: Option<Duration>) -> Result<Run> {
    let stop = AtomicBool::new(false);
    let answers = Mutex::new(Vec::new());
    let failed = std::sync::atomic::AtomicUsize::new(0);
    put(router, PATTERNS[0])?;
    let puts = std::thread::scope(|scope| {
        for client in 0..STREAMS {
            let (stop, answers, failed) = (&stop, &answers, &failed);
            scope.spawn(move || {
                for round in 0_u32.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match request(router, client, round) {
                        Ok(answer) => answers.lock().expect("no client panics").push(answer),
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let puts = change(router, duration, period);
        stop.store(true, Ordering::Relaxed);
        puts
    })?;
    let answers = answers.into_inner().expect("no client panics");
    ensure!(!answers.is_empty(), "every request failed");
    Ok(Run { answers, puts, failed: failed.into_inner() })
}

/// Changes the pattern and returns when each change was asked for.
fn change(
    router: &str,
    duration: Duration,
    period: Option<Duration>,
) -> Result<Vec<(Instant, &'static str)>> {
    let start = Instant::now();
    let period = period.unwrap_or(duration / 2);
    let mut puts = Vec::new();
    std::thread::sleep(period);
    while start.elapsed() + period / 2 < duration {
        let pattern = PATTERNS[(puts.len() + 1) % PATTERNS.len()];
        puts.push((Instant::now(), pattern));
        put(router, pattern)?;
        let next = period * u32::try_from(puts.len() + 1).context("too many changes")?;
        std::thread::sleep(next.saturating_sub(start.elapsed()));
    }
    Ok(puts)
}

fn put(router: &str, pattern: &str) -> Result<()> {
    let answer = http::put(&format!("{router}/admin/v1/pattern"), &json!({"name": pattern}))?;
    ensure!(answer.status == 200, "{}: {}", answer.status, answer.body);
    Ok(())
}

fn request(router: &str, client: u32, round: u32) -> Result<Answered> {
    let prompt: Vec<u32> =
        (0..PROMPT_TOKENS).map(|at| 97 + (at * 7 + client * 13 + round * 3) % 26).collect();
    let body = json!({"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "cache_salt": format!("{client}-{round}")});
    let mut stream = http::post_stream(&format!("{router}/v1/completions"), &[], &body)?;
    let at = Instant::now();
    let header = stream.headers.iter().find(|(name, _)| name == "x-microserving-pattern");
    let pattern = header.map(|(_, value)| value.clone()).context("the answer does not say its pattern")?;
    let mut last = at;
    while let Some(event) = stream.next_event()? {
        ensure!(event.get("error").is_none(), "{event}");
        if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            last = Instant::now();
        }
    }
    Ok(Answered { at, pattern, tpot: (last - at) / (OUTPUT_TOKENS - 1) })
}
