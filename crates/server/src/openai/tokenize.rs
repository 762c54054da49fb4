//! `POST /tokenize`, `POST /detokenize`, `GET /microserving/tokenizer`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, HeaderValue};
use microserving_protocol::{
    DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse,
};
use microserving_text::Specials;

use crate::app::App;
use crate::body::{WholeBody, blocking};
use crate::errors::Failure;
use crate::generate::check_model;
use crate::prompt;

/// Turns text, or messages through the chat template, into tokens.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<TokenizeResponse>, Failure> {
    let request = body.parse(TokenizeRequest::from_json).await?;
    check_model(&app, request.model.as_deref())?;
    let tokens = match request.input {
        TokenizeInput::Text(text) => prompt::encode(&app, text, request.add_special_tokens).await?,
        TokenizeInput::Chat(messages) => prompt::chat_tokens(&app, messages).await?.to_vec(),
    };
    let max_model_len = Some(app.engine.info().executor.max_context);
    Ok(Json(TokenizeResponse { count: tokens.len(), tokens, max_model_len }))
}

/// Turns tokens into text.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    body: WholeBody,
) -> Result<Json<DetokenizeResponse>, Failure> {
    let request = body.parse(DetokenizeRequest::from_json).await?;
    check_model(&app, request.model.as_deref())?;
    let text = app.text.clone();
    let prompt = blocking(move || text.decode(&request.tokens, Specials::Show)).await?;
    Ok(Json(DetokenizeResponse { prompt }))
}

/// Hands out vocabulary and chat template, so that a router tokenises exactly as this engine does.
pub(crate) async fn tokenizer(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], app.text.bundle()).into_response()
}
