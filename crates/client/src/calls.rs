//! An engine, as its callers see it.

use std::fmt;
use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CommitRequest, CommitResponse, CompletionRequest,
    CompletionResponse, KvEvent, ModelList, PauseRequest, PauseResponse, PrepRecvRequest, PrepRecvResponse,
    RemoteSendRequest, RemoteSendResponse, StartGenerateRequest, StateView,
};

use crate::{CallContext, ClientError, Door, EngineKind, Relayed, Written};

/// The chunks of a completion. Ends after the last chunk, or with one error; dropping it cancels the generation.
pub type ChunkStream = Pin<Box<dyn Stream<Item = Result<CompletionResponse, ClientError>> + Send>>;

/// The changes of an engine's context cache. Ends with an error when the engine drains or is gone; dropping it ends the following.
pub type KvEventStream = Pin<Box<dyn Stream<Item = Result<KvEvent, ClientError>> + Send>>;

/// The calls of one engine.
///
/// Every call ends by the context's deadline, with [`ClientError::Timeout`] at the latest. Cancel safety: a dropped future may leave
/// its effect at the engine (a reservation, a job); [`EngineCalls::abort`] undoes it, and so does the end of the lease.
#[async_trait]
pub trait EngineCalls: Send + Sync + fmt::Debug {
    /// Returns the engine's name for logs and metrics: where it is reached.
    fn name(&self) -> &str;

    /// Returns what kind of server it is. Changes nothing.
    fn kind(&self) -> EngineKind {
        EngineKind::Microserving
    }

    /// Says whether its operator vouches that it may answer beside engines of other kinds that serve its model's name.
    fn vouched(&self) -> bool {
        false
    }

    /// Returns the wire that its calls take now, for logs and operators.
    fn wire(&self) -> &'static str {
        "rest"
    }

    /// Matches a prompt in the engine's context cache and reserves pages for the rest. Changes state: a leased reservation.
    async fn prep_recv(
        &self,
        cx: &CallContext,
        request: &PrepRecvRequest,
    ) -> Result<PrepRecvResponse, ClientError>;

    /// Computes KV and delivers it to an address; returns when the receiver can read all of it.
    async fn remote_send(
        &self,
        cx: &CallContext,
        request: &RemoteSendRequest,
    ) -> Result<RemoteSendResponse, ClientError>;

    /// Generates from what was received, or from the prompt alone.
    async fn start_generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
    ) -> Result<ChunkStream, ClientError>;

    /// Generates from a prompt for which nothing was prepared here: data parallel.
    ///
    /// `written` is the request as its client wrote it, for engines that take no token ids; `request` may have an empty prompt beside
    /// it.
    async fn generate(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        written: Option<&Written>,
    ) -> Result<ChunkStream, ClientError> {
        let _ = written;
        self.start_generate(cx, request).await
    }

    /// As [`EngineCalls::start_generate`], with the answer as clients of `door` read it, to be passed on unread; nothing if the engine
    /// turns out not to mark it, which is over then. Only for engines whose state says `marks`.
    async fn start_relayed(
        &self,
        cx: &CallContext,
        request: &StartGenerateRequest,
        door: Door,
    ) -> Result<Option<Relayed>, ClientError> {
        let _ = (cx, request, door);
        Ok(None)
    }

    /// Gives a sequence up. Idempotent.
    async fn abort(&self, cx: &CallContext, request: &AbortRequest) -> Result<AbortResponse, ClientError>;

    /// Keeps received KV in the context cache without generating.
    async fn commit(&self, cx: &CallContext, request: &CommitRequest) -> Result<CommitResponse, ClientError>;

    /// Stops decoding and answers the tokens so far; the sequence keeps its pages until it is aborted. Changes state.
    ///
    /// An engine that cannot be stopped says so, with 501.
    async fn pause(&self, cx: &CallContext, request: &PauseRequest) -> Result<PauseResponse, ClientError> {
        let _ = (cx, request);
        let error = ApiError::new(501, "this engine cannot pause a sequence");
        Err(ClientError::Refused { engine: self.name().to_owned(), error: Box::new(error) })
    }

    /// Generates by the engine's own OpenAI door, `POST /v1/completions`.
    async fn completions(
        &self,
        cx: &CallContext,
        request: &CompletionRequest,
    ) -> Result<ChunkStream, ClientError>;

    /// Returns the models that the engine serves. Changes nothing.
    async fn models(&self, cx: &CallContext) -> Result<ModelList, ClientError>;

    /// Returns the engine's load. Changes nothing.
    async fn state(&self, cx: &CallContext) -> Result<StateView, ClientError>;

    /// Says whether the engine takes requests now. Changes nothing.
    async fn ready(&self, cx: &CallContext) -> Result<(), ClientError>;

    /// Returns the engine's profile in the cost crate's form; none if it was not calibrated. Changes nothing.
    async fn profile(&self, _cx: &CallContext) -> Result<Option<serde_json::Value>, ClientError> {
        Ok(None)
    }

    /// Returns the engine's tokenizer and chat template, in the text crate's form. Changes nothing.
    async fn tokenizer(&self, cx: &CallContext) -> Result<serde_json::Value, ClientError>;

    /// Follows the changes of the engine's context cache from number `from` on. Changes nothing.
    ///
    /// A snapshot comes first if `from` is 0 or some of the changes asked for are gone. By default an engine has no such events, and says
    /// so by 404.
    async fn kv_events(&self, cx: &CallContext, from: u64) -> Result<KvEventStream, ClientError> {
        let _ = (cx, from);
        let error = ApiError::new(404, format!("{} does not tell what its context cache holds", self.name()));
        Err(ClientError::Refused { engine: self.name().to_owned(), error: Box::new(error) })
    }

    /// Says whether [`EngineCalls::relay`] is worth trying; the same of one client for ever, as its kind is. Changes nothing.
    fn may_relay(&self) -> bool {
        false
    }

    /// Passes a client's body to the engine's door of the same name, and returns the answer as the engine wrote it for the client;
    /// nothing if the engine turns out not to know of relaying. The parts of `body` follow each other.
    async fn relay(
        &self,
        cx: &CallContext,
        door: Door,
        body: &[Bytes],
    ) -> Result<Option<Relayed>, ClientError> {
        let _ = (cx, door, body);
        Ok(None)
    }
}
