//! Requests and contexts that move from one engine to another while they are in use.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, Daemon, Points, Proxy, binary_dir, http};
use microserving_tests::{Case, number, prompt};
use serde_json::{Value, json};

const PROMPT_TOKENS: u32 = 1000;
const MAX_TOKENS: u32 = 100;
/// The output when it is told to move.
const MOVE_AT: usize = 20;

fn slow_steps(num_engines: usize) -> ClusterOptions {
    // A step takes 4 ms and 32 tokens: to compute the prompt again takes 30 times as long as to decode.
    ClusterOptions::toy(num_engines).engine_args([
        "--transport",
        "shm",
        "--toy-step-ms",
        "4",
        "--max-batch-tokens",
        "32",
        "--num-pages",
        "1024",
    ])
}

/// A stream that is told to move when it has some tokens.
struct Moved {
    tokens: Vec<u64>,
    largest_gap: Duration,
    answer: Value,
}

fn stream_and_move(router: &str, body: &Value) -> Result<Moved> {
    let headers = [("x-microserving-pattern", "data_parallel"), ("x-request-id", "mover")];
    let mut stream = http::post_stream(&format!("{router}/v1/completions"), &headers, body)?;
    let (mut tokens, mut last, mut largest_gap) = (Vec::new(), None, Duration::ZERO);
    std::thread::scope(|scope| {
        let mut moving = None;
        while let Some(event) = stream.next_event()? {
            ensure!(event.get("error").is_none(), "{event}");
            let ids = event["choices"][0]["token_ids"].as_array().into_iter().flatten();
            let before = tokens.len();
            tokens.extend(ids.filter_map(Value::as_u64));
            if tokens.len() > before {
                let now = Instant::now();
                if let Some(last) = last.replace(now) {
                    largest_gap = largest_gap.max(now - last);
                }
            }
            if tokens.len() >= MOVE_AT && moving.is_none() {
                moving = Some(scope.spawn(|| {
                    http::post(&format!("{router}/admin/v1/migrate"), &[], &json!({"request_id": "mover"}))?
                        .json()
                }));
            }
        }
        let answer = moving.context("the stream was too short")?.join().expect("no panic")?;
        Ok(Moved { tokens, largest_gap, answer })
    })
}

