//! The admin API: rules, revisions, audit, tokens, and what would be chosen.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use microserving_router::{Change, Role};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::fake::{Act, Answer, Fake, World, tokens};

async fn send(world: &World, method: &str, path: &str, body: Value) -> Answer {
    world.call(method, &format!("/admin/v1/{path}"), &[], &body.to_string()).await
}

async fn get(world: &World, path: &str) -> Value {
    let answer = world.get(&format!("/admin/v1/{path}")).await;
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    assert_eq!(answer.headers["etag"], format!("\"{}\"", answer.json()["revision"]), "{path}");
    answer.json()
}

fn param(answer: &Answer) -> String {
    answer.json()["error"]["param"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(start_paused = true)]
async fn the_first_rule_that_fits_chooses_the_pattern() {
    let (p, d) = (Fake::new("p"), Fake::new("d"));
    let world = World::new(&[(&p, Role::Prefill), (&d, Role::Decode)], "data_parallel").await;
    let rules = json!({"rules": [
        {"pattern": "balanced:0.5", "tenant": "acme"},
        {"pattern": {"name": "balanced", "ratio": 0.25}, "header": {"name": "X-Team", "prefix": "red"}, "max_tokens": 50},
        {"pattern": "prefill_decode", "min_tokens": 20, "max_tokens": 100, "model": "toy"},
        {"pattern": "balanced", "header": {"name": "x-exact", "is": "yes"}},
    ]});
    let answer = send(&world, "PUT", "rules", rules).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.json()["rules"][3]["pattern"], json!({"name": "balanced", "ratio": 0.1}));
    for (len, headers, expected) in [
        (10, vec![], "data_parallel"),
        (20, vec![], "prefill_decode"),
        (100, vec![], "prefill_decode"),
        (101, vec![], "data_parallel"),
        (20, vec![("x-microserving-tenant", "acme")], "balanced:0.5"),
        (20, vec![("x-microserving-tenant", "acme2")], "prefill_decode"),
        (20, vec![("x-team", "red-7")], "balanced:0.25"),
        (60, vec![("x-team", "red-7")], "prefill_decode"),
        (10, vec![("x-exact", "yes")], "balanced:0.1"),
        (10, vec![("x-exact", "yes!")], "data_parallel"),
        (20, vec![("x-microserving-pattern", "balanced:0.75")], "balanced:0.75"),
    ] {
        let body = format!(r#"{{"prompt":{}}}"#, tokens(len));
        let answer = world.call("POST", "/v1/completions", &headers, &body).await;
        assert_eq!(answer.headers["x-microserving-pattern"], expected, "{len} {headers:?}");
    }
    let metrics = world.get("/metrics").await.body;
    assert!(metrics.contains(r#"requests_total{pattern="prefill_decode",status="200"} 4"#), "{metrics}");

    for (rule, field) in [
        (json!({"pattern": "nope"}), "rules[0].pattern.name"),
        (json!({"pattern": "balanced:2"}), "rules[0].pattern.ratio"),
        (json!({}), "rules[0].pattern"),
        (json!({"pattern": "balanced", "speed": 1}), "rules[0].speed"),
        (json!({"pattern": "balanced", "min_tokens": 5, "max_tokens": 4}), "rules[0].max_tokens"),
        (json!({"pattern": "balanced", "header": {"name": "cookie", "is": "x"}}), "rules[0].header.name"),
        (json!({"pattern": "balanced", "header": {"name": "a b", "is": "x"}}), "rules[0].header.name"),
        (json!({"pattern": "balanced", "header": {"name": "x"}}), "rules[0].header.is"),
        (json!(7), "rules[0]"),
    ] {
        let answer = send(&world, "PUT", "rules", json!({"rules": [rule]})).await;
        assert!(answer.status.is_client_error(), "{rule}");
        assert_eq!(param(&answer), field, "{rule}");
    }
    assert_eq!(get(&world, "rules").await["rules"].as_array().map(Vec::len), Some(4), "nothing changed");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_change_is_a_revision_that_can_be_returned_to() {
    let a = Fake::new("a");
    let world = World::new(&[(&a, Role::Any)], "data_parallel").await;
    let start = get(&world, "config").await;
    assert_eq!((&start["revision"], &start["pattern"]["name"]), (&json!(1), &json!("data_parallel")));

    let stale = [("if-match", "\"7\"")];
    let body = r#"{"name":"balanced","ratio":0.5}"#;
    assert_eq!(world.call("PUT", "/admin/v1/pattern", &stale, body).await.status, 412);
    assert_eq!(world.call("PUT", "/admin/v1/pattern", &[("if-match", "W/x")], body).await.status, 412);
    assert_eq!(get(&world, "pattern").await["name"], "data_parallel");
    let changed = world.call("PUT", "/admin/v1/pattern", &[("if-match", "\"9\", \"1\"")], body).await;
    assert_eq!((changed.status.as_u16(), changed.headers["etag"].as_bytes()), (200, b"\"2\"".as_slice()));
    // The revision of a body counts like If-Match.
    let stale = send(&world, "PUT", "pattern", json!({"name": "balanced", "revision": 1})).await;
    assert_eq!(stale.status, 412);

    // A dry run checks all and makes nothing; what changes nothing is no revision.
    let dry = world.call("PUT", "/admin/v1/pattern?dry_run=true", &[], r#"{"name":"prefill_decode"}"#).await;
    assert_eq!((dry.status.as_u16(), &dry.json()["name"]), (200, &json!("balanced")));
    assert_eq!(world.call("PUT", "/admin/v1/pattern?dry_run=true", &[], r#"{"name":"x"}"#).await.status, 400);
    assert_eq!(world.call("PUT", "/admin/v1/pattern?dryrun=true", &[], body).await.status, 400);
    assert_eq!(world.call("PUT", "/admin/v1/pattern", &[], body).await.json()["revision"], 2);

    let mut document = get(&world, "config").await;
    document["thresholds"]["dead_seconds"] = json!(9.0);
    document["rules"] = json!([{"pattern": "prefill_decode", "min_tokens": 7}]);
    let put = send(&world, "PUT", "config", document.clone()).await;
    assert_eq!((put.status.as_u16(), &put.json()["revision"]), (200, &json!(3)), "{}", put.body);
    assert_eq!(world.service.cluster().thresholds().dead.as_secs(), 9);
    let again = send(&world, "PUT", "config", document).await;
    assert_eq!(again.status, 412, "it was made for revision 2");

    let back = send(&world, "POST", "rollback", json!({"to": 2})).await;
    assert_eq!((back.status.as_u16(), &back.json()["revision"]), (200, &json!(4)), "{}", back.body);
    assert_eq!((&back.json()["rules"], &back.json()["pattern"]["ratio"]), (&json!([]), &json!(0.5)));
    assert_eq!(world.service.cluster().thresholds().dead.as_secs(), 3);
    for (to, status, field) in [(json!(99), 404, "to"), (json!(-1), 400, "to"), (json!("x"), 422, "to")] {
        let answer = send(&world, "POST", "rollback", json!({"to": to})).await;
        assert_eq!((answer.status.as_u16(), param(&answer).as_str()), (status, field));
    }
    let history = get(&world, "history").await;
    let revisions: Vec<_> =
        history["history"].as_array().expect("a list").iter().map(|row| row["revision"].clone()).collect();
    assert_eq!(revisions, [4, 3, 2, 1]);
    assert_eq!(world.get("/admin/v1/history/3").await.json()["rules"][0]["min_tokens"], 7);

    let audit = get(&world, "audit").await;
    let rows = audit["audit"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[2]["before"], json!({"pattern": {"name": "data_parallel"}}));
    assert_eq!(rows[2]["after"], json!({"pattern": {"name": "balanced", "ratio": 0.5}}));
    assert_eq!((&rows[0]["what"], &rows[0]["who"]), (&json!("roll back to 2"), &json!("local")));
    assert!(rows[0]["after"].get("engines").is_none(), "only what changed: {}", rows[0]);
    world.service.note_refusal(&Change::new("SIGHUP", "read"), "no TOML");
    let last = world.get("/admin/v1/audit?last=1").await.json()["audit"].clone();
    assert_eq!(
        (&last[0]["outcome"], &last[0]["error"], &last[0]["revision"]),
        (&json!("refused"), &json!("no TOML"), &json!(4))
    );
    assert_eq!(world.get("/admin/v1/audit?first=1").await.status, 400);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_document_is_taken_as_a_whole_or_not_at_all() {
    let a = Fake::new("a");
    let world = World::new(&[(&a, Role::Any)], "data_parallel").await;
    let base = get(&world, "config").await;
    let with = |path: &str, value: Value| {
        let mut document = base.clone();
        *document.pointer_mut(path).expect("a place in the document") = value;
        document
    };
    for (document, field) in [
        (with("/pattern", json!("nope")), "name"),
        (with("/pattern", json!({"name": "balanced", "ratio": 3})), "ratio"),
        (with("/engines/0/weight", json!(0)), "weight"),
        (with("/engines/0/role", json!("boss")), "engines[0].role"),
        (with("/engines/0/kind", json!("other")), "engines[0].kind"),
        (with("/engines/0/kind", json!("mlc")), "engines[0].kind"),
        (with("/engines/0", json!({"url": "openai+http://x:1", "role": "prefill"})), "engines[0].role"),
        (with("/engines/0", json!({"url": "ftp://x"})), "engines[0].url"),
        (with("/engines/0", json!({"url": "http://x:1", "kind": "nope"})), "engines[0].kind"),
        (with("/engines/0", json!({"url": "http://x:1", "size": 1})), "engines[0].size"),
        (with("/engines", json!([{"url": "http://x:1"}, {"url": "http://x:1/"}])), "engines[1].url"),
        (with("/thresholds/dead_seconds", json!(0.1)), "thresholds.dead_seconds"),
        (with("/thresholds/heartbeat_seconds", json!(0)), "thresholds.heartbeat_seconds"),
        (with("/thresholds/breaker_failures", json!(-1)), "thresholds.breaker_failures"),
        (with("/thresholds", json!({"wishes": 3})), "thresholds.wishes"),
        (with("/rules", json!(null)), "rules"),
    ] {
        let answer = send(&world, "PUT", "config", document.clone()).await;
        assert!(answer.status.is_client_error(), "{document}");
        assert_eq!(param(&answer), field, "{}", answer.body);
    }
    let mut unknown = base.clone();
    unknown["colour"] = json!("red");
    assert_eq!(param(&send(&world, "PUT", "config", unknown).await), "colour");
    assert_eq!(get(&world, "config").await, base);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn engines_join_change_drain_and_leave_by_the_api() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    let added =
        send(&world, "POST", "engines", json!({"url": "http://127.0.0.1:9/", "role": "decode", "weight": 2}))
            .await;
    assert_eq!(added.status, 201, "{}", added.body);
    let shown = added.json();
    assert_eq!(
        (&shown["id"], &shown["url"], &shown["health"]),
        (&json!(2), &json!("http://127.0.0.1:9"), &json!("down"))
    );
    assert_eq!(send(&world, "POST", "engines", json!({"url": "http://127.0.0.1:9"})).await.status, 409);
    assert_eq!(param(&send(&world, "POST", "engines", json!({"url": "x", "wait": 1})).await), "wait");
    assert_eq!(param(&send(&world, "POST", "engines", json!({})).await), "url");
    assert_eq!(param(&send(&world, "POST", "engines", json!({"url": "ftp://x"})).await), "url");

    let changed = send(&world, "PATCH", "engines/2", json!({"weight": 0.5, "role": "prefill"})).await;
    assert_eq!((&changed.json()["weight"], &changed.json()["role"]), (&json!(0.5), &json!("prefill")));
    assert_eq!(param(&send(&world, "PATCH", "engines/2", json!({"url": "y"})).await), "url");
    assert_eq!(param(&send(&world, "PATCH", "engines/2", json!({"draining": true})).await), "draining");
    assert_eq!(send(&world, "PATCH", "engines/77", json!({"weight": 1})).await.status, 404);
    assert_eq!(send(&world, "PATCH", "engines/x", json!({"weight": 1})).await.status, 400);
    assert_eq!(world.call("DELETE", "/admin/v1/engines/2", &[], "").await.status, 200);
    assert_eq!(world.get("/admin/v1/engines/2").await.status, 404);

    a.on_generate(Act::HangAfter(1));
    b.on_generate(Act::HangAfter(1));
    let request = Request::post("/v1/completions").body(Body::from(r#"{"prompt":[1],"stream":true}"#));
    let running = world.app().oneshot(request.expect("a request")).await.expect("infallible");
    let busy = world.service.cluster().engines().iter().position(|e| e.in_flight() > 0).expect("one is busy");
    let path = format!("/admin/v1/engines/{busy}");
    let refused = world.call("DELETE", &path, &[], "").await;
    assert_eq!(
        (refused.status.as_u16(), refused.json()["error"]["code"].as_str()),
        (409, Some("engine_busy"))
    );
    assert_eq!(
        get(&world, &format!("engines/{busy}")).await["draining"],
        false,
        "a refused change changes nothing"
    );
    let drained = world.call("POST", &format!("{path}/drain"), &[], "").await.json();
    assert_eq!((&drained["draining"], &drained["takes_requests"]), (&json!(true), &json!(false)));
    let back = world.call("POST", &format!("{path}/undrain"), &[], "").await.json();
    assert_eq!(back["takes_requests"], true);
    let dry = world.call("DELETE", &format!("{path}?force=true&dry_run=true"), &[], "").await;
    assert_eq!(dry.status, 200);
    assert!(
        world.service.cluster().engine(busy.try_into().expect("small")).is_some_and(|e| e.takes_requests())
    );
    assert_eq!(world.call("DELETE", &format!("{path}?force=true"), &[], "").await.status, 200);
    assert_eq!(get(&world, "engines").await["engines"].as_array().map(Vec::len), Some(1));
    drop(running);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_token_guards_operators_and_nobody_else() {
    let a = Fake::new("a");
    let world = World::with(&[(&a, Role::Any)], "data_parallel", |config| {
        config.admin_token = Some("open-sesame".into());
    })
    .await;
    for (header, status) in [
        (None, 401),
        (Some("Bearer open-sesam"), 401),
        (Some("Bearer open-sesame!"), 401),
        (Some("open-sesame"), 401),
        (Some("Bearer "), 401),
        (Some("Bearer open-sesame"), 200),
    ] {
        let headers: Vec<_> = header.iter().map(|value| ("authorization", *value)).collect();
        for path in ["/admin/v1/config", "/admin/v1/engines", "/admin/v1/audit"] {
            let answer = world.call("GET", path, &headers, "").await;
            assert_eq!(answer.status, status, "{header:?} {path}");
            assert_eq!(answer.headers.contains_key("www-authenticate"), status == 401);
        }
    }
    assert_eq!(world.complete(r#"{"prompt":[1]}"#).await.status, 200, "clients need none");

    // Where only clients are served, operators find nothing, and the other way round.
    let ask = |app: axum::Router, path: &'static str| async move {
        let request = Request::get(path).header("authorization", "Bearer open-sesame").body(Body::empty());
        app.oneshot(request.expect("a request")).await.expect("infallible").status().as_u16()
    };
    let service: &Arc<_> = &world.service;
    assert_eq!(ask(service.client_http(), "/admin/v1/config").await, 404);
    assert_eq!(ask(service.client_http(), "/v1/models").await, 200);
    assert_eq!(ask(service.admin_http(), "/admin/v1/config").await, 200);
    assert_eq!(ask(service.admin_http(), "/v1/models").await, 404);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn explain_says_what_would_be_chosen_and_changes_nothing() {
    let (p, d, e) = (Fake::new("p"), Fake::new("d"), Fake::new("e"));
    let engines = [(&p, Role::Prefill), (&d, Role::Any), (&e, Role::Any)];
    let world = World::new(&engines, "data_parallel").await;
    let rules = json!({"rules": [{"pattern": "prefill_decode", "tenant": "acme"}]});
    assert_eq!(send(&world, "PUT", "rules", rules).await.status, 200);
    let body = format!(r#"{{"prompt":{},"max_tokens":1}}"#, tokens(40));
    world.complete(&body).await;
    let holder = if d.calls().is_empty() { "e" } else { "d" };
    let calls = || [&p, &d, &e].map(|fake| fake.calls().len());
    let before = calls();

    let explained = world.call("POST", "/admin/v1/explain", &[], &body).await;
    assert_eq!(explained.status, 200, "{}", explained.body);
    let explained = explained.json();
    assert_eq!((&explained["rule"], &explained["pattern"]["name"]), (&json!(null), &json!("data_parallel")));
    assert_eq!((&explained["num_tokens"], &explained["chosen"]["decode"]), (&json!(40), &json!(holder)));
    let engine = |name: &str| {
        let all = explained["engines"].as_array().expect("engines");
        all.iter().find(|engine| engine["url"] == name).expect("it is there").clone()
    };
    assert_eq!(engine(holder)["held_tokens"], 40);
    assert_eq!(engine("p")["held_tokens"], 0);
    for engine in explained["engines"].as_array().expect("engines") {
        let ttft = engine["predicted"]["ttft_seconds"].as_f64().expect("a number");
        assert!(ttft > 0.0 && engine["predicted"]["tpot_seconds"].as_f64() > Some(0.0), "{engine}");
    }
    let cached = engine(holder)["predicted"]["ttft_seconds"].as_f64();
    assert!(cached < engine("p")["predicted"]["ttft_seconds"].as_f64(), "what it holds it need not compute");
    assert_eq!(explained["pairs"].as_array().map(Vec::len), Some(4), "p, d and e prefill for d and e");

    let tenant = [("x-microserving-tenant", "acme")];
    let explained = world.call("POST", "/admin/v1/explain", &tenant, &body).await.json();
    assert_eq!((&explained["rule"], &explained["pattern"]["name"]), (&json!(0), &json!("prefill_decode")));
    assert!(explained["chosen"]["prefill"].is_string());
    let asked = format!(r#"{{"prompt":{},"pattern":"balanced:0.5"}}"#, tokens(40));
    let explained = world.call("POST", "/admin/v1/explain", &tenant, &asked).await.json();
    assert_eq!(explained["pattern"], json!({"name": "balanced", "ratio": 0.5}));
    let chat = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
    assert_eq!(world.call("POST", "/admin/v1/explain", &[], chat).await.json()["num_tokens"], 8);
    for (bad, field) in
        [(r#"{"prompt":[1],"pattern":"x"}"#, "pattern"), ("{}", "prompt"), (r#"{"prompt":[]}"#, "prompt")]
    {
        let answer = world.call("POST", "/admin/v1/explain", &[], bad).await;
        assert!(answer.status.is_client_error());
        assert_eq!(param(&answer), field);
    }
    assert_eq!(calls(), before, "no engine heard of it");
    assert_eq!(world.service.cluster().in_flight(), 0);
    world.end().await;
}
