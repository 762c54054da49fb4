//! Engines as the elements of an OpenSHMEM world: real processes that its launcher starts.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Answer};
use microserving_harness::{Daemon, World, binary_dir};
use microserving_tests::{Case, Work, number, prompt, sampled, until};
use rustix::process::Signal;
use serde_json::{Value, json};

const NUM_TOKENS: u32 = 200;

/// Two engines whose pools differ, and perhaps one whose pages have another size.
fn world(with_stranger: bool, more: &[&str]) -> Result<Option<World>> {
    if !World::can_start() {
        // Not a failure of a full run either: the launcher is a package of the system, which cannot be had everywhere.
        eprintln!("SKIPPED: oshrun is not installed (openmpi-bin, libopenmpi-dev)");
        return Ok(None);
    }
    let engine = |own: &[&str]| -> Vec<String> {
        let all = ["--model", "toy", "--transport", "openshmem", "--lease-seconds", "2"];
        all.iter().chain(own).chain(more).map(|&arg| arg.to_owned()).collect()
    };
    let mut engines = vec![engine(&["--num-pages", "512"]), engine(&["--num-pages", "1500"])];
    if with_stranger {
        engines.push(engine(&["--num-pages", "256", "--page-size", "32"]));
    }
    World::start(None, &engines, 256 << 20, &["--wire", "rest"], Duration::from_secs(60)).map(Some)
}

fn check_patterns(world: &World) -> Result<()> {
    microserving_tests::check_patterns(world.router().url(), &world.engines()[0])
}

/// The calls by hand, from one engine to another.
struct Calls<'a> {
    world: &'a World,
    sender: usize,
    receiver: usize,
    seq_id: &'static str,
}

impl Calls<'_> {
    fn call(engine: &str, call: &str, body: &Value) -> Result<Answer> {
        http::post(&format!("{engine}/microserving/{call}"), &[], body)
    }

    fn prep_recv(&self) -> Result<Value> {
        let body = json!({"prompt": prompt(NUM_TOKENS, 5), "end": -1, "seq_id": self.seq_id});
        Self::call(&self.world.engines()[self.receiver], "prep_recv", &body)?.json()
    }

    fn remote_send(&self, prepared: &Value, recv_rank: i64) -> Result<Answer> {
        self.remote_send_from(&self.world.engines()[self.sender], prepared, recv_rank)
    }

    fn remote_send_from(&self, engine: &str, prepared: &Value, recv_rank: i64) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": 0, "end": NUM_TOKENS - 1,
            "kv_addr_info": prepared["kv_append_metadata"], "recv_rank": recv_rank, "seq_id": self.seq_id,
        });
        Self::call(engine, "remote_send", &body)
    }

    fn start_generate(&self) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": NUM_TOKENS - 1, "seq_id": self.seq_id, "max_tokens": 12,
            "temperature": 0, "timeout_seconds": 30,
        });
        Self::call(&self.world.engines()[self.receiver], "start_generate", &body)
    }

    /// What the sender makes of the same prompt by itself.
    fn alone(&self) -> Result<String> {
        let body = json!({"prompt": prompt(NUM_TOKENS, 5), "max_tokens": 12, "temperature": 0, "cache_salt": "alone"});
        let url = format!("{}/v1/completions", self.world.engines()[self.sender]);
        let answer: Value = http::post(&url, &[], &body)?.json()?;
        Ok(answer["choices"][0]["text"].as_str().context("no text")?.to_owned())
    }
}

fn is_at_least_one(engine: &str, field: &str) -> Result<bool> {
    let state: Value = http::get(&format!("{engine}/microserving/state"))?.json()?;
    Ok(number(&state, field)? > 0)
}

#[test]
fn tokens_are_equal_over_openshmem() -> Result<()> {
    let Some(mut world) = world(true, &[])? else { return Ok(()) };
    let ready: Value = http::get(&format!("{}/health/ready", world.engines()[1]))?.json()?;
    let detail = ready["detail"].as_str().unwrap_or_default();
    ensure!(detail.starts_with("transport openshmem (as configured); 64 KiB in "), "{ready}");
    ensure!(detail.contains("from element 1 of 3"), "{ready}");
    check_patterns(&world)?;

    let calls = Calls { world: &world, sender: 0, receiver: 1, seq_id: "by-hand" };
    let alone = calls.alone()?;
    let prepared = calls.prep_recv()?;
    for wrong in [0, 2, -1] {
        let answer = calls.remote_send(&prepared, wrong)?;
        ensure!(answer.status == 400 && answer.body.contains("recv_rank"), "rank {wrong}: {answer:?}");
    }
    let sent: Value = calls.remote_send(&prepared, 1)?.json()?;
    ensure!(sent["sent_tokens"] == NUM_TOKENS - 1, "{sent}");
    let answer: Value = calls.start_generate()?.json()?;
    ensure!(answer["choices"][0]["text"] == alone.as_str(), "{answer} is not {alone}");

    let strange = Calls { world: &world, sender: 0, receiver: 2, seq_id: "strange" };
    let refused = strange.remote_send(&strange.prep_recv()?, 2)?;
    ensure!((400..500).contains(&refused.status) && refused.body.contains("layout"), "{refused:?}");

    // All of them leave together, so the launcher finds nothing wrong.
    let status = world.stop(Duration::from_secs(20))?;
    ensure!(status.success(), "{status}: {}", world.log());
    Ok(())
}

