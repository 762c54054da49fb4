//! The text side of a model, as handlers use it.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use microserving_protocol::{ApiError, ChatMessage, TokenId};
use microserving_text::{
    ChatOptions, Detokenizer, Grammar, GrammarCompiler, GrammarSpec, Specials, StopStrings, TextBundle,
    TextError, TextModel, TextStream,
};

/// A model's tokenizer, chat template and grammars; cheap to clone.
#[derive(Clone, Debug)]
pub struct ModelText {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    model: TextModel,
    /// The bundle as JSON, as routers ask for it.
    bundle: Bytes,
    /// Made when the first request needs it: many servers never see one, and a large vocabulary takes a while.
    grammars: OnceLock<Result<GrammarCompiler, TextError>>,
}

impl ModelText {
    /// Makes a bundle ready.
    ///
    /// # Errors
    /// If its vocabulary or template is broken.
    pub fn new(bundle: &TextBundle) -> Result<Self, TextError> {
        let model = bundle.build()?;
        Ok(Self {
            inner: Arc::new(Inner { model, bundle: bundle.to_json().into(), grammars: OnceLock::new() }),
        })
    }

    /// Returns the text side of the toy model: a byte a token, a plain chat format.
    ///
    /// # Panics
    /// Never: the bundle is built in.
    #[must_use]
    pub fn toy() -> Self {
        Self::new(&TextBundle::toy("toy")).expect("the built-in bundle builds, which its own tests show")
    }

    /// Returns the bundle as JSON.
    pub(crate) fn bundle(&self) -> Bytes {
        self.inner.bundle.clone()
    }

    /// Turns text into tokens; `around` adds what the model wants around a prompt.
    pub(crate) fn encode(&self, text: &str, around: bool) -> Result<Vec<TokenId>, ApiError> {
        let tokenizer = &self.inner.model.tokenizer;
        let tokens = if around { tokenizer.encode(text) } else { tokenizer.encode_bare(text) };
        tokens.map_err(|error| text_error(&error, "prompt"))
    }

    /// Turns tokens into text, special tokens by name if `specials`.
    pub(crate) fn decode(&self, tokens: &[TokenId], specials: Specials) -> Result<String, ApiError> {
        self.inner.model.tokenizer.decode(tokens, specials).map_err(|error| text_error(&error, "tokens"))
    }

    /// Writes a conversation as the model expects it, up to where its answer begins.
    pub(crate) fn render(&self, messages: &[ChatMessage]) -> Result<String, ApiError> {
        let Some(template) = &self.inner.model.chat_template else {
            return Err(ApiError::bad_request(
                "messages",
                "this model has no chat template: use /v1/completions",
            ));
        };
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_seconds: crate::app::unix_seconds(),
            ..ChatOptions::default()
        };
        template.render(messages, &options).map_err(|error| text_error(&error, "messages"))
    }

    /// Refuses a text that cannot fit a context of `max_context` tokens however it is cut, without cutting it.
    pub(crate) fn check_length(&self, field: &str, text: &str, max_context: u32) -> Result<(), ApiError> {
        if text.len() <= self.inner.model.tokenizer.max_text_bytes(max_context) {
            return Ok(());
        }
        let message = format!(
            "{field} has {} bytes, which are more than the {max_context} tokens of the context",
            text.len()
        );
        Err(ApiError::bad_request(field, message).with_code("context_length_exceeded"))
    }

    /// Makes the pipeline of one choice, for an output that follows `prompt`.
    pub(crate) fn stream(&self, prompt: &[TokenId], stop: &[String]) -> Result<TextStream, ApiError> {
        let stops = StopStrings::new(stop).map_err(|error| text_error(&error, "stop"))?;
        Ok(TextStream::new(Detokenizer::after(Arc::clone(&self.inner.model.tokenizer), prompt), stops))
    }

    /// Spells a token for log-probabilities; bytes that are no text by themselves as `bytes:\x..`.
    pub(crate) fn spelling(&self, token: TokenId) -> String {
        let bytes = self.inner.model.tokenizer.token_bytes(token).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
        }
    }

    /// Returns a grammar at its beginning. May take long: call it off the HTTP threads.
    pub(crate) fn grammar(&self, spec: &GrammarSpec) -> Result<Grammar, ApiError> {
        let model = &self.inner.model;
        let compiler = self
            .inner
            .grammars
            .get_or_init(|| GrammarCompiler::new(&model.tokenizer, &model.eos_token_ids))
            .as_ref()
            .map_err(|error| text_error(error, "response_format"))?;
        compiler.compile(spec).map_err(|error| text_error(&error, "response_format"))
    }
}

/// Says what an error of the text crate is on the wire; `field` is the one at hand.
fn text_error(error: &TextError, field: &str) -> ApiError {
    match error {
        TextError::InvalidField { field, .. } => ApiError::bad_request(field.as_str(), error.to_string()),
        TextError::Encode { .. }
        | TextError::UnknownToken { .. }
        | TextError::Template { .. }
        | TextError::Grammar { .. }
        | TextError::Unsupported { .. } => ApiError::bad_request(field, format!("{field}: {error}")),
        TextError::Read { .. } | TextError::Malformed { .. } => ApiError::internal(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_keep_bytes_that_are_no_text() {
        let text = ModelText::toy();
        assert_eq!(text.spelling(TokenId(97)), "a");
        assert_eq!(text.spelling(TokenId(0xf0)), "bytes:\\xf0");
        assert_eq!(text.spelling(TokenId(1_000_000)), "");
    }

    #[test]
    fn errors_name_the_field_at_hand() {
        let text = ModelText::toy();
        let error = text.decode(&[TokenId(9999)], Specials::Show).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("tokens")));
        let error = text.check_length("prompt", &"x".repeat(1 << 20), 16).unwrap_err();
        assert_eq!((error.status, error.code.as_deref()), (400, Some("context_length_exceeded")));
        let schema = GrammarSpec::JsonSchema(serde_json::json!({"type": "colour"}));
        let error = text.grammar(&schema).unwrap_err();
        assert_eq!(error.status, 400);
        assert!(error.param.unwrap_or_default().starts_with("response_format"));
    }
}
