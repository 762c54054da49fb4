//! A template, and what it is given.

use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use super::messages::normalise;
use super::{json, python, time};
use crate::error::TextError;

/// The name of the one template.
const NAME: &str = "chat_template";
/// Steps a rendering may take: a thousand messages take some hundred thousand.
const FUEL: u64 = 5_000_000;
/// The longest prompt a rendering may produce, in bytes.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// How deep macros and blocks may call each other.
const MAX_RECURSION: usize = 128;

/// A model's chat template, compiled.
///
/// The dialect is that of Hugging Face's `apply_chat_template`: Jinja with trimmed blocks, `break` and
/// `continue`, `raise_exception`, `strftime_now`, a `tojson` that writes like Python, and the methods of
/// Python's strings and dictionaries. A rendering is bounded in steps, depth and output.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

/// What else a rendering needs.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// Ends the prompt so that the model answers next.
    pub add_generation_prompt: bool,
    /// The time that `strftime_now` tells, in seconds since 1970 (UTC).
    pub now_unix_seconds: u64,
    /// Further variables of the template (`enable_thinking`, say); they may not replace the messages.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TextError::Template`] if it is not valid.
    pub fn new(source: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self, TextError> {
        let broken = |error: Error| TextError::Template { reason: describe(&error) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(python::call);
        environment.add_filter("tojson", json::filter);
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, without_generation_marks(source)).map_err(broken)?;
        Ok(Self {
            environment,
            bos_token: bos_token.unwrap_or_default().to_owned(),
            eos_token: eos_token.unwrap_or_default().to_owned(),
        })
    }

    /// Renders a conversation: messages in the form of OpenAI's API, as anything that serialises to it.
    /// Contents given as parts are joined to one text.
    ///
    /// # Errors
    /// [`TextError::InvalidField`] naming the message and part that is not acceptable,
    /// [`TextError::Template`] if the template refuses the conversation, or fails.
    pub fn render<M: Serialize>(&self, messages: &[M], options: &ChatOptions) -> Result<String, TextError> {
        let broken = |error: Error| TextError::Template { reason: describe(&error) };
        let messages = normalise(messages)?;
        let now = options.now_unix_seconds;
        let strftime_now =
            Value::from_function(move |format: String, _: Kwargs| time::strftime(&format, now));
        let mut variables: Vec<(String, Value)> =
            vec![("tools".to_owned(), Value::from(())), ("documents".to_owned(), Value::from(()))];
        let given = options.variables.iter();
        variables.extend(given.map(|(name, value)| (name.clone(), Value::from(Serde(value)))));
        variables.extend([
            ("messages".to_owned(), Value::from(Serde(messages))),
            ("add_generation_prompt".to_owned(), options.add_generation_prompt.into()),
            ("bos_token".to_owned(), self.bos_token.clone().into()),
            ("eos_token".to_owned(), self.eos_token.clone().into()),
            ("strftime_now".to_owned(), strftime_now),
        ]);
        let context = Value::from_pairs(variables);
        let template = self.environment.get_template(NAME).map_err(broken)?;
        let mut output = Bounded { bytes: Vec::new() };
        template.render_captured_to(context, &mut output).map_err(broken)?;
        String::from_utf8(output.bytes).map_err(|error| TextError::Template { reason: error.to_string() })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("bos_token", &self.bos_token)
            .field("eos_token", &self.eos_token)
            .finish_non_exhaustive()
    }
}

/// Collects output up to the bound.
struct Bounded {
    bytes: Vec<u8>,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("the prompt is longer than {MAX_OUTPUT_BYTES} bytes")));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes out `{% generation %}` and `{% endgeneration %}`, which mark the model's own words for training and
/// print nothing.
fn without_generation_marks(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let end = begin + length + 2;
        let inside = &rest[begin + 2..end - 2];
        let word = inside.trim_matches(|char: char| char == '-' || char == '+' || char.is_whitespace());
        output.push_str(&rest[..begin]);
        if matches!(word, "generation" | "endgeneration") {
            // An empty `if` keeps what the tag's dashes trim.
            let (open, close) = (inside.starts_with('-'), inside.ends_with('-'));
            output.push_str(if open { "{%- if true %}" } else { "{% if true %}" });
            output.push_str(if close { "{% endif -%}" } else { "{% endif %}" });
        } else {
            output.push_str(&rest[begin..end]);
        }
        rest = &rest[end..];
    }
    output.push_str(rest);
    output
}

/// Writes the error with what caused it and where, on one line.
fn describe(error: &Error) -> String {
    let mut reason = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if error.kind() == ErrorKind::OutOfFuel {
        reason = format!("it takes more than {FUEL} steps");
    }
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        reason = format!("{reason}: {cause}");
        source = cause.source();
    }
    match error.line() {
        Some(line) => format!("{reason} (line {line})"),
        None => reason,
    }
}

#[cfg(test)]
mod tests;
