//! The routes: bodies are read whole within REST's bounds, then served; answers are counted by the status that REST would have had.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use microserving_grpc::wire::engine_server::EngineServer;
use microserving_grpc::{ERROR_TRAILER, error_of, to_status};
use microserving_protocol::ApiError;
use microserving_server::{CountedStatus, EngineService};
use tonic::{Code, Status};
use tower::Service;

use crate::calls::Calls;

/// Every method of the service; what is not here is answered 404, which gRPC reads as "not implemented".
const METHODS: [&str; 8] = [
    "/microserving.v1.Engine/PrepRecv",
    "/microserving.v1.Engine/RemoteSend",
    "/microserving.v1.Engine/StartGenerate",
    "/microserving.v1.Engine/Abort",
    "/microserving.v1.Engine/Commit",
    "/microserving.v1.Engine/Pause",
    "/microserving.v1.Engine/WatchKvEvents",
    "/microserving.v1.Engine/State",
];

#[derive(Clone)]
struct Door {
    service: EngineService,
    calls: EngineServer<Calls>,
}

/// Returns the gRPC routes of an engine, to be handed to [`EngineService::router`].
pub fn routes(service: &EngineService) -> Router {
    // Messages are bounded as bodies are, before they are read as messages.
    let calls = EngineServer::new(Calls::new(service.clone())).max_decoding_message_size(usize::MAX);
    let door = Door { service: service.clone(), calls };
    let mut router = Router::new();
    for method in METHODS {
        router = router.route(method, post(enter));
    }
    router.with_state(door)
}

async fn enter(State(mut door): State<Door>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = match door.service.read_body(body).await {
        Ok(body) => body,
        Err(error) => return refuse(&error),
    };
    let response = match door.calls.call(Request::from_parts(head, Body::from(body))).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let Some(status) = Status::from_header_map(response.headers()).filter(|status| status.code() != Code::Ok)
    else {
        return response.map(Body::new);
    };
    match error_of(&status) {
        Some(error) => counted(response.map(Body::new), &error),
        // A compression that we do not know is for the client to leave out; gRPC has its own words for that.
        None if status.code() == Code::Unimplemented => response.map(Body::new),
        // What the calls did not make is about the message itself.
        None => refuse(&ApiError::unprocessable(format!("the message cannot be read: {}", status.message()))),
    }
}

fn refuse(error: &ApiError) -> Response {
    counted(to_status(error).into_http(), error)
}

fn counted(mut response: Response, error: &ApiError) -> Response {
    debug_assert!(response.headers().contains_key(ERROR_TRAILER), "an error is carried whole");
    response.extensions_mut().insert(CountedStatus(error.status));
    response
}
