//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use microserving_protocol::{CallOptions, CompletionRequest, Fields};

use crate::app::App;
use crate::body::WholeBody;
use crate::deliver::{Delivery, deliver};
use crate::errors::Failure;
use crate::generate::{Generation, generate, marks, parameters, wants_stats};
use crate::prompt;
use crate::tracking::Arrival;

/// Continues a prompt.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    body: WholeBody,
) -> Result<Response, Failure> {
    let read = |body: &[u8]| {
        let mut fields = Fields::parse(body)?;
        let request = CompletionRequest::from_fields(&mut fields)?;
        Ok((request, CallOptions::timeout_from_fields(&mut fields)?))
    };
    let (request, timeout) = body.parse(read).await?;
    let params = parameters(&app, &request, None)?;
    let prompt_text = prompt::text_of(&request.prompt);
    let prompt = prompt::tokens(&app, request.prompt).await?;
    let generated_from = prompt::len(&prompt)?;
    let marks = marks(&headers);
    let delivery =
        Delivery { stream: params.stream, include_usage: params.include_usage, chat: false, marks };
    let generation = Generation {
        id: format!("cmpl-{}", crate::random::hex_id()),
        key: None,
        prompt,
        prompt_text,
        begin: 0,
        generated_from,
        first_choice: 0,
        resume_from: None,
        timeout,
        stats: wants_stats(&headers),
        marks,
    };
    let answer = generate(&app, generation, params, arrival).await?;
    Ok(deliver(answer, delivery).await?)
}
