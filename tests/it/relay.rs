//! The router's short way, over real engines: byte for byte what the long way answers, also when an engine is lost on the way.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, Daemon, Points, Proxy, binary_dir, http};
use serde_json::Value;

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";

/// Everything a client can ask for that changes what an answer looks like. All of them name a seed, since two requests that do not
/// differ by right.
const BODIES: &[(&str, &str)] = &[
    (COMPLETIONS, r#"{"prompt":"once upon","max_tokens":12,"seed":1}"#),
    (COMPLETIONS, r#"{"prompt":"once","max_tokens":9,"seed":2,"temperature":1.5,"stream":true}"#),
    (COMPLETIONS, r#"{"prompt":[104,105,106],"max_tokens":7,"seed":3,"n":3,"temperature":1}"#),
    (COMPLETIONS, r#"{"prompt":[104,105],"max_tokens":7,"seed":3,"n":2,"temperature":1,"stream":true}"#),
    (COMPLETIONS, r#"{"prompt":"a","max_tokens":6,"seed":4,"logprobs":3}"#),
    (COMPLETIONS, r#"{"prompt":"a","max_tokens":6,"seed":4,"logprobs":2,"stream":true}"#),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":6,"seed":4,"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":6,"seed":4,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
    ),
    (COMPLETIONS, r#"{"prompt":"a","max_tokens":40,"seed":5,"temperature":1,"stop":["e","t"]}"#),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":40,"seed":5,"temperature":1,"stop":["e","t"],"stream":true}"#,
    ),
    (COMPLETIONS, r#"{"prompt":"a","max_tokens":6,"seed":6,"return_token_ids":true,"stream":true}"#),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":6,"seed":6,"return_token_ids":true,"user":"u","priority":1}"#,
    ),
    (COMPLETIONS, r#"{"prompt":"ab","max_tokens":6,"seed":7,"echo":true}"#),
    (COMPLETIONS, r#"{"prompt":"ab","max_tokens":30,"seed":8,"response_format":{"type":"json_object"}}"#),
    (CHATS, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":8,"seed":9}"#),
    (CHATS, r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":8,"seed":9,"stream":true}"#),
    (
        CHATS,
        r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":8,"seed":9,"logprobs":true,"top_logprobs":2,"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
    (COMPLETIONS, r#"{"prompt":"a","top_p":3}"#),
    (COMPLETIONS, r#"{"prompt":"a","model":"nobody"}"#),
    (COMPLETIONS, r#"{"prompt":"a","suffix":"b"}"#),
    (COMPLETIONS, r#"{"prompt":"a","logit_bias":{"999999":1}}"#),
    (COMPLETIONS, r#"{"prompt":[999999]}"#),
    (COMPLETIONS, r#"{"prompt":["a","b"]}"#),
    (COMPLETIONS, r#"{"prompt":"a","n":0}"#),
    (CHATS, r#"{"messages":[{"role":"user","content":"hi"}],"tools":[{}]}"#),
    (CHATS, r#"{"messages":"hi"}"#),
];

/// Names and times differ by right; everything else must not.
fn without_names(body: &str) -> Result<String> {
    let mut lines = Vec::new();
    for line in body.lines() {
        let (begin, json) = match line.strip_prefix("data: ") {
            Some("[DONE]") => ("data: [DONE]", ""),
            Some(json) => ("data: ", json),
            None => ("", line),
        };
        if json.is_empty() {
            lines.push(begin.to_owned());
            continue;
        }
        let mut value: Value = serde_json::from_str(json).with_context(|| format!("no JSON: {line}"))?;
        if let Some(id) = value.get("id").and_then(Value::as_str) {
            let prefix = id.split('-').next().unwrap_or_default().to_owned();
            ensure!(id.len() == prefix.len() + 33, "{id}");
            value["id"] = prefix.into();
            value["created"] = 0.into();
        }
        lines.push(format!("{begin}{value}"));
    }
    Ok(lines.join("\n"))
}

#[test]
fn both_ways_answer_byte_for_byte() -> Result<()> {
    let cluster = Cluster::start(&ClusterOptions::toy(2))?;
    let router = cluster.router().url();
    let mut args = vec!["--relay".to_owned(), "false".to_owned()];
    args.extend(cluster.engines().iter().flat_map(|engine| ["--engine".to_owned(), engine.url().to_owned()]));
    let patience = Duration::from_secs(20);
    let mut reading = Daemon::spawn("reading router", &binary_dir()?.join("routerd"), &args, patience)?;
    reading.wait_ready(patience)?;
    let relayed = || -> Result<u64> {
        let metrics = http::get(&format!("{router}/metrics"))?.body;
        let line = metrics.lines().find(|line| line.contains("call=\"relay\",outcome=\"ok\""));
        Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0))
    };
    let mut num_relayed = 0;
    // What is disaggregated or moved is passed on from its first token on.
    let patterns = ["data_parallel", "prefill_decode", "migrate:2"];
    let all = patterns.iter().flat_map(|pattern| BODIES.iter().map(move |body| (*pattern, body)));
    for (number, (pattern, (path, body))) in all.enumerate() {
        // Neither may find what the other has left in a cache.
        let ask = |base: &str| {
            let body = body.replacen('{', &format!(r#"{{"cache_salt":"{base} {number}","#), 1);
            let headers = [("x-microserving-pattern", pattern)];
            http::post_bytes(&format!("{base}{path}"), &headers, body.as_bytes())
        };
        let before = relayed()?;
        let short = ask(router)?;
        num_relayed += relayed()? - before;
        let long = ask(reading.url())?;
        ensure!(short.header("x-microserving-pattern") == long.header("x-microserving-pattern"), "{body}");
        ensure!(short.header("content-type") == long.header("content-type"), "{body}");
        ensure!(short.status == long.status, "{path} {body}: {} is not {}", short.status, long.status);
        let (short, long) = (without_names(&short.body)?, without_names(&long.body)?);
        ensure!(short == long, "{pattern} {path} {body}\nshort: {short}\nlong:  {long}");
    }
    ensure!(num_relayed == 16, "{num_relayed} answers took the short way");
    Ok(())
}

/// Streams whose beginnings are of every kind that matters for going on: stop strings, half characters, a role, token ids, log-probabilities.
const STREAMS: &[(&str, &str)] = &[
    (COMPLETIONS, r#"{"prompt":"once","max_tokens":12,"seed":2,"temperature":1,"stream":true}"#),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":40,"seed":5,"temperature":1,"stop":["e","th","q"],"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
    (
        COMPLETIONS,
        r#"{"prompt":"hé","max_tokens":60,"seed":11,"temperature":1,"logit_bias":{"195":100,"169":100,"233":100},"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
    ),
    (
        COMPLETIONS,
        r#"{"prompt":"a","max_tokens":9,"seed":4,"logprobs":2,"return_token_ids":true,"stream":true}"#,
    ),
    (
        CHATS,
        r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":10,"seed":9,"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
];

/// As [`without_names`], and without what was found in caches; the names must be the same throughout.
fn as_seen(body: &str) -> Result<String> {
    let mut names = BTreeSet::new();
    let mut seen = Vec::new();
    for line in without_names(body)?.lines() {
        let Some(json) = line.strip_prefix("data: {").map(|rest| format!("{{{rest}")) else {
            seen.push(line.to_owned());
            continue;
        };
        let mut value: Value = serde_json::from_str(&json)?;
        if let Some(details) = value.pointer_mut("/usage/prompt_tokens_details/cached_tokens") {
            *details = 0.into();
        }
        seen.push(value.to_string());
    }
    for line in body.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let value: Value = serde_json::from_str(&format!("{{{line}"))?;
        names.insert(format!("{} {} {} {}", value["id"], value["created"], value["model"], value["object"]));
    }
    ensure!(names.len() == 1, "an answer of several names: {names:?}");
    Ok(seen.join("\n"))
}

/// The connection to an engine breaks after its first, second, sixth and last event, and behind the text; the client does not notice.
#[test]
fn a_stream_that_loses_its_engine_goes_on() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(3))?;
    let (points, cut) = (Points::default(), Arc::new(Mutex::new(String::new())));
    let reached = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(Mutex::new(0_usize));
    let mut args = ["--min-engines", "3", "--wire", "rest"].map(str::to_owned).to_vec();
    let mut proxies = Vec::new();
    for engine in cluster.engines() {
        let (cut, reached, seen) = (cut.clone(), reached.clone(), seen.clone());
        let proxy = Proxy::start(
            engine.url(),
            points.clone(),
            Arc::new(move |point: &str| {
                if let Some(number) = point.strip_prefix("relay 0 event ") {
                    *seen.lock().unwrap_or_else(PoisonError::into_inner) = number.parse().unwrap_or(0);
                }
                let cuts = *cut.lock().unwrap_or_else(PoisonError::into_inner) == point;
                reached.fetch_or(cuts, Ordering::Relaxed);
                !cuts
            }),
        )?;
        args.extend(["--engine".to_owned(), proxy.url().to_owned()]);
        proxies.push(proxy);
    }
    let patience = Duration::from_secs(20);
    let mut router = Daemon::spawn("router", &binary_dir()?.join("routerd"), &args, patience)?;
    router.wait_ready(patience)?;
    let set_cut = |point: String| *cut.lock().unwrap_or_else(PoisonError::into_inner) = point;
    for (number, (path, body)) in STREAMS.iter().enumerate() {
        let ask = |run: usize| {
            points.reset();
            let body = body.replacen('{', &format!(r#"{{"cache_salt":"{number} {run}","#), 1);
            let headers = [("x-request-id", "it-goes-on")];
            let answer = http::post_bytes(&format!("{}{path}", router.url()), &headers, body.as_bytes())?;
            ensure!(answer.header("x-request-id") == Some("it-goes-on"), "{answer:?}");
            as_seen(&answer.body)
        };
        set_cut(String::new());
        let calm = ask(0)?;
        ensure!(calm.matches("data: [DONE]").count() == 1, "{calm}");
        // The last one is [DONE].
        let events = *seen.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(events > 3, "{calm}");
        for k in BTreeSet::from([1, 2, 5.min(events - 1), events - 2, events - 1]) {
            reached.store(false, Ordering::Relaxed);
            set_cut(format!("relay 0 event {k}"));
            let got = ask(k)?;
            ensure!(reached.load(Ordering::Relaxed), "{path} {body} has no event {k}");
            ensure!(got == calm, "{path} {body}, cut after {k} of {events} events:\n{got}\n---\n{calm}");
            wait_ready(router.url(), 3)?;
        }
    }
    drop(router);
    cluster.wait_idle(Duration::from_secs(10))
}

/// Waits until the router takes all its engines for ready again.
fn wait_ready(router: &str, engines: usize) -> Result<()> {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        let metrics = http::get(&format!("{router}/metrics"))?.body;
        let ready =
            |line: &&str| line.starts_with("microserving_router_engine_ready{") && line.ends_with(" 1");
        if metrics.lines().filter(ready).count() == engines {
            return Ok(());
        }
        ensure!(std::time::Instant::now() < deadline, "{metrics}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
