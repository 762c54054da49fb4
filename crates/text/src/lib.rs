//! Text to tokens and back.
//!
//! - [`Tokenizer`]: from a `tokenizer.json`, from a vocabulary embedded in a GGUF file ([`GgufVocab`], read
//!   by [`GgufMetadata`] or by whoever has the file open), or built in (`toy-bytes`).
//! - [`TextBundle`]: all that serving the text of a model needs, as one document that an engine hands to a
//!   router; [`TextModel`] is the bundle made ready.
//! - [`ChatTemplate`]: from a conversation to a prompt.
//! - [`Detokenizer`], [`StopStrings`] and both in a row, [`TextStream`]: from tokens to the text a client
//!   sees, one token at a time.
//! - [`GrammarCompiler`] and [`Grammar`] (feature `grammar`): which tokens keep an answer inside a JSON schema.
//!
//! # A token is bytes
//!
//! Incremental decoding is often done by decoding a window of tokens twice and taking the difference, because
//! a decoder is a chain of steps that may look at its neighbours. The vocabularies that language models are
//! served with do not need that: byte-level and SentencePiece tokens contribute the same bytes wherever they
//! stand, save the space in front of the first. So a table of bytes is made when the vocabulary is loaded,
//! and decoding, streaming, log-probabilities and grammars all read it. What a client gets is then the same
//! for every way of cutting the stream, by construction, and a decoder whose tokens have no bytes of their
//! own is refused when the model is loaded rather than found out in production.
//!
//! # Example
//!
//! ```
//! use microserving_text::{ChatOptions, Detokenizer, StopStrings, TextBundle, TextStream};
//!
//! let model = TextBundle::toy("toy").build()?;
//! let template = model.chat_template.as_ref().expect("the toy has one");
//! let messages = [serde_json::json!({ "role": "user", "content": "Hello" })];
//! let prompt = template.render(&messages, &ChatOptions { add_generation_prompt: true, ..ChatOptions::default() })?;
//! assert_eq!(prompt, "user: Hello\nassistant: ");
//!
//! let prompt = model.tokenizer.encode_bare(&prompt)?;
//! let mut stream = TextStream::new(Detokenizer::after(model.tokenizer.clone(), &prompt), StopStrings::new(&["!"])?);
//! let mut answer = String::new();
//! for token in model.tokenizer.encode_bare("Grüße! And more")? {
//!     let step = stream.push(token);
//!     answer.push_str(&step.text);
//!     if step.stopped_by.is_some() {
//!         break;
//!     }
//! }
//! answer.push_str(&stream.finish().text);
//! assert_eq!(answer, "Grüße");
//! # Ok::<(), microserving_text::TextError>(())
//! ```

#![forbid(unsafe_code)]

mod bundle;
mod chat;
mod detokenizer;
mod error;
mod gguf;
#[cfg(feature = "grammar")]
mod grammar;
mod stop;
mod stream;
#[cfg(test)]
mod testing;
mod token_table;
mod tokenizer;

pub use bundle::{TextBundle, TextModel, TokenizerSource};
pub use chat::{ChatOptions, ChatTemplate};
pub use detokenizer::{Detokenizer, TextPiece};
pub use error::TextError;
pub use gguf::{GgufMetadata, GgufTokenType, GgufValue, GgufVocab};
#[cfg(feature = "grammar")]
pub use grammar::{Grammar, GrammarCompiler, GrammarSpec};
pub use stop::{StopStep, StopStrings};
pub use stream::{TextStep, TextStream};
pub use tokenizer::{Specials, Tokenizer};
