//! The client against a scripted server.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::{StreamExt, stream};
use microserving_client::{CallContext, ClientError, EngineCalls, HttpEngineClient};
use microserving_protocol::{
    AbortRequest, CallOptions, CompletionRequest, KvEvent, KvEventKind, PrepRecvRequest, Prompt, SeqId,
    StartGenerateRequest, TokenId,
};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

/// A server that stops when dropped.
struct Server {
    url: String,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(app: Router) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let task = tokio::spawn(async move {
        axum::serve(listener, app).await.expect("serves until aborted");
    });
    Server { url, task }
}

fn prep() -> PrepRecvRequest {
    PrepRecvRequest {
        completion: CompletionRequest::new(Prompt::Tokens(vec![TokenId(1), TokenId(2)].into())),
        call: CallOptions { seq_id: Some(SeqId::from("k")), ..CallOptions::default() },
        end: 1,
        commit: false,
        reserve_tokens: 0,
    }
}

fn generate() -> StartGenerateRequest {
    let PrepRecvRequest { completion, call, .. } = prep();
    StartGenerateRequest { completion, call, begin: 1, ..StartGenerateRequest::default() }
}

fn events(parts: Vec<&'static str>) -> Response {
    let body =
        stream::iter(parts.into_iter().map(|part| Ok::<_, Infallible>(Bytes::from_static(part.as_bytes()))));
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(body)).into_response()
}

fn chunk(text: &str) -> String {
    format!(
        r#"{{"id":"k","choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":null}}],"usage":null}}"#
    )
}

#[tokio::test]
async fn headers_and_bodies_go_through() {
    let (sender, mut seen) = mpsc::channel::<(HeaderMap, Bytes)>(1);
    let app = Router::new().route(
        "/microserving/prep_recv",
        post(move |headers: HeaderMap, body: Bytes| async move {
            sender.send((headers, body)).await.expect("the test listens");
            (
                [(header::CONTENT_TYPE, "application/json")],
                r#"{"kv_append_metadata":"AA==","prefix_matched_length":1}"#,
            )
        }),
    );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let cx = CallContext {
        request_id: Some("r-1".into()),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        wants_stats: true,
        ..CallContext::within(Duration::from_secs(5))
    };
    let answer = engine.prep_recv(&cx, &prep()).await.expect("answers");
    assert_eq!((answer.kv_addr_info.as_str(), answer.prefix_matched_length), ("AA==", 1));
    let (headers, body) = seen.recv().await.expect("a request");
    assert_eq!(headers["x-request-id"], "r-1");
    assert_eq!(headers["traceparent"], "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    assert_eq!(headers["x-microserving-stats"], "1");
    assert_eq!(headers[header::CONTENT_TYPE], "application/json");
    assert_eq!(PrepRecvRequest::from_json(&body), Ok(prep()));
}

#[tokio::test]
async fn refusals_keep_status_body_and_retry_after() {
    let app = Router::new().route(
        "/microserving/prep_recv",
        post(|| async {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                [(header::RETRY_AFTER, "3")],
                r#"{"error":{"message":"no room","type":"overloaded_error","param":null,"code":"no_room"}}"#,
            )
        }),
    );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let error = engine.prep_recv(&CallContext::default(), &prep()).await.expect_err("refuses");
    assert!(error.is_worth_another_engine() && !error.means_down());
    let error = error.to_api_error();
    assert_eq!(
        (error.status, error.message.as_str(), error.code.as_deref()),
        (503, "no room", Some("no_room"))
    );
    assert_eq!(error.retry_after, Some(Duration::from_secs(3)));
}

#[tokio::test]
async fn nobody_there() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let engine = HttpEngineClient::new(&url).expect("a URL");
    let error = engine.ready(&CallContext::default()).await.expect_err("refused");
    assert!(matches!(&error, ClientError::Unreachable { engine, .. } if *engine == url), "{error:?}");
    assert!(error.means_down() && error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_connection_closed_before_the_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let server = tokio::spawn(async move {
        for _ in 0..3 {
            let (mut connection, _) = listener.accept().await.expect("a connection");
            let mut buffer = [0; 64];
            let _ = tokio::io::AsyncReadExt::read(&mut connection, &mut buffer).await;
        }
    });
    let engine = HttpEngineClient::new(&url).expect("a URL");
    let error = engine.prep_recv(&CallContext::default(), &prep()).await.expect_err("closed");
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    server.abort();
}

