//! When engines are trusted.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use microserving_protocol::ApiError;
use microserving_router::{BreakerState, Engine, Health, PlacementPolicy, Role};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;

use crate::fake::{Act, Fake, World, tokens};

fn generates(fake: &Arc<Fake>) -> usize {
    fake.calls().iter().filter(|call| **call == "start_generate").count()
}

fn body() -> String {
    format!(r#"{{"prompt":{},"max_tokens":3}}"#, tokens(10))
}

fn engine(world: &World, number: u32) -> Arc<Engine> {
    world.service.cluster().engine(number).expect("it is there")
}

async fn reaches(engine: &Engine, health: Health) -> Duration {
    let begun = Instant::now();
    while engine.health() != health {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} never is {health:?}", engine.name());
        sleep(Duration::from_millis(10)).await;
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn silence_makes_suspect_then_dead_and_what_runs_there_runs_elsewhere() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    a.on_generate(Act::HangAfter(1));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
        config.placement = PlacementPolicy::RoundRobin;
        config.request_timeout = Duration::from_secs(60);
    })
    .await;
    let first = engine(&world, 0);
    let outcome = async {
        world.until("it runs", || first.in_flight() > 0).await;
        a.set_silent(true);
        let suspect = reaches(&first, Health::Suspect).await;
        assert!((700..=1100).contains(&suspect.as_millis()), "{suspect:?}");
        for _ in 0..2 {
            assert_eq!(world.complete(&body()).await.text(), "abc");
        }
        assert_eq!(generates(&a), 1, "no new requests");
        let dead = reaches(&first, Health::Down).await;
        assert!((1900..=2100).contains(&dead.as_millis()), "{dead:?}");
    };
    let body = body();
    let (answer, ()) = tokio::join!(world.complete(&body), outcome);
    assert_eq!(answer.text(), "abc", "{}", answer.body);
    a.set_silent(false);
    reaches(&first, Health::Ready).await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_whose_streams_deliver_is_alive() {
    let a = Fake::new("a");
    a.on_generate(Act::Slow(Duration::from_millis(400)));
    let world = World::with(&[(&a, Role::Any)], "data_parallel", |config| {
        config.request_timeout = Duration::from_secs(60);
    })
    .await;
    let request = Request::post("/v1/completions")
        .body(Body::from(r#"{"prompt":[1],"stream":true,"max_tokens":20}"#))
        .expect("a request");
    let running = world.app().oneshot(request).await.expect("infallible");
    a.set_silent(true);
    let whole = running.into_body().collect().await.expect("a whole body").to_bytes();
    assert!(whole.ends_with(b"data: [DONE]\n\n"), "8 seconds without an answer about its health");
    assert_eq!(engine(&world, 0).health(), Health::Ready);
    reaches(&engine(&world, 0), Health::Down).await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_says_it_is_not_ready_gets_nothing_more_until_it_is() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
        config.placement = PlacementPolicy::RoundRobin;
        config.thresholds.heartbeat = Duration::from_secs(3600);
    })
    .await;
    // Restarted between two heartbeats.
    a.set_ready(false);
    a.on_generate(Act::Refuse(
        ApiError::unavailable("starting", Duration::from_secs(1)).with_code("not_ready"),
    ));
    for _ in 0..4 {
        assert_eq!(world.complete(&body()).await.text(), "abc");
    }
    assert_eq!(generates(&a), 1, "asked once");
    assert_eq!(engine(&world, 0).health(), Health::NotReady);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_whose_events_break_off_is_looked_at_before_its_next_heartbeat() {
    let a = Fake::new("a");
    let broken = a.tell_events();
    let world = World::with(&[(&a, Role::Any)], "data_parallel", |config| {
        config.thresholds.heartbeat = Duration::from_secs(3600);
    })
    .await;
    sleep(Duration::from_secs(1)).await;
    a.set_ready(false);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(engine(&world, 0).health(), Health::Ready, "nobody has looked");
    broken.notify_one();
    reaches(&engine(&world, 0), Health::Down).await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn thresholds_change_while_serving() {
    let a = Fake::new("a");
    let world = World::new(&[(&a, Role::Any)], "data_parallel").await;
    let mut document = world.get("/admin/v1/config").await.json();
    document["thresholds"]["suspect_seconds"] = 5.into();
    document["thresholds"]["dead_seconds"] = 20.into();
    assert_eq!(world.call("PUT", "/admin/v1/config", &[], &document.to_string()).await.status, 200);
    sleep(Duration::from_secs(2)).await;
    a.set_silent(true);
    let suspect = reaches(&engine(&world, 0), Health::Suspect).await;
    assert!((4700..=5100).contains(&suspect.as_millis()), "{suspect:?}");
    let dead = reaches(&engine(&world, 0), Health::Down).await;
    assert!((14_900..=15_100).contains(&dead.as_millis()), "{dead:?}");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn failures_in_a_row_keep_requests_away_until_one_succeeds() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
        config.placement = PlacementPolicy::RoundRobin;
        config.thresholds.breaker_failures = 3;
        config.thresholds.breaker_cooldown = Duration::from_secs(4);
    })
    .await;
    let first = engine(&world, 0);
    // What is the client's doing, or a matter of room, is no failure.
    for error in [ApiError::unavailable("room", Duration::from_secs(1)), ApiError::gone("lease")] {
        for _ in 0..4 {
            a.on_generate(Act::Refuse(error.clone()));
        }
    }
    while generates(&a) < 8 {
        assert_eq!(world.complete(&body()).await.text(), "abc");
    }
    assert_eq!(first.breaker(), BreakerState::Closed);
    for _ in 0..4 {
        a.on_generate(Act::Refuse(ApiError::internal("boom")));
    }
    while first.breaker() == BreakerState::Closed {
        assert_eq!(world.complete(&body()).await.text(), "abc", "another engine serves it");
    }
    assert_eq!(generates(&a), 11);
    assert!(!first.takes_requests());
    for _ in 0..4 {
        world.complete(&body()).await;
    }
    assert_eq!(generates(&a), 11, "nothing goes there");
    let metrics = world.get("/metrics").await.body;
    assert!(metrics.contains(r#"engine_breaker_open{engine="a"} 1"#), "{metrics}");

    // One may try; it fails, and the engine is left alone for another while.
    sleep(Duration::from_secs(5)).await;
    assert_eq!(first.breaker(), BreakerState::HalfOpen);
    while generates(&a) < 12 {
        world.complete(&body()).await;
    }
    assert_eq!(first.breaker(), BreakerState::Open);
    sleep(Duration::from_secs(5)).await;
    while first.breaker() != BreakerState::Closed {
        world.complete(&body()).await;
    }
    assert_eq!(generates(&a), 13);
    assert!(first.effective_weight(Instant::now()) < 0.5, "it starts slowly");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn when_all_failed_a_try_is_better_than_a_refusal() {
    let a = Fake::new("a");
    let world = World::with(&[(&a, Role::Any)], "data_parallel", |config| {
        config.thresholds.breaker_failures = 1;
    })
    .await;
    a.on_generate(Act::Refuse(ApiError::internal("boom")));
    assert_eq!(world.complete(&body()).await.status, 500);
    assert_eq!(engine(&world, 0).breaker(), BreakerState::Open);
    assert_eq!(world.complete(&body()).await.text(), "abc");
    assert_eq!(engine(&world, 0).breaker(), BreakerState::Closed);
    world.end().await;
}
