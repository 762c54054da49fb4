//! A peer that dies, or stops, between any two of the three calls.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Answer};
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::{number, prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

const NUM_TOKENS: u32 = 200;

/// The three calls of one request, made by hand.
struct Calls {
    p: String,
    d: String,
    seq_id: String,
    prompt: Vec<u32>,
}

impl Calls {
    fn new(cluster: &Cluster, seq_id: &str) -> Self {
        Self {
            p: cluster.engines()[0].url().to_owned(),
            d: cluster.engines()[1].url().to_owned(),
            seq_id: seq_id.to_owned(),
            prompt: prompt(NUM_TOKENS, 5),
        }
    }

    fn prep_recv(&self) -> Result<Value> {
        let body = json!({"prompt": self.prompt, "end": -1, "seq_id": self.seq_id});
        http::post(&format!("{}/microserving/prep_recv", self.d), &[], &body)?.json()
    }

    fn remote_send(&self, prepared: &Value) -> Result<Answer> {
        let body = json!({
            "prompt": self.prompt, "begin": prepared["prefix_matched_length"], "end": NUM_TOKENS - 1,
            "kv_addr_info": prepared["kv_append_metadata"], "recv_rank": 0, "seq_id": self.seq_id,
        });
        http::post(&format!("{}/microserving/remote_send", self.p), &[], &body)
    }

    fn start_generate(&self) -> Result<Answer> {
        let body = json!({
            "prompt": self.prompt, "begin": NUM_TOKENS - 1, "seq_id": self.seq_id, "max_tokens": 12, "temperature": 0,
            "timeout_seconds": 10,
        });
        http::post(&format!("{}/microserving/start_generate", self.d), &[], &body)
    }
}

fn cluster() -> Result<Cluster> {
    Cluster::start(&ClusterOptions::toy(2).engine_args(["--lease-seconds", "1", "--transport", "shm"]))
}

fn expected_text(cluster: &Cluster) -> Result<String> {
    let body =
        json!({"prompt": prompt(NUM_TOKENS, 5), "max_tokens": 12, "temperature": 0, "cache_salt": "alone"});
    let answer: Value =
        http::post(&format!("{}/v1/completions", cluster.engines()[1].url()), &[], &body)?.json()?;
    Ok(answer["choices"][0]["text"].as_str().context("no text")?.to_owned())
}

#[test]
fn sender_killed_after_sending_changes_nothing() -> Result<()> {
    let mut cluster = cluster()?;
    let wanted = expected_text(&cluster)?;
    let calls = Calls::new(&cluster, "after-send");
    let prepared = calls.prep_recv()?;
    let sent: Value = calls.remote_send(&prepared)?.json()?;
    ensure!(number(&sent, "sent_tokens")? == u64::from(NUM_TOKENS - 1), "{sent}");
    cluster.engines_mut()[0].kill()?;
    let answer: Value = calls.start_generate()?.json()?;
    ensure!(answer["choices"][0]["text"] == wanted.as_str(), "{answer}");
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn sender_killed_before_sending_leaves_nothing_behind() -> Result<()> {
    let mut cluster = cluster()?;
    let wanted = expected_text(&cluster)?;
    let calls = Calls::new(&cluster, "before-send");
    calls.prep_recv()?;
    cluster.engines_mut()[0].kill()?;
    let start = Instant::now();
    let answer = calls.start_generate()?;
    ensure!(start.elapsed() < Duration::from_secs(11), "waited {:?}", start.elapsed());
    // Nothing came, and nothing will: the lease or the deadline ends the wait with a clear error, or D computes it itself.
    if answer.status == 200 {
        let answer: Value = answer.json()?;
        ensure!(answer["choices"][0]["text"] == wanted.as_str(), "{answer}");
    } else {
        ensure!([410, 504].contains(&answer.status), "{answer:?}");
    }
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn stopped_sender_holds_its_pages_until_it_is_gone() -> Result<()> {
    // Slow steps, so that the transfer is under way when the sender stops.
    let options = ClusterOptions::toy(2).engine_args([
        "--lease-seconds",
        "1",
        "--transport",
        "shm",
        "--toy-step-ms",
        "100",
        "--max-batch-tokens",
        "32",
    ]);
    let mut cluster = Cluster::start(&options)?;
    let calls = Calls::new(&cluster, "stopped");
    let prepared = calls.prep_recv()?;
    let answer = std::thread::scope(|scope| -> Result<Option<Answer>> {
        let sending = scope.spawn(|| calls.remote_send(&prepared));
        std::thread::sleep(Duration::from_millis(250));
        cluster.engines()[0].signal(Signal::STOP);
        // The lease ends, but a stopped process may go on at any time: its pages stay quarantined.
        std::thread::sleep(Duration::from_millis(2500));
        let state = cluster.engine_state(1)?;
        cluster.engines_mut()[0].kill()?;
        let quarantined = state.pointer("/pages/quarantined").and_then(Value::as_u64).context("no figure")?;
        ensure!(quarantined > 0, "a stopped writer's pages are not quarantined: {state}");
        Ok(sending.join().expect("no panic").ok())
    })?;
    ensure!(answer.is_none(), "a killed sender answered {answer:?}");
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn router_survives_the_death_of_one_engine() -> Result<()> {
    let mut cluster = cluster()?;
    let url = cluster.router().url().to_owned();
    cluster.engines_mut()[0].kill()?;
    for index in 0..20 {
        let body = json!({"prompt": prompt(50, index), "max_tokens": 5});
        let pattern = [("x-microserving-pattern", "data_parallel")];
        let answer = http::post(&format!("{url}/v1/completions"), &pattern, &body)?;
        ensure!(answer.status == 200, "request {index}: {answer:?}");
    }
    cluster.wait_idle(Duration::from_secs(10))
}
