//! What each program asks of which engine.

use microserving_router::Role;
use serde_json::json;

use crate::fake::{Act, Fake, World, prompt_of, tokens};

#[tokio::test(start_paused = true)]
async fn data_parallel_makes_one_call() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    for _ in 0..4 {
        let answer = world.complete(&format!(r#"{{"prompt":{},"max_tokens":3}}"#, tokens(10))).await;
        assert_eq!(answer.text(), "abc");
        assert_eq!(answer.headers["x-microserving-pattern"], "data_parallel");
    }
    assert!(a.calls().iter().chain(&b.calls()).all(|call| *call == "start_generate"));
    assert_eq!(a.calls().len() + b.calls().len(), 4);
    let seen = if a.calls().is_empty() { b.last("start_generate") } else { a.last("start_generate") };
    assert_eq!(seen.body["begin"], 0);
    assert_eq!(prompt_of(&seen).tokens().map(<[_]>::len), Some(10));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn round_robin_takes_turns() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
        config.placement = microserving_router::PlacementPolicy::RoundRobin;
    })
    .await;
    for _ in 0..6 {
        world.complete(r#"{"prompt":[1,2,3]}"#).await;
    }
    assert_eq!((a.calls().len(), b.calls().len()), (3, 3));
    world.end().await;
}

