//! Clients that go away, at every await.

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use microserving_router::Role;
use tower::ServiceExt;

use crate::fake::{Act, Fake, World, tokens};

fn request(stream: bool) -> Request<Body> {
    let body = format!(r#"{{"prompt":{},"stream":{stream}}}"#, tokens(10));
    Request::post("/v1/completions").body(Body::from(body)).expect("a request")
}

/// Cancels while `hang` hangs and checks who is told.
async fn cancelled_at(hang: &str, stream: bool, on_p: &[&str], on_d: &[&str]) {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    match hang {
        "prep_recv" => d.on_prep(Act::Hang),
        "remote_send" => p.on_send(Act::Hang),
        "start_generate" => d.on_generate(Act::Hang),
        _ => d.on_generate(Act::HangAfter(2)),
    }
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    let app = world.app();
    let client = tokio::spawn(async move {
        let mut response = app.oneshot(request(stream)).await.expect("infallible");
        // Reads until the engine hangs.
        while response.body_mut().frame().await.is_some() {}
    });
    let call = if hang == "stream" { "start_generate" } else { hang };
    world.until("the call", || p.calls().contains(&call) || d.calls().contains(&call)).await;
    tokio::task::yield_now().await;
    assert_eq!(p.calls().len() + d.calls().len(), on_p.len() + on_d.len() - aborts(on_p) - aborts(on_d));
    assert!(world.service.cluster().in_flight() > 0);
    client.abort();
    let _ = client.await;
    world.until("aborts", || p.calls() == on_p && d.calls() == on_d).await;
    let key = &d.seen()[0].body["user"];
    for abort in p.seen().iter().chain(&d.seen()).filter(|seen| seen.call == "abort") {
        assert_eq!(&abort.body["seq_id"], key);
        assert_eq!(abort.body["attempt"], 0);
    }
    let metrics = world.get("/metrics").await.body;
    let line = r#"microserving_router_requests_total{pattern="prefill_decode",status="499"} 1"#;
    assert!(metrics.contains(line), "{metrics}");
    world.end().await;
    // Nothing more was sent when the router ended.
    assert_eq!((p.calls(), d.calls()), (on_p.to_vec(), on_d.to_vec()));
}

fn aborts(calls: &[&str]) -> usize {
    calls.iter().filter(|call| **call == "abort").count()
}

#[tokio::test(start_paused = true)]
async fn during_prep_recv() {
    for stream in [false, true] {
        cancelled_at("prep_recv", stream, &[], &["prep_recv", "abort"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn during_remote_send_both_engines_are_told() {
    for stream in [false, true] {
        cancelled_at("remote_send", stream, &["remote_send", "abort"], &["prep_recv", "abort"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn before_the_first_token() {
    for stream in [false, true] {
        cancelled_at("start_generate", stream, &["remote_send"], &["prep_recv", "start_generate", "abort"])
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn in_the_middle_of_the_answer() {
    for stream in [false, true] {
        cancelled_at("stream", stream, &["remote_send"], &["prep_recv", "start_generate", "abort"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_was_read_to_its_end_is_not_aborted() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    for stream in [false, true] {
        let response = world.app().oneshot(request(stream)).await.expect("infallible");
        response.into_body().collect().await.expect("a whole body");
    }
    world.end().await;
    assert!(!p.calls().contains(&"abort") && !d.calls().contains(&"abort"));
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_never_read_gives_everything_back() {
    let d = Fake::new("d");
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    let response = world.app().oneshot(request(true)).await.expect("infallible");
    assert_eq!(world.service.cluster().in_flight(), 1);
    drop(response);
    world.until("the abort", || d.calls().contains(&"abort")).await;
    world.end().await;
}
