//! gRPC between real processes: cancelling, dying, and engines that come back without it.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions, binary_dir};
use microserving_tests::{prompt, until};
use serde_json::{Value, json};

/// Returns how many generations an engine has answered over gRPC.
pub(crate) fn grpc_calls(cluster: &Cluster, engine: usize) -> Result<u64> {
    let text = http::get(&format!("{}/metrics", cluster.engines()[engine].url()))?.body;
    let calls = text.lines().filter(|line| line.contains("Engine/StartGenerate") && !line.starts_with('#'));
    Ok(calls.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum())
}

fn wire_of(cluster: &Cluster) -> Result<String> {
    let engines: Value = http::get(&format!("{}/admin/v1/engines", cluster.router().url()))?.json()?;
    Ok(engines.pointer("/engines/0/wire").and_then(Value::as_str).context("no wire")?.to_owned())
}

fn is_ready(cluster: &Cluster) -> Result<bool> {
    Ok(http::status(&format!("{}/health/ready", cluster.router().url()))? == 200)
}

fn complete(cluster: &Cluster, seed: u32) -> Result<String> {
    let body = json!({"prompt": prompt(50, seed), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let answer: Value =
        http::post(&format!("{}/v1/completions", cluster.router().url()), &[], &body)?.json()?;
    Ok(answer["choices"][0]["text"].as_str().context("no text")?.to_owned())
}

#[test]
fn a_client_that_leaves_cancels_through_the_router() -> Result<()> {
    for pattern in ["data_parallel", "prefill_decode"] {
        let options = ClusterOptions::toy(2).engine_args(["--toy-step-ms", "10"]).wire("grpc");
        let mut cluster = Cluster::start(&options)?;
        let body = json!({"prompt": prompt(50, 1), "max_tokens": 2000, "stream": true, "ignore_eos": true});
        let url = format!("{}/v1/completions", cluster.router().url());
        let mut stream = http::post_stream(&url, &[("x-microserving-pattern", pattern)], &body)?;
        stream.next_event()?.context("no first event")?;
        drop(stream);
        // Two thousand tokens take twenty seconds: whoever is idle before that was told.
        cluster.wait_idle(Duration::from_secs(10))?;
        let aborted = |engine| -> Result<u64> {
            let state = cluster.engine_state(engine)?;
            state.pointer("/counters/aborted").and_then(Value::as_u64).context("no figure")
        };
        ensure!(aborted(0)? + aborted(1)? > 0, "{pattern}: nothing was aborted");
    }
    Ok(())
}

#[test]
fn an_engine_killed_within_a_stream_ends_it_with_an_error() -> Result<()> {
    let options = ClusterOptions::toy(2).engine_args(["--toy-step-ms", "10"]).wire("grpc");
    let mut cluster = Cluster::start(&options)?;
    let url = format!("{}/v1/completions", cluster.router().url());
    let pattern = [("x-microserving-pattern", "data_parallel")];
    // Long enough to be killed within, short enough to be told again by a crowded machine.
    let body = json!({"prompt": prompt(50, 1), "max_tokens": 500, "stream": true, "ignore_eos": true});
    let mut stream = http::post_stream(&url, &pattern, &body)?;
    stream.next_event()?.context("no first event")?;
    let running =
        |engine| -> Result<u64> { cluster.engine_state(engine)?["running"].as_u64().context("no figure") };
    let busy = if running(0)? > 0 { 0 } else { 1 };
    let killed = Instant::now();
    cluster.engines_mut()[busy].kill()?;
    // Either it goes on elsewhere, or the client is told at once; it never just hangs.
    while let Some(event) = stream.next_event()? {
        if event.get("error").is_some() {
            break;
        }
    }
    ensure!(killed.elapsed() < Duration::from_secs(60), "the stream ended after {:?}", killed.elapsed());
    drop(stream);
    for seed in 0..5 {
        ensure!(complete(&cluster, seed)?.len() == 8, "the other engine serves");
    }
    cluster.wait_idle(Duration::from_secs(10))
}

/// An engine on a given port, killed when dropped.
struct Successor(Child);

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_engine_may_come_back_without_grpc_and_with_it() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(1))?;
    ensure!(wire_of(&cluster)? == "grpc", "auto takes what is offered");
    let wanted = complete(&cluster, 1)?;
    let address = cluster.engines()[0].url().trim_start_matches("http://").to_owned();
    cluster.engines_mut()[0].kill()?;
    until("the router misses it", || Ok(!is_ready(&cluster)?))?;
    for (flags, wire) in [(&["--no-grpc"][..], "rest"), (&[][..], "grpc")] {
        let engined = binary_dir()?.join("engined");
        let args = ["--model", "toy", "--engine-id", "engine-0", "--listen", &address];
        let child = Command::new(engined)
            .args(args)
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let successor = Successor(child);
        // The router finds it by itself, and then no request fails.
        until("the router finds it", || Ok(is_ready(&cluster)? && wire_of(&cluster)? == wire))?;
        for _ in 0..5 {
            ensure!(complete(&cluster, 1)? == wanted, "{wire}: another answer");
        }
        drop(successor);
        until("the router misses it", || Ok(!is_ready(&cluster)?))?;
    }
    Ok(())
}
