//! Engines over NIXL, which come and go: one that dies takes down what it had a part in and nothing else.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Answer};
use microserving_harness::{Cluster, ClusterOptions, Daemon, binary_dir};
use microserving_tests::{check_patterns, number, path_or_skip, prompt, sampled};
use rustix::process::Signal;
use serde_json::{Value, json};

const NUM_TOKENS: u32 = 200;

/// Options of two engines, if there is a library.
fn engines(more: &[&str]) -> Option<ClusterOptions> {
    let library = path_or_skip("NIXL_LIBRARY", "NIXL")?;
    let library = library.to_string_lossy();
    let mut options =
        ClusterOptions::toy(2).engine_args(["--nixl-listen", "127.0.0.1:0", "--lease-seconds", "1"]);
    options.engine_args.extend(["--nixl-library", &*library].iter().chain(more).map(|&arg| arg.to_owned()));
    Some(options)
}

/// A slow engine, so that there is something under way when a signal comes.
const SLOW: [&str; 4] = ["--toy-step-ms", "100", "--max-batch-tokens", "32"];

/// The calls by hand, from one engine to another.
struct Calls<'a> {
    p: &'a str,
    d: &'a str,
    seq_id: &'a str,
}

impl Calls<'_> {
    fn call(engine: &str, call: &str, body: &Value) -> Result<Answer> {
        http::post(&format!("{engine}/microserving/{call}"), &[], body)
    }

    fn prep_recv(&self) -> Result<Value> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "end": -1, "seq_id": self.seq_id, "cache_salt": self.seq_id,
        });
        Self::call(self.d, "prep_recv", &body)?.json()
    }

    fn remote_send(&self, prepared: &Value) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": 0, "end": NUM_TOKENS - 1, "recv_rank": 0,
            "kv_addr_info": prepared["kv_append_metadata"], "seq_id": self.seq_id, "cache_salt": self.seq_id,
        });
        Self::call(self.p, "remote_send", &body)
    }

    fn start_generate(&self) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": NUM_TOKENS - 1, "seq_id": self.seq_id, "max_tokens": 12,
            "temperature": 0, "timeout_seconds": 10, "cache_salt": self.seq_id,
        });
        Self::call(self.d, "start_generate", &body)
    }

    fn all(&self) -> Result<Value> {
        let sent: Value = self.remote_send(&self.prep_recv()?)?.json()?;
        ensure!(sent["sent_tokens"] == NUM_TOKENS - 1, "{sent}");
        self.start_generate()?.json()
    }
}

fn expected_text(engine: &str) -> Result<String> {
    let body =
        json!({"prompt": prompt(NUM_TOKENS, 5), "max_tokens": 12, "temperature": 0, "cache_salt": "alone"});
    let answer: Value = http::post(&format!("{engine}/v1/completions"), &[], &body)?.json()?;
    Ok(answer["choices"][0]["text"].as_str().context("no text")?.to_owned())
}

