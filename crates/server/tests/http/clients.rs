//! The typed clients, over either wire, against real engines: the same outcome for the same call.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use microserving_client::{CallContext, ClientError, EngineCalls, HttpEngineClient};
use microserving_grpc::{AnyWireClient, GrpcEngineClient, WirePolicy};
use microserving_protocol::{
    AbortRequest, ApiError, Attempt, CallOptions, CommitRequest, CompletionRequest, KvEventKind,
    PauseRequest, PrepRecvRequest, Prompt, RemoteSendRequest, SeqId, StartGenerateRequest, TokenId,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{Node, Settings, one, over, prompt, two};
use crate::wires::Wire;

over_both_wires! {
    the_three_calls,
    changes_of_the_cache_are_followed,
    a_deadline_ends_a_call_and_a_stream,
    a_dropped_stream_gives_its_sequence_up,
    an_engine_that_is_lost_within_an_answer,
    nobody_there,
    a_connection_closed_before_the_answer,
}

fn client(wire: Wire, url: &str) -> Arc<dyn EngineCalls> {
    match wire {
        Wire::Rest => Arc::new(HttpEngineClient::new(url).unwrap()),
        Wire::Grpc => Arc::new(GrpcEngineClient::new(url).unwrap()),
    }
}

fn url(node: &Node) -> String {
    format!("http://{}", node.address)
}

fn completion(tokens: &[u32], max_tokens: i64) -> CompletionRequest {
    let tokens: Vec<_> = tokens.iter().copied().map(TokenId).collect();
    CompletionRequest {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        stream: true,
        ..CompletionRequest::new(Prompt::Tokens(tokens.into()))
    }
}

fn keyed(seq_id: &str) -> CallOptions {
    CallOptions { seq_id: Some(SeqId::from(seq_id)), ..CallOptions::default() }
}

fn generate(tokens: &[u32], max_tokens: i64, seq_id: &str, begin: i64) -> StartGenerateRequest {
    StartGenerateRequest {
        completion: completion(tokens, max_tokens),
        call: keyed(seq_id),
        begin,
        generated_from: None,
        resume_from: None,
        choice_index: None,
    }
}

fn prepare(tokens: &[u32], seq_id: &str) -> PrepRecvRequest {
    PrepRecvRequest {
        completion: completion(tokens, 8),
        call: keyed(seq_id),
        end: -1,
        commit: false,
        reserve_tokens: 0,
    }
}

fn send(tokens: &[u32], seq_id: &str, kv_addr_info: String) -> RemoteSendRequest {
    RemoteSendRequest {
        completion: completion(tokens, 8),
        call: keyed(seq_id),
        begin: 0,
        end: -1,
        kv_addr_info,
        recv_rank: 0,
    }
}

async fn text(engine: &Arc<dyn EngineCalls>, cx: &CallContext, request: &StartGenerateRequest) -> String {
    let mut chunks = engine.start_generate(cx, request).await.unwrap();
    let mut text = String::new();
    while let Some(chunk) = chunks.next().await {
        text.extend(chunk.unwrap().choices.into_iter().map(|choice| choice.text));
    }
    text
}

async fn the_three_calls(wire: Wire) {
    let (p, d) = two(&over(wire)).await;
    let (p_calls, d_calls) = (client(wire, &url(&p)), client(wire, &url(&d)));
    let cx = CallContext { wants_stats: true, ..CallContext::within(Duration::from_secs(30)) };
    let tokens = prompt(50, 4);
    let prepared = d_calls.prep_recv(&cx, &prepare(&tokens, "a")).await.unwrap();
    assert_eq!((prepared.prefix_matched_length, prepared.engine_id.unwrap().as_str()), (0, "d"));
    let sent = p_calls.remote_send(&cx, &send(&tokens, "a", prepared.kv_addr_info)).await.unwrap();
    assert_eq!(sent.sent_tokens, 49);
    let mut chunks = d_calls.start_generate(&cx, &generate(&tokens, 8, "a", -1)).await.unwrap();
    let (mut words, mut stats) = (String::new(), None);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.unwrap();
        assert_eq!(chunk.id, "a");
        stats = stats.or(chunk.microserving);
        words.extend(chunk.choices.into_iter().map(|choice| choice.text));
    }
    assert_eq!(stats.expect("they were asked for").received_tokens, 49);
    let alone = one(&Settings::default()).await;
    let bare = CallContext::default();
    assert_eq!(words, text(&client(Wire::Rest, &url(&alone)), &bare, &generate(&tokens, 8, "b", 0)).await);
    // An answer in one piece is a stream of one, and no statistics were asked for.
    let mut whole = generate(&tokens, 8, "c", 0);
    whole.completion.stream = false;
    let pieces: Vec<_> = d_calls.start_generate(&bare, &whole).await.unwrap().collect().await;
    assert_eq!(pieces.len(), 1);
    let piece = pieces[0].as_ref().unwrap();
    assert_eq!((piece.choices[0].text.as_str(), &piece.microserving), (words.as_str(), &None));
    d_calls.ready(&cx).await.unwrap();
    assert_eq!(d_calls.models(&cx).await.unwrap().data[0].id, "toy");
    assert_eq!(d_calls.state(&cx).await.unwrap().engine_id.as_str(), "d");
    assert!(d_calls.tokenizer(&cx).await.unwrap().is_object());
    assert!(!d_calls.abort(&cx, &AbortRequest::new(SeqId::from("nobody"))).await.unwrap().aborted);
    let error = d_calls.pause(&cx, &PauseRequest::new(SeqId::from("stranger"))).await.unwrap_err();
    assert_eq!(error.to_api_error().code.as_deref(), Some("unknown_sequence"));
    d.wait_idle().await;
    p.wait_idle().await;
}

