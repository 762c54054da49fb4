//! Engines as the elements of an OpenSHMEM world: real processes that its launcher starts.

use std::time::Duration;

use anyhow::{Result, ensure};
use microserving_harness::World;
use microserving_harness::http::{self, Answer};
use microserving_tests::{Case, PAGE_SIZE, Work, prompt, skip};
use serde_json::{Value, json};

const NUM_TOKENS: u32 = 200;

/// Two engines whose pools differ, and perhaps one whose pages have another size.
fn world(with_stranger: bool, more: &[&str]) -> Result<Option<World>> {
    if !World::can_start() {
        skip("oshrun is not installed (openmpi-bin, libopenmpi-dev)");
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

fn case(num_tokens: u32, salt: &str) -> Case {
    Case {
        prompt: prompt(num_tokens, num_tokens + 1),
        max_tokens: 12,
        temperature: 0.8,
        seed: 99,
        salt: salt.to_owned(),
    }
}

/// What two engines make of a prompt is what one makes of it, and bytes really went from one to the other.
fn check_patterns(world: &World) -> Result<()> {
    for pattern in ["data_parallel", "prefill_decode", "balanced:0.25"] {
        for num_tokens in [1, PAGE_SIZE, PAGE_SIZE + 1, 1000] {
            let salt = format!("{pattern}-{num_tokens}");
            let answer = case(num_tokens, &salt).send(world.router().url(), Some(pattern))?;
            let alone = case(num_tokens, &format!("alone-{salt}")).send(&world.engines()[0], None)?;
            ensure!(
                answer.token_ids == alone.token_ids,
                "{salt}: {:?} is not {:?}",
                answer.token_ids,
                alone.token_ids
            );
            let (work, wanted) = (Work::of(&answer)?, Work::cold(pattern, num_tokens));
            ensure!(work == wanted, "{salt}: {work:?}, expected {wanted:?}");
        }
    }
    Ok(())
}

/// The calls by hand, to engine 1 and from engine 0.
struct Calls<'a> {
    world: &'a World,
    receiver: usize,
    seq_id: &'static str,
}

impl Calls<'_> {
    fn prep_recv(&self) -> Result<Value> {
        let body = json!({"prompt": prompt(NUM_TOKENS, 5), "end": -1, "seq_id": self.seq_id});
        http::post(&format!("{}/microserving/prep_recv", self.world.engines()[self.receiver]), &[], &body)?
            .json()
    }

    fn remote_send(&self, prepared: &Value, recv_rank: i64) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": 0, "end": NUM_TOKENS - 1,
            "kv_addr_info": prepared["kv_append_metadata"], "recv_rank": recv_rank, "seq_id": self.seq_id,
        });
        http::post(&format!("{}/microserving/remote_send", self.world.engines()[0]), &[], &body)
    }

    fn start_generate(&self) -> Result<Answer> {
        let body = json!({
            "prompt": prompt(NUM_TOKENS, 5), "begin": NUM_TOKENS - 1, "seq_id": self.seq_id, "max_tokens": 12,
            "temperature": 0, "timeout_seconds": 10,
        });
        http::post(
            &format!("{}/microserving/start_generate", self.world.engines()[self.receiver]),
            &[],
            &body,
        )
    }
}

#[test]
fn tokens_are_equal_over_openshmem() -> Result<()> {
    let Some(mut world) = world(true, &[])? else { return Ok(()) };
    let ready: Value = http::get(&format!("{}/health/ready", world.engines()[1]))?.json()?;
    let detail = ready["detail"].as_str().unwrap_or_default();
    ensure!(detail.starts_with("transport openshmem (as configured); 64 KiB in "), "{ready}");
    ensure!(detail.contains("from element 1 of 3"), "{ready}");
    check_patterns(&world)?;

    let alone: Value = http::post(
        &format!("{}/v1/completions", world.engines()[0]),
        &[],
        &json!({"prompt": prompt(NUM_TOKENS, 5), "max_tokens": 12, "temperature": 0, "cache_salt": "alone"}),
    )?
    .json()?;
    let calls = Calls { world: &world, receiver: 1, seq_id: "by-hand" };
    let prepared = calls.prep_recv()?;
    for wrong in [0, 2, -1] {
        let answer = calls.remote_send(&prepared, wrong)?;
        ensure!(answer.status == 400 && answer.body.contains("recv_rank"), "rank {wrong}: {answer:?}");
    }
    let sent: Value = calls.remote_send(&prepared, 1)?.json()?;
    ensure!(sent["sent_tokens"] == NUM_TOKENS - 1, "{sent}");
    let answer: Value = calls.start_generate()?.json()?;
    ensure!(answer["choices"][0]["text"] == alone["choices"][0]["text"], "{answer} is not {alone}");

    let strange = Calls { world: &world, receiver: 2, seq_id: "strange" };
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

/// When an element dies the world is lost: the launcher ends it, and a new one serves.
#[test]
fn a_world_is_lost_with_an_engine_and_formed_anew() -> Result<()> {
    let Some(mut first) = world(false, &[])? else { return Ok(()) };
    let alone = case(300, "alone").send(&first.engines()[0], None)?;
    first.kill_engine(1)?;
    let status = first.wait(Duration::from_secs(20))?;
    ensure!(!status.success(), "the launcher took no notice of a dead engine");
    drop(first);
    let Some(second) = world(false, &[])? else { return Ok(()) };
    let again = case(300, "again").send(second.router().url(), Some("prefill_decode"))?;
    ensure!(again.token_ids == alone.token_ids, "{:?} is not {:?}", again.token_ids, alone.token_ids);
    Ok(())
}