/// Runs one request of `len` tokens and returns the calls with their ranges, in order: P's and D's.
async fn ranges(pattern: &str, len: u32, matched: u32) -> Vec<String> {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    d.set_matched(matched);
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], pattern).await;
    let answer = world.complete(&format!(r#"{{"prompt":{}}}"#, tokens(len))).await;
    assert_eq!(answer.text(), "abc", "{}", answer.body);
    let id = d.last("start_generate").body["user"].clone();
    let mut out = Vec::new();
    for seen in d.seen().iter().take(1).chain(&p.seen()).chain(d.seen().iter().skip(1)) {
        assert_eq!(seen.body["user"], id, "one key ties the calls together");
        assert_eq!(prompt_of(seen), prompt_of(&d.last("start_generate")));
        let range = match seen.call {
            "prep_recv" => format!("prep_recv {}", seen.body["end"]),
            "remote_send" => {
                assert_eq!(seen.body["kv_addr_info"], "addr-of-d");
                format!("remote_send {}..{}", seen.body["begin"], seen.body["end"])
            }
            call => format!("{call} {}", seen.body["begin"]),
        };
        out.push(range);
    }
    world.end().await;
    out
}

#[tokio::test(start_paused = true)]
async fn prefill_decode_sends_what_the_decoder_lacks() {
    for (len, matched, expected) in [
        (10, 0, vec!["prep_recv 9", "remote_send 0..9", "start_generate 9"]),
        (10, 4, vec!["prep_recv 9", "remote_send 4..9", "start_generate 9"]),
        (10, 8, vec!["prep_recv 9", "remote_send 8..9", "start_generate 9"]),
        (10, 9, vec!["prep_recv 9", "start_generate 9"]),
        (2, 0, vec!["prep_recv 1", "remote_send 0..1", "start_generate 1"]),
        (1, 0, vec!["prep_recv 0", "start_generate 0"]),
    ] {
        assert_eq!(ranges("prefill_decode", len, matched).await, expected, "{len} {matched}");
    }
}

#[tokio::test(start_paused = true)]
async fn balanced_moves_the_end_of_the_prefill() {
    for (pattern, len, matched, expected) in [
        ("balanced:0.1", 100, 0, vec!["prep_recv 90", "remote_send 0..90", "start_generate 90"]),
        ("balanced:0.25", 100, 0, vec!["prep_recv 75", "remote_send 0..75", "start_generate 75"]),
        ("balanced:0.5", 100, 48, vec!["prep_recv 50", "remote_send 48..50", "start_generate 50"]),
        ("balanced:0.5", 100, 96, vec!["prep_recv 50", "start_generate 50"]),
        ("balanced:0.5", 1, 0, vec!["prep_recv 0", "start_generate 0"]),
    ] {
        assert_eq!(ranges(pattern, len, matched).await, expected, "{pattern} {len} {matched}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_generation_carries_sampling_and_every_call_the_same_seed() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    let body = format!(
        r#"{{"prompt":{},"temperature":0.8,"stop":["z"],"cache_salt":"t1","priority":3}}"#,
        tokens(10)
    );
    world.complete(&body).await;
    let start = d.last("start_generate").body;
    assert!(start["seed"].is_i64(), "a seed is drawn when none is given: {start}");
    assert_eq!((&start["stop"], &start["stream"]), (&json!(["z"]), &json!(true)));
    for bare in [d.last("prep_recv").body, p.last("remote_send").body] {
        assert_eq!(
            (&bare["temperature"], &bare["stop"], &bare["stream"]),
            (&json!(null), &json!(null), &json!(null))
        );
        assert_eq!((&bare["cache_salt"], &bare["priority"]), (&json!("t1"), &json!(3)));
    }
    world.complete(&format!(r#"{{"prompt":{},"seed":-5}}"#, tokens(10))).await;
    assert_eq!(d.last("start_generate").body["seed"], -5);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_second_engine_the_decoder_does_it_all() {
    let only = Fake::new("only");
    let world = World::new(&[(&only, Role::Any)], "prefill_decode").await;
    assert_eq!(world.complete(r#"{"prompt":[1,2,3]}"#).await.text(), "abc");
    assert_eq!(only.calls(), ["start_generate"]);
    assert_eq!(only.last("start_generate").body["begin"], 0);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn roles_are_kept() {
    let p = Fake::new("p");
    let world = World::new(&[(&p, Role::Prefill)], "data_parallel").await;
    let answer = world.complete(r#"{"prompt":[1,2,3]}"#).await;
    assert_eq!((answer.status.as_u16(), answer.json()["error"]["code"].as_str()), (503, Some("no_engine")));
    assert_eq!(answer.headers["retry-after"], "1");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_pattern_changes_while_requests_run() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "data_parallel").await;
    d.on_generate(Act::HangAfter(1));
    let app = world.app();
    let running = tokio::spawn(async move {
        let request = axum::http::Request::post("/v1/completions")
            .body(axum::body::Body::from(r#"{"prompt":[1,2,3],"stream":true}"#))
            .expect("a request");
        let response = tower::ServiceExt::oneshot(app, request).await.expect("infallible");
        response.headers()["x-microserving-pattern"].clone()
    });
    assert_eq!(running.await.expect("runs"), "data_parallel");

    let answer = world.get("/admin/v1/pattern").await.json();
    assert_eq!(
        answer,
        json!({
            "name": "data_parallel",
            "available": ["adaptive", "balanced", "data_parallel", "migrate", "prefill_decode"],
            "revision": 1,
        })
    );
    let changed = world.call("PUT", "/admin/v1/pattern", &[], r#"{"name":"balanced","ratio":0.5}"#).await;
    assert_eq!((changed.status.as_u16(), &changed.json()["ratio"]), (200, &json!(0.5)));
    let answer = world.complete(r#"{"prompt":[1,2,3,4]}"#).await;
    assert_eq!(answer.headers["x-microserving-pattern"], "balanced:0.5");
    assert_eq!(d.last("start_generate").body["begin"], 2);

    for (body, param) in [
        (r#"{"name":"nope"}"#, "name"),
        (r#"{"name":"balanced","ratio":2}"#, "ratio"),
        (r#"{"name":"prefill_decode","ratio":0.1}"#, "ratio"),
        (r#"{"name":"balanced","ratio":"x"}"#, "ratio"),
        (r#"{"name":"balanced","speed":1}"#, "speed"),
        (r"{}", "name"),
    ] {
        let answer = world.call("PUT", "/admin/v1/pattern", &[], body).await;
        assert!(answer.status.is_client_error(), "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
    assert_eq!(world.get("/admin/v1/pattern").await.json()["name"], "balanced");
    world.end().await;
}

/// Profile of engines that prefill 1000 tokens a second and take 10 ms for a step.
fn slow_to_prefill(config: &mut microserving_router::RouterConfig) {
    let profile = br#"{"version": 1,
        "prefill": {"new_tokens": [1, 1000], "context": [0], "seconds": [[0.011], [1.0]]},
        "decode": {"sequences": [1, 100], "context": [0], "seconds": [[0.01], [0.02]]},
        "riding": {"new_tokens": [1, 1000], "sequences": [1], "seconds": [[0.001], [1.0]]},
        "links": {"any": {"fixed_seconds": 0.001, "seconds_per_token": 0.00001}}}"#;
    let profile = microserving_cost::Profile::from_json(profile).expect("a profile");
    config.profile = Some(std::sync::Arc::new(profile));
}

#[tokio::test(start_paused = true)]
async fn adaptive_prefills_elsewhere_while_others_decode() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let specs = [(&p, Role::Prefill), (&d, Role::Decode)];
    let world = World::with(&specs, "adaptive", slow_to_prefill).await;
    assert_eq!(world.complete(&format!(r#"{{"prompt":{}}}"#, tokens(900))).await.text(), "abc");
    let alone = d.calls();
    // Four streams that a prefill on D would stall.
    let mut streams = Vec::new();
    for _ in 0..4 {
        d.on_generate(Act::HangAfter(2));
        let request = axum::http::Request::post("/v1/completions")
            .body(axum::body::Body::from(r#"{"prompt":[1,2,3],"stream":true}"#))
            .expect("a request");
        streams.push(tower::ServiceExt::oneshot(world.app(), request).await.expect("infallible"));
    }
    d.set_matched(8);
    let other: Vec<u32> = (5000..5800).collect();
    let answer = world.complete(&format!(r#"{{"prompt":{other:?}}}"#)).await;
    assert_eq!(
        (answer.text().as_str(), &answer.headers["x-microserving-pattern"]),
        ("abc", &"adaptive:fixed".parse().unwrap())
    );
    assert_eq!(d.calls()[alone.len() + 4..], ["prep_recv", "start_generate"]);
    assert_eq!(p.last("remote_send").body["begin"], 8, "the truth replaces the hint");
    assert_eq!(p.last("remote_send").body["end"], d.last("prep_recv").body["end"]);
    assert_eq!(d.last("start_generate").body["begin"], d.last("prep_recv").body["end"]);
    // A short prompt is not worth a second engine.
    let before = p.calls().len();
    assert_eq!(world.complete(r#"{"prompt":[7,8,9]}"#).await.text(), "abc");
    assert_eq!((p.calls().len(), d.calls().last()), (before, Some(&"start_generate")));
    drop(streams);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn predictions_follow_what_engines_take() {
    let a = Fake::new("a");
    let world = World::with(&[(&a, Role::Any)], "data_parallel", slow_to_prefill).await;
    let metrics = world.get("/metrics").await.body;
    let line = r#"microserving_router_prediction_ratio{engine="a",phase="prefill"} "#;
    assert!(metrics.contains(&format!("{line}1.0")), "{metrics}");
    a.set_first_token(std::time::Duration::from_secs(2));
    for start in 0..3 {
        let tokens: Vec<u32> = (start * 2000..start * 2000 + 500).collect();
        world.complete(&format!(r#"{{"prompt":{tokens:?}}}"#)).await;
    }
    let metrics = world.get("/metrics").await.body;
    let ratio = metrics.lines().find_map(|found| found.strip_prefix(line)).expect("a ratio");
    let ratio: f64 = ratio.parse().expect("a number");
    assert!((3.5..4.5).contains(&ratio), "500 tokens take two seconds instead of half of one: {ratio}");
    world.end().await;
}
