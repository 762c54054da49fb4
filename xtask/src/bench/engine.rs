//! One engine over HTTP: prefill 512 and decode 128 tokens, at several batch sizes.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use microserving_harness::http::{self, Timed};
use microserving_harness::{Cluster, ClusterOptions};
use serde_json::json;

use super::row::Rows;
use crate::table;

const PREFILL_TOKENS: u32 = 512;
const DECODE_TOKENS: u32 = 128;

/// Measures an engine alone, then the same load through prefill–decode on two.
pub(crate) fn run(binaries: &Path, model: &str, rows: &mut Rows) -> Result<()> {
    let mut lines = Vec::new();
    for pattern in ["engine", "data_parallel", "prefill_decode"] {
        let mut options = ClusterOptions::model(if pattern == "engine" { 1 } else { 2 }, model);
        options.binaries = Some(binaries.to_path_buf());
        let threads = if pattern == "engine" { "2" } else { "1" };
        let cluster = Cluster::start(&options.engine_args(["--threads", threads]))?;
        let (url, headers) = match pattern {
            "engine" => (cluster.engines()[0].url(), vec![]),
            pattern => (cluster.router().url(), vec![("x-microserving-pattern", pattern)]),
        };
        for batch in [1, 4, 8, 16] {
            let load = Load { url, headers: &headers, batch };
            let (answers, elapsed, failed) = load.run()?;
            let (line, result) = summarise(pattern, batch, &answers, elapsed, failed);
            rows.push("engine", result)?;
            lines.push(line);
        }
        let (now, peak) = cluster.engines()[0].resident_bytes()?;
        rows.push("engine_memory", json!({"setup": pattern, "rss_bytes": now, "peak_rss_bytes": peak}))?;
    }
    println!("\nengine: prompt {PREFILL_TOKENS}, output {DECODE_TOKENS} tokens, {model}");
    let header =
        ["setup", "batch", "TTFT p50 ms", "TTFT p99", "TPOT p50 ms", "TPOT p99", "output tok/s", "failed"];
    table::print(&header, &lines);
    Ok(())
}

/// A closed batch: all requests at once.
struct Load<'a> {
    url: &'a str,
    headers: &'a [(&'a str, &'a str)],
    batch: u32,
}

impl Load<'_> {
    fn run(&self) -> Result<(Vec<Timed>, Duration, usize)> {
        let start = Instant::now();
        let results: Vec<Result<Timed>> = std::thread::scope(|scope| {
            let clients: Vec<_> =
                (0..self.batch).map(|client| scope.spawn(move || self.request(client))).collect();
            clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
        });
        let elapsed = start.elapsed();
        let failed = results.iter().filter(|result| result.is_err()).count();
        let answers: Vec<Timed> = results.into_iter().flatten().collect();
        if answers.is_empty() {
            self.request(0).context("every request failed")?;
        }
        Ok((answers, elapsed, failed))
    }

    /// Sends token ids, so that the prompt's length is exact; each client's differ from the first token on.
    fn request(&self, client: u32) -> Result<Timed> {
        let prompt: Vec<u32> =
            (0..PREFILL_TOKENS).map(|at| 40 + (at * 7 + client * 13 + self.batch * 31) % 200).collect();
        let body = json!({
            "prompt": prompt, "max_tokens": DECODE_TOKENS, "temperature": 0, "ignore_eos": true,
            "cache_salt": format!("{}-{client}", self.batch), "return_token_ids": true,
        });
        http::timed_stream(&format!("{}/v1/completions", self.url), self.headers, &body, |_| ())
    }
}

fn summarise(
    setup: &str,
    batch: u32,
    answers: &[Timed],
    elapsed: Duration,
    failed: usize,
) -> (Vec<String>, serde_json::Value) {
    let ttft: Vec<f64> = answers.iter().map(|answer| answer.ttft.as_secs_f64()).collect();
    let tpot: Vec<f64> = answers.iter().map(|answer| answer.tpot.as_secs_f64()).collect();
    let tokens: usize = answers.iter().map(|answer| answer.token_ids.len()).sum();
    let rate = tokens as f64 / elapsed.as_secs_f64();
    let result = json!({
        "setup": setup, "batch": batch, "prompt_tokens": PREFILL_TOKENS, "output_tokens": DECODE_TOKENS,
        "ttft_p50_seconds": percentile(&ttft, 50.0), "ttft_p99_seconds": percentile(&ttft, 99.0),
        "tpot_p50_seconds": percentile(&tpot, 50.0), "tpot_p99_seconds": percentile(&tpot, 99.0),
        "output_tokens_per_second": rate, "failed": failed,
    });
    let millis = |values: &[f64], p: f64| format!("{:.1}", percentile(values, p) * 1e3);
    let line = vec![
        setup.to_owned(),
        batch.to_string(),
        millis(&ttft, 50.0),
        millis(&ttft, 99.0),
        millis(&tpot, 50.0),
        millis(&tpot, 99.0),
        format!("{rate:.1}"),
        failed.to_string(),
    ];
    (line, result)
}

/// Returns the value below which `p` percent lie (nearest rank); 0 of nothing.
pub(crate) fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (p / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!((percentile(&values, 50.0), percentile(&values, 99.0)), (50.0, 99.0));
        assert_eq!((percentile(&[7.0], 99.0), percentile(&[], 50.0)), (7.0, 0.0));
    }
}
