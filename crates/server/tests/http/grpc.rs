//! What is gRPC's own: frames, metadata, codes, and both versions of HTTP on one port.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http::header::CONTENT_TYPE;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use microserving_grpc::{error_of, wire};
use microserving_protocol::{ApiError, KvAddrInfo};
use serde_json::json;
use tonic::{Code, Status};

use crate::support::{Node, Settings, completion, one, over, prompt, with};
use crate::wires::Wire;

/// Sends bytes to a method, as a client of another make might.
async fn raw(node: &Node, method: &str, body: Vec<u8>) -> (u16, Option<Status>) {
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http::<Full<Bytes>>();
    let request = Request::post(format!("http://{}/microserving.v1.Engine/{method}", node.address))
        .header(CONTENT_TYPE, "application/grpc")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let (head, body) = client.request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().and_then(Status::from_header_map);
    (head.status.as_u16(), Status::from_header_map(&head.headers).or(trailers))
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(message);
    bytes
}

fn whole(status: Option<Status>) -> ApiError {
    error_of(&status.expect("a status")).expect("an engine's error")
}

#[tokio::test]
async fn bytes_that_are_no_message() {
    let node = one(&Settings { max_body_bytes: 4096, ..over(Wire::Grpc) }).await;
    for method in ["PrepRecv", "RemoteSend", "StartGenerate", "Abort", "Commit", "Pause", "WatchKvEvents"] {
        for body in [vec![], vec![0; 3], framed(b"\xff\xff\xff")] {
            let (http, status) = raw(&node, method, body.clone()).await;
            let error = whole(status);
            assert_eq!((http, error.status), (200, 422), "{method} {body:?}: {error}");
        }
        let error = whole(raw(&node, method, framed(&vec![0; 5000])).await.1);
        assert_eq!(error.status, 413, "{method}: {error}");
        assert!(error.message.contains("4096"), "it names the limit: {error}");
    }
    let (http, status) = raw(&node, "NoSuchMethod", framed(b"")).await;
    assert_eq!((http, status.is_none()), (404, true), "gRPC reads this as not implemented");
    let metrics = node.get("/metrics").await.body;
    let counted = metrics.lines().any(|line| {
        line.contains("microserving.v1.Engine/PrepRecv") && line.contains("413") && line.ends_with(" 1")
    });
    assert!(counted, "errors are counted as what they are: {metrics}");
    node.wait_idle().await;
}

#[tokio::test]
async fn large_prompts_travel_whole() {
    let settings = Settings { num_pages: 7000, max_context: 110_000, ..over(Wire::Grpc) };
    let node = one(&settings).await;
    let tokens: Vec<u32> = (0..100_000).map(|at| at % 251).collect();
    let body = with(completion(&tokens, 4), json!({"end": -1, "user": "a"}));
    let prepared = node.call("/microserving/prep_recv", &body).await;
    let address = microserving_protocol::addr_from_text(prepared["kv_append_metadata"].as_str().unwrap());
    let address = KvAddrInfo::decode(&address.unwrap()).unwrap();
    assert_eq!((address.range.begin(), address.range.end()), (0, 99_999));
    let ids: Vec<_> = tokens[..99_999].iter().copied().map(microserving_protocol::TokenId).collect();
    assert_eq!(address.prompt_digest, microserving_protocol::prompt_digest(&ids));
    node.call("/microserving/abort", &json!({"seq_id": "a"})).await;
    node.wait_idle().await;
}

#[tokio::test]
async fn a_deadline_in_the_metadata_ends_the_call() {
    let node = one(&Settings { step_time: Duration::from_millis(10), ..over(Wire::Grpc) }).await;
    let message = |stream| wire::StartGenerateRequest {
        completion: Some(wire::CompletionRequest {
            prompt: Some(wire::completion_request::Prompt::Tokens(wire::TokenIds { ids: prompt(20, 1) })),
            max_tokens: Some(1500),
            ignore_eos: true,
            stream,
            ..Default::default()
        }),
        ..Default::default()
    };
    let within = |stream, timeout: &'static str| {
        let mut request = tonic::Request::new(message(stream));
        request.metadata_mut().insert("grpc-timeout", timeout.parse().unwrap());
        request
    };
    let error = node.grpc.engine().start_generate(within(false, "100m")).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert_eq!(error_of(&error).unwrap().status, 504);
    let mut messages = node.grpc.engine().start_generate(within(true, "300m")).await.unwrap().into_inner();
    assert!(messages.message().await.unwrap().is_some());
    let error = loop {
        match messages.message().await {
            Ok(message) => assert!(message.is_some(), "it does not end well"),
            Err(error) => break error,
        }
    };
    assert_eq!(error_of(&error).unwrap().code.as_deref(), Some("deadline_exceeded"));
    node.wait_idle().await;
    assert_eq!(node.state().await.counters.aborted, 2, "nobody waits, so nothing is computed");
    let error = node.grpc.engine().start_generate(within(true, "soon")).await.unwrap_err();
    assert_eq!(error_of(&error).unwrap().param.as_deref(), Some("grpc-timeout"));
}

#[tokio::test]
async fn identity_travels_as_metadata() {
    let node = one(&over(Wire::Grpc)).await;
    let mut request = tonic::Request::new(wire::StateRequest {});
    request.metadata_mut().insert("x-request-id", "r-77".parse().unwrap());
    let answer = node.grpc.engine().state(request).await.unwrap();
    assert_eq!(answer.metadata().get("x-request-id").unwrap(), "r-77");
    assert!(answer.into_inner().grpc);
}

#[tokio::test]
async fn one_port_speaks_both() {
    let node = one(&Settings { step_time: Duration::from_millis(2), ..over(Wire::Grpc) }).await;
    let body = with(completion(&prompt(20, 1), 200), json!({"stream": true, "begin": 0}));
    let over_grpc = node.post("/microserving/start_generate", &body);
    let over_rest =
        node.send(node.request(http::Method::POST, "/microserving/start_generate", body.to_string()));
    let (a, b, models) = tokio::join!(over_grpc, over_rest, node.get("/v1/models"));
    assert_eq!(a.streamed_text(0), b.streamed_text(0));
    assert_eq!(a.streamed_text(0).len(), 200);
    assert_eq!(models.status, 200);
    node.wait_idle().await;
}
