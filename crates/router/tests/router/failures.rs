//! Engines that fail, at every call and in the stream.

use std::time::Duration;

use microserving_protocol::ApiError;
use microserving_router::Role;

use crate::fake::{Act, Fake, World, tokens};

fn no_room() -> ApiError {
    ApiError::unavailable("no room", Duration::from_secs(7)).with_code("no_room")
}

fn body(stream: bool) -> String {
    format!(r#"{{"prompt":{},"stream":{stream}}}"#, tokens(10))
}

#[tokio::test(start_paused = true)]
async fn before_the_first_token_another_engine_does_it() {
    for stream in [false, true] {
        for act in [
            Act::Unreachable,
            Act::Refuse(no_room()),
            Act::Refuse(ApiError::internal("boom")),
            Act::BreakAfter(0),
            Act::EndAfter(0),
            Act::PreemptAfter(0),
            Act::FailAfter(0, no_room()),
        ] {
            let (a, b) = (Fake::new("a"), Fake::new("b"));
            // Whoever is first fails once.
            a.on_generate(act.clone());
            b.on_generate(act.clone());
            let c = Fake::new("c");
            let world =
                World::new(&[(&a, Role::Any), (&b, Role::Any), (&c, Role::Any)], "data_parallel").await;
            let answer = world.complete(&body(stream)).await;
            assert_eq!(answer.status, 200, "{act:?}: {}", answer.body);
            let text = if stream { answer.streamed_text() } else { answer.text() };
            assert_eq!(text, "abc", "{act:?}");
            assert_eq!(c.calls().iter().filter(|call| **call == "start_generate").count(), 1, "{act:?}");
            world.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_are_numbered_and_the_earlier_ones_aborted() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    p.on_send(Act::Unreachable);
    let q = Fake::new("q");
    q.on_send(Act::Unreachable);
    let world =
        World::new(&[(&p, Role::Prefill), (&q, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    let answer = world.complete(&body(false)).await;
    assert_eq!(answer.text(), "abc", "{}", answer.body);
    world.until("aborts", || d.calls().iter().filter(|call| **call == "abort").count() == 2).await;
    let attempts = |call: &str| -> Vec<u64> {
        let of_call = d.seen().into_iter().filter(|seen| seen.call == call);
        of_call.map(|seen| seen.body["attempt"].as_u64().unwrap_or(0)).collect()
    };
    assert_eq!(attempts("prep_recv"), [0, 1], "two prefillers failed");
    assert_eq!(attempts("start_generate"), [2], "the decoder does it alone");
    let mut aborted = attempts("abort");
    aborted.sort_unstable();
    assert_eq!(aborted, [0, 1], "and the reservations are given up");
    assert!(
        p.calls().contains(&"abort") && q.calls().contains(&"abort"),
        "a lost call may have had its effect"
    );
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_engines_quarrel_about_is_no_clients_fault() {
    for error in [
        ApiError::gone("the lease has expired"),
        ApiError::conflict("another layout"),
        ApiError::forbidden("no signature"),
        ApiError::bad_request("kv_addr_info", "unreachable peer"),
    ] {
        let (p, d) = (Fake::new("p"), Fake::new("d"));
        p.on_send(Act::Refuse(error.clone()));
        let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
        let answer = world.complete(&body(false)).await;
        assert_eq!(answer.status, 200, "{error}: {}", answer.body);
        assert_eq!(d.last("start_generate").body["begin"], 0, "{error}");
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_client_did_wrong_is_not_tried_again() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let error = ApiError::bad_request("logit_bias", "token 9 is not in the vocabulary");
    a.on_generate(Act::Refuse(error.clone()));
    b.on_generate(Act::Refuse(error));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    let answer = world.complete(&body(true)).await;
    assert_eq!((answer.status.as_u16(), answer.json()["error"]["param"].as_str()), (400, Some("logit_bias")));
    let made = a.seen().into_iter().chain(b.seen()).filter(|seen| seen.call == "start_generate").count();
    assert_eq!(made, 1);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_without_room_to_receive_may_still_do_it_alone() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    d.on_prep(Act::Refuse(no_room()));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    assert_eq!(world.complete(&body(false)).await.text(), "abc");
    assert_eq!(d.calls(), ["prep_recv", "start_generate"]);

    // With another decoder, that one gets it, prefilled as usual.
    let e = Fake::new("e");
    for fake in [&d, &e] {
        fake.on_prep(Act::Refuse(no_room()));
    }
    let f = Fake::new("f");
    let both = World::new(
        &[(&p, Role::Prefill), (&d, Role::Decode), (&e, Role::Decode), (&f, Role::Decode)],
        "prefill_decode",
    )
    .await;
    assert_eq!(both.complete(&body(false)).await.text(), "abc");
    assert_eq!(f.calls(), ["prep_recv", "start_generate"]);
    assert_eq!(p.calls(), ["remote_send"]);
    both.end().await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn no_room_anywhere_is_told_with_its_retry_after() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    d.on_prep(Act::Refuse(no_room()));
    d.on_generate(Act::Refuse(no_room()));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "prefill_decode").await;
    let answer = world.complete(&body(false)).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.headers["retry-after"], "7");
    assert_eq!(answer.json()["error"]["code"], "no_room");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn attempts_are_bounded() {
    let engines: Vec<_> = (0..9).map(|i| Fake::new(&format!("e{i}"))).collect();
    for engine in &engines {
        engine.on_generate(Act::Refuse(ApiError::internal("boom")));
    }
    let specs: Vec<_> = engines.iter().map(|engine| (engine, Role::Any)).collect();
    let world = World::new(&specs, "data_parallel").await;
    let answer = world.complete(&body(false)).await;
    assert_eq!((answer.status.as_u16(), answer.json()["error"]["message"].as_str()), (500, Some("boom")));
    let calls = engines.iter().flat_map(|e| e.calls()).filter(|call| *call == "start_generate").count();
    assert_eq!(calls, 4);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn with_nobody_to_go_on_the_stream_ends_with_an_error_and_nothing_twice() {
    for (act, status) in [
        (Act::BreakAfter(2), 503),
        (Act::FailAfter(2, ApiError::internal("boom")), 500),
        (Act::FailAfter(2, ApiError::gone("aborted")), 503),
        (Act::EndAfter(2), 503),
        (Act::HangAfter(2), 504),
    ] {
        let a = Fake::new("a");
        a.on_generate(act.clone());
        let world = World::new(&[(&a, Role::Any)], "data_parallel").await;
        let answer = world.complete(&body(true)).await;
        assert_eq!(answer.status, 200, "{act:?}");
        let events = answer.events();
        assert_eq!(answer.streamed_text(), "ab", "{act:?}");
        let error = &events.last().expect("events")["error"];
        assert_eq!(error["status"], status, "{act:?}: {error}");
        assert!(error["message"].is_string() && error["type"].is_string());
        let count = |call: &str| a.calls().iter().filter(|made| **made == call).count();
        assert_eq!(count("start_generate"), 1, "{act:?}");
        world.until("the abort", || count("abort") == 1).await;
        let metrics = world.get("/metrics").await.body;
        let line =
            format!(r#"microserving_router_requests_total{{pattern="data_parallel",status="{status}"}} 1"#);
        assert!(metrics.contains(&line), "{line}\n{metrics}");
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_one_piece_goes_on_too() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    a.on_generate(Act::BreakAfter(2));
    b.on_generate(Act::BreakAfter(2));
    let c = Fake::new("c");
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any), (&c, Role::Any)], "data_parallel").await;
    let answer = world.complete(&body(false)).await;
    assert_eq!(answer.text(), "abc");
    assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
    let made =
        [&a, &b, &c].into_iter().flat_map(|fake| fake.calls()).filter(|call| *call == "start_generate");
    assert_eq!(made.count(), 2, "what is left after two tokens is one, and that comes before the next break");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn one_deadline_runs_through_all_calls() {
    for (slow, pattern) in
        [("prep", "prefill_decode"), ("send", "prefill_decode"), ("generate", "data_parallel")]
    {
        for stream in [false, true] {
            let (p, d) = (Fake::new("p"), Fake::new("d"));
            match slow {
                "prep" => d.on_prep(Act::Hang),
                "send" => p.on_send(Act::Hang),
                _ => d.on_generate(Act::Hang),
            }
            let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], pattern).await;
            let begun = tokio::time::Instant::now();
            let body = format!(r#"{{"prompt":{},"stream":{stream},"timeout_seconds":2.5}}"#, tokens(10));
            let answer = world.complete(&body).await;
            assert_eq!(answer.status, 504, "{slow}: {}", answer.body);
            let took = begun.elapsed();
            assert!(
                took >= Duration::from_millis(2400) && took < Duration::from_millis(2700),
                "{slow}: {took:?}"
            );
            world.until("the abort", || d.calls().contains(&"abort")).await;
            world.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_connections_gets_nothing_until_it_is_seen_again() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    a.set_ready(false);
    a.on_generate(Act::Unreachable);
    for _ in 0..4 {
        assert_eq!(world.complete(&body(false)).await.text(), "abc");
    }
    let on_a = a.calls().iter().filter(|call| **call == "start_generate").count();
    assert!(on_a <= 1, "one failed call is enough");
    a.set_ready(true);
    world
        .until("seen again", || {
            world.service.cluster().engines()[0].health() == microserving_router::Health::Ready
        })
        .await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn too_many_requests_are_shed() {
    let d = Fake::new("d");
    d.on_generate(Act::HangAfter(1));
    let world = World::with(&[(&d, Role::Any)], "data_parallel", |config| {
        (config.max_in_flight, config.max_queued) = (1, 0);
    })
    .await;
    let request = axum::http::Request::post("/v1/completions").body(axum::body::Body::from(body(true)));
    let first =
        tower::ServiceExt::oneshot(world.app(), request.expect("a request")).await.expect("infallible");
    assert_eq!(first.status(), 200);
    let second = world.complete(&body(false)).await;
    assert_eq!((second.status.as_u16(), second.headers["retry-after"].as_bytes()), (429, b"1".as_slice()));
    drop(first);
    assert_eq!(world.complete(&body(false)).await.status, 200, "the slot is free again");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_draining_router_ends_what_it_has_and_takes_nothing_new() {
    let d = Fake::new("d");
    let world = World::new(&[(&d, Role::Any)], "data_parallel").await;
    let request = axum::http::Request::post("/v1/completions").body(axum::body::Body::from(body(true)));
    let first =
        tower::ServiceExt::oneshot(world.app(), request.expect("a request")).await.expect("infallible");
    world.service.drain();
    let second = world.complete(&body(false)).await;
    assert_eq!((second.status.as_u16(), second.json()["error"]["code"].as_str()), (503, Some("draining")));
    assert_eq!(second.headers["retry-after"], "1");
    assert_eq!(world.get("/health/ready").await.status, 503);
    assert_eq!(world.get("/health/live").await.status, 200);
    let rest = http_body_util::BodyExt::collect(first.into_body()).await.expect("a whole body").to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    world.end().await;
}
