//! Models, tokenizing, health and metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use microserving_client::CallContext;
use microserving_protocol::{
    ApiError, DetokenizeRequest, DetokenizeResponse, ModelCard, ModelList, TokenizeInput, TokenizeRequest,
    TokenizeResponse,
};
use serde_json::json;

use super::headers;
use super::respond::{Failure, WholeBody};
use crate::RouterService;
use crate::prompt::{self, Codec};

/// How long fetching a tokenizer may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn models(State(service): State<Arc<RouterService>>) -> Json<ModelList> {
    Json(ModelList::new(service.cluster().models()))
}

pub(crate) async fn model(
    State(service): State<Arc<RouterService>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, Failure> {
    let Path(name) = name.map_err(|rejection| ApiError::bad_request("model", rejection.body_text()))?;
    Ok(Json(service.model(Some(&name))?))
}

pub(crate) async fn tokenize(
    State(service): State<Arc<RouterService>>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Json<TokenizeResponse>, Failure> {
    let request = TokenizeRequest::from_json(&body)?;
    let (model, codec) = codec(&service, &headers, request.model.as_deref()).await?;
    let tokens = match request.input {
        TokenizeInput::Text(text) => prompt::encode(codec, &model, text, request.add_special_tokens).await?,
        TokenizeInput::Chat(messages) => prompt::encode_chat(codec, &model, messages).await?,
    };
    Ok(Json(TokenizeResponse { count: tokens.len(), tokens, max_model_len: model.max_model_len }))
}

pub(crate) async fn detokenize(
    State(service): State<Arc<RouterService>>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Json<DetokenizeResponse>, Failure> {
    let request = DetokenizeRequest::from_json(&body)?;
    let (_, codec) = codec(&service, &headers, request.model.as_deref()).await?;
    Ok(Json(DetokenizeResponse { prompt: prompt::decode(codec, request.tokens).await? }))
}

async fn codec(
    service: &RouterService,
    headers: &HeaderMap,
    model: Option<&str>,
) -> Result<(ModelCard, Codec), Failure> {
    let model = service.model(model)?;
    let cx = CallContext {
        traceparent: headers::traceparent(headers).map(Into::into),
        ..CallContext::within(PATIENCE)
    };
    let codec = service.codecs.get(service.cluster(), &cx, &model.id).await?;
    Ok((model, codec))
}

pub(crate) async fn live() -> Json<serde_json::Value> {
    Json(json!({"status": "live"}))
}

/// Ready when some engine is, and the router is not about to end.
pub(crate) async fn ready(State(service): State<Arc<RouterService>>) -> Response {
    if service.is_draining() {
        let error =
            ApiError::unavailable("the router is draining", Duration::from_secs(1)).with_code("draining");
        return Failure(error).into_response();
    }
    let engines = service.cluster().engines();
    let ready = service.cluster().num_ready();
    if ready == 0 {
        let error =
            ApiError::unavailable("no engine is ready", Duration::from_secs(1)).with_code("no_engine");
        return Failure(error).into_response();
    }
    Json(json!({"status": "ready", "engines": engines.len(), "engines_ready": ready})).into_response()
}

pub(crate) async fn metrics(State(service): State<Arc<RouterService>>) -> Response {
    service.metrics().set_waiting(service.num_waiting().into_iter());
    let text = service.metrics().render(service.cluster(), service.index());
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text).into_response()
}
