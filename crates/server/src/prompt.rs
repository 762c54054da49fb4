//! From prompts and messages to tokens.

use std::sync::Arc;

use microserving_protocol::{ApiError, ChatMessage, Prompt, TokenId};

use crate::app::App;
use crate::body::blocking;

/// Texts from this length on are tokenised on a blocking thread.
const LONG_TEXT_BYTES: usize = 1024;

/// Returns a prompt's tokens, each checked to be in the model's vocabulary.
///
/// # Errors
/// 400 naming `prompt`.
pub(crate) async fn tokens(app: &Arc<App>, prompt: Prompt) -> Result<Arc<[TokenId]>, ApiError> {
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens.into_vec(),
        Prompt::Text(text) => encode(app, text, true).await?,
    };
    checked(app, tokens)
}

/// Returns the tokens of a conversation, as the model's template writes it.
///
/// # Errors
/// 400 naming `messages` if the template refuses it.
pub(crate) async fn chat_tokens(
    app: &Arc<App>,
    messages: Vec<ChatMessage>,
) -> Result<Arc<[TokenId]>, ApiError> {
    let (text, limit) = (app.text.clone(), app.engine.info().executor.max_context);
    let tokens = blocking(move || {
        let rendered = text.render(&messages)?;
        text.check_length("messages", &rendered, limit)?;
        text.encode(&rendered, false)
    });
    let tokens = tokens.await?;
    checked(app, tokens)
}

/// Turns text into tokens; `around` adds what the model wants around a prompt.
///
/// # Errors
/// 400 if the text can never fit the context, before it is tokenised, or if the tokenizer gives up.
pub(crate) async fn encode(app: &Arc<App>, prompt: String, around: bool) -> Result<Vec<TokenId>, ApiError> {
    app.text.check_length("prompt", &prompt, app.engine.info().executor.max_context)?;
    if prompt.len() < LONG_TEXT_BYTES {
        return app.text.encode(&prompt, around);
    }
    let text = app.text.clone();
    blocking(move || text.encode(&prompt, around)).await
}

/// Returns the client's own text, if it sent text: `echo` gives it back as it came.
pub(crate) fn text_of(prompt: &Prompt) -> Option<String> {
    match prompt {
        Prompt::Text(text) => Some(text.clone()),
        Prompt::Tokens(_) => None,
    }
}

/// Returns how many tokens a prompt has.
///
/// # Errors
/// 400 if they cannot be counted in 32 bits; no context is that long.
pub(crate) fn len(prompt: &[TokenId]) -> Result<u32, ApiError> {
    u32::try_from(prompt.len()).map_err(|_| ApiError::bad_request("prompt", "prompt is too long"))
}

fn checked(app: &App, tokens: Vec<TokenId>) -> Result<Arc<[TokenId]>, ApiError> {
    let vocab_size = app.engine.info().executor.vocab_size;
    if tokens.is_empty() {
        return Err(ApiError::bad_request("prompt", "prompt has no tokens"));
    }
    if let Some(at) = tokens.iter().position(|token| token.0 >= vocab_size) {
        let message = format!("prompt[{at}] is {}, must be below {vocab_size}", tokens[at]);
        return Err(ApiError::bad_request("prompt", message));
    }
    Ok(tokens.into())
}
