//! What clients get: the same under every pattern.

use microserving_router::Role;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::fake::{Fake, MODEL, World, tokens};

const PATTERNS: [&str; 3] = ["data_parallel", "prefill_decode", "balanced:0.25"];

async fn pair() -> (World, std::sync::Arc<Fake>, std::sync::Arc<Fake>) {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "data_parallel").await;
    (world, p, d)
}

/// What may differ between answers to the same request.
fn without_names(mut answer: Value) -> Value {
    answer["id"] = json!("id");
    answer["created"] = json!(0);
    answer
}

#[tokio::test(start_paused = true)]
async fn answers_do_not_depend_on_the_pattern() {
    let (world, _, _) = pair().await;
    for body in [
        r#"{"prompt":"hello","max_tokens":4}"#.to_owned(),
        r#"{"prompt":"hello","max_tokens":4,"n":2,"echo":true}"#.to_owned(),
        format!(r#"{{"model":"toy","prompt":{},"max_tokens":2}}"#, tokens(40)),
        r#"{"prompt":"hello","max_tokens":4,"stream":true}"#.to_owned(),
        r#"{"prompt":"hello","max_tokens":2,"n":2,"echo":true,"stream":true,"stream_options":{"include_usage":true}}"#
            .to_owned(),
    ] {
        let mut answers = Vec::new();
        for pattern in PATTERNS {
            let answer =
                world.call("POST", "/v1/completions", &[("x-microserving-pattern", pattern)], &body).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            assert_eq!(answer.headers["x-microserving-pattern"], pattern);
            let values = if answer.body.starts_with("data:") { answer.events() } else { vec![answer.json()] };
            answers.push(values.into_iter().map(without_names).collect::<Vec<_>>());
        }
        assert_eq!(answers[0], answers[1], "{body}");
        assert_eq!(answers[0], answers[2], "{body}");
    }
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_completion_in_full() {
    let (world, _, _) = pair().await;
    let answer = world.complete(r#"{"prompt":"hey","max_tokens":2,"n":2,"echo":true}"#).await;
    assert_eq!(answer.headers["content-type"], "application/json");
    let mut json = answer.json();
    assert!(json["id"].as_str().is_some_and(|id| id.starts_with("cmpl-") && id.len() == 37), "{json}");
    assert!(json["created"].as_u64().is_some_and(|created| created > 1_700_000_000));
    json = without_names(json);
    let choice =
        |index: u32| json!({"index": index, "text": "heyab", "logprobs": null, "finish_reason": "length"});
    assert_eq!(
        json,
        json!({"id": "id", "object": "text_completion", "created": 0, "model": MODEL,
            "choices": [choice(0), choice(1)],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}})
    );
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn streams_carry_usage_only_if_asked() {
    let (world, _, _) = pair().await;
    let plain = world.complete(r#"{"prompt":"hey","max_tokens":2,"stream":true}"#).await;
    assert_eq!(plain.headers["content-type"], "text/event-stream; charset=utf-8");
    assert!(plain.body.ends_with("\n\ndata: [DONE]\n\n"));
    let events = plain.events();
    assert_eq!(events.len(), 2);
    assert!(events.iter().all(|event| event["usage"].is_null() && event["id"] == events[0]["id"]));
    assert_eq!(plain.streamed_text(), "ab");

    let usage = world
        .complete(r#"{"prompt":"hey","max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}"#)
        .await;
    let events = usage.events();
    assert_eq!(events.len(), 3);
    assert_eq!((&events[2]["choices"], &events[2]["usage"]["total_tokens"]), (&json!([]), &json!(5)));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn chats_stream_and_answer() {
    let (world, _, d) = pair().await;
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":2}"#;
    let answer = world.call("POST", "/v1/chat/completions", &[], body).await.json();
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": "ab"}));
    let prompt: Vec<u32> = "<user>hi".chars().map(u32::from).collect();
    assert_eq!(d.last("start_generate").body["prompt"], json!(prompt));
    assert_eq!(d.last("start_generate").body["model"], MODEL, "engines are told which model was meant");

    let body = r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"stream":true}"#;
    let events = world.call("POST", "/v1/chat/completions", &[], body).await.events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": "a"}));
    assert_eq!(events[1]["choices"][0]["delta"], json!({"content": "b"}));
    assert_eq!(events[1]["choices"][0]["finish_reason"], "length");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn statistics_on_request() {
    let (world, p, d) = pair().await;
    d.set_matched(4);
    p.set_prefill_cached(8);
    let headers = [("x-microserving-stats", "1"), ("x-microserving-pattern", "prefill_decode")];
    let body = format!(r#"{{"prompt":{},"max_tokens":2}}"#, tokens(20));
    let answer = world.call("POST", "/v1/completions", &headers, &body).await.json();
    assert_eq!(
        answer["microserving"],
        json!({"pattern": "prefill_decode", "matched_tokens": 4, "received_tokens": 15, "computed_tokens": 1,
            "prefill_cached_tokens": 8, "prefill_computed_tokens": 11, "sent_tokens": 15, "sent_bytes": 150,
            "transfer_seconds": 0.5, "exposed_transfer_seconds": 0.25, "decode_engine": "d", "prefill_engine": "p"})
    );
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
    assert!(d.last("start_generate").cx.wants_stats);

    let streamed = format!(r#"{{"prompt":{},"max_tokens":2,"stream":true}}"#, tokens(20));
    let events = world.call("POST", "/v1/completions", &headers, &streamed).await.events();
    let last = events.last().expect("events");
    assert_eq!((&last["usage"], &last["microserving"]["sent_tokens"]), (&json!(null), &json!(15)));

    let plain = world.complete(&body).await.json();
    assert!(plain.get("microserving").is_none(), "only on request");
    let metrics = world.get("/metrics").await.body;
    for line in [
        r#"microserving_router_prompt_tokens_total{phase="sent"} 30"#,
        r#"microserving_router_prompt_tokens_total{phase="prefill_computed"} 22"#,
        "microserving_router_kv_sent_bytes_total 300",
        r#"microserving_router_requests_total{pattern="prefill_decode",status="200"} 2"#,
        r#"microserving_router_time_to_first_token_seconds_count{pattern="prefill_decode"} 2"#,
        r#"microserving_router_engine_calls_total{call="remote_send",outcome="ok"} 2"#,
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn models_and_tokens() {
    let (world, _, _) = pair().await;
    let models = world.get("/v1/models").await.json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(models["data"].as_array().map(Vec::len), Some(1), "each model once");
    assert_eq!(world.get("/v1/models/toy").await.json()["id"], MODEL);
    assert_eq!(world.get("/v1/models/other").await.status, 404);
    let tokens = world.call("POST", "/tokenize", &[], r#"{"prompt":"hi"}"#).await.json();
    assert_eq!(tokens, json!({"tokens": [104, 105], "count": 2, "max_model_len": 1000}));
    let chat =
        world.call("POST", "/tokenize", &[], r#"{"messages":[{"role":"user","content":"x"}]}"#).await.json();
    assert_eq!(chat["count"], 7);
    let text = world.call("POST", "/detokenize", &[], r#"{"tokens":[104,105]}"#).await.json();
    assert_eq!(text, json!({"prompt": "hi"}));
    assert_eq!(world.call("POST", "/detokenize", &[], r#"{"tokens":[55555555]}"#).await.status, 400);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn bad_requests_name_the_field_and_reach_no_engine() {
    let (world, p, d) = pair().await;
    for (path, body, status, param) in [
        ("/v1/completions", "not json", 422, ""),
        ("/v1/completions", r#"{"prompt":""}"#, 400, "prompt"),
        ("/v1/completions", r#"{"prompt":[-1]}"#, 400, "prompt"),
        ("/v1/completions", r#"{"prompt":["a","b"]}"#, 400, "prompt"),
        ("/v1/completions", r#"{"prompt":"a","temperature":-1}"#, 400, "temperature"),
        ("/v1/completions", r#"{"prompt":"a","temperature":"nan"}"#, 400, "temperature"),
        ("/v1/completions", r#"{"prompt":"a","n":null}"#, 422, "n"),
        ("/v1/completions", r#"{"prompt":"a","suffix":"x"}"#, 400, "suffix"),
        ("/v1/completions", r#"{"prompt":"a","model":"other"}"#, 404, "model"),
        ("/v1/completions", r#"{"prompt":"a","timeout_seconds":0}"#, 400, "timeout_seconds"),
        ("/v1/chat/completions", r#"{"messages":[]}"#, 400, "messages"),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"x"}],"tools":[{}]}"#,
            400,
            "tools",
        ),
    ] {
        let answer = world.call("POST", path, &[], body).await;
        assert_eq!(answer.status.as_u16(), status, "{body}");
        assert_eq!(answer.headers["content-type"], "application/json");
        let error = &answer.json()["error"];
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body}");
        assert!(error["message"].is_string() && error["type"].is_string());
    }
    let long = world.complete(&format!(r#"{{"prompt":{}}}"#, tokens(1000))).await;
    assert_eq!((long.status.as_u16(), long.json()["error"]["param"].as_str()), (400, Some("prompt")));
    assert_eq!(world.get("/nowhere").await.json()["error"]["type"], "not_found_error");
    assert_eq!(world.get("/v1/completions").await.status, 405);
    let odd = world.get("/v1/models/%ff").await;
    assert_eq!((odd.status.as_u16(), odd.json()["error"]["param"].as_str()), (400, Some("model")));
    assert!(p.calls().is_empty() && d.calls().is_empty());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_given_up() {
    let d = Fake::new("d");
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    let pending = futures::stream::pending::<Result<axum::body::Bytes, std::convert::Infallible>>();
    let request = axum::http::Request::post("/v1/completions").body(axum::body::Body::from_stream(pending));
    let response = world.app().oneshot(request.expect("a request")).await.expect("infallible");
    assert_eq!(response.status(), 408);
    assert!(d.calls().is_empty());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_tokenizer_comes_from_an_engine() {
    let d = Fake::new("d");
    let world = World::with(&[(&d, Role::Any)], "data_parallel", |config| config.codec = None).await;
    let tokens = world.call("POST", "/tokenize", &[], r#"{"prompt":"hi"}"#).await.json();
    assert_eq!(tokens["count"], 2, "the toy's tokens are bytes");
    let chat = r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;
    assert_eq!(world.call("POST", "/v1/chat/completions", &[], chat).await.status, 200);
    let prompt = d.last("start_generate").body["prompt"].as_array().map(Vec::len);
    assert_eq!(prompt, Some("user: hi\nassistant: ".len()));
    let endless = "x".repeat(1 << 20);
    for (path, body, field) in [
        ("/v1/completions", json!({"prompt": endless}), "prompt"),
        ("/tokenize", json!({"prompt": endless}), "prompt"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": endless}]}), "messages"),
    ] {
        let refused = world.call("POST", path, &[], &body.to_string()).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status.as_u16(), error["param"].as_str()), (400, Some(field)), "{path}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains("bytes")), "uncut: {error}");
    }
    world.end().await;
}