#[tokio::test]
async fn a_deadline_ends_a_call_and_a_stream() {
    let app = Router::new().route("/health/ready", get(std::future::pending::<()>)).route(
        "/microserving/start_generate",
        post(|| async {
            let first = stream::iter([Ok::<_, Infallible>(Bytes::from(format!("data: {}\n\n", chunk("a"))))]);
            let body = Body::from_stream(first.chain(stream::pending()));
            ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
        }),
    );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let cx = CallContext::within(Duration::from_millis(100));
    assert!(matches!(engine.ready(&cx).await, Err(ClientError::Timeout { .. })));
    let cx = CallContext::within(Duration::from_millis(200));
    let mut chunks = engine.start_generate(&cx, &generate()).await.expect("begins");
    assert_eq!(chunks.next().await.expect("a chunk").expect("text").choices[0].text, "a");
    assert!(matches!(chunks.next().await, Some(Err(ClientError::Timeout { .. }))));
    assert!(chunks.next().await.is_none());
}

#[tokio::test]
async fn streams_and_single_answers_read_alike() {
    let app = Router::new()
        .route(
            "/microserving/start_generate",
            post(|| async {
                // Cut in the middle of an event, as a network does.
                events(vec![
                    "data: {\"id\":\"k\",\"choices\":[{\"index\":0,\"te",
                    "xt\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: {\"id\":\"k\",\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":1,\"total_tokens\":3}}\n\n",
                    "data: [DONE]\n\n",
                ])
            }),
        )
        .route(
            "/v1/completions",
            post(|| async {
                ([(header::CONTENT_TYPE, "application/json")], r#"{"id":"k","choices":[{"index":0,"text":"whole"}]}"#)
            }),
        );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let cx = CallContext::default();
    let chunks: Vec<_> = engine.start_generate(&cx, &generate()).await.expect("begins").collect().await;
    let chunks: Vec<_> = chunks.into_iter().map(|chunk| chunk.expect("a chunk")).collect();
    assert_eq!(chunks.len(), 2);
    assert_eq!(chunks[0].choices[0].text, "a");
    assert_eq!(chunks[1].usage.expect("usage").total_tokens, 3);
    let whole: Vec<_> =
        engine.completions(&cx, &generate().completion).await.expect("answers").collect().await;
    assert_eq!(whole[0].as_ref().expect("a chunk").choices[0].text, "whole");
}

#[tokio::test]
async fn broken_streams_end_with_one_typed_error() {
    let app = Router::new().route(
        "/microserving/start_generate",
        post(|body: Bytes| async move {
            let request = StartGenerateRequest::from_json(&body).expect("ours");
            match request.call.seq_id.as_ref().map(SeqId::as_str) {
                Some("cut") => events(vec!["data: {\"id\":\"k\",\"choices\":[]}\n\n", "data: {\"id\""]),
                Some("error") => events(vec![
                    "data: {\"error\":{\"message\":\"boom\",\"type\":\"server_error\",\"param\":null,\"code\":null,\"status\":503}}\n\n",
                ]),
                Some("junk") => events(vec!["data: {]\n\n"]),
                _ => events(vec!["data: {\"id\":3}\n\n"]),
            }
        }),
    );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    for (id, expected) in
        [("cut", "Lost"), ("error", "Refused"), ("junk", "Malformed"), ("type", "Malformed")]
    {
        let mut request = generate();
        request.call.seq_id = Some(SeqId::from(id));
        let items: Vec<_> =
            engine.start_generate(&CallContext::default(), &request).await.expect("begins").collect().await;
        let error = items.last().expect("an item").as_ref().expect_err("an error");
        assert!(format!("{error:?}").starts_with(expected), "{id}: {error:?}");
        assert_eq!(items.iter().filter(|item| item.is_err()).count(), 1, "{id}");
        if id == "error" {
            assert_eq!(error.to_api_error().status, 503);
        }
    }
}

#[tokio::test]
async fn malformed_answers() {
    let app = Router::new()
        .route("/v1/models", get(|| async { "<html>" }))
        .route("/microserving/abort", post(|| async { r#"{"aborted":"perhaps"}"# }));
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let cx = CallContext::default();
    assert!(matches!(engine.models(&cx).await, Err(ClientError::Malformed { .. })));
    let abort = AbortRequest::new(SeqId::from("k"));
    assert!(matches!(engine.abort(&cx, &abort).await, Err(ClientError::Malformed { .. })));
    let error = engine.state(&cx).await.expect_err("no such path");
    assert_eq!(error.to_api_error().status, 404);
}

#[tokio::test]
async fn cache_events_are_followed_until_the_engine_lets_go() {
    let app = Router::new().route(
        "/microserving/kv_events",
        get(|query: axum::extract::RawQuery| async move {
            assert_eq!(query.0.as_deref(), Some("from=7"));
            events(vec![
                r#"data: {"incarnation":"00000000000000ab","number":7,"type":"stored","pages":["000000"#,
                "\"]}\n\ndata: {\"incarnation\":\"00000000000000ab\",\"number\":8,\"type\":\"cleared\"}\n\n",
                "data: {\"error\":{\"message\":\"drains\",\"type\":\"x\",\"code\":\"draining\",\"status\":503}}\n\n",
            ])
        }),
    );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let followed = engine.kv_events(&CallContext::default(), 7).await.expect("begins");
    let followed: Vec<_> = followed.collect().await;
    let event = |number, kind| KvEvent { incarnation: "00000000000000ab".into(), number, kind };
    assert_eq!(followed[0], Ok(event(7, KvEventKind::Stored { pages: vec!["000000".into()] })));
    assert_eq!(followed[1], Ok(event(8, KvEventKind::Cleared)));
    assert!(
        matches!(&followed[2], Err(ClientError::Refused { error, .. }) if error.status == 503),
        "{followed:?}"
    );
    assert_eq!(followed.len(), 3);

    let nothing = serve(Router::new()).await;
    let engine = HttpEngineClient::new(&nothing.url).expect("a URL");
    let Err(error) = engine.kv_events(&CallContext::default(), 0).await else {
        panic!("there are no events")
    };
    assert_eq!(error.to_api_error().status, 404);
}

/// Tells, when dropped, that the server noticed the client's going away.
struct Notice(Option<oneshot::Sender<()>>);

impl Drop for Notice {
    fn drop(&mut self) {
        if let Some(sender) = self.0.take() {
            let _ = sender.send(());
        }
    }
}

#[tokio::test]
async fn dropping_a_stream_or_a_call_closes_the_connection() {
    let (stream_notice, stream_gone) = oneshot::channel();
    let (call_notice, call_gone) = oneshot::channel();
    let (begun, mut call_begun) = mpsc::channel(1);
    let notices = Arc::new(std::sync::Mutex::new((Some(stream_notice), Some(call_notice))));
    let of_stream = notices.clone();
    let of_call = notices.clone();
    let app = Router::new()
        .route(
            "/microserving/start_generate",
            post(move || async move {
                let notice = Notice(of_stream.lock().expect("not poisoned").0.take());
                let body = stream::unfold((notice, 0), |(notice, n)| async move {
                    if n > 0 {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    Some((
                        Ok::<_, Infallible>(Bytes::from(format!("data: {}\n\n", chunk("a")))),
                        (notice, n + 1),
                    ))
                });
                ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
            }),
        )
        .route(
            "/microserving/remote_send",
            post(move || async move {
                let _notice = Notice(of_call.lock().expect("not poisoned").1.take());
                begun.send(()).await.expect("the test listens");
                std::future::pending::<()>().await;
            }),
        );
    let server = serve(app).await;
    let engine = HttpEngineClient::new(&server.url).expect("a URL");
    let cx = CallContext::default();

    let mut chunks = engine.start_generate(&cx, &generate()).await.expect("begins");
    chunks.next().await.expect("a chunk").expect("text");
    drop(chunks);
    tokio::time::timeout(Duration::from_secs(5), stream_gone).await.expect("in time").expect("noticed");

    let PrepRecvRequest { completion, call, .. } = prep();
    let send = microserving_protocol::RemoteSendRequest {
        completion,
        call,
        begin: 0,
        end: 1,
        kv_addr_info: String::new(),
        recv_rank: 0,
    };
    let in_flight = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.remote_send(&CallContext::default(), &send).await })
    };
    call_begun.recv().await.expect("the call arrived");
    in_flight.abort();
    tokio::time::timeout(Duration::from_secs(5), call_gone).await.expect("in time").expect("noticed");
}

#[test]
fn addresses() {
    for (url, fits) in [
        ("http://127.0.0.1:8001", true),
        ("http://host:80/", true),
        ("http://host/prefix/", true),
        ("https://host:443", false),
        ("host:80", false),
        ("http://", false),
        ("", false),
        ("http://h?x=1", false),
    ] {
        assert_eq!(HttpEngineClient::new(url).is_ok(), fits, "{url}");
    }
    assert_eq!(
        HttpEngineClient::new("https://h").expect_err("no TLS").to_string(),
        r#""https://h" is no engine address: must begin with http://"#
    );
}

#[tokio::test]
async fn connections_are_used_again_and_one_that_was_closed_is_replaced() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (accepted, mut connections) = mpsc::unbounded_channel();
    let server = tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.expect("a connection");
            accepted.send(()).expect("the test listens");
            // Two answers each, then it is closed without a word.
            for _ in 0..2 {
                let mut buffer = [0; 1024];
                let len = connection.read(&mut buffer).await.expect("a request");
                assert!(buffer[..len].ends_with(b"\r\n\r\n"), "a GET in one piece");
                connection
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    .await
                    .expect("a reader");
            }
        }
    });
    let engine = HttpEngineClient::new(&url).expect("a URL");
    for _ in 0..5 {
        engine.ready(&CallContext::within(Duration::from_secs(5))).await.expect("answers");
    }
    server.abort();
    let mut num_connections = 0;
    while connections.try_recv().is_ok() {
        num_connections += 1;
    }
    assert_eq!(num_connections, 3);
}
