//! From text to tokens, once, by the model's own tokenizer.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use microserving_client::CallContext;
use microserving_protocol::{ApiError, ChatMessage, ModelCard, TokenId};
use microserving_text::{ChatOptions, Specials, TextBundle, TextError, TextModel};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::{Cluster, Error};

/// Texts below this length are tokenised where they are, whatever the tokenizer.
const SHORT_TEXT_BYTES: usize = 1024;
/// So are those that take no longer than this: about ten times what a change of threads costs, and nothing that another request would notice.
const QUICK: Duration = Duration::from_micros(100);

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

/// A codec, and how fast it has been.
#[derive(Clone, Debug)]
pub(crate) struct Codec {
    codec: Arc<dyn PromptCodec>,
    pace: Arc<Pace>,
}

impl Codec {
    fn new(codec: Arc<dyn PromptCodec>) -> Self {
        Self { codec, pace: Arc::default() }
    }

    /// Does work that grows with `num_bytes`, off the worker threads if it will take long.
    async fn work<T: Send + 'static>(
        self,
        num_bytes: usize,
        work: impl FnOnce(&dyn PromptCodec) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if num_bytes < SHORT_TEXT_BYTES {
            return work(&*self.codec);
        }
        let is_quick = self.pace.is_quick(num_bytes);
        let timed = move || {
            let began = Instant::now();
            let outcome = work(&*self.codec);
            self.pace.note(num_bytes, began.elapsed());
            outcome
        };
        if is_quick { timed() } else { off_thread(timed).await }
    }
}

/// What a byte of text takes, as learned from texts that were long enough to tell.
#[derive(Debug, Default)]
struct Pace {
    /// 0 until something is known.
    picoseconds: AtomicU64,
}

impl Pace {
    fn is_quick(&self, num_bytes: usize) -> bool {
        let pace = u128::from(self.picoseconds.load(Ordering::Relaxed));
        pace > 0 && pace * num_bytes as u128 <= QUICK.as_nanos() * 1000
    }

    /// Takes a measurement in, by an eighth; one that is lost to another thread's does no harm.
    fn note(&self, num_bytes: usize, took: Duration) {
        let new = u64::try_from(took.as_nanos() * 1000 / num_bytes.max(1) as u128).unwrap_or(u64::MAX).max(1);
        let before = self.picoseconds.load(Ordering::Relaxed);
        let pace = if before == 0 { new } else { before - before / 8 + new / 8 };
        self.picoseconds.store(pace.max(1), Ordering::Relaxed);
    }
}

/// The codecs of the models served: a given one for all, or each model's own, fetched from an engine when it is first wanted.
#[derive(Debug, Default)]
pub(crate) struct Codecs {
    given: Option<Codec>,
    fetched: Mutex<HashMap<String, Arc<CodecCell>>>,
}

/// One model's codec: whoever finds it empty fetches, the others wait for this cell and no other.
type CodecCell = OnceCell<Codec>;

impl Codecs {
    pub(crate) fn new(given: Option<Arc<dyn PromptCodec>>) -> Self {
        Self { given: given.map(Codec::new), ..Self::default() }
    }

    /// Says whether one codec was given for all models.
    pub(crate) const fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Returns a model's codec. While one request fetches it, the others wait for it.
    pub(crate) async fn get(&self, cluster: &Cluster, cx: &CallContext, model: &str) -> Result<Codec, Error> {
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

async fn fetch(cluster: &Cluster, cx: &CallContext, model: &str) -> Result<Codec, Error> {
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
                return Ok(Codec::new(Arc::new(model)));
            }
            Err(source) => last = Error::Call { call: "tokenizer", source },
        }
    }
    Err(last)
}

/// Encodes, off the worker threads if that takes long.
pub(crate) async fn encode(
    codec: Codec,
    model: &ModelCard,
    text: String,
    special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    check_length(&*codec.codec, model, "prompt", text.len())?;
    codec.work(text.len(), move |codec| codec.encode(&text, special)).await
}

/// Encodes a conversation, off the worker threads if that takes long.
pub(crate) async fn encode_chat(
    codec: Codec,
    model: &ModelCard,
    messages: Vec<ChatMessage>,
) -> Result<Vec<TokenId>, ApiError> {
    let num_bytes = messages.iter().map(|message| message.content.len()).sum();
    check_length(&*codec.codec, model, "messages", num_bytes)?;
    codec.work(num_bytes, move |codec| codec.encode_chat(&messages)).await
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
pub(crate) async fn decode(codec: Codec, tokens: Vec<TokenId>) -> Result<String, ApiError> {
    if tokens.len() < SHORT_TEXT_BYTES {
        return codec.codec.decode(&tokens);
    }
    off_thread(move || codec.codec.decode(&tokens)).await
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_learned_and_follows() {
        let pace = Pace::default();
        assert!(!pace.is_quick(SHORT_TEXT_BYTES), "nothing is known yet");
        pace.note(1000, Duration::from_micros(1));
        assert!(pace.is_quick(100_000) && !pace.is_quick(101_000));
        for _ in 0..100 {
            pace.note(1000, Duration::from_millis(1));
        }
        assert!(!pace.is_quick(1000));
        pace.note(1, Duration::ZERO);
        pace.note(0, Duration::MAX);
    }
}
