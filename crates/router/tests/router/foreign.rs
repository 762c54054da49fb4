//! Engines of other makes, over real connections.

use microserving_router::{EngineSpec, PlacementPolicy, Role};
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::servers::{Foreign, Turn};

fn spec(address: &str, role: Role) -> EngineSpec {
    let address: microserving_client::EngineAddress = address.parse().expect("an address");
    EngineSpec::at(&address, role).expect("an address")
}

fn mlc(server: &Foreign, options: &str, role: Role) -> EngineSpec {
    spec(&format!("mlc+{}{options}", server.address), role)
}

fn openai(server: &Foreign, options: &str) -> EngineSpec {
    spec(&format!("openai+{}{options}", server.address), Role::Any)
}

/// Two servers of MLC-LLM and a router that has their tokenizer.
async fn disaggregated(pattern: &str) -> (Foreign, Foreign, World) {
    let (p, d) = (Foreign::mlc("llama").await, Foreign::mlc("llama").await);
    let specs = vec![mlc(&p, "", Role::Prefill), mlc(&d, "#recv_rank=4", Role::Decode)];
    let world = World::over(specs, 2, pattern, |_| {}).await;
    (p, d, world)
}

#[tokio::test]
async fn mlc_servers_disaggregate_in_their_own_words() {
    let (p, d, world) = disaggregated("prefill_decode").await;
    let body = r#"{"prompt":"hello world","max_tokens":3,"temperature":0.5,"stop":"zz","ignore_eos":true,"logit_bias":{"5":1.5},
        "response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object"}}}}"#;
    let answer = world.complete(body).await;
    assert_eq!(answer.text(), "abc", "{}", answer.body);
    assert_eq!(answer.json()["usage"]["total_tokens"], 10);
    assert_eq!(d.paths(), ["/microserving/prep_recv", "/microserving/start_generate"]);
    assert_eq!(p.paths(), ["/microserving/remote_send"]);
    let (prep, start, send) = (&d.arrived()[0], &d.arrived()[1], &p.arrived()[0]);
    assert_eq!((&prep.body["end"], &start.body["begin"]), (&json!(10), &json!(10)));
    assert_eq!(
        (&send.body["begin"], &send.body["end"], &send.body["recv_rank"]),
        (&json!(0), &json!(10), &json!(4))
    );
    assert_eq!(send.body["kv_addr_info"], "AAAA");
    for call in [prep, start, send] {
        assert_eq!(call.body["user"], prep.body["user"], "one key ties the calls together");
        assert_eq!(call.body["model"], "llama");
        // The server goes by what the first call says.
        assert_eq!((&call.body["temperature"], &call.body["max_tokens"]), (&json!(0.5), &json!(3)));
        assert_eq!(
            (&call.body["stop"], &call.body["debug_config"]["ignore_eos"]),
            (&json!(["zz"]), &json!(true))
        );
        assert_eq!(
            call.body["response_format"],
            json!({"type": "json_object", "schema": r#"{"type":"object"}"#})
        );
        assert_eq!(call.body["seed"], prep.body["seed"]);
        assert!(call.headers.get("x-microserving-stats").is_none());
    }
    assert_eq!(start.body["stream"], true);

    // What there is nothing to move for goes to one server.
    let answer = world.complete(r#"{"prompt":"x","max_tokens":2}"#).await;
    assert_eq!(answer.text(), "ab", "{}", answer.body);
    assert_eq!(d.paths()[2..], ["/v1/completions"]);
    let answer = world.complete(r#"{"prompt":"hello world","n":2}"#).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!((d.paths()[3..].to_vec(), p.paths().len()), (vec!["/v1/completions".to_owned()], 1));
    world.end().await;
}

#[tokio::test]
async fn mlc_servers_are_not_asked_for_what_they_would_ignore() {
    let (p, d, world) = disaggregated("prefill_decode").await;
    for (field, value) in [
        ("top_k", "3"),
        ("min_p", "0.1"),
        ("cache_salt", r#""t""#),
        ("min_tokens", "2"),
        ("return_token_ids", "true"),
    ] {
        let answer = world.complete(&format!(r#"{{"prompt":"hello","{field}":{value}}}"#)).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["param"]),
            (400, &json!(field)),
            "{}",
            answer.body
        );
    }
    assert!(p.paths().is_empty() && d.paths().is_empty());
    world.end().await;
}

#[tokio::test]
async fn without_their_tokenizer_mlc_servers_get_text() {
    let server = Foreign::mlc("llama").await;
    let world =
        World::over(vec![mlc(&server, "", Role::Any)], 1, "prefill_decode", |config| config.codec = None)
            .await;
    assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    let chat = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#;
    let answer = world.call("POST", "/v1/chat/completions", &[], chat).await;
    let events = answer.events();
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "abc", "{}", answer.body);
    assert_eq!(events.last().expect("usage")["usage"]["completion_tokens"], 3);
    assert_eq!(world.complete(r#"{"prompt":[104,105]}"#).await.text(), "abc");
    assert_eq!(server.paths(), ["/v1/completions", "/v1/chat/completions", "/v1/completions"]);
    let bodies: Vec<Value> = server.arrived().into_iter().map(|arrived| arrived.body).collect();
    assert_eq!((&bodies[0]["prompt"], &bodies[2]["prompt"]), (&json!("hello"), &json!([104, 105])));
    assert_eq!(bodies[1]["messages"], json!([{"role": "user", "content": "hi"}]));
    let users: Vec<_> = bodies.iter().map(|body| body["user"].as_str().expect("a key").to_owned()).collect();
    assert!(users[0] != users[1] && users[1] != users[2], "{users:?}");
    world.end().await;
}

#[tokio::test]
async fn a_preempted_request_is_run_again_under_another_key() {
    let server = Foreign::mlc("llama").await;
    let world =
        World::over(vec![mlc(&server, "", Role::Any)], 1, "data_parallel", |config| config.codec = None)
            .await;
    server.then(Turn::PreemptAfter(0));
    assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    let users: Vec<_> = server
        .arrived()
        .iter()
        .map(|arrived| arrived.body["user"].as_str().expect("a key").to_owned())
        .collect();
    assert_eq!((users.len(), &users[1]), (2, &format!("{}.1", users[0])));
    // What was streamed is not streamed again.
    server.then(Turn::PreemptAfter(2));
    let answer = world.complete(r#"{"prompt":"hello","stream":true}"#).await;
    assert_eq!(answer.streamed_text(), "ab");
    assert_eq!(answer.events().last().expect("an error")["error"]["status"], 503);
    world.end().await;
}

#[tokio::test]
async fn what_mlc_servers_refuse_is_told_in_their_words() {
    let server = Foreign::mlc("llama").await;
    let world =
        World::over(vec![mlc(&server, "", Role::Any)], 1, "data_parallel", |config| config.codec = None)
            .await;
    server.then(Turn::Status(400, r#""{\"object\":\"error\",\"message\":\"too long\",\"code\":400}""#));
    let answer = world.complete(r#"{"prompt":"hello"}"#).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["message"]), (400, &json!("too long")));
    let answer = world.complete(r#"{"prompt":"hello","logprobs":9}"#).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["message"]),
        (422, &json!("logprobs is above 5"))
    );
    world.end().await;
}

#[tokio::test]
async fn openai_servers_get_what_the_client_wrote() {
    let server = Foreign::openai("org/llama", true).await;
    let world =
        World::over(vec![openai(&server, "#model=llama")], 1, "prefill_decode", |config| config.codec = None)
            .await;
    assert_eq!(world.get("/v1/models").await.json()["data"][0]["id"], "llama");
    let pattern = world.get("/admin/v1/pattern").await.json();
    assert!(
        pattern["caution"].as_str().is_some_and(|caution| caution.contains("no engine moves KV")),
        "{pattern}"
    );
    let changed = world.call("PUT", "/admin/v1/pattern", &[], r#"{"name":"data_parallel"}"#).await.json();
    assert_eq!(changed["caution"], json!(null), "nothing to be cautious of");
    let back = json!({"name": "prefill_decode", "caution": pattern["caution"]}).to_string();
    let changed = world.call("PUT", "/admin/v1/pattern", &[], &back).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    let answer = world
        .complete(r#"{"prompt":"hello","model":"llama","max_tokens":2,"temperature":0.5,"echo":true}"#)
        .await;
    assert_eq!(
        (answer.text().as_str(), &answer.json()["model"]),
        ("helloab", &json!("llama")),
        "{}",
        answer.body
    );
    let chat = r#"{"messages":[{"role":"user","content":"hi"}],"logprobs":true,"top_logprobs":2,"seed":7}"#;
    let answer = world.call("POST", "/v1/chat/completions", &[], chat).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "abc", "{answer}");
    assert_eq!(world.complete(r#"{"prompt":[1,2]}"#).await.text(), "abc");
    let usage = json!({"include_usage": true});
    let bodies: Vec<Value> = server.arrived().into_iter().map(|arrived| arrived.body).collect();
    assert_eq!(
        bodies,
        [
            json!({"prompt": "hello", "model": "org/llama", "max_tokens": 2, "temperature": 0.5, "n": 1, "stream": true, "stream_options": usage}),
            json!({"messages": [{"role": "user", "content": "hi"}], "model": "org/llama", "logprobs": true, "top_logprobs": 2, "seed": 7,
                   "n": 1, "stream": true, "stream_options": usage}),
            json!({"prompt": [1, 2], "model": "org/llama", "n": 1, "stream": true, "stream_options": usage}),
        ]
    );
    // A word that this server does not know goes there all the same, and its own refusal comes back.
    let answer = world.complete(r#"{"prompt":"hello","top_k":4}"#).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["message"]),
        (422, &json!("top_k is not known"))
    );
    let answer = world.call("POST", "/tokenize", &[], r#"{"prompt":"hello"}"#).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (501, &json!("no_tokenizer")));
    world.end().await;
}

#[tokio::test]
async fn before_the_first_token_another_server_does_it_and_after_it_the_prefix_stands() {
    let (a, b) = (Foreign::openai("m", false).await, Foreign::openai("m", true).await);
    let world = World::over(vec![openai(&a, ""), openai(&b, "")], 2, "data_parallel", |config| {
        config.codec = None;
        config.placement = PlacementPolicy::RoundRobin;
    })
    .await;
    let chat = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    for turn in [Turn::Status(503, "no room"), Turn::BreakAfter(0)] {
        world.until("both are there", || world.service.cluster().num_ready() == 2).await;
        let before = a.paths().len() + b.paths().len();
        a.then(turn.clone());
        for _ in 0..2 {
            let answer = world.call("POST", "/v1/chat/completions", &[], chat).await;
            let events = answer.events();
            let text = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
            // The role, which may have come before the connection broke, is no token.
            assert_eq!(text.collect::<String>(), "abc", "{turn:?}: {}", answer.body);
        }
        assert_eq!(a.paths().len() + b.paths().len(), before + 3, "{turn:?}: one of them is asked elsewhere");
    }
    world.until("both are back", || world.service.cluster().num_ready() == 2).await;
    let before = a.paths().len() + b.paths().len();
    a.then(Turn::BreakAfter(2));
    b.then(Turn::BreakAfter(2));
    let answer = world.complete(r#"{"prompt":"hello","stream":true}"#).await;
    assert_eq!(answer.streamed_text(), "ab", "{}", answer.body);
    assert_eq!(answer.events().last().expect("an error")["error"]["status"], 503);
    assert_eq!(a.paths().len() + b.paths().len(), before + 1, "nothing is made again after the first token");
    world.end().await;
}

#[tokio::test]
async fn a_name_is_not_shared_by_kinds_unless_the_operator_says_so() {
    let ours = Fake::new("ours");
    let server = Foreign::openai("toy", true).await;
    let fake = || EngineSpec::new(ours.clone(), Role::Any);
    let world = World::over(vec![fake(), openai(&server, "")], 1, "data_parallel", |_| {}).await;
    world.until("the other one is seen", || world.service.cluster().engines()[1].models().len() == 1).await;
    for _ in 0..4 {
        assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    }
    let engines = world.get("/admin/v1/engines").await.json();
    assert_eq!(
        (&engines["engines"][1]["kind"], &engines["engines"][1]["health"]),
        (&json!("openai"), &json!("not_ready"))
    );
    assert!(server.paths().is_empty());
    world.end().await;

    let world = World::over(vec![fake(), openai(&server, "#model=toy")], 2, "data_parallel", |config| {
        config.placement = PlacementPolicy::RoundRobin;
    })
    .await;
    for _ in 0..4 {
        assert_eq!(world.complete(r#"{"prompt":"hello"}"#).await.text(), "abc");
    }
    assert!(!server.paths().is_empty(), "the operator vouches for it");
    let (before, moved) = (server.paths().len(), [("x-microserving-pattern", "prefill_decode")]);
    for _ in 0..4 {
        let answer = world.call("POST", "/v1/completions", &moved, r#"{"prompt":"hello"}"#).await;
        assert_eq!(answer.text(), "abc");
    }
    assert_eq!(server.paths().len(), before, "a pattern that moves KV prefers engines that can");
    assert!(ours.calls().iter().all(|call| *call == "start_generate"), "there is nobody to move it from");
    world.end().await;
}

#[tokio::test]
async fn a_client_that_goes_away_closes_the_servers_connection() {
    let server = Foreign::openai("m", true).await;
    let world =
        World::over(vec![openai(&server, "")], 1, "data_parallel", |config| config.codec = None).await;
    let request = axum::http::Request::post("/v1/completions")
        .body(axum::body::Body::from(r#"{"prompt":"hello","stream":true,"max_tokens":30000}"#))
        .expect("a request");
    let response = tower::ServiceExt::oneshot(world.app(), request).await.expect("infallible");
    assert_eq!(response.status(), 200);
    drop(response);
    world.until("the server sees it", || server.closed() == 1).await;
    let metrics = world.get("/metrics").await.body;
    assert!(
        metrics.contains("microserving_router_aborts_total 0"),
        "there is no call to abort by: {metrics}"
    );
    world.end().await;
}