/// Waits until an engine is receiving, and some of it has arrived or is about to.
fn until_sending(engine: &str) -> Result<()> {
    let begun = Instant::now();
    loop {
        let state: Value = http::get(&format!("{engine}/microserving/state"))?.json()?;
        if number(&state, "sending")? > 0 {
            return Ok(());
        }
        ensure!(begun.elapsed() < Duration::from_secs(20), "nothing is sent: {state}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn tokens_are_equal_over_nixl() -> Result<()> {
    for more in [&[][..], &["--checksum"]] {
        let Some(options) = engines(more) else { return Ok(()) };
        let mut cluster = Cluster::start(&options)?;
        let url = cluster.engines()[1].url();
        let ready: Value = http::get(&format!("{url}/health/ready"))?.json()?;
        let detail = ready["detail"].as_str().unwrap_or_default();
        let why = "it is told where engines of other hosts connect";
        ensure!(detail.starts_with(&format!("transport nixl ({why}); 64 KiB in ")), "{ready}");
        check_patterns(cluster.router().url(), cluster.engines()[0].url())?;
        cluster.wait_idle(Duration::from_secs(10))?;
    }
    Ok(())
}

/// The sender dies while it sends: its receiver gives up that request, keeps no page of it, and goes on with a sender that came later.
#[test]
fn a_dead_engine_is_an_error_of_its_requests_alone() -> Result<()> {
    let Some(options) = engines(&SLOW) else { return Ok(()) };
    let mut cluster = Cluster::start(&options)?;
    let (p, d) = (cluster.engines()[0].url().to_owned(), cluster.engines()[1].url().to_owned());
    let wanted = expected_text(&d)?;
    let long = microserving_tests::Case { max_tokens: 30, ..sampled(40, "long") };
    let alone = long.send(&d, None)?;
    let calls = Calls { p: &p, d: &d, seq_id: "dead" };
    let prepared = calls.prep_recv()?;
    std::thread::scope(|scope| -> Result<()> {
        let other =
            scope.spawn(|| microserving_tests::Case { salt: "other".into(), ..long.clone() }.send(&d, None));
        let sending = scope.spawn(|| calls.remote_send(&prepared));
        until_sending(&p)?;
        std::thread::sleep(Duration::from_millis(250));
        cluster.engines_mut()[0].kill()?;
        let sent = sending.join().expect("no panic");
        ensure!(sent.is_err(), "a killed sender answered {sent:?}");
        let answer = calls.start_generate()?;
        // The lease or the deadline ends the wait with a clear error, or D computes it itself.
        if answer.status == 200 {
            let answer: Value = answer.json()?;
            ensure!(answer["choices"][0]["text"] == wanted.as_str(), "{answer} is not {wanted}");
        } else {
            ensure!([410, 504].contains(&answer.status), "{answer:?}");
        }
        let other = other.join().expect("no panic")?;
        ensure!(other.token_ids == alone.token_ids, "a request without a part in it suffered");
        Ok(())
    })?;
    cluster.wait_idle(Duration::from_secs(10))?;

    let mut args = vec!["--model".to_owned(), "toy".to_owned()];
    args.extend(options.engine_args.iter().cloned());
    let engined = binary_dir()?.join("engined");
    let mut newcomer = Daemon::spawn("newcomer", &engined, &args, Duration::from_secs(20))?;
    newcomer.wait_ready(Duration::from_secs(30))?;
    let answer = Calls { p: newcomer.url(), d: &d, seq_id: "newcomer" }.all()?;
    ensure!(answer["choices"][0]["text"] == wanted.as_str(), "{answer} is not {wanted}");
    cluster.wait_idle(Duration::from_secs(10))
}

/// Nothing lands in pages but what their engine reads: those that a stopped sender was to fill are free when the lease ends.
#[test]
fn a_stopped_sender_holds_no_pages() -> Result<()> {
    let Some(options) = engines(&SLOW) else { return Ok(()) };
    let mut cluster = Cluster::start(&options)?;
    let (p, d) = (cluster.engines()[0].url().to_owned(), cluster.engines()[1].url().to_owned());
    let calls = Calls { p: &p, d: &d, seq_id: "stopped" };
    let prepared = calls.prep_recv()?;
    std::thread::scope(|scope| -> Result<()> {
        let sending = scope.spawn(|| calls.remote_send(&prepared));
        until_sending(&p)?;
        std::thread::sleep(Duration::from_millis(250));
        cluster.engines()[0].signal(Signal::STOP);
        let begun = Instant::now();
        loop {
            let state = cluster.engine_state(1)?;
            let count = |name: &str| state.pointer(&format!("/pages/{name}")).and_then(Value::as_u64);
            if count("reserved") == Some(0) && count("quarantined") == Some(0) {
                break;
            }
            ensure!(begun.elapsed() < Duration::from_secs(15), "a stopped sender's pages are held: {state}");
            std::thread::sleep(Duration::from_millis(50));
        }
        cluster.engines()[0].signal(Signal::CONT);
        let sent = sending.join().expect("no panic")?;
        ensure!(sent.status >= 400, "what was given up passes for sent: {sent:?}");
        Ok(())
    })?;
    cluster.wait_idle(Duration::from_secs(10))
}
