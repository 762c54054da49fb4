//! Nothing is lost or left behind by a crowd of requests, a third of them cancelled.

use std::time::Duration;

use anyhow::{Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::prompt;
use serde_json::json;

const NUM_REQUESTS: u32 = 300;
const NUM_CLIENTS: u32 = 12;

/// Reads a stream, or drops it after so many events.
fn request(url: &str, index: u32) -> Result<bool> {
    let patterns = ["data_parallel", "prefill_decode", "balanced:0.25"];
    let pattern = patterns[index as usize % patterns.len()];
    let length = 1 + (index * 37) % 400;
    let body = json!({
        "prompt": prompt(length, index / 3), "max_tokens": 1 + index % 60, "temperature": f64::from(index % 2),
        "seed": index, "n": 1 + index % 2, "stream": true, "priority": index % 3,
    });
    let mut stream =
        http::post_stream(&format!("{url}/v1/completions"), &[("x-microserving-pattern", pattern)], &body)?;
    let cancel_after = if index.is_multiple_of(3) { index / 3 % 25 } else { u32::MAX };
    let mut num_events = 0;
    while num_events < cancel_after {
        match stream.next_event()? {
            None => return Ok(true),
            Some(event) => ensure!(event.get("error").is_none(), "request {index} failed: {event}"),
        }
        num_events += 1;
    }
    Ok(false)
}

#[test]
fn pages_balance_after_300_requests_a_third_cancelled() -> Result<()> {
    let options = ClusterOptions::toy(2).engine_args([
        "--lease-seconds",
        "1",
        "--toy-step-ms",
        "1",
        "--num-pages",
        "2048",
    ]);
    let mut cluster = Cluster::start(&options)?;
    let url = cluster.router().url().to_owned();
    let outcomes: Vec<Result<bool>> = std::thread::scope(|scope| {
        let url = &url;
        let clients: Vec<_> = (0..NUM_CLIENTS)
            .map(|client| {
                let mine = (0..NUM_REQUESTS).filter(move |index| index % NUM_CLIENTS == client);
                scope.spawn(move || mine.map(|index| request(url, index)).collect::<Vec<_>>())
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().expect("a client does not panic")).collect()
    });
    let mut finished = 0;
    let mut cancelled = 0;
    for outcome in outcomes {
        if outcome? { finished += 1 } else { cancelled += 1 }
    }
    ensure!(
        finished + cancelled == NUM_REQUESTS && cancelled > NUM_REQUESTS / 5,
        "{finished} finished, {cancelled} cancelled"
    );
    cluster.wait_idle(Duration::from_secs(15))?;
    let metrics = http::get(&format!("{url}/metrics"))?.body;
    let in_flight: Vec<&str> =
        metrics.lines().filter(|line| line.contains("in_flight") && !line.starts_with('#')).collect();
    ensure!(!in_flight.is_empty(), "the router counts nothing in flight:\n{metrics}");
    for line in in_flight {
        ensure!(line.ends_with(" 0"), "still in flight: {line}");
    }
    Ok(())
}
