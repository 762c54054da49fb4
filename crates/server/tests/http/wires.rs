//! The same calls over gRPC: bodies of JSON become messages, and answers are shown as REST would have shown them.
//!
//! Nothing is checked on the way: what an engine must refuse reaches it.

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use microserving_grpc::wire::engine_client::EngineClient;
use microserving_grpc::{error_of, wire};
use microserving_protocol::{
    AbortResponse, CommitResponse, CompletionResponse, KvEvent, PauseResponse, PrepRecvResponse,
    RemoteSendResponse, SSE_DONE, StateView, addr_from_text, sse_event,
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tonic::{Response, Status, Streaming};

use crate::support::Answer;

/// How a test's calls reach their engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Rest,
    Grpc,
}

/// Runs each test over each wire.
macro_rules! over_both_wires {
    ($($test:ident),* $(,)?) => {
        over_both_wires!(rest Rest $($test)*);
        over_both_wires!(grpc Grpc $($test)*);
    };
    ($module:ident $wire:ident $($test:ident)*) => {
        mod $module {
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test(crate::wires::Wire::$wire).await;
                }
            )*
        }
    };
}

/// A client of the generated kind, on one connection.
#[derive(Clone)]
pub(crate) struct GrpcCaller(EngineClient<Client<HttpConnector, tonic::body::Body>>);

impl GrpcCaller {
    pub(crate) fn new(origin: &str) -> Self {
        // Small, so that a reader who does not read is noticed.
        let channel = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .http2_initial_stream_window_size(16 << 10)
            .http2_initial_connection_window_size(1 << 20)
            .build_http();
        let origin: Uri = origin.parse().unwrap();
        Self(EngineClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX))
    }

    /// Makes the call that `path` names; nothing if gRPC has no such call.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Option<Answer> {
        let mut engine = self.0.clone();
        let fields = Fields::of(body);
        Some(match path.strip_prefix("/microserving/")? {
            "prep_recv" => whole::<PrepRecvResponse, _>(engine.prep_recv(fields.prep_recv()).await),
            "remote_send" => match fields.remote_send() {
                Ok(message) => whole::<RemoteSendResponse, _>(engine.remote_send(message).await),
                Err(answer) => *answer,
            },
            "start_generate" => {
                let message = fields.start_generate();
                let stream = message.completion.as_ref().is_some_and(|completion| completion.stream);
                generated(engine.start_generate(message).await, stream).await
            }
            "abort" => whole::<AbortResponse, _>(engine.abort(fields.sequence()).await),
            "commit" => whole::<CommitResponse, _>(engine.commit(fields.sequence()).await),
            "pause" => whole::<PauseResponse, _>(engine.pause(fields.sequence()).await),
            _ => return None,
        })
    }

    /// Makes the call that `path` names; nothing if gRPC has no such call.
    pub(crate) async fn get(&self, path: &str) -> Option<Answer> {
        let mut engine = self.0.clone();
        match path {
            "/microserving/state" => Some(whole::<StateView, _>(engine.state(wire::StateRequest {}).await)),
            "/microserving/kv_events" => {
                let answer = engine.watch_kv_events(wire::WatchKvEventsRequest { from: 0 }).await;
                Some(streamed::<KvEvent, _>(answer).await)
            }
            _ => None,
        }
    }

    /// Begins a generation and leaves it alone, with everything that keeps it going.
    pub(crate) async fn open(
        &self,
        body: &Value,
    ) -> Result<Response<Streaming<wire::CompletionResponse>>, Status> {
        self.0.clone().start_generate(Fields::of(body).start_generate()).await
    }

    /// Returns the generated client.
    pub(crate) fn engine(&self) -> EngineClient<Client<HttpConnector, tonic::body::Body>> {
        self.0.clone()
    }

    /// Returns the first changes of the context cache.
    pub(crate) async fn first_events(&self, from: u64, count: usize) -> Vec<Value> {
        let answer = self.0.clone().watch_kv_events(wire::WatchKvEventsRequest { from }).await;
        let mut events = answer.unwrap().into_inner();
        let mut seen = Vec::new();
        while seen.len() < count {
            let event = KvEvent::try_from(events.message().await.unwrap().unwrap()).unwrap();
            seen.push(serde_json::to_value(event).unwrap());
        }
        seen
    }
}