async fn changes_of_the_cache_are_followed(wire: Wire) {
    let node = one(&over(wire)).await;
    let engine = client(wire, &url(&node));
    let cx = CallContext::default();
    let mut events = engine.kv_events(&cx, 0).await.unwrap();
    let first = events.next().await.unwrap().unwrap();
    assert!(matches!(&first.kind, KvEventKind::Snapshot { pages } if pages.is_empty()), "{first:?}");
    text(&engine, &cx, &generate(&prompt(40, 1), 1, "a", 0)).await;
    let next = events.next().await.unwrap().unwrap();
    assert_eq!(next.incarnation, first.incarnation);
    assert!(matches!(&next.kind, KvEventKind::Stored { pages } if !pages.is_empty()), "{next:?}");
    node.engine.drain().await.unwrap();
    let last = loop {
        match events.next().await.expect("it ends with an error") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(last.to_api_error().code.as_deref(), Some("draining"));
    assert!(events.next().await.is_none());
}

async fn a_deadline_ends_a_call_and_a_stream(wire: Wire) {
    let node = one(&Settings { step_time: Duration::from_millis(10), ..over(wire) }).await;
    let engine = client(wire, &url(&node));
    let cx = CallContext::within(Duration::from_millis(300));
    let mut chunks = engine.start_generate(&cx, &generate(&prompt(20, 1), 1500, "a", 0)).await.unwrap();
    let error = loop {
        match chunks.next().await.expect("it does not end well") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.to_api_error().status, 504, "{error:?}");
    assert!(chunks.next().await.is_none());
    drop(chunks);
    node.wait_idle().await;
    let mut whole = generate(&prompt(20, 1), 1500, "b", 0);
    whole.completion.stream = false;
    let cx = CallContext::within(Duration::from_millis(200));
    let error = engine.start_generate(&cx, &whole).await.err().expect("too late");
    assert_eq!(error.to_api_error().status, 504, "{error:?}");
    let over = engine.state(&CallContext::within(Duration::ZERO)).await.unwrap_err();
    assert!(matches!(over, ClientError::Timeout { .. }), "{over:?}");
    node.wait_idle().await;
}

async fn a_dropped_stream_gives_its_sequence_up(wire: Wire) {
    let node = one(&Settings { step_time: Duration::from_millis(10), ..over(wire) }).await;
    let engine = client(wire, &url(&node));
    // Enough of them that a connection which counts cancelled streams against its peer would be given up.
    for number in 0..40 {
        let request = generate(&prompt(20, number), 1500, &format!("a{number}"), 0);
        let mut chunks = engine.start_generate(&CallContext::default(), &request).await.unwrap();
        chunks.next().await.unwrap().unwrap();
    }
    node.wait_idle().await;
    assert_eq!(node.state().await.counters.aborted, 40);
}

async fn an_engine_that_is_lost_within_an_answer(wire: Wire) {
    let node = one(&Settings { step_time: Duration::from_millis(10), ..over(wire) }).await;
    let engine = client(wire, &url(&node));
    let request = generate(&prompt(20, 1), 1500, "a", 0);
    let mut chunks = engine.start_generate(&CallContext::default(), &request).await.unwrap();
    chunks.next().await.unwrap().unwrap();
    drop(node);
    let error = loop {
        match chunks.next().await.expect("it does not end well") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ClientError::Lost { .. }), "{error:?}");
    assert!(chunks.next().await.is_none());
}

