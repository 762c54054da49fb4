//! Input that is wrong in every way a client can be wrong: a clear error, nothing left behind, and the daemon goes on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Answer};
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::prompt;
use serde_json::{Value, json};

/// Checks that the answer is an error of one of the statuses whose body is OpenAI's and names the field.
fn check(what: &str, answer: &Answer, statuses: &[u16], field: &str) -> Result<()> {
    ensure!(statuses.contains(&answer.status), "{what}: status {} {}", answer.status, answer.body);
    let body: Value =
        serde_json::from_str(&answer.body).with_context(|| format!("{what}: {}", answer.body))?;
    let message =
        body.pointer("/error/message").and_then(Value::as_str).with_context(|| format!("{what}: {body}"))?;
    for key in ["type", "param", "code"] {
        ensure!(body["error"].get(key).is_some(), "{what}: no {key} in {body}");
    }
    let names_it =
        message.contains(field) || body.pointer("/error/param").and_then(Value::as_str) == Some(field);
    ensure!(names_it, "{what}: {body} does not name {field}");
    Ok(())
}

#[test]
fn completions_refuse_what_cannot_be() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(2).engine_args(["--lease-seconds", "1"]))?;
    let long: Vec<u32> = prompt(200_000, 1);
    let cases = [
        ("temperature", json!({"prompt": "a", "temperature": -1})),
        ("temperature", json!({"prompt": "a", "temperature": "hot"})),
        ("top_p", json!({"prompt": "a", "top_p": 1.5})),
        ("max_tokens", json!({"prompt": "a", "max_tokens": -4})),
        ("max_tokens", json!({"prompt": "a", "max_tokens": 1.5})),
        ("n", json!({"prompt": "a", "n": 0})),
        ("stop", json!({"prompt": "a", "stop": 7})),
        ("prompt", json!({"prompt": ""})),
        ("prompt", json!({"prompt": []})),
        ("prompt", json!({})),
        ("prompt", json!({"prompt": [1, -2]})),
        ("prompt", json!({"prompt": [4_000_000_000_u32]})),
        ("prompt", json!({"prompt": long})),
        ("logit_bias", json!({"prompt": "a", "logit_bias": {"5": 1e9}})),
        ("model", json!({"prompt": "a", "model": "no-such-model"})),
        ("suffix", json!({"prompt": "a", "suffix": "b"})),
        ("best_of", json!({"prompt": "a", "best_of": 3})),
    ];
    for url in [cluster.engines()[0].url(), cluster.router().url()] {
        for (field, body) in &cases {
            let answer = http::post(&format!("{url}/v1/completions"), &[], body)?;
            let short: String = body.to_string().chars().take(80).collect();
            check(&format!("{url} {short}"), &answer, &[400, 404, 422], field)?;
        }
        for raw in ["", "{", "[]", "\"text\"", "{\"prompt\": \"a\", \"temperature\": NaN}", "\u{feff}{}"] {
            let answer = http::post_bytes(&format!("{url}/v1/completions"), &[], raw.as_bytes())?;
            ensure!([400, 422].contains(&answer.status), "{url} {raw:?}: {answer:?}");
        }
        let answer = http::post_bytes(&format!("{url}/v1/completions"), &[], b"{\"prompt\": \"\xff\xfe\"}")?;
        ensure!([400, 422].contains(&answer.status), "{url} bad UTF-8: {answer:?}");
        let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        let answer = http::post_bytes(&format!("{url}/v1/completions"), &[], deep.as_bytes())?;
        ensure!([400, 422].contains(&answer.status), "{url} deep nesting: {}", answer.status);
        let chat = http::post(&format!("{url}/v1/chat/completions"), &[], &json!({"messages": []}))?;
        check(url, &chat, &[400, 422], "messages")?;
        let answer = http::post(
            &format!("{url}/v1/completions"),
            &[],
            &json!({"prompt": "still there?", "max_tokens": 3}),
        )?;
        ensure!(answer.status == 200, "{url}: {answer:?}");
    }
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn calls_refuse_what_cannot_be() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(2).engine_args(["--lease-seconds", "1"]))?;
    let [p, d] = [0, 1].map(|index| format!("{}/microserving", cluster.engines()[index].url()));
    let tokens = prompt(50, 9);
    let with = |extra: Value| {
        let mut body = json!({"prompt": tokens});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        body
    };
    for end in [50, 51, -51, 1_000_000] {
        check(
            "prep_recv end",
            &http::post(&format!("{d}/prep_recv"), &[], &with(json!({"end": end})))?,
            &[400],
            "end",
        )?;
    }
    for (key, value) in [("end", json!("x")), ("end", Value::Null), ("user", json!(5))] {
        let mut body = with(json!({"end": -1}));
        body[key] = value;
        check("prep_recv types", &http::post(&format!("{d}/prep_recv"), &[], &body)?, &[400, 422], key)?;
    }
    let both = with(json!({"end": -1, "user": "a", "seq_id": "b"}));
    check("two keys", &http::post(&format!("{d}/prep_recv"), &[], &both)?, &[400], "seq_id")?;

    let prepared: Value =
        http::post(&format!("{d}/prep_recv"), &[], &with(json!({"end": -1, "seq_id": "k1"})))?.json()?;
    let address = prepared["kv_append_metadata"].as_str().context("no address")?.to_owned();
    let other = with(json!({"end": 10, "seq_id": "k1"}));
    check("same key, other body", &http::post(&format!("{d}/prep_recv"), &[], &other)?, &[409], "k1")?;

    let send = |extra: Value| {
        let mut body =
            with(json!({"begin": 0, "end": 49, "kv_addr_info": address, "recv_rank": 0, "seq_id": "k1"}));
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        http::post(&format!("{p}/remote_send"), &[], &body)
    };
    for (begin, end, field) in
        [(0, 50, "end"), (-51, 49, "begin"), (20, 20, "begin"), (30, 10, "begin"), (0, -51, "end")]
    {
        let answer = send(json!({"begin": begin, "end": end}))?;
        check(&format!("begin {begin} end {end}"), &answer, &[400], field)?;
    }
    let mut forged = address.clone().into_bytes();
    let middle = forged.len() / 2;
    forged[middle] = if forged[middle] == b'A' { b'B' } else { b'A' };
    for bad in
        [String::from_utf8(forged)?, address[..address.len() / 2].to_owned(), "!!!".to_owned(), String::new()]
    {
        let answer = send(json!({"kv_addr_info": bad}))?;
        ensure!([400, 403, 409, 410].contains(&answer.status), "address {bad:?}: {answer:?}");
    }
    let mismatch = http::post(
        &format!("{d}/start_generate"),
        &[],
        &json!({"prompt": prompt(50, 10), "begin": 49, "seq_id": "k1"}),
    )?;
    check("another prompt", &mismatch, &[409], "prompt")?;
    let wrong_begin =
        http::post(&format!("{d}/start_generate"), &[], &with(json!({"begin": 3, "seq_id": "k1"})))?;
    check("another begin", &wrong_begin, &[400], "begin")?;
    for call in ["commit", "pause"] {
        check(
            call,
            &http::post(&format!("{d}/{call}"), &[], &json!({"seq_id": "nobody"}))?,
            &[404],
            "nobody",
        )?;
    }
    let aborted: Value = http::post(&format!("{d}/abort"), &[], &json!({"seq_id": "nobody"}))?.json()?;
    ensure!(aborted["aborted"] == false, "{aborted}");
    std::thread::sleep(Duration::from_millis(1500));
    let late = send(json!({}))?;
    ensure!(late.status == 410, "an expired address: {late:?}");
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn stale_addresses_are_refused_by_a_new_incarnation() -> Result<()> {
    let first = Cluster::start(&ClusterOptions::toy(2))?;
    let tokens = prompt(50, 9);
    let d = first.engines()[1].url().to_owned();
    let prepared: Value =
        http::post(&format!("{d}/microserving/prep_recv"), &[], &json!({"prompt": tokens, "end": -1}))?
            .json()?;
    drop(first);
    let second = Cluster::start(&ClusterOptions::toy(2))?;
    let body = json!({
        "prompt": tokens, "begin": 0, "end": 49, "kv_addr_info": prepared["kv_append_metadata"], "recv_rank": 0,
    });
    let answer = http::post(&format!("{}/microserving/remote_send", second.engines()[0].url()), &[], &body)?;
    ensure!(answer.status == 410, "{answer:?}");
    Ok(())
}
