//! `POST /microserving/start_generate`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use microserving_protocol::{ApiError, RELAY_HEADER, StartGenerateRequest, normalise_begin};

use super::key_of;
use crate::answer::Answer;
use crate::app::App;
use crate::body::WholeBody;
use crate::deliver::{Delivery, Marks, deliver};
use crate::errors::Failure;
use crate::generate::{Generation, generate, parameters, wants_stats};
use crate::prompt;
use crate::tracking::Arrival;

/// Prefills `prompt[begin..]` and decodes.
pub(crate) async fn start_generate(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
    body: WholeBody,
) -> Result<Response, Failure> {
    let request = body.parse(StartGenerateRequest::from_json).await?;
    let (marks, chat) = marks(&headers)?;
    let (answer, delivery) = serve(&app, request, arrival, wants_stats(&headers), marks).await?;
    Ok(deliver(answer, Delivery { chat, ..delivery }).await?)
}

/// Returns what a router that passes the answer on wants marked, and whether it is to be written as a chat.
fn marks(headers: &HeaderMap) -> Result<(Marks, bool), ApiError> {
    let Some(value) = headers.get(RELAY_HEADER) else { return Ok((Marks::Nothing, false)) };
    match value.as_bytes() {
        b"completion" => Ok((Marks::Tokens, false)),
        b"chat" => Ok((Marks::Tokens, true)),
        _ => {
            let message = format!("{RELAY_HEADER} is {value:?}, must be completion or chat on this call");
            Err(ApiError::bad_request(RELAY_HEADER, message))
        }
    }
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(
    app: &Arc<App>,
    request: StartGenerateRequest,
    arrival: Arrival,
    stats: bool,
    marks: Marks,
) -> Result<(Answer, Delivery), ApiError> {
    let params = parameters(app, &request.completion, request.call.seq_id.as_ref())?;
    let key = key_of(&request.call)?;
    let prompt_text = prompt::text_of(&request.completion.prompt);
    if prompt_text.is_some() && request.generated_from.is_some() {
        return Err(ApiError::bad_request(
            "generated_from",
            "generated_from counts tokens, so prompt must be a list of token ids",
        ));
    }
    let prompt = prompt::tokens(app, request.completion.prompt).await?;
    let begin = normalise_begin(request.begin, prompt.len())?;
    let len = prompt::len(&prompt)?;
    let generated_from = request.generated_from.unwrap_or(len);
    check_replay(request.resume_from, generated_from, len, params.n)?;
    let id = match &key {
        Some(key) => key.seq_id.to_string(),
        None => format!("cmpl-{}", crate::random::hex_id()),
    };
    let delivery =
        Delivery { stream: params.stream, include_usage: params.include_usage, chat: false, marks };
    let generation = Generation {
        id,
        key,
        prompt,
        prompt_text,
        begin,
        generated_from,
        first_choice: request.choice_index.unwrap_or(0),
        resume_from: request.resume_from,
        timeout: request.call.timeout,
        stats,
        marks,
    };
    Ok((generate(app, generation, params, arrival).await?, delivery))
}

/// Replayed output belongs to one choice, and a stream that is attached to has its own replay.
fn check_replay(resume_from: Option<u32>, generated_from: u32, len: u32, n: u32) -> Result<(), ApiError> {
    if generated_from == len {
        return Ok(());
    }
    if n != 1 {
        let message = format!(
            "n is {n}, must be 1 when generated_from marks output of an earlier attempt; choice_index says of which choice"
        );
        return Err(ApiError::bad_request("n", message));
    }
    if resume_from.is_some() {
        return Err(ApiError::bad_request(
            "resume_from",
            "resume_from and generated_from exclude each other",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_are_of_one_choice() {
        assert!(check_replay(Some(3), 10, 10, 4).is_ok());
        assert!(check_replay(None, 8, 10, 1).is_ok());
        assert_eq!(check_replay(None, 8, 10, 2).unwrap_err().param.as_deref(), Some("n"));
        assert_eq!(check_replay(Some(1), 8, 10, 1).unwrap_err().param.as_deref(), Some("resume_from"));
    }
}
