//! Names, traces, patterns and health over HTTP.

use microserving_router::Role;

use crate::fake::{Fake, World, tokens};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(start_paused = true)]
async fn names_and_traces_reach_every_call() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    let headers = [("x-request-id", "r-7"), ("traceparent", TRACE)];
    let answer =
        world.call("POST", "/v1/completions", &headers, &format!(r#"{{"prompt":{}}}"#, tokens(10))).await;
    assert_eq!(answer.headers["x-request-id"], "r-7");
    let seen: Vec<_> = p.seen().into_iter().chain(d.seen()).collect();
    assert_eq!(seen.len(), 3);
    for call in seen {
        assert_eq!(call.cx.request_id.as_deref(), Some("r-7"));
        assert_eq!(call.cx.traceparent.as_deref(), Some(TRACE));
        let seconds = call.body["timeout_seconds"].as_f64().expect("the deadline goes along");
        assert!(seconds > 4.0 && seconds <= 5.0, "{seconds}");
        assert!(call.cx.deadline.is_some());
    }
    let unnamed = world.get("/v1/models").await;
    assert!(unnamed.headers["x-request-id"].to_str().is_ok_and(|id| id.starts_with("req-")));
    let refused = world.call("GET", "/nowhere", &[("x-request-id", "r-8")], "").await;
    assert_eq!(refused.headers["x-request-id"], "r-8");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_chooses_its_pattern() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "data_parallel").await;
    let body = format!(r#"{{"prompt":{}}}"#, tokens(10));
    for (asked, answered) in [
        ("prefill_decode", "prefill_decode"),
        ("balanced", "balanced:0.1"),
        ("balanced:0.25", "balanced:0.25"),
    ] {
        let answer = world.call("POST", "/v1/completions", &[("x-microserving-pattern", asked)], &body).await;
        assert_eq!(answer.headers["x-microserving-pattern"], answered);
    }
    assert_eq!(world.complete(&body).await.headers["x-microserving-pattern"], "data_parallel");
    for bad in ["nope", "balanced:x", "balanced:7", "data_parallel:0.1", ""] {
        let answer = world.call("POST", "/v1/completions", &[("x-microserving-pattern", bad)], &body).await;
        assert_eq!(answer.status, 400, "{bad}");
        assert_eq!(answer.json()["error"]["param"], "x-microserving-pattern");
    }
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn health_follows_the_engines() {
    let d = Fake::new("d");
    d.set_ready(false);
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    assert_eq!(world.get("/health/live").await.status, 200);
    assert_eq!(world.get("/health/ready").await.status, 503);
    let early = world.complete(r#"{"prompt":[1]}"#).await;
    assert_eq!((early.status.as_u16(), early.headers["retry-after"].as_bytes()), (503, b"1".as_slice()));
    d.set_ready(true);
    world.service.wait_ready(1, std::time::Duration::from_secs(2)).await.expect("seen");
    let health = world.get("/health").await;
    assert_eq!((health.status.as_u16(), health.json()["engines_ready"].as_u64()), (200, Some(1)));
    assert_eq!(world.complete(r#"{"prompt":[1]}"#).await.status, 200);
    let engines = world.get("/admin/v1/engines").await.json();
    assert_eq!(engines["engines"][0]["health"], "ready");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_route_that_is_described_is_served() {
    let d = Fake::new("d");
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    let document = world.get("/openapi.json").await.json();
    let paths = document["paths"].as_object().expect("paths");
    assert!(paths.len() >= 12);
    for (path, operations) in paths {
        for method in operations.as_object().expect("operations").keys() {
            let path = path.replace("{model}", "toy");
            let answer = world.call(&method.to_uppercase(), &path, &[], "{}").await;
            // A thing that is not there is answered 404 too, by who looked for it.
            let unserved = answer.status == 404 && answer.body.contains("no such path");
            assert!(
                !unserved && !matches!(answer.status.as_u16(), 405 | 500),
                "{method} {path}: {}",
                answer.status
            );
        }
    }
    world.end().await;
}