#[test]
fn a_running_request_moves_and_its_source_goes_last() -> Result<()> {
    let mut cluster = Cluster::start(&slow_steps(2))?;
    let log: Arc<Mutex<Vec<(usize, String)>>> = Arc::default();
    let points = Points::default();
    let mut proxies = Vec::new();
    for (index, engine) in cluster.engines().iter().enumerate() {
        let log = log.clone();
        proxies.push(Proxy::start(
            engine.url(),
            points.clone(),
            Arc::new(move |point: &str| {
                log.lock().unwrap_or_else(PoisonError::into_inner).push((index, point.to_owned()));
                true
            }),
        )?);
    }
    let args: Vec<String> =
        proxies.iter().flat_map(|proxy| ["--engine".to_owned(), proxy.url().to_owned()]).collect();
    let more = ["--min-engines", "2", "--wire", "rest", "--relay", "false"];
    let args = [args, more.map(str::to_owned).to_vec()].concat();
    let mut router = Daemon::spawn("router", &binary_dir()?.join("routerd"), &args, Duration::from_secs(20))?;
    router.wait_ready(Duration::from_secs(30))?;

    for (temperature, seed) in [(0.0, 0), (0.8, 77)] {
        log.lock().unwrap_or_else(PoisonError::into_inner).clear();
        points.reset();
        let alone = Case {
            prompt: prompt(PROMPT_TOKENS, 3),
            max_tokens: MAX_TOKENS,
            temperature,
            seed,
            salt: format!("alone-{seed}"),
        };
        let wanted = alone.send(cluster.engines()[0].url(), None)?;
        let body = json!({
            "prompt": alone.prompt, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed,
            "cache_salt": format!("moves-{seed}"), "return_token_ids": true, "ignore_eos": true, "stream": true,
        });
        let moved = stream_and_move(router.url(), &body)?;
        let wanted: Vec<u64> = wanted.token_ids.iter().map(|&id| id.into()).collect();
        ensure!(moved.tokens == wanted, "{:?} is not {wanted:?}", moved.tokens);
        let at = number(&moved.answer, "output_tokens")?;
        ensure!(at >= MOVE_AT as u64 && at < u64::from(MAX_TOKENS), "{}", moved.answer);
        let computed = number(&moved.answer, "computed")?;
        ensure!(computed < 2 * 16 + 2, "the target computed {computed} tokens anew: {}", moved.answer);

        let log = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let find = |point: &str| log.iter().position(|(_, seen)| seen == point).context(point.to_owned());
        let (began, paused, runs) =
            (find("start_generate 0 before")?, find("pause 0 answered")?, find("start_generate 1 event 1")?);
        let source = log[began].0;
        ensure!(log[runs].0 != source, "it stayed where it was");
        let released = log.iter().position(|(engine, point)| *engine == source && point.starts_with("abort"));
        let released = released.context("the source was never given up")?;
        ensure!(paused < runs && runs < released, "{log:?}");

        // What it would take to compute it all on an engine that has nothing.
        let mut so_far = alone.prompt.clone();
        so_far.extend(&wanted[..MOVE_AT].iter().map(|&id| id as u32).collect::<Vec<_>>());
        let cold = Case { prompt: so_far, max_tokens: 1, salt: format!("cold-{seed}"), ..alone };
        let recompute = cold.send(cluster.engines()[1].url(), None)?.ttft;
        eprintln!(
            "moved after {at} tokens: largest gap between tokens {:?} (paused {} us); to compute again takes {recompute:?}",
            moved.largest_gap,
            number(&moved.answer, "paused_micros")?,
        );
    }
    drop(router);
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn a_request_that_cannot_move_stays() -> Result<()> {
    stays("false")
}

#[test]
fn a_relayed_request_that_cannot_move_stays() -> Result<()> {
    stays("true")
}

fn stays(relay: &str) -> Result<()> {
    let mut cluster = Cluster::start(&slow_steps(1).router_args(["--relay", relay]))?;
    let url = format!("{}/admin/v1/migrate", cluster.router().url());
    let unknown = http::post(&url, &[], &json!({"request_id": "nobody"}))?;
    ensure!(unknown.status == 404, "{unknown:?}");
    let nowhere = http::post(&url, &[], &json!({"request_id": "nobody", "to": "http://nowhere"}))?;
    ensure!(nowhere.status == 404 && nowhere.body.contains("nowhere"), "{nowhere:?}");
    let body = json!({"prompt": prompt(50, 1), "max_tokens": 60, "ignore_eos": true, "stream": true, "return_token_ids": true});
    let headers = [("x-request-id", "alone")];
    let mut stream =
        http::post_stream(&format!("{}/v1/completions", cluster.router().url()), &headers, &body)?;
    let mut tokens = 0;
    while let Some(event) = stream.next_event()? {
        tokens += event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
        if tokens == 5 {
            let refused = std::thread::scope(|scope| {
                scope
                    .spawn(|| http::post(&url, &[], &json!({"request_id": "alone"})))
                    .join()
                    .expect("no panic")
            })?;
            ensure!(refused.status == 409 && refused.body.contains("cannot_move"), "{refused:?}");
        }
    }
    ensure!(tokens == 60, "{tokens}");
    cluster.wait_idle(Duration::from_secs(10))
}

/// Moves a relayed stream by an order: no token is lost or repeated.
#[test]
fn a_relayed_request_moves() -> Result<()> {
    let mut cluster = Cluster::start(&slow_steps(2))?;
    let router = cluster.router().url().to_owned();
    for (temperature, seed) in [(0.0, 0), (0.8, 77)] {
        let alone = Case {
            prompt: prompt(PROMPT_TOKENS, 3),
            max_tokens: MAX_TOKENS,
            temperature,
            seed,
            salt: format!("alone-{seed}"),
        };
        let wanted = alone.send(cluster.engines()[0].url(), None)?;
        let wanted: Vec<u64> = wanted.token_ids.iter().map(|&id| id.into()).collect();
        let body = json!({
            "prompt": alone.prompt, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed,
            "cache_salt": format!("moves-{seed}"), "return_token_ids": true, "ignore_eos": true, "stream": true,
        });
        let moved = stream_and_move(&router, &body)?;
        ensure!(moved.tokens == wanted, "{:?} is not {wanted:?}", moved.tokens);
        let at = number(&moved.answer, "output_tokens")?;
        ensure!(at >= MOVE_AT as u64 && at < u64::from(MAX_TOKENS), "{}", moved.answer);
        let computed = number(&moved.answer, "computed")?;
        ensure!(
            computed < u64::from(PROMPT_TOKENS) / 4,
            "the target computed {computed} tokens anew: {}",
            moved.answer
        );
        eprintln!("moved after {at} tokens, {computed} computed anew: largest gap {:?}", moved.largest_gap);
    }
    let metrics = http::get(&format!("{router}/metrics"))?.body;
    let has = |what: &str| metrics.lines().any(|line| line.contains(what) && !line.ends_with(" 0"));
    ensure!(has("call=\"relay\",outcome=\"ok\"") && has("call=\"commit\",outcome=\"ok\""), "{metrics}");
    cluster.wait_idle(Duration::from_secs(10))
}

/// An engine that is told to drain decodes only the first part of what it was decoding.
#[test]
fn an_engine_that_drains_sends_its_requests_away() -> Result<()> {
    for relay in ["true", "false"] {
        let mut cluster = Cluster::start(&slow_steps(2).router_args(["--relay", relay]))?;
        let router = cluster.router().url().to_owned();
        let alone = Case {
            prompt: prompt(PROMPT_TOKENS, 5),
            max_tokens: MAX_TOKENS,
            temperature: 0.0,
            seed: 0,
            salt: "alone".into(),
        };
        let wanted: Vec<u64> =
            alone.send(cluster.engines()[0].url(), None)?.token_ids.iter().map(|&id| id.into()).collect();
        let decoded = |engine: usize| -> Result<u64> {
            let state = cluster.engine_state(engine)?;
            state
                .pointer("/counters/decode_tokens")
                .and_then(Value::as_u64)
                .context("no count of decoded tokens")
        };
        let before = [decoded(0)?, decoded(1)?];
        let body = json!({
            "prompt": alone.prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "cache_salt": "drains",
            "return_token_ids": true, "ignore_eos": true, "stream": true,
        });
        let mut stream = http::post_stream(&format!("{router}/v1/completions"), &[], &body)?;
        let (mut tokens, mut drained) = (Vec::<u64>::new(), false);
        while let Some(event) = stream.next_event()? {
            ensure!(event.get("error").is_none(), "{event}");
            tokens.extend(
                event["choices"][0]["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64),
            );
            if tokens.len() >= MOVE_AT && !drained {
                drained = true;
                let engines: Value = http::get(&format!("{router}/admin/v1/engines"))?.json()?;
                let all = engines["engines"].as_array().context("no engines")?;
                let busy = all.iter().find(|engine| engine["in_flight"] != 0).context("nobody serves it")?;
                let answer =
                    http::post(&format!("{router}/admin/v1/engines/{}/drain", busy["id"]), &[], &json!({}))?;
                ensure!(answer.status == 200, "{answer:?}");
            }
        }
        ensure!(tokens == wanted, "{tokens:?} is not {wanted:?}");
        let shares = [decoded(0)? - before[0], decoded(1)? - before[1]];
        ensure!(
            shares.iter().all(|&share| share > 0),
            "relay {relay}: one engine decoded it all: {shares:?}"
        );
        cluster.wait_idle(Duration::from_secs(10))?;
    }
    Ok(())
}

#[test]
fn a_context_moves_before_its_requests_do() -> Result<()> {
    let mut cluster = Cluster::start(&slow_steps(2))?;
    let (a, b) = (cluster.engines()[0].url().to_owned(), cluster.engines()[1].url().to_owned());
    let context = prompt(200, 9);
    let case = |seed: u32, salt: &str| {
        let mut prompt_of = context.clone();
        prompt_of.extend(prompt(20, seed));
        Case { prompt: prompt_of, max_tokens: 4, temperature: 0.0, seed: 0, salt: salt.to_owned() }
    };
    case(1, "docs").send(&a, None)?;
    let body = json!({"prompt": context, "cache_salt": "docs", "from": a, "to": b});
    let url = format!("{}/admin/v1/contexts/migrate", cluster.router().url());
    let moved: Value = http::post(&url, &[], &body)?.json()?;
    ensure!(number(&moved, "tokens")? == 192 && number(&moved, "sent_tokens")? == 192, "{moved}");
    let again: Value = http::post(&url, &[], &body)?.json()?;
    ensure!(number(&again, "sent_tokens")? == 0, "it is there already: {again}");

    let used = case(2, "docs").send(&b, None)?;
    let cached = used.usage.pointer("/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
    ensure!(cached == Some(192), "{}", used.usage);
    let alone = case(2, "alone").send(&a, None)?;
    ensure!(used.token_ids == alone.token_ids, "a context that moved changes tokens");
    for (body, status, named) in [
        (json!({"prompt": context, "to": "http://nowhere"}), 404, "to"),
        (json!({"prompt": [1, 2], "to": b}), 400, "prompt"),
        (json!({"prompt": context, "from": b, "to": b}), 400, "to"),
        (json!({"prompt": context}), 422, "to"),
        (json!({"prompt": context, "to": b, "tier": 1}), 400, "tier"),
    ] {
        let answer = http::post(&url, &[], &body)?;
        let error: Value = serde_json::from_str(&answer.body)?;
        ensure!((answer.status, error["error"]["param"].as_str()) == (status, Some(named)), "{answer:?}");
    }
    cluster.wait_idle(Duration::from_secs(10))
}