#[test]
fn checksums_are_verified_over_openshmem() -> Result<()> {
    match world(false, &["--checksum"])? {
        Some(world) => check_patterns(&world),
        None => Ok(()),
    }
}

/// A slow engine, so that there is something under way when its world ends.
const SLOW: [&str; 4] = ["--toy-step-ms", "50", "--max-batch-tokens", "32"];

/// When an element dies the world is lost: what the others have begun they end by themselves, and all of them make room for a new world.
#[test]
fn a_world_is_lost_with_an_engine_and_formed_anew() -> Result<()> {
    let Some(mut first) = world(false, &SLOW)? else { return Ok(()) };
    let long = Case { max_tokens: 60, ..sampled(40, "long") };
    let alone =
        [sampled(300, "alone").send(&first.engines()[0], None)?, long.send(&first.engines()[1], None)?];
    let (receiver, sender) = (first.engines()[0].clone(), first.engines()[1].clone());
    let calls = Calls { world: &first, sender: 1, receiver: 0, seq_id: "within" };
    let wanted = calls.alone()?;
    let prepared = calls.prep_recv()?;
    std::thread::scope(|scope| -> Result<()> {
        let stream = scope.spawn(|| long.send(&receiver, None));
        let sending = scope.spawn(|| calls.remote_send(&prepared, 0));
        until("the sender sends", || is_at_least_one(&sender, "sending"))?;
        let waiting = scope.spawn(|| calls.start_generate());
        until("the stream runs", || is_at_least_one(&receiver, "running"))?;
        first.signal_engine(1, Signal::KILL)?;

        let mut seen = None;
        until("the survivor says that the world is lost", || {
            let live = http::get(&format!("{receiver}/health/live"))?;
            seen = (live.status == 503).then_some(live.body);
            Ok(seen.is_some())
        })?;
        ensure!(seen.iter().any(|body| body.contains("the world is lost: element 1 is gone")), "{seen:?}");
        let refused = sampled(10, "late").send(&receiver, None);
        ensure!(refused.is_err(), "an engine without a world takes new work");

        ensure!(sending.join().expect("no panic").is_err(), "a killed sender answered");
        let answer: Value = waiting.join().expect("no panic")?.json()?;
        ensure!(answer["choices"][0]["text"] == wanted.as_str(), "{answer} is not {wanted}");
        let stream = stream.join().expect("no panic")?;
        ensure!(
            stream.token_ids == alone[1].token_ids,
            "{:?} is not {:?}",
            stream.token_ids,
            alone[1].token_ids
        );
        Ok(())
    })?;
    first.wait(Duration::from_secs(30))?;
    ensure!(first.log().contains("start all of its engines anew"), "{}", first.log());
    drop(first);

    let Some(second) = world(false, &[])? else { return Ok(()) };
    let again = sampled(300, "again").send(second.router().url(), Some("prefill_decode"))?;
    ensure!(again.token_ids == alone[0].token_ids, "{:?} is not {:?}", again.token_ids, alone[0].token_ids);
    Ok(())
}

/// Nobody joins a formed world: whoever comes later is a world of its own, and told so.
#[test]
fn joining_a_formed_world_is_refused() -> Result<()> {
    let key = ["--cluster-key", &"ab".repeat(32)];
    let Some(world) = world(false, &key)? else { return Ok(()) };
    let args = ["--model", "toy", "--transport", "openshmem", key[0], key[1]].map(str::to_owned);
    let binary = binary_dir()?.join("engined");
    let mut late = Daemon::spawn("late", &binary, &args, Duration::from_secs(20))?;
    late.wait_ready(Duration::from_secs(60))?;

    let calls = Calls { world: &world, sender: 0, receiver: 1, seq_id: "late" };
    let refused = calls.remote_send_from(late.url(), &calls.prep_recv()?, 1)?;
    ensure!(refused.status == 400, "{refused:?}");
    ensure!(refused.body.contains("kv_addr_info") && refused.body.contains("takes nobody in"), "{refused:?}");
    // Those who are in it go on.
    let answer = sampled(100, "members").send(world.router().url(), Some("prefill_decode"))?;
    ensure!(Work::of(&answer)?.sent == 99, "{:?}", answer.stats);
    Ok(())
}

/// Nobody leaves a formed world for a while: whoever ends is gone for good, for those who stay as well.
#[test]
fn leaving_a_formed_world_is_final() -> Result<()> {
    let Some(mut world) = world(false, &[])? else { return Ok(()) };
    let calls = Calls { world: &world, sender: 0, receiver: 1, seq_id: "left" };
    let prepared = calls.prep_recv()?;
    world.signal_engine(1, Signal::TERM)?;
    until("the other one notices", || {
        Ok(world.log().contains("an element has left; a formed world takes nobody in"))
    })?;
    let refused = calls.remote_send(&prepared, 1)?;
    ensure!(refused.status == 410 && refused.body.contains("the receiver is gone"), "{refused:?}");
    let alone = sampled(50, "alone").send(&world.engines()[0], None)?;
    ensure!(!alone.token_ids.is_empty(), "the one that stays serves what it computes itself");
    until("the one that leaves says so", || Ok(world.log().contains("leaves a world that others go on in")))?;
    world.stop(Duration::from_secs(30))?;
    Ok(())
}
