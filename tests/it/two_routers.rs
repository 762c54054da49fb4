//! Two routers over the same engines know nothing of each other: engines arbitrate, and the load does not pile up.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, Daemon, binary_dir, http};
use microserving_tests::{Case, prompt};
use serde_json::{Value, json};

/// Clients at once, of each router.
const CLIENTS: u32 = 16;
const ROUNDS: u32 = 4;

/// A call with a key, as a router sends it.
fn call(key: &str, seed: u32, max_tokens: u32, more: &Value) -> Value {
    let mut body = json!({"prompt": prompt(100, seed), "max_tokens": max_tokens, "temperature": 0, "seq_id": key, "ignore_eos": true,
        "stream_options": {"include_usage": true}, "return_token_ids": true});
    for (name, value) in more.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

fn ids(event: &Value) -> Vec<u64> {
    event["choices"][0]["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}

/// Two routers that happen to use one key for two requests: the first one has its stream, undisturbed, the other one is told.
#[test]
fn one_key_is_one_stream_and_the_other_is_a_conflict() -> Result<()> {
    let mut cluster =
        Cluster::start(&ClusterOptions::toy(1).engine_args(["--num-pages", "2048", "--toy-step-ms", "10"]))?;
    let engine = cluster.engines()[0].url();
    let start = format!("{engine}/microserving/start_generate");
    let body = call("shared", 1, 200, &json!({"begin": 0, "stream": true}));
    let alone = call("alone", 1, 200, &json!({"begin": 0, "stream": true, "cache_salt": "alone"}));
    let mut wanted = Vec::new();
    let mut stream = http::post_stream(&start, &[], &alone)?;
    while let Some(event) = stream.next_event()? {
        wanted.extend(ids(&event));
    }
    ensure!(wanted.len() == 200, "{} tokens", wanted.len());

    let mut stream = http::post_stream(&start, &[], &body)?;
    let mut tokens = ids(&stream.next_event()?.context("a first event")?);
    let others = [
        ("start_generate", call("shared", 2, 8, &json!({"begin": 0}))),
        ("start_generate", call("shared", 1, 9, &json!({"begin": 0}))),
        ("prep_recv", call("shared", 2, 200, &json!({"end": 50}))),
        ("prep_recv", call("shared", 1, 200, &json!({"end": 50}))),
    ];
    for (name, other) in others {
        let answer = http::post(&format!("{engine}/microserving/{name}"), &[], &other)?;
        ensure!(answer.status == 409, "{name}: {} {}", answer.status, answer.body);
    }
    while let Some(event) = stream.next_event()? {
        ensure!(event.get("error").is_none(), "{event}");
        tokens.extend(ids(&event));
    }
    ensure!(tokens == wanted, "{tokens:?} is not {wanted:?}");

    // A reservation of one router is not another one's.
    let prepared = http::post(
        &format!("{engine}/microserving/prep_recv"),
        &[],
        &call("kept", 3, 8, &json!({"end": 50})),
    )?;
    ensure!(prepared.status == 200, "{}", prepared.body);
    let other = http::post(
        &format!("{engine}/microserving/prep_recv"),
        &[],
        &call("kept", 4, 8, &json!({"end": 50})),
    )?;
    ensure!(other.status == 409, "{} {}", other.status, other.body);
    let aborted = http::post(&format!("{engine}/microserving/abort"), &[], &json!({"seq_id": "kept"}))?;
    ensure!(aborted.status == 200, "{}", aborted.body);
    cluster.wait_idle(Duration::from_secs(10))
}

/// Sends rounds of requests, all clients at once, and returns how many each engine decoded.
fn load(router: &str, name: u32, pattern: &str, wanted: &[Vec<u32>]) -> Result<BTreeMap<String, u32>> {
    let mut spread = BTreeMap::new();
    for round in 0..ROUNDS {
        let outcomes: Vec<Result<String>> = std::thread::scope(|scope| {
            let send = |client: u32| {
                let answer = case(client, &format!("{name}-{round}-{client}")).send(router, Some(pattern))?;
                ensure!(
                    answer.token_ids == wanted[client as usize],
                    "client {client}: {:?}",
                    answer.token_ids
                );
                Ok(answer.stats["decode_engine"].as_str().context("no engine")?.to_owned())
            };
            let threads: Vec<_> = (0..CLIENTS).map(|client| scope.spawn(move || send(client))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
        });
        for engine in outcomes {
            *spread.entry(engine?).or_default() += 1;
        }
    }
    Ok(spread)
}

fn case(client: u32, salt: &str) -> Case {
    Case {
        prompt: prompt(150 + client, 700 + client),
        max_tokens: 16,
        temperature: 0.0,
        seed: 1,
        salt: salt.to_owned(),
    }
}

#[test]
fn two_routers_serve_the_same_engines_without_piling_up() -> Result<()> {
    let args = ["--transport", "shm", "--num-pages", "4096"];
    let mut cluster = Cluster::start(&ClusterOptions::toy(4).engine_args(args))?;
    let engines = cluster
        .engines()
        .iter()
        .flat_map(|engine| ["--engine".to_owned(), engine.url().to_owned()])
        .collect::<Vec<_>>();
    let mut second =
        Daemon::spawn("router-2", &binary_dir()?.join("routerd"), &engines, Duration::from_secs(20))?;
    second.wait_ready(Duration::from_secs(20))?;
    let alone = cluster.engines()[0].url();
    let wanted: Vec<Vec<u32>> = (0..CLIENTS)
        .map(|client| {
            case(client, &format!("alone-{client}")).send(alone, None).map(|answer| answer.token_ids)
        })
        .collect::<Result<_>>()?;
    for pattern in ["data_parallel", "prefill_decode"] {
        let (first, other) = std::thread::scope(|scope| {
            let (router, second, wanted) = (cluster.router().url(), second.url(), &wanted);
            let other = scope.spawn(move || load(second, 2, pattern, wanted));
            (load(router, 1, pattern, wanted), other.join().expect("does not panic"))
        });
        let mut spread = first?;
        for (engine, count) in other? {
            *spread.entry(engine).or_default() += count;
        }
        let total: u32 = spread.values().sum();
        let (most, least) =
            (spread.values().max().copied().unwrap_or(0), spread.values().min().copied().unwrap_or(0));
        let fair = f64::from(total) / 4.0;
        println!(
            "two routers, {pattern}: {total} requests, most {most}, least {least}, fair {fair}: most is {:.2} of fair",
            f64::from(most) / fair
        );
        ensure!(total == 2 * ROUNDS * CLIENTS, "{total} requests");
        ensure!(spread.len() == 4, "{spread:?}: some engine got nothing");
        ensure!(f64::from(most) < 2.0 * fair, "{spread:?}: they herd");
    }
    second.stop(Duration::from_secs(10))?;
    cluster.wait_idle(Duration::from_secs(10))
}
