//! Who is served when not all can be.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use microserving_router::Role;
use tower::ServiceExt;

use crate::fake::{Act, Fake, World, tokens};

fn body(priority: i32, stream: bool) -> String {
    format!(r#"{{"prompt":{},"max_tokens":3,"stream":{stream},"priority":{priority}}}"#, tokens(10))
}

#[tokio::test(start_paused = true)]
async fn what_cannot_run_waits_in_its_class_and_the_rest_is_turned_away() {
    let d = Fake::new("d");
    d.on_generate(Act::HangAfter(1));
    let world = World::with(&[(&d, Role::Any)], "data_parallel", |config| {
        (config.max_in_flight, config.max_queued) = (1, 2);
    })
    .await;
    let request = Request::post("/v1/completions").body(Body::from(body(0, true))).expect("a request");
    let first = world.app().oneshot(request).await.expect("infallible");
    let (low, high) = (body(-1, false), body(5, false));
    let waits = async {
        tokio::join!(world.complete(&low), world.complete(&low), async {
            world.until("both wait", || waiting(&world, "low") == 2).await;
            let third = world.complete(&low).await;
            assert_eq!(
                (third.status.as_u16(), third.headers["retry-after"].as_bytes()),
                (429, b"1".as_slice())
            );
            let urgent = world.complete(&high);
            let release = async {
                world.until("it waits", || waiting(&world, "high") == 1).await;
                assert_eq!(d.calls(), ["start_generate"], "only one runs");
                drop(first);
            };
            tokio::join!(urgent, release).0
        })
    };
    let (a, b, urgent) = waits.await;
    for answer in [&a, &b, &urgent] {
        assert_eq!(answer.text(), "abc", "{}", answer.body);
    }
    let priorities: Vec<_> = d
        .seen()
        .iter()
        .filter(|seen| seen.call == "start_generate")
        .map(|seen| seen.body["priority"].as_i64().unwrap_or_default())
        .collect();
    assert_eq!(priorities, [0, 5, -1, -1], "the urgent one overtook");
    let metrics = world.get("/metrics").await.body;
    assert!(metrics.contains(r#"turned_away_total{reason="queue"} 1"#), "{metrics}");
    world.end().await;
}

fn waiting(world: &World, class: &str) -> usize {
    world.service.num_waiting().into_iter().find(|(name, _)| *name == class).expect("a class").1
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_no_longer_than_its_deadline() {
    let d = Fake::new("d");
    d.on_generate(Act::HangAfter(1));
    let world = World::with(&[(&d, Role::Any)], "data_parallel", |config| {
        (config.max_in_flight, config.max_queued) = (1, 2);
    })
    .await;
    let request = Request::post("/v1/completions").body(Body::from(body(0, true))).expect("a request");
    let first = world.app().oneshot(request).await.expect("infallible");
    let late = format!(r#"{{"prompt":{},"timeout_seconds":1}}"#, tokens(10));
    let begun = tokio::time::Instant::now();
    assert_eq!(world.complete(&late).await.status, 504);
    assert!(begun.elapsed() < Duration::from_millis(1100), "{:?}", begun.elapsed());
    assert_eq!(waiting(&world, "normal"), 0);
    drop(first);
    assert_eq!(world.complete(&body(0, false)).await.text(), "abc");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_first_token_that_would_come_too_late_is_not_begun() {
    let d = Fake::new("d");
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    let mut document = world.get("/admin/v1/config").await.json();
    let mut set = async |most: serde_json::Value| {
        document["thresholds"]["max_ttft_seconds"] = most;
        document.as_object_mut().expect("an object").remove("revision");
        let answer = world.call("PUT", "/admin/v1/config", &[], &document.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    };
    set(1e-9.into()).await;
    let answer = world.complete(&body(0, false)).await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
        (429, Some("predicted_ttft"))
    );
    assert!(answer.headers.contains_key("retry-after"));
    assert!(d.calls().is_empty());
    set(3600.into()).await;
    assert_eq!(world.complete(&body(0, false)).await.text(), "abc");
    set(serde_json::Value::Null).await;
    assert_eq!(world.complete(&body(0, false)).await.text(), "abc");
    world.end().await;
}
