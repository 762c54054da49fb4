//! All of an answer is equal under every program, not its tokens alone: usage, log-probabilities, stop strings, choices and echo.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, http};
use microserving_tests::{path_or_skip, program_name, programs, prompt};
use serde_json::{Value, json};

/// Requests at once.
const CLIENTS: usize = 16;

/// What is asked for beside tokens, each by itself and some together.
fn variants() -> Vec<(&'static str, Value)> {
    vec![
        ("plain", json!({"temperature": 0})),
        ("seeded", json!({"temperature": 0.9, "seed": 11})),
        ("logprobs", json!({"temperature": 0, "logprobs": 3})),
        ("seeded logprobs", json!({"temperature": 0.8, "seed": 12, "logprobs": 1, "top_p": 0.9})),
        ("choices", json!({"temperature": 1.0, "seed": 13, "n": 3})),
        ("stop", json!({"temperature": 0.9, "seed": 14, "stop": ["e", "xy"], "max_tokens": 64})),
        ("echo", json!({"temperature": 0.7, "seed": 15, "echo": true})),
        (
            "penalties",
            json!({"temperature": 0.9, "seed": 16, "frequency_penalty": 0.7, "repetition_penalty": 1.3}),
        ),
        ("ids", json!({"temperature": 0, "return_token_ids": true, "ignore_eos": true})),
    ]
}

/// One request: a variant over a prompt of text.
fn body(variant: &Value, length: u32, salt: &str) -> Value {
    let letters: Vec<u8> =
        prompt(length, 500 + length).into_iter().filter_map(|token| u8::try_from(token).ok()).collect();
    let mut body = json!({"prompt": String::from_utf8_lossy(&letters), "max_tokens": 16, "cache_salt": salt});
    for (key, value) in variant.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    body
}

/// What must be equal of an answer: all but names and times.
fn essence(answer: &http::Answer) -> Result<Value> {
    let mut value: Value = answer.json()?;
    let object = value.as_object_mut().context("no object")?;
    for name in ["id", "created", "model"] {
        ensure!(object.remove(name).is_some(), "the answer has no {name}");
    }
    Ok(value)
}

/// The same as a stream, put together again.
fn streamed(url: &str, headers: &[(&str, &str)], body: &Value) -> Result<(Vec<String>, Value)> {
    let mut body = body.clone();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut stream = http::post_stream(&format!("{url}/v1/completions"), headers, &body)?;
    let (mut texts, mut usage) = (vec![String::new(); 3], Value::Null);
    while let Some(event) = stream.next_event()? {
        ensure!(event.get("error").is_none(), "{event}");
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = usize::try_from(choice["index"].as_u64().context("no index")?)?;
            texts[index].push_str(choice["text"].as_str().context("no text")?);
        }
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
    }
    Ok((texts, usage))
}

/// One cell: a program, a variant, a length.
fn check(cluster: &Cluster, pattern: &str, name: &str, variant: &Value, length: u32) -> Result<()> {
    let cell = format!("{pattern}, {name}, {length} tokens");
    let headers = [("x-microserving-pattern", pattern)];
    let (router, alone) = (cluster.router().url(), cluster.engines()[0].url());
    let wanted = http::post(
        &format!("{alone}/v1/completions"),
        &[],
        &body(variant, length, &format!("alone {cell}")),
    )?;
    let wanted = essence(&wanted).with_context(|| format!("{cell}, alone"))?;
    let answer = http::post(
        &format!("{router}/v1/completions"),
        &headers,
        &body(variant, length, &format!("whole {cell}")),
    )?;
    let answered = answer.header("x-microserving-pattern").unwrap_or_default().to_owned();
    let name = pattern.split(':').next().unwrap_or_default();
    let by_script = answered.strip_prefix("script:").is_some_and(|script| script == name);
    ensure!(
        by_script || (answered.starts_with(name) && !answered.contains("fallback")),
        "{cell}: served by {answered:?}"
    );
    let answer = essence(&answer).with_context(|| cell.clone())?;
    ensure!(answer == wanted, "{cell}: {answer} is not {wanted}");
    let (texts, usage) = streamed(router, &headers, &body(variant, length, &format!("stream {cell}")))?;
    for choice in wanted["choices"].as_array().into_iter().flatten() {
        let index = usize::try_from(choice["index"].as_u64().context("no index")?)?;
        ensure!(
            choice["text"] == texts[index].as_str(),
            "{cell}, streamed: {:?} is not {choice}",
            texts[index]
        );
    }
    ensure!(usage == wanted["usage"], "{cell}, streamed: {usage} is not {}", wanted["usage"]);
    Ok(())
}

/// Runs cells, so many at once, and returns how many there were.
fn check_all(cluster: &Cluster, lengths: &[u32], only: impl Fn(usize) -> bool) -> Result<usize> {
    let patterns: Vec<String> = programs(cluster.router().url())?.iter().map(program_name).collect();
    let variants = variants();
    let cells: Vec<_> = patterns
        .iter()
        .flat_map(|pattern| variants.iter().map(move |variant| (pattern, variant)))
        .flat_map(|(pattern, variant)| lengths.iter().map(move |length| (pattern, variant, *length)))
        .enumerate()
        .filter(|(number, _)| only(*number))
        .map(|(_, cell)| cell)
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut failures = Vec::new();
            while let Some((pattern, (name, variant), length)) =
                cells.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
            {
                if let Err(error) = check(cluster, pattern, name, variant, *length) {
                    failures.push(format!("{error:#}"));
                }
            }
            failures
        };
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a client does not panic")).collect()
    });
    eprintln!("answers: {} cells over {patterns:?}, {} differ", cells.len(), failures.len());
    ensure!(
        failures.is_empty(),
        "{} of {} cells fail:\n{}",
        failures.len(),
        cells.len(),
        failures.join("\n")
    );
    Ok(cells.len())
}

/// `MICROSERVING_MATRIX` takes more lengths.
fn check_toy(wire: &str) -> Result<()> {
    let options = ClusterOptions::toy(3).engine_args(["--transport", "shm", "--num-pages", "4096"]);
    let mut cluster = Cluster::start(&options.wire(wire))?;
    let whole = std::env::var_os("MICROSERVING_MATRIX").is_some();
    check_all(&cluster, if whole { &[1, 15, 16, 17, 70, 400] } else { &[1, 70] }, |_| true)?;
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn toy_answers_are_equal_under_every_program_over_rest() -> Result<()> {
    check_toy("rest")
}

#[test]
fn toy_answers_are_equal_under_every_program_over_grpc() -> Result<()> {
    check_toy("grpc")
}

/// A sample: every program, and every variant under some program.
#[test]
fn demo_model_answers_sample() -> Result<()> {
    let Some(model) = path_or_skip("MICROSERVING_DEMO_MODEL", "the demo model") else { return Ok(()) };
    let options = ClusterOptions::model(2, &model.display().to_string());
    let mut cluster = Cluster::start(&options.engine_args(["--transport", "shm", "--threads", "1"]))?;
    let whole = std::env::var_os("MICROSERVING_MATRIX").is_some();
    let cells = check_all(&cluster, &[40], |number| whole || number.is_multiple_of(4))?;
    ensure!(cells > 5, "only {cells} cells");
    cluster.wait_idle(Duration::from_secs(10))
}
