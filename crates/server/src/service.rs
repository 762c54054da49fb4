//! The calls of an engine for a wire other than HTTP and JSON.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use microserving_engine::EngineHandle;
use microserving_protocol::{
    AbortRequest, AbortResponse, ApiError, CommitRequest, CommitResponse, PauseRequest, PauseResponse,
    PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, RemoteSendResponse, StartGenerateRequest,
    StateView,
};

use crate::app::App;
use crate::calls::kv_events::KvEvents;
use crate::calls::{abort, commit, pause, prep_recv, remote_send, start_generate, state};
use crate::chunks::Chunks;
use crate::deliver::Marks;
use crate::tracking::Arrival;
use crate::{ModelText, ServerConfig, body, routes};

/// An engine's calls as REST serves them: checked, answered and counted alike, whatever wire a request came over. Cheap to clone.
///
/// Dropping the future of a call has the same effect as closing the connection that it came over.
#[derive(Clone, Debug)]
pub struct EngineService {
    app: Arc<App>,
}

impl EngineService {
    /// Serves `engine`.
    #[must_use]
    pub fn new(engine: EngineHandle, text: ModelText, config: ServerConfig) -> Self {
        Self { app: App::new(engine, text, config) }
    }

    /// Returns the HTTP surface with `beside` added to it: those routes get an [`Arrival`] too, and are counted.
    pub fn router(&self, beside: Router) -> Router {
        routes::router(Arc::clone(&self.app), beside)
    }

    /// Reads a body to its end, within the bounds that hold for all of them.
    ///
    /// # Errors
    /// 413 if it is too long, 408 if it takes too long.
    pub async fn read_body(&self, body: Body) -> Result<Bytes, ApiError> {
        body::read(&self.app, body).await
    }

    /// Serves `prep_recv`.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn prep_recv(&self, request: PrepRecvRequest) -> Result<PrepRecvResponse, ApiError> {
        prep_recv::serve(&self.app, request).await
    }

    /// Serves `remote_send`.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn remote_send(
        &self,
        request: RemoteSendRequest,
        arrival: &Arrival,
    ) -> Result<RemoteSendResponse, ApiError> {
        remote_send::serve(&self.app, request, arrival).await
    }

    /// Serves `start_generate`, chunk by chunk or as one chunk that holds all. `stats` asks for the phase statistics.
    ///
    /// # Errors
    /// What REST answers before the first token.
    pub async fn start_generate(
        &self,
        request: StartGenerateRequest,
        arrival: Arrival,
        stats: bool,
    ) -> Result<Chunks, ApiError> {
        let (answer, delivery) =
            start_generate::serve(&self.app, request, arrival, stats, Marks::Nothing).await?;
        Chunks::begin(answer, delivery).await
    }

    /// Serves `abort`.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn abort(&self, request: AbortRequest) -> Result<AbortResponse, ApiError> {
        abort::serve(&self.app, request).await
    }

    /// Serves `commit`.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn commit(&self, request: CommitRequest) -> Result<CommitResponse, ApiError> {
        commit::serve(&self.app, request).await
    }

    /// Serves `pause`.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn pause(&self, request: PauseRequest) -> Result<PauseResponse, ApiError> {
        pause::serve(&self.app, request).await
    }

    /// Follows the changes of the context cache from number `from` on.
    #[must_use]
    pub fn kv_events(&self, from: u64) -> KvEvents {
        KvEvents::from(&self.app, from)
    }

    /// Shows the engine's load.
    ///
    /// # Errors
    /// What REST answers.
    pub async fn state(&self) -> Result<StateView, ApiError> {
        state::serve(&self.app).await
    }
}
