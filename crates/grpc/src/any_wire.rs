//! gRPC where an engine offers it, REST elsewhere.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use microserving_client::{
    BadUrl, CallContext, ChunkStream, ClientError, Door, EngineCalls, HttpEngineClient, KvEventStream,
    Relayed,
};
use microserving_protocol::{
    AbortRequest, AbortResponse, CommitRequest, CommitResponse, CompletionRequest, ModelList, PauseRequest,
    PauseResponse, PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, RemoteSendResponse,
    StartGenerateRequest, StateView,
};
use tracing::info;

use crate::GrpcEngineClient;

/// Which wire a client takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WirePolicy {
    /// gRPC as long as the engine offers it, else REST.
    #[default]
    Auto,
    /// gRPC only.
    Grpc,
    /// REST only.
    Rest,
}

impl fmt::Display for WirePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Grpc => "grpc",
            Self::Rest => "rest",
        })
    }
}

impl FromStr for WirePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "grpc" => Ok(Self::Grpc),
            "rest" => Ok(Self::Rest),
            _ => Err(format!("{text:?} is no wire, must be auto, grpc or rest")),
        }
    }
}

/// An engine by whatever wire it offers and the policy allows. Cheap to clone; clones share what they learn.
///
/// The state of an engine says whether it takes gRPC; until it was asked, and after a connection failed, calls go over REST. So an
/// engine may come back without gRPC, or with it, and nobody needs to be told.
#[derive(Clone, Debug)]
pub struct AnyWireClient {
    policy: WirePolicy,
    /// The engine said last that it takes gRPC.
    offered: Arc<AtomicBool>,
    rest: HttpEngineClient,
    grpc: GrpcEngineClient,
}

impl AnyWireClient {
    /// Makes a client of the engine at `url`. Connects on the first call.
    ///
    /// # Errors
    /// If `url` is not `http://host:port`, possibly with a path that goes before those of the calls.
    pub fn new(url: &str, policy: WirePolicy) -> Result<Self, BadUrl> {
        Ok(Self {
            policy,
            offered: Arc::default(),
            rest: HttpEngineClient::new(url)?,
            grpc: GrpcEngineClient::new(url)?,
        })
    }

    fn takes_grpc(&self) -> bool {
        match self.policy {
            WirePolicy::Auto => self.offered.load(Ordering::Acquire),
            WirePolicy::Grpc => true,
            WirePolicy::Rest => false,
        }
    }

    fn learn(&self, offered: bool) {
        if self.policy == WirePolicy::Auto && self.offered.swap(offered, Ordering::AcqRel) != offered {
            let wire = if offered { "grpc" } else { "rest" };
            info!(engine = self.name(), wire, "calls of the engine take another wire");
        }
    }

    /// Makes a call over the wire in use, and again over REST if the engine says that it does not know gRPC: nothing has happened then.
    async fn call<T, G, R>(
        &self,
        over_grpc: impl FnOnce() -> G + Send,
        over_rest: impl FnOnce() -> R + Send,
    ) -> Result<T, ClientError>
    where
        G: Future<Output = Result<T, ClientError>> + Send,
        R: Future<Output = Result<T, ClientError>> + Send,
    {
        if !self.takes_grpc() {
            return over_rest().await;
        }
        let outcome = over_grpc().await;
        let Err(error) = &outcome else { return outcome };
        match error {
            ClientError::Refused { error, .. } if error.status == 501 && self.policy == WirePolicy::Auto => {
                self.learn(false);
                over_rest().await
            }
            // Perhaps its successor does without; its state will tell.
            error if error.means_down() => {
                self.learn(false);
                outcome
            }
            _ => outcome,
        }
    }
}

#[async_trait]
impl EngineCalls for AnyWireClient {
    fn name(&self) -> &str {
        self.rest.name()
    }

    fn wire(&self) -> &'static str {
        if self.takes_grpc() { "grpc" } else { "rest" }
    }

    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError> {
        self.call(|| self.grpc.prep_recv(cx, request), || self.rest.prep_recv(cx, request)).await
    }

    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError> {
        self.call(|| self.grpc.remote_send(cx, request), || self.rest.remote_send(cx, request)).await
    }

    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.call(|| self.grpc.start_generate(cx, request), || self.rest.start_generate(cx, request)).await
    }

    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError> {
        self.call(|| self.grpc.abort(cx, request), || self.rest.abort(cx, request)).await
    }

    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError> {
        self.call(|| self.grpc.commit(cx, request), || self.rest.commit(cx, request)).await
    }

    async fn pause(&self, cx: &CallContext, request: &PauseRequest) -> Result<PauseResponse, ClientError> {
        self.call(|| self.grpc.pause(cx, request), || self.rest.pause(cx, request)).await
    }

    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError> {
        self.rest.completions(cx, request).await
    }

    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError> {
        self.rest.models(cx).await
    }

    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError> {
        if self.policy == WirePolicy::Grpc {
            return self.grpc.state(cx).await;
        }
        let state = self.rest.state(cx).await?;
        self.learn(state.grpc);
        Ok(state)
    }

    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError> {
        self.rest.ready(cx).await
    }

    async fn profile(&self, cx: &CallContext) -> Result<Option<serde_json::Value>, ClientError> {
        self.rest.profile(cx).await
    }

    async fn tokenizer(&self, cx: &CallContext) -> Result<serde_json::Value, ClientError> {
        self.rest.tokenizer(cx).await
    }

    async fn kv_events(&self, cx: &CallContext, from: u64) -> Result<KvEventStream, ClientError> {
        self.call(|| self.grpc.kv_events(cx, from), || self.rest.kv_events(cx, from)).await
    }

    fn may_relay(&self) -> bool {
        // The doors for clients speak REST.
        self.policy != WirePolicy::Grpc
    }

    async fn start_relayed(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        self.rest.start_relayed(cx, request, door).await
    }

    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        self.rest.relay(cx, door, body).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_names() {
        for policy in [WirePolicy::Auto, WirePolicy::Grpc, WirePolicy::Rest] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("http".parse::<WirePolicy>().unwrap_err().contains("http"));
    }
}
