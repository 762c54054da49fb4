//! From text to tokens, once, by the model's own tokenizer.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use microserving_client::CallContext;
use microserving_protocol::{ApiError, ChatMessage, ModelCard, TokenId};
use microserving_text::{ChatOptions, Specials, TextBundle, TextError, TextModel};
use tokio::sync::OnceCell;

use crate::{Cluster, Error};

/// Texts from this length on are tokenised on a thread of their own.
const LONG_TEXT_BYTES: usize = 1024;

/// Turns prompts into tokens, exactly as the model's engines do.
pub trait PromptCodec: Send + Sync + fmt::Debug {
    /// Turns text into tokens; `special` adds what the model wants in front of a prompt.
    ///
    /// # Errors
    /// 400 if the text cannot be tokenised.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, ApiError>;

    /// Turns a conversation into tokens, as the model's template writes it.
    ///
    /// # Errors
    /// 400 if the template refuses it, or there is none.
    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, ApiError>;

    /// Turns tokens into text, special ones included.
    ///
    /// # Errors
    /// 400 if one is outside the vocabulary.
    fn decode(&self, tokens: &[TokenId]) -> Result<String, ApiError>;

    /// Returns the bytes that the text of `num_tokens` tokens can have at most: a longer one is refused without being cut.
    /// By default there is no bound.
    fn max_text_bytes(&self, num_tokens: u32) -> usize {
        let _ = num_tokens;
        usize::MAX
    }
}

impl PromptCodec for TextModel {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, ApiError> {
        let tokens = if special { self.tokenizer.encode(text) } else { self.tokenizer.encode_bare(text) };
        tokens.map_err(|error| text_error(&error, "prompt"))
    }

    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<TokenId>, ApiError> {
        let Some(template) = &self.chat_template else {
            return Err(ApiError::bad_request(
                "messages",
                format!("the model {:?} has no chat template", self.name),
            ));
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let options =
            ChatOptions { add_generation_prompt: true, now_unix_seconds: now, ..ChatOptions::default() };
        let text = template.render(messages, &options).map_err(|error| text_error(&error, "messages"))?;
        self.tokenizer.encode_bare(&text).map_err(|error| text_error(&error, "messages"))
    }

    fn decode(&self, tokens: &[TokenId]) -> Result<String, ApiError> {
        self.tokenizer.decode(tokens, Specials::Show).map_err(|error| text_error(&error, "tokens"))
    }

    fn max_text_bytes(&self, num_tokens: u32) -> usize {
        self.tokenizer.max_text_bytes(num_tokens)
    }
}

fn text_error(error: &TextError, field: &str) -> ApiError {
    ApiError::bad_request(error.field().unwrap_or(field), error.to_string())
}

/// The codecs of the models served: a given one for all, or each model's own, fetched from an engine when it is first wanted.
#[derive(Debug, Default)]
pub(crate) struct Codecs {
    given: Option<Arc<dyn PromptCodec>>,
    fetched: Mutex<HashMap<String, Arc<CodecCell>>>,
}

/// One model's codec: whoever finds it empty fetches, the others wait for this cell and no other.
type CodecCell = OnceCell<Arc<dyn PromptCodec>>;

impl Codecs {
    pub(crate) fn new(given: Option<Arc<dyn PromptCodec>>) -> Self {
        Self { given, ..Self::default() }
    }

    /// Says whether one codec was given for all models.
    pub(crate) const fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Returns a model's codec. While one request fetches it, the others wait for it.
    pub(crate) async fn get(
        &self,
        cluster: &Cluster,
        cx: &CallContext,
        model: &str,
    ) -> Result<Arc<dyn PromptCodec>, Error> {
        if let Some(codec) = &self.given {
            return Ok(codec.clone());
        }
        let cell = {
            let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
            fetched.entry(model.to_owned()).or_default().clone()
        };
        cell.get_or_try_init(|| fetch(cluster, cx, model)).await.cloned()
    }
}

async fn fetch(cluster: &Cluster, cx: &CallContext, model: &str) -> Result<Arc<dyn PromptCodec>, Error> {
    let mut last = Error::NoEngine { job: "give its tokenizer" };
    let mut engines = cluster.decoders(Some(model));
    engines.extend(cluster.prefillers(Some(model)));
    // Engines of other makes keep theirs to themselves.
    engines.retain(|engine| engine.kind().is_ours());
    if engines.is_empty() {
        let error =
            ApiError::new(501, format!("no engine of {model:?} tells its tokenizer: give the router one"));
        return Err(error.with_code("no_tokenizer").into());
    }
    for engine in engines {
        match engine.calls().tokenizer(cx).await {
            Ok(bundle) => {
                // Building a vocabulary takes a good part of a second.
                let built = tokio::task::spawn_blocking(move || {
                    serde_json::from_value::<TextBundle>(bundle)
                        .map_err(|error| error.to_string())
                        .and_then(|bundle| bundle.build().map_err(|error| error.to_string()))
                });
                let built = built.await.map_err(|error| ApiError::internal(error.to_string()))?;
                let model = built.map_err(|reason| {
                    ApiError::new(502, format!("the tokenizer of {} cannot be used: {reason}", engine.name()))
                })?;
                tracing::info!(engine = engine.name(), model = %model.name, "tokenizer fetched");
                return Ok(Arc::new(model));
            }
            Err(source) => last = Error::Call { call: "tokenizer", source },
        }
    }
    Err(last)
}

/// Encodes, off the worker threads if it is long.
pub(crate) async fn encode(
    codec: Arc<dyn PromptCodec>,
    model: &ModelCard,
    text: String,
    special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(&*codec, model, "prompt", text.len())?;
    if text.len() < LONG_TEXT_BYTES {
        return codec.encode(&text, special);
    }
    off_thread(move || codec.encode(&text, special)).await
}

/// Encodes a conversation, off the worker threads if it is long.
pub(crate) async fn encode_chat(
    codec: Arc<dyn PromptCodec>,
    model: &ModelCard,
    messages: Vec<ChatMessage>,
) -> Result<Vec<TokenId>, ApiError> {
    let num_bytes = messages.iter().map(|message| message.content.len()).sum();
    check_length(&*codec, model, "messages", num_bytes)?;
    if num_bytes < LONG_TEXT_BYTES {
        return codec.encode_chat(&messages);
    }
    off_thread(move || codec.encode_chat(&messages)).await
}

/// Refuses a text that cannot fit the model's context however it is cut.
fn check_length(
    codec: &dyn PromptCodec,
    model: &ModelCard,
    field: &str,
    num_bytes: usize,
) -> Result<(), ApiError> {
    let Some(context) = model.max_model_len else { return Ok(()) };
    if num_bytes <= codec.max_text_bytes(context) {
        return Ok(());
    }
    let message =
        format!("{field} has {num_bytes} bytes, which are more than the {context} tokens of the context");
    Err(ApiError::bad_request(field, message).with_code("context_length_exceeded"))
}

/// Decodes, off the worker threads if it is long.
pub(crate) async fn decode(codec: Arc<dyn PromptCodec>, tokens: Vec<TokenId>) -> Result<String, ApiError> {
    if tokens.len() < LONG_TEXT_BYTES {
        return codec.decode(&tokens);
    }
    off_thread(move || codec.decode(&tokens)).await
}

/// Runs long work on a thread of its own.
pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(ApiError::internal(format!("a blocking task failed: {error}"))),
    }
}
