//! What MLC-LLM's own Router sends, as recorded: our client, asked for the same, sends the same, and reads what was answered.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use microserving_client::{CallContext, ChunkStream, ClientError, EngineAddress};
use microserving_protocol::{
    CallOptions, CompletionRequest, PrepRecvRequest, RemoteSendRequest, StartGenerateRequest,
};
use serde_json::Value;

fn fixtures() -> Option<PathBuf> {
    match std::env::var_os("MICROSERVING_FIXTURES") {
        Some(folder) => Some(PathBuf::from(folder).join("conformance/mlc_router_exchanges.jsonl")),
        None => {
            assert!(std::env::var_os("MICROSERVING_FULL").is_none(), "MICROSERVING_FIXTURES is not set");
            eprintln!(
                "SKIPPED: MICROSERVING_FIXTURES is not set, so there are no recorded exchanges to compare with"
            );
            None
        }
    }
}

/// Answers each request as the recorded row did, and keeps what came.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<(Option<Value>, Option<Value>)>>);

async fn answer(State(recorder): State<Recorder>, body: Bytes) -> Response {
    let mut inner = recorder.0.lock().expect("not poisoned");
    inner.1 = Some(serde_json::from_slice(&body).expect("JSON"));
    let row = inner.0.clone().expect("a row");
    let content_type = row["content_type"].as_str().expect("a type").to_owned();
    let body = row["response"].as_str().expect("a body").to_owned();
    ([(header::CONTENT_TYPE, content_type)], Body::from(body)).into_response()
}

/// Fields that are null inside the objects of a request say nothing.
fn settled(mut body: Value) -> Value {
    if let Some(format) = body["response_format"].as_object_mut() {
        format.retain(|_, value| !value.is_null());
    }
    body
}

/// Reads a stream. Where the recorded Router went away before its end, breaking off is how it ends here.
async fn texts(chunks: ChunkStream, row: &Value) -> String {
    let mut items: Vec<_> = chunks.collect().await;
    let stream = row["content_type"].as_str().is_some_and(|kind| kind.starts_with("text/event-stream"));
    if stream && !row["response"].as_str().is_some_and(|text| text.contains("[DONE]")) {
        let last = items.pop();
        assert!(matches!(last, Some(Err(ClientError::Lost { .. }))), "{last:?}");
    }
    let chunks = items.into_iter().map(|item| item.expect("a chunk"));
    chunks.flat_map(|chunk| chunk.choices).map(|choice| choice.text).collect()
}

#[tokio::test]
async fn the_same_requests_are_sent_and_the_answers_read() {
    let Some(path) = fixtures() else { return };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let recorder = Recorder::default();
    let app = Router::new().fallback(answer).with_state(recorder.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = format!("mlc+http://{}", listener.local_addr().expect("bound"));
    let server = tokio::spawn(async move { axum::serve(listener, app).await.expect("serves until aborted") });
    let address: EngineAddress = address.parse().expect("an address");
    let engine = address.connect().expect("an address");
    let cx = CallContext::default();
    let mut seen = std::collections::BTreeMap::new();
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).expect("a row");
        recorder.0.lock().expect("not poisoned").0 = Some(row.clone());
        let body = row["request"].to_string();
        let answer: Result<String, ClientError> = match row["path"].as_str().expect("a path") {
            "/microserving/prep_recv" => {
                let request = PrepRecvRequest::from_json(body.as_bytes()).expect("ours too");
                engine.prep_recv(&cx, &request).await.map(|answer| answer.kv_addr_info)
            }
            "/microserving/remote_send" => {
                let request = RemoteSendRequest::from_json(body.as_bytes()).expect("ours too");
                engine.remote_send(&cx, &request).await.map(|answer| answer.sent_tokens.to_string())
            }
            "/microserving/start_generate" => {
                let request = StartGenerateRequest::from_json(body.as_bytes()).expect("ours too");
                let chunks = engine.start_generate(&cx, &request).await.expect("begins");
                Ok(texts(chunks, &row).await)
            }
            path => {
                assert_eq!(path, "/v1/completions");
                let completion = CompletionRequest::from_json(body.as_bytes()).expect("ours too");
                let call = CallOptions {
                    seq_id: completion.user.as_deref().map(Into::into),
                    ..CallOptions::default()
                };
                let request = StartGenerateRequest {
                    completion,
                    call,
                    begin: 0,
                    generated_from: None,
                    choice_index: None,
                    resume_from: None,
                };
                let chunks = engine.generate(&cx, &request, None).await.expect("begins");
                Ok(texts(chunks, &row).await)
            }
        };
        let case = format!("{} {} {}", row["flow"], row["seq"], row["path"]);
        let answer = answer.unwrap_or_else(|error| panic!("{case}: {error}"));
        let sent = recorder.0.lock().expect("not poisoned").1.take().expect("a request");
        assert_eq!(settled(sent), settled(row["request"].clone()), "{case}");
        match row["path"].as_str().expect("a path") {
            "/microserving/prep_recv" => {
                assert!(row["response"].as_str().expect("text").contains(&answer), "{case}");
            }
            "/microserving/remote_send" => assert_ne!(answer, "0", "{case}"),
            _ => assert!(!answer.is_empty(), "{case}"),
        }
        *seen.entry(row["path"].as_str().expect("a path").to_owned()).or_insert(0) += 1;
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
    server.abort();
}
