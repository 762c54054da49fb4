//! From a checked request to an answer under way: what `/v1/*` and `start_generate` have in common.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use microserving_engine::{CallKey, CallOptions, StartGenerate};
use microserving_protocol::{
    ApiError, CompletionRequest, GenerationParams, OutputFormat, RELAY_HEADER, SeqId, TokenId,
};
use microserving_text::Specials;

use crate::answer::{Answer, AnswerPlan};
use crate::app::App;
use crate::body::blocking;
use crate::constraint;
use crate::deliver::Marks;
use crate::errors::api_error;
use crate::tracking::Arrival;

/// One generation, everything but its parameters.
#[derive(Debug)]
pub(crate) struct Generation {
    /// The id in the answer.
    pub(crate) id: String,
    /// The key of `start_generate`; `/v1/*` has none.
    pub(crate) key: Option<CallKey>,
    /// The prompt, with the output of an earlier attempt behind it.
    pub(crate) prompt: Arc<[TokenId]>,
    /// The client's own text of the prompt, if it sent text.
    pub(crate) prompt_text: Option<String>,
    /// Where prefilling begins.
    pub(crate) begin: u32,
    /// Where the true prompt ends.
    pub(crate) generated_from: u32,
    /// What the sampler calls the first choice.
    pub(crate) first_choice: u32,
    /// Attach to a running stream.
    pub(crate) resume_from: Option<u32>,
    /// The caller's deadline.
    pub(crate) timeout: Option<Duration>,
    /// The caller asked by header for statistics.
    pub(crate) stats: bool,
    /// What a router that passes the answer on wants marked.
    pub(crate) marks: Marks,
}

/// Checks a request's bounds and draws a seed where the client gave none.
///
/// # Errors
/// 400 naming the field; 404 if the model is another one.
pub(crate) fn parameters(
    app: &App,
    request: &CompletionRequest,
    key: Option<&SeqId>,
) -> Result<GenerationParams, ApiError> {
    check_model(app, request.model.as_deref())?;
    let params = request.generation(app.draw_seed(key))?;
    let vocab_size = app.engine.info().executor.vocab_size;
    let inside = |field: &str, token: TokenId| {
        if token.0 < vocab_size {
            return Ok(());
        }
        let message = format!("{field} names token {token}, must be below {vocab_size}");
        Err(ApiError::bad_request(field, message))
    };
    params.sampling.logit_bias.iter().try_for_each(|(token, _)| inside("logit_bias", *token))?;
    params.stop_tokens.iter().try_for_each(|token| inside("stop_token_ids", *token))?;
    Ok(params)
}

/// Refuses every model but ours; none is ours.
///
/// # Errors
/// 404.
pub(crate) fn check_model(app: &App, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(name) if name != app.config.served_model_name => Err(ApiError::model_not_found(name)),
        _ => Ok(()),
    }
}

/// Says whether the caller wants to know where tokens came from.
pub(crate) fn wants_stats(headers: &HeaderMap) -> bool {
    headers.get("x-microserving-stats").is_some_and(|value| value == "1")
}

/// Says what a caller of `/v1/*` that passes the answer on wants marked.
pub(crate) fn marks(headers: &HeaderMap) -> Marks {
    if headers.get(RELAY_HEADER).is_some_and(|value| value == "1") { Marks::Events } else { Marks::Nothing }
}

/// Returns what every call to the engine carries.
pub(crate) fn call_options(app: &App, params: &GenerationParams, timeout: Option<Duration>) -> CallOptions {
    CallOptions {
        cache_salt: Arc::clone(&params.cache_salt),
        priority: params.priority,
        timeout: timeout.or(app.config.default_timeout),
    }
}

/// Starts the engine on a generation and waits for its first token.
///
/// # Errors
/// What the engine, the grammar or the pipeline refuses.
pub(crate) async fn generate(
    app: &Arc<App>,
    generation: Generation,
    params: GenerationParams,
    arrival: Arrival,
) -> Result<Answer, ApiError> {
    let executor = &app.engine.info().executor;
    let true_prompt = generation.prompt[..generation.generated_from as usize].to_vec();
    let replayed = generation.prompt[generation.generated_from as usize..].to_vec();
    let mut end_tokens = params.stop_tokens.clone();
    if !params.ignore_eos {
        end_tokens.extend_from_slice(&executor.eos_tokens);
    }
    let echo = match (params.echo, generation.prompt_text) {
        (false, _) => None,
        (true, Some(text)) => Some(text),
        (true, None) => {
            let (text, prompt) = (app.text.clone(), true_prompt.clone());
            Some(blocking(move || text.decode(&prompt, Specials::Skip)).await?)
        }
    };
    let constraints = match &params.format {
        OutputFormat::Text => Vec::new(),
        format => {
            let (text, format, n) = (app.text.clone(), format.clone(), params.n);
            blocking(move || constraint::build(&text, &format, n)).await?
        }
    };
    let plan = AnswerPlan {
        id: generation.id,
        n: params.n,
        prompt_tokens: generation.generated_from,
        text: app.text.stream(&true_prompt, &params.stop)?,
        replayed,
        resume_from: generation.resume_from.unwrap_or(0),
        min_tokens: params.min_tokens,
        end_tokens,
        echo,
        logprobs: params.sampling.logprobs.is_some(),
        token_ids: params.return_token_ids,
        continuous_usage: params.include_usage && params.continuous_usage_stats,
        stats: generation.stats,
        marks: generation.marks,
    };
    let options = call_options(app, &params, generation.timeout);
    let call = StartGenerate {
        key: generation.key,
        prompt: generation.prompt,
        begin: generation.begin,
        generated_from: generation.generated_from,
        n: params.n,
        first_choice: generation.first_choice,
        sampling: params.sampling,
        max_tokens: params.max_tokens,
        min_tokens: params.min_tokens,
        stop_tokens: params.stop_tokens,
        ignore_eos: params.ignore_eos,
        constraints,
        // The pipeline needs every token to be in the same state as before; it hides those that the caller has.
        resume_from: generation.resume_from.map(|_| 0),
        options,
    };
    let stream = app.engine.start_generate(call).await.map_err(|error| api_error(&error))?;
    Answer::begin(Arc::clone(app), plan, stream, arrival).await
}