async fn nobody_there(wire: Wire) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = client(wire, &format!("http://{}", listener.local_addr().unwrap()));
    drop(listener);
    let error = engine.prep_recv(&CallContext::default(), &prepare(&[1, 2], "a")).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    assert!(error.means_down() && error.to_string().contains("refused"), "{error}");
}

async fn a_connection_closed_before_the_answer(wire: Wire) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = client(wire, &format!("http://{}", listener.local_addr().unwrap()));
    let server = tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 64];
            let _ = connection.read(&mut buffer).await;
        }
    });
    let cx = CallContext::within(Duration::from_secs(20));
    let error = engine.prep_recv(&cx, &prepare(&[1, 2], "a")).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    server.abort();
}

/// The server around an engine answers without gRPC while there is none; a router is told the same over either wire.
#[tokio::test]
async fn an_engine_that_still_loads_is_not_ready() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let (options, health) = crate::support::daemon_options();
    let shutdown = microserving_daemon::Shutdown::manual(Duration::ZERO);
    let _server = microserving_daemon::HttpServer::bind(&address, &options, health, shutdown).await.unwrap();
    let mut answers = Vec::new();
    for wire in [Wire::Rest, Wire::Grpc] {
        let engine = client(wire, &format!("http://{address}"));
        let error = engine.prep_recv(&CallContext::default(), &prepare(&[1, 2], "a")).await.unwrap_err();
        assert!(matches!(error, ClientError::Refused { .. }), "{error:?}");
        answers.push(error.to_api_error());
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!((answers[0].status, answers[0].retry_after), (503, Some(Duration::from_secs(1))));
}

/// A router judges errors by status, code and `Retry-After`, so all of that must not depend on the wire.
#[tokio::test]
async fn errors_are_the_same_over_both_wires() {
    let (p, d) = two(&Settings { num_pages: 4, ..Settings::default() }).await;
    let [of_p, of_d] = [&p, &d].map(|node| [Wire::Rest, Wire::Grpc].map(|wire| client(wire, &url(node))));
    let cx = CallContext::default();
    let prepared = of_d[0].prep_recv(&cx, &prepare(&prompt(40, 1), "held")).await.unwrap();
    let refused = |outcome: Option<ClientError>| -> ApiError {
        match outcome {
            Some(ClientError::Refused { error, .. }) => *error,
            other => panic!("not refused: {other:?}"),
        }
    };
    let mut statuses = Vec::new();
    let mut compare = |over_rest: ApiError, over_grpc: ApiError| {
        assert_eq!(over_rest, over_grpc);
        statuses.push(over_rest.status);
    };
    macro_rules! both {
        ($engine:ident, $call:ident, $request:expr) => {{
            let request = $request;
            let over_rest = $engine[0].$call(&cx, &request).await.err();
            let over_grpc = $engine[1].$call(&cx, &request).await.err();
            compare(refused(over_rest), refused(over_grpc));
        }};
    }
    let tokens = prompt(20, 2);
    both!(of_d, prep_recv, PrepRecvRequest { end: 20, ..prepare(&tokens, "a") });
    both!(of_d, prep_recv, prepare(&prompt(40, 3), "held"));
    both!(of_d, prep_recv, prepare(&prompt(33, 1), "b"));
    both!(of_d, prep_recv, prepare(&prompt(2000, 1), "c"));
    both!(of_d, commit, CommitRequest::new(SeqId::from("nobody")));
    both!(of_d, start_generate, {
        let mut request = generate(&tokens, 4, "e", 0);
        request.completion.top_p = Some(2.0);
        request
    });
    both!(of_d, start_generate, {
        let mut request = generate(&tokens, 4, "e", 0);
        request.completion.model = Some("another".into());
        request
    });
    both!(of_p, remote_send, send(&prompt(40, 9), "held", prepared.kv_addr_info.clone()));
    both!(of_p, remote_send, send(&prompt(40, 1), "held", "***".into()));
    both!(of_p, remote_send, {
        let mut forged = microserving_protocol::addr_from_text(&prepared.kv_addr_info).unwrap();
        *forged.last_mut().unwrap() ^= 1;
        send(&prompt(40, 1), "held", microserving_protocol::addr_to_text(&forged))
    });
    let gone = AbortRequest { seq_id: SeqId::from("gone"), attempt: Some(Attempt(3)) };
    of_d[0].abort(&cx, &gone).await.unwrap();
    both!(of_d, prep_recv, {
        let mut request = prepare(&tokens, "gone");
        request.call.attempt = Some(Attempt(3));
        request
    });
    both!(of_d, prep_recv, {
        let mut request = prepare(&tokens, "late");
        request.completion.max_tokens = Some(0);
        request
    });
    d.engine.drain().await.unwrap();
    both!(of_d, start_generate, generate(&tokens, 4, "z", 0));
    for status in [400, 403, 404, 409, 410, 503] {
        assert!(statuses.contains(&status), "{status} is not among {statuses:?}");
    }
}

