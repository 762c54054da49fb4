//! Engines that join, drain and leave while requests run.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use microserving_router::{EngineSpec, PlacementPolicy, Role};
use tokio::time::sleep;
use tower::ServiceExt;

use crate::fake::{Act, Fake, World, tokens};

fn generates(fake: &Arc<Fake>) -> usize {
    fake.calls().iter().filter(|call| **call == "start_generate").count()
}

fn body(stream: bool) -> String {
    format!(r#"{{"prompt":{},"max_tokens":3,"stream":{stream}}}"#, tokens(10))
}

async fn world(engines: &[(&Arc<Fake>, Role)]) -> World {
    World::with(engines, "data_parallel", |config| config.placement = PlacementPolicy::RoundRobin).await
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_joins_gets_requests_and_one_that_left_gets_none() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = world(&[(&a, Role::Any)]).await;
    let joined = world.service.add_engine(EngineSpec::new(b.clone(), Role::Any)).expect("a new one");
    assert_eq!((joined.number(), joined.name()), (1, "b"));
    let twice = world.service.add_engine(EngineSpec::new(b.clone(), Role::Any)).expect_err("the same again");
    assert_eq!((twice.status, twice.param.as_deref()), (409, Some("url")));
    world.service.wait_ready(2, Duration::from_secs(5)).await.expect("it is seen");
    for _ in 0..6 {
        assert_eq!(world.complete(&body(false)).await.text(), "abc");
    }
    let slowly = generates(&b);
    assert!(slowly <= 1, "it starts slowly, with a tenth of its share: {slowly} of 6");
    sleep(Duration::from_secs(11)).await;
    for _ in 0..6 {
        assert_eq!(world.complete(&body(false)).await.text(), "abc");
    }
    assert_eq!((generates(&a), generates(&b)), (9 - slowly, 3 + slowly));

    world.service.remove_engine(0, false).expect("idle");
    for _ in 0..4 {
        assert_eq!(world.complete(&body(false)).await.text(), "abc");
    }
    assert_eq!((generates(&a), generates(&b)), (9 - slowly, 7 + slowly));
    assert!(!world.get("/metrics").await.body.contains(r#"engine="a""#));
    let error = world.service.remove_engine(0, true).expect_err("gone");
    assert_eq!((error.status, error.param.as_deref()), (404, Some("id")));

    // The number of one that left is never used again.
    let again = world.service.add_engine(EngineSpec::new(a.clone(), Role::Any)).expect("not there any more");
    assert_eq!(again.number(), 2);
    assert!(world.service.cluster().engine(0).is_none());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_draining_engine_ends_what_it_has_and_gets_nothing_new() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = world(&[(&a, Role::Any), (&b, Role::Any)]).await;
    let request = Request::post("/v1/completions").body(Body::from(body(true))).expect("a request");
    let running = world.app().oneshot(request).await.expect("infallible");
    let busy = world.service.cluster().engines().iter().find(|engine| engine.in_flight() > 0).cloned();
    let number = busy.expect("the stream is on one of them").number();
    world.service.drain_engine(number).expect("it exists");
    let (drained, other) = if number == 0 { (&a, &b) } else { (&b, &a) };
    for _ in 0..4 {
        world.complete(&body(false)).await;
    }
    assert_eq!((generates(drained), generates(other)), (1, 4));

    let error = world.service.remove_engine(number, false).expect_err("busy");
    assert_eq!((error.status, error.code.as_deref()), (409, Some("engine_busy")));
    let rest = running.into_body().collect().await.expect("a whole body").to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    assert!(!drained.calls().contains(&"abort"));

    world.service.undrain_engine(number).expect("it exists");
    sleep(Duration::from_secs(11)).await;
    for _ in 0..4 {
        world.complete(&body(false)).await;
    }
    assert_eq!((generates(drained), generates(other)), (3, 6));
    world.service.remove_engine(number, false).expect("idle");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_runs_on_an_engine_that_is_forced_out_runs_elsewhere() {
    for act in [Act::HangAfter(2), Act::Hang] {
        let (a, b) = (Fake::new("a"), Fake::new("b"));
        a.on_generate(act.clone());
        let world = world(&[(&a, Role::Any), (&b, Role::Any)]).await;
        let service = world.service.clone();
        let forced = async {
            world.until("it runs", || service.cluster().engines()[0].in_flight() > 0).await;
            service.remove_engine(0, true).expect("forced");
        };
        let body = body(false);
        let (answer, ()) = tokio::join!(world.complete(&body), forced);
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "abc"), "{act:?}");
        assert_eq!((generates(&a), generates(&b)), (1, 1));
        world.until("the abort", || a.calls().contains(&"abort")).await;
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn roles_and_weights_change_while_serving() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = world(&[(&a, Role::Any), (&b, Role::Any)]).await;
    let engines = world.service.cluster().engines();
    engines[0].set_role(Role::Prefill);
    for _ in 0..4 {
        world.complete(&body(false)).await;
    }
    assert_eq!((generates(&a), generates(&b)), (0, 4));
    engines[0].set_weight(2.5);
    assert!((engines[0].weight() - 2.5).abs() < f64::EPSILON);
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let spec = EngineSpec::new(Fake::new("c"), Role::Any).with_weight(weight);
        assert_eq!(world.service.add_engine(spec).expect_err("no share").param.as_deref(), Some("weight"));
    }
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn programs_see_whose_request_it_is() {
    use async_trait::async_trait;
    use microserving_router::{Ctx, Error, Program, TokenStream};

    /// Serves one tenant, and refuses the others by what it saw.
    #[derive(Debug)]
    struct Looks;

    #[async_trait]
    impl Program for Looks {
        fn name(&self) -> &str {
            "looks"
        }

        async fn serve(
            &self,
            ctx: &Ctx,
            request: &microserving_router::Request,
        ) -> Result<TokenStream, Error> {
            let seen = (request.tenant(), request.header("x-team"), request.priority());
            assert_eq!(seen, ("acme", Some("red"), 2));
            assert_eq!(request.header("authorization"), None);
            ctx.decoder(request)?.start_generate(request, 0).await
        }
    }

    let a = Fake::new("a");
    let world = World::with(&[(&a, Role::Any)], "looks", |config| {
        config.programs = vec![Arc::new(Looks)];
    })
    .await;
    let headers = [("x-microserving-tenant", "acme"), ("x-team", "red"), ("authorization", "Bearer secret")];
    let answer = world.call("POST", "/v1/completions", &headers, r#"{"prompt":[1,2],"priority":2}"#).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let long = "x".repeat(200);
    let refused =
        world.call("POST", "/v1/completions", &[("x-microserving-tenant", &long)], r#"{"prompt":[1]}"#).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "x-microserving-tenant");
    world.end().await;
}
