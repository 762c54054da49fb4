//! What an operator sees: metrics, ids, statistics, the description.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use crate::support::{Settings, completion, one, prompt, two, with};

#[tokio::test]
async fn metrics_show_what_happened() {
    let (p, d) = two(&Settings::default()).await;
    let tokens = prompt(50, 1);
    let keyed = |fields: Value| with(with(completion(&tokens, 5), json!({"user": "a"})), fields);
    let prep = d.call("/microserving/prep_recv", &keyed(json!({"end": -1}))).await;
    let send = json!({"begin": 0, "end": -1, "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 0});
    p.call("/microserving/remote_send", &keyed(send)).await;
    d.call("/microserving/start_generate", &keyed(json!({"begin": -1}))).await;
    d.get("/nothing").await;

    let text = d.get("/metrics").await;
    assert_eq!(text.status, 200);
    let text = text.body;
    for line in [
        "microserving_requests_total{route=\"/microserving/start_generate\",status=\"200\"} 1",
        "microserving_requests_total{route=\"unmatched\",status=\"404\"} 1",
        "microserving_time_to_first_token_seconds_count 1",
        "microserving_time_per_output_token_seconds_count 1",
        "microserving_generation_seconds_count 1",
        "microserving_sequences{state=\"running\"} 0",
        "microserving_kv_pages{state=\"reserved\"} 0",
        "microserving_prefill_tokens_total 1",
        "microserving_decode_tokens_total 5",
        "microserving_queued_prefill_tokens 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    for (name, help) in [
        ("microserving_engine", "What this engine is"),
        ("microserving_prefix_lookup_tokens", "looked up"),
        ("microserving_transfer_seconds", "sending"),
    ] {
        let line = text.lines().find(|line| line.starts_with(&format!("# HELP {name}"))).unwrap_or_default();
        assert!(line.contains(help), "{name}: {text}");
    }
    let value = |text: &str, name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_default();
        line.rsplit(' ').next().unwrap_or_default().parse().unwrap_or_else(|_| panic!("{name} in\n{text}"))
    };
    assert!(value(&text, "microserving_transfer_received_bytes_total") > 0.0);
    let sender = p.get("/metrics").await.body;
    assert!(value(&sender, "microserving_transfer_sent_bytes_total") > 0.0);
    assert!(sender.contains("microserving_remote_send_seconds_count 1"), "{sender}");
    assert!(text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn a_scrape_does_not_wait_for_a_long_step() {
    let node = one(&Settings { step_time: Duration::from_millis(600), ..Settings::default() }).await;
    let body = completion(&prompt(5, 1), 4);
    let running = node.post("/v1/completions", &body);
    let scraping = async {
        // Without looking at the engine there is no telling when its step has begun; any time will do.
        for _ in 0..4 {
            let began = tokio::time::Instant::now();
            assert_eq!(node.get("/metrics").await.status, 200);
            assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        }
    };
    let (answer, ()) = tokio::join!(running, scraping);
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn request_ids_come_back() {
    let node = one(&Settings::default()).await;
    let mut request = node.request(Method::GET, "/v1/models", "");
    request.headers_mut().insert("x-request-id", "abc-123".parse().unwrap());
    assert_eq!(node.send(request).await.header("x-request-id"), "abc-123");
    assert!(node.get("/v1/models").await.header("x-request-id").starts_with("req-"));
    let mut request = node.request(Method::GET, "/nothing", "");
    request.headers_mut().insert("x-request-id", "x".repeat(500).parse().unwrap());
    assert!(node.send(request).await.header("x-request-id").starts_with("req-"));
}

#[tokio::test]
async fn statistics_are_for_those_who_ask() {
    let node = one(&Settings::default()).await;
    let body = completion(&prompt(20, 1), 3);
    assert!(node.call("/v1/completions", &body).await.get("microserving").is_none());
    let mut request = node.request(Method::POST, "/v1/completions", body.to_string());
    request.headers_mut().insert("x-microserving-stats", "1".parse().unwrap());
    let stats = &node.send(request).await.json()["microserving"];
    assert_eq!((&stats["matched_tokens"], &stats["computed_tokens"]), (&json!(16), &json!(4)));
    assert_eq!(stats["decode_engine"], "d");
}

#[tokio::test]
async fn the_state_and_the_description() {
    let node = one(&Settings::default()).await;
    let state = node.get("/microserving/state").await.json();
    assert_eq!(state["engine_id"], "d");
    assert_eq!(state["incarnation"].as_str().unwrap().len(), 16);
    assert_eq!(state["model"], "toy");
    assert_eq!(state["pages"]["total"], 256);
    assert_eq!(state["pages"]["free"], 256);
    assert_eq!(state["max_context"], 2048);
    assert_eq!(state["draining"], false);
    assert_eq!(state["layout_fingerprint"].as_str().unwrap().len(), 16);
    let document = node.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, methods) in document["paths"].as_object().unwrap() {
        if path.starts_with("/health") {
            continue;
        }
        for method in methods.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            // A stream of cache events would not end.
            let path = if path.ends_with("kv_events") { "/microserving/kv_events?from=x" } else { path };
            let answer = node.send(node.request(method, &path.replace("{seq_id}", "nobody"), "")).await;
            let told = ["unknown_sequence", "no_profile"].iter().any(|code| answer.body.contains(code));
            let unknown = answer.status == 404 && !told;
            assert!(answer.status != 405 && !unknown, "{path}: {}", answer.body);
        }
    }
}

#[tokio::test]
async fn a_deadline_ends_a_request() {
    let node = one(&Settings { step_time: Duration::from_millis(20), ..Settings::default() }).await;
    let body = with(completion(&prompt(20, 1), 1000), json!({"timeout_seconds": 0.3}));
    let answer = node.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 504, "{}", answer.body);
    let streamed = node.post("/v1/completions", &with(body, json!({"stream": true}))).await;
    let (events, done) = streamed.events_and_done();
    assert!(!done && events.len() > 1, "{}", streamed.body);
    assert_eq!(events.last().unwrap()["error"]["status"], 504);
    node.wait_idle().await;
}