#[tokio::test]
async fn grpc_is_taken_where_it_is_offered() {
    let with = one(&Settings::default()).await;
    let without = one(&Settings { offers_grpc: false, ..Settings::default() }).await;
    let cx = CallContext::default();
    let request = generate(&prompt(20, 1), 4, "a", 0);
    for (node, policy, wire) in [
        (&with, WirePolicy::Auto, "grpc"),
        (&with, WirePolicy::Rest, "rest"),
        (&with, WirePolicy::Grpc, "grpc"),
        (&without, WirePolicy::Auto, "rest"),
        (&without, WirePolicy::Rest, "rest"),
    ] {
        let engine = AnyWireClient::new(&url(node), policy).unwrap();
        engine.state(&cx).await.unwrap();
        assert_eq!(engine.wire(), wire, "{policy}");
        let engine: Arc<dyn EngineCalls> = Arc::new(engine);
        assert_eq!(text(&engine, &cx, &request).await.len(), 4);
    }
    let count = |metrics: String| {
        let line = metrics.lines().find(|line| line.contains("Engine/StartGenerate")).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).unwrap_or(0)
    };
    assert_eq!(count(with.get("/metrics").await.body), 2, "it was really taken");
    assert_eq!(count(without.get("/metrics").await.body), 0);
    let forced = GrpcEngineClient::new(&url(&without)).unwrap();
    assert_eq!(forced.start_generate(&cx, &request).await.err().unwrap().to_api_error().status, 501);
}

/// An engine that does not offer gRPC any more, whether or not it still speaks HTTP/2, costs at most one call that says so.
#[tokio::test]
async fn an_engine_may_come_back_without_grpc() {
    let liar = Settings { offers_grpc: false, claims_grpc: Some(true), ..Settings::default() };
    let node = one(&liar).await;
    let cx = CallContext::within(Duration::from_secs(20));
    let engine = AnyWireClient::new(&url(&node), WirePolicy::Auto).unwrap();
    engine.state(&cx).await.unwrap();
    assert_eq!(engine.wire(), "grpc");
    let shared: Arc<dyn EngineCalls> = Arc::new(engine.clone());
    assert_eq!(text(&shared, &cx, &generate(&prompt(20, 1), 4, "a", 0)).await.len(), 4, "no call is lost");
    assert_eq!(engine.wire(), "rest");

    // One that knows HTTP/1.1 only, and answers the preface of HTTP/2 as what it is to it: a bad request.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let state = node.get("/microserving/state").await.body;
    let serving = tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut head = [0; 1024];
            let len = connection.read(&mut head).await.unwrap();
            let (status, body) = if head[..len].starts_with(b"GET ") {
                ("200 OK", state.as_str())
            } else {
                ("400 Bad Request", "")
            };
            let head =
                format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = connection.write_all(format!("{head}{body}").as_bytes()).await;
        }
    });
    let engine = AnyWireClient::new(&address, WirePolicy::Auto).unwrap();
    engine.state(&cx).await.unwrap();
    assert_eq!(engine.wire(), "grpc");
    let error = engine.prep_recv(&cx, &prepare(&[1, 2], "a")).await.unwrap_err();
    assert!(error.means_down() && error.is_worth_another_engine(), "{error:?}");
    assert_eq!(engine.wire(), "rest", "the next call goes over REST");
    serving.abort();
}