/// A body, read field by field; what is left at the end could not be said over gRPC.
struct Fields(Map<String, Value>);

impl Fields {
    fn of(body: &Value) -> Self {
        let mut map = body.as_object().unwrap().clone();
        // Null is absent.
        map.retain(|_, value| !value.is_null());
        Self(map)
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    fn int<T: TryFrom<i64>>(&mut self, name: &str) -> Option<T> {
        let value = self.take(name)?;
        let number = value.as_i64().unwrap_or_else(|| panic!("{name} is {value}"));
        Some(T::try_from(number).unwrap_or_else(|_| panic!("{name} is {value}")))
    }

    fn float(&mut self, name: &str) -> Option<f32> {
        Some(self.take(name)?.as_f64().unwrap() as f32)
    }

    fn flag(&mut self, name: &str) -> bool {
        self.take(name).is_some_and(|value| value.as_bool().unwrap())
    }

    fn text(&mut self, name: &str) -> Option<String> {
        Some(self.take(name)?.as_str().unwrap().to_owned())
    }

    fn ids(value: &Value) -> Vec<u32> {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn call(&mut self) -> wire::CallOptions {
        let (seq_id, user) = (self.text("seq_id"), self.text("user"));
        wire::CallOptions {
            seq_id: seq_id.or(user),
            attempt: self.int("attempt"),
            timeout_seconds: self.take("timeout_seconds").map(|value| value.as_f64().unwrap()),
        }
    }

    fn completion(mut self) -> wire::CompletionRequest {
        let debug = self.take("debug_config").unwrap_or_default();
        let prompt = self.take("prompt").map(|prompt| match prompt {
            Value::String(text) => wire::completion_request::Prompt::Text(text),
            list => wire::completion_request::Prompt::Tokens(wire::TokenIds { ids: Self::ids(&list) }),
        });
        let format = self.take("response_format").map(|format| wire::ResponseFormat {
            r#type: format["type"].as_str().unwrap().to_owned(),
            json_schema: format.get("json_schema").filter(|schema| !schema.is_null()).map(|schema| {
                wire::JsonSchema { name: "schema".into(), schema: schema["schema"].to_string() }
            }),
        });
        let options = self.take("stream_options").map(|options| wire::StreamOptions {
            include_usage: options["include_usage"] == true,
            continuous_usage_stats: options["continuous_usage_stats"] == true,
        });
        let bias = self.take("logit_bias").map(|bias| serde_json::from_value(bias).unwrap());
        let stop = self.take("stop").map(|stop| match stop {
            Value::String(text) => vec![text],
            list => serde_json::from_value(list).unwrap(),
        });
        let message = wire::CompletionRequest {
            model: self.text("model"),
            prompt,
            echo: self.flag("echo"),
            temperature: self.float("temperature"),
            top_p: self.float("top_p"),
            top_k: self.int("top_k"),
            min_p: self.float("min_p"),
            repetition_penalty: self.float("repetition_penalty"),
            frequency_penalty: self.float("frequency_penalty"),
            presence_penalty: self.float("presence_penalty"),
            logit_bias: bias.unwrap_or_default(),
            seed: self.int("seed"),
            logprobs: self.int("logprobs"),
            max_tokens: self.int("max_tokens"),
            min_tokens: self.int("min_tokens"),
            n: self.int("n"),
            stop: stop.unwrap_or_default(),
            stop_token_ids: self.take("stop_token_ids").map(|ids| Self::ids(&ids)).unwrap_or_default(),
            ignore_eos: self.flag("ignore_eos") || debug["ignore_eos"] == true,
            stream: self.flag("stream"),
            stream_options: options,
            user: None,
            response_format: format,
            cache_salt: self.text("cache_salt"),
            priority: self.int("priority"),
            return_token_ids: self.flag("return_token_ids"),
        };
        // One candidate for each choice is what there is without the word.
        if self.0.get("best_of").is_some_and(|best_of| *best_of == 1) {
            self.take("best_of");
        }
        assert_eq!(self.0, Map::new(), "this cannot be said over gRPC");
        message
    }

    fn prep_recv(mut self) -> wire::PrepRecvRequest {
        wire::PrepRecvRequest {
            call: Some(self.call()),
            end: self.int("end").unwrap(),
            commit: self.flag("commit"),
            reserve_tokens: self.int("reserve_tokens").unwrap_or(0),
            completion: Some(self.completion()),
        }
    }

    /// An address that is not base64 is refused on this side, as the client does.
    fn remote_send(mut self) -> Result<wire::RemoteSendRequest, Box<Answer>> {
        let address = self.text("kv_addr_info").unwrap();
        let kv_addr_info = addr_from_text(&address).map_err(|error| {
            let error = json!({"error": {
                "message": error.to_string(), "type": "invalid_request_error", "param": "kv_addr_info", "code": "bad_address",
            }});
            Box::new(shown(400, error.to_string()))
        })?;
        Ok(wire::RemoteSendRequest {
            call: Some(self.call()),
            begin: self.int("begin").unwrap(),
            end: self.int("end").unwrap(),
            kv_addr_info,
            recv_rank: self.int("recv_rank").unwrap(),
            completion: Some(self.completion()),
        })
    }

    fn start_generate(mut self) -> wire::StartGenerateRequest {
        wire::StartGenerateRequest {
            call: Some(self.call()),
            begin: self.int("begin").unwrap(),
            generated_from: self.int("generated_from"),
            resume_from: self.int("resume_from"),
            choice_index: None,
            completion: Some(self.completion()),
        }
    }

    fn sequence(mut self) -> wire::SequenceRequest {
        let wire::CallOptions { seq_id, attempt, .. } = self.call();
        wire::SequenceRequest { seq_id: seq_id.unwrap(), attempt }
    }
}

fn shown(status: u16, body: String) -> Answer {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Answer { status, headers, body }
}

/// Shows an error as REST would, from nothing but what its trailer says.
fn refused(status: &Status) -> Answer {
    let error = error_of(status).unwrap_or_else(|| panic!("an error without its trailer: {status:?}"));
    let mut answer = shown(error.status, error.to_json());
    if let Some(seconds) = error.retry_after_seconds() {
        answer.headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    answer
}

fn whole<T: From<M> + Serialize, M>(answer: Result<Response<M>, Status>) -> Answer {
    match answer {
        Ok(answer) => shown(200, serde_json::to_string(&T::from(answer.into_inner())).unwrap()),
        Err(status) => refused(&status),
    }
}

async fn generated(
    answer: Result<Response<Streaming<wire::CompletionResponse>>, Status>,
    stream: bool,
) -> Answer {
    if stream {
        return streamed::<CompletionResponse, _>(answer).await;
    }
    let mut messages = match answer {
        Ok(answer) => answer.into_inner(),
        Err(status) => return refused(&status),
    };
    let message = match messages.message().await {
        Ok(message) => message.expect("an answer in one piece"),
        Err(status) => return refused(&status),
    };
    assert_eq!(messages.message().await.unwrap(), None, "one piece");
    let answer = CompletionResponse::try_from(message).unwrap();
    shown(200, serde_json::to_string(&answer).unwrap())
}

/// Shows a stream as server-sent events: `[DONE]` stands for an end without an error.
async fn streamed<T, M>(answer: Result<Response<Streaming<M>>, Status>) -> Answer
where
    T: TryFrom<M, Error: std::fmt::Debug> + Serialize,
{
    let mut messages = match answer {
        Ok(answer) => answer.into_inner(),
        Err(status) => return refused(&status),
    };
    let mut body = String::new();
    loop {
        match messages.message().await {
            Ok(Some(message)) => body.push_str(&sse_event(&T::try_from(message).unwrap())),
            Ok(None) => {
                body.push_str(SSE_DONE);
                break;
            }
            Err(status) => {
                let error = error_of(&status).unwrap_or_else(|| panic!("cut off: {status:?}"));
                body.push_str(&sse_event(&error.to_event()));
                break;
            }
        }
    }
    let mut answer = shown(200, body);
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    answer.headers.insert(CONTENT_TYPE, kind);
    answer
}
