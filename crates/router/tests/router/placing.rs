//! Who gets a request.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use microserving_router::{PlacementPolicy, Role};
use tower::ServiceExt;

use crate::fake::{Act, Fake, World};

fn of(start: u32, len: u32) -> String {
    let tokens: Vec<u32> = (start..start + len).collect();
    format!(r#"{{"prompt":{tokens:?},"max_tokens":1}}"#)
}

fn count(fake: &Arc<Fake>) -> usize {
    fake.calls().iter().filter(|call| **call == "start_generate").count()
}

#[tokio::test(start_paused = true)]
async fn a_prompt_returns_to_the_engine_that_holds_its_beginning() {
    let engines: Vec<_> = ["a", "b", "c"].map(Fake::new).into();
    let specs: Vec<_> = engines.iter().map(|engine| (engine, Role::Any)).collect();
    let world = World::new(&specs, "data_parallel").await;
    for turn in 0..5 {
        for talk in [1000, 2000, 3000] {
            world.complete(&of(talk, 40 + 8 * turn)).await;
        }
    }
    let mut counts: Vec<_> = engines.iter().map(count).collect();
    counts.sort_unstable();
    assert_eq!(counts, [5, 5, 5], "each conversation stays where it began");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_engine_is_believed_to_hold_nothing() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    world.complete(&of(1, 400)).await;
    let (holder, other) = if count(&a) == 1 { (&a, &b) } else { (&b, &a) };
    // The holder is a little busier, which its cache outweighs.
    holder.set_load(2);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    world.complete(&of(1, 400)).await;
    assert_eq!((count(holder), count(other)), (2, 0));
    holder.reboot();
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    world.complete(&of(1, 400)).await;
    assert_eq!((count(holder), count(other)), (2, 1));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn load_is_what_is_in_flight_and_what_engines_report() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::with(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel", |config| {
        config.placement = PlacementPolicy::LeastLoaded;
    })
    .await;
    a.on_generate(Act::HangAfter(1));
    b.on_generate(Act::HangAfter(1));
    let stream = || {
        Request::post("/v1/completions")
            .body(Body::from(r#"{"prompt":[1],"stream":true}"#))
            .expect("a request")
    };
    let first = world.app().oneshot(stream()).await.expect("infallible");
    let second = world.app().oneshot(stream()).await.expect("infallible");
    assert_eq!((count(&a), count(&b)), (1, 1), "the second goes to the idle one");
    drop((first, second));
    world.until("idle", || world.service.cluster().in_flight() == 0).await;

    b.set_load(50);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    for i in 0..4 {
        world.complete(&of(100 * i, 8)).await;
    }
    assert_eq!((count(&a), count(&b)), (5, 1), "another router keeps b busy");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn prefilling_goes_to_another_engine_than_decoding() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "prefill_decode").await;
    for i in 0..6 {
        world.complete(&of(100 * i, 40)).await;
    }
    let sends = |fake: &Arc<Fake>| fake.calls().iter().filter(|call| **call == "remote_send").count();
    assert_eq!(sends(&a) + sends(&b), 6);
    assert_eq!(
        (sends(&a), sends(&b)),
        (count(&b), count(&a)),
        "any engine takes any role, never both at once"
    );
    assert!(count(&a) > 0 && count(&b) > 0);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_pattern_that_moves_kv_decodes_where_kv_can_be_moved_to() {
    let (a, b, stranger) = (Fake::new("a"), Fake::new("b"), Fake::new("stranger"));
    stranger.set_layout(7);
    let engines = [(&stranger, Role::Any), (&a, Role::Any), (&b, Role::Any)];
    for pattern in ["prefill_decode", "balanced:0.25"] {
        let world = World::new(&engines, pattern).await;
        let sends =
            || [&a, &b].map(|fake| fake.calls().iter().filter(|call| **call == "remote_send").count());
        let before: usize = sends().iter().sum();
        for i in 0..9 {
            world.complete(&of(100 * i, 40)).await;
        }
        assert_eq!(sends().iter().sum::<usize>() - before, 9, "{pattern}");
        assert_eq!(count(&stranger), 0, "{pattern}: nobody can send to it");
        world.end().await;
    }

    // With nobody to send, any engine serves; and a pattern that moves nothing takes it as every other one.
    for (ready, pattern) in [(false, "prefill_decode"), (true, "data_parallel")] {
        b.set_ready(ready);
        let before = count(&stranger);
        let world = World::new(&engines, pattern).await;
        for i in 20..26 {
            world.complete(&of(100 * i, 40)).await;
        }
        assert!(count(&stranger) > before, "{pattern}");
        world.end().await;
    }
}
