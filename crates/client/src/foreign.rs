//! What engines of other makes have in common: their names for models, and the way back from their answers.
//!
//! Servers agree on OpenAI's API as far as their clients made them. So their answers are read by what is needed of them: a field that is null,
//! missing or unknown is no error, a finish reason that we do not know is one, since passing on another would be a lie.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use futures::{Stream, StreamExt};
use microserving_protocol::{
    CompletionChoice, CompletionLogprobs, CompletionResponse, FinishReason, ModelList, TokenId, TopLogprobs,
    Usage,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{CallContext, ChunkStream, ClientError};

/// Under which name clients ask for an engine's model, and what the engine calls it.
#[derive(Debug, Default)]
pub(crate) struct Names {
    ours: Option<String>,
    /// What the engine calls it: from its address, or its first model once it has told.
    theirs: Mutex<Option<String>>,
    fixed: bool,
}

impl Names {
    pub(crate) fn new(ours: Option<String>, theirs: Option<String>) -> Self {
        Self { ours, fixed: theirs.is_some(), theirs: Mutex::new(theirs) }
    }

    /// Says whether the operator gave the name, and so vouches for what it stands for.
    pub(crate) const fn are_given(&self) -> bool {
        self.ours.is_some()
    }

    /// Notes the models that the engine tells, and returns them under the names that clients use.
    ///
    /// # Errors
    /// With what is wrong, if the model that its address names is not among them.
    pub(crate) fn learn(&self, mut models: ModelList) -> Result<ModelList, String> {
        let Some(ours) = &self.ours else { return Ok(models) };
        let mut theirs = self.theirs.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = theirs.as_ref().filter(|_| self.fixed);
        let found = models.data.into_iter().find(|card| wanted.is_none_or(|wanted| card.id == *wanted));
        let Some(mut card) = found else {
            return Err(match wanted {
                Some(wanted) => format!("it does not serve the model {wanted:?}"),
                None => "it serves no model".to_owned(),
            });
        };
        if !self.fixed {
            *theirs = Some(card.id.clone());
        }
        card.id.clone_from(ours);
        models.data = vec![card];
        Ok(models)
    }

    /// Returns what the engine calls a model that a client asked for.
    pub(crate) fn theirs(&self, asked: Option<&str>) -> Option<String> {
        if self.ours.is_none() {
            return asked.map(str::to_owned);
        }
        self.theirs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An error for what a kind of engine cannot do.
pub(crate) fn unsupported(engine: &str, call: &'static str) -> ClientError {
    ClientError::Unsupported { engine: engine.to_owned(), call }
}

/// Leaves out what is meant for engines of ours.
pub(crate) fn bare(cx: &CallContext) -> CallContext {
    CallContext { wants_stats: false, ..cx.clone() }
}

/// An answer or a chunk of one, completion or chat.
#[derive(Debug, Deserialize)]
pub(crate) struct Answer {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    created: Option<f64>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<LaxUsage>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    #[serde(default)]
    text: Option<String>,
    #[serde(default, alias = "message")]
    delta: Option<Message>,
    #[serde(default)]
    logprobs: Option<Map<String, Value>>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Option<Vec<TokenId>>,
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(default)]
    content: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct LaxUsage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: Option<u32>,
    #[serde(default)]
    prompt_tokens_details: Option<LaxDetails>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct LaxDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

impl From<LaxUsage> for Usage {
    fn from(usage: LaxUsage) -> Self {
        let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0);
        Self::new(usage.prompt_tokens, usage.completion_tokens.unwrap_or(0), cached)
    }
}

/// Turns the answers of one request into chunks as engines of ours send them: text first, usage last and by itself.
#[derive(Debug)]
pub(crate) struct Reader {
    engine: String,
    keeps_usage: bool,
    usage: Option<Usage>,
    /// Characters of each choice so far, to say where a token's text begins when the engine does not.
    offsets: HashMap<u32, u32>,
    head: CompletionResponse,
}

impl Reader {
    /// Begins an answer; `keeps_usage` leaves the usage so far in every chunk.
    pub(crate) fn new(engine: &str, keeps_usage: bool) -> Self {
        let head = CompletionResponse::new("", 0, "", Vec::new());
        Self { engine: engine.to_owned(), keeps_usage, usage: None, offsets: HashMap::new(), head }
    }

    /// Reads a whole stream.
    pub(crate) fn stream(
        self,
        answers: impl Stream<Item = Result<Answer, ClientError>> + Send + 'static,
    ) -> ChunkStream {
        let state = Some((self, Box::pin(answers)));
        Box::pin(futures::stream::unfold(state, |state| async move {
            let (mut reader, mut answers) = state?;
            loop {
                match answers.next().await {
                    Some(Ok(answer)) => match reader.read(answer) {
                        Ok(Some(chunk)) => return Some((Ok(chunk), Some((reader, answers)))),
                        Ok(None) => {}
                        Err(error) => return Some((Err(error), None)),
                    },
                    Some(Err(error)) => return Some((Err(error), None)),
                    None => return reader.last().map(|chunk| (Ok(chunk), None)),
                }
            }
        }))
    }

    /// Returns the chunk of an answer; nothing if it says nothing new, as the first chunk of a chat, which names a role.
    fn read(&mut self, answer: Answer) -> Result<Option<CompletionResponse>, ClientError> {
        self.head.id = answer.id.unwrap_or_default();
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates; seconds since 1970"
        )]
        let created = answer.created.unwrap_or(0.0) as u64;
        self.head.created = created;
        self.head.model = answer.model;
        if let Some(usage) = answer.usage {
            self.usage = Some(usage.into());
        }
        let mut choices = Vec::with_capacity(answer.choices.len());
        for choice in answer.choices {
            choices.extend(self.choice(choice)?);
        }
        if choices.is_empty() {
            return Ok(None);
        }
        let usage = if self.keeps_usage { self.usage } else { None };
        Ok(Some(CompletionResponse { choices, usage, ..self.head.clone() }))
    }

    fn choice(&mut self, choice: Choice) -> Result<Option<CompletionChoice>, ClientError> {
        let text = choice.text.or(choice.delta.and_then(|message| message.content)).unwrap_or_default();
        let finish_reason = choice.finish_reason.map(|reason| self.finish_reason(&reason)).transpose()?;
        let logprobs = match choice.logprobs {
            Some(logprobs) => self.logprobs(choice.index, logprobs)?,
            None => None,
        };
        if text.is_empty() && finish_reason.is_none() && logprobs.is_none() {
            return Ok(None);
        }
        Ok(Some(CompletionChoice {
            index: choice.index,
            text,
            logprobs,
            finish_reason,
            token_ids: choice.token_ids,
        }))
    }

    fn finish_reason(&self, reason: &str) -> Result<FinishReason, ClientError> {
        match reason {
            "stop" => Ok(FinishReason::Stop),
            "length" => Ok(FinishReason::Length),
            "preempt" => Ok(FinishReason::Preempt),
            // The server gave the request up; what is here is not the answer.
            "abort" | "error" => Err(ClientError::Lost {
                engine: self.engine.clone(),
                reason: format!("it ended the answer with the finish reason {reason:?}"),
            }),
            _ => Err(self.malformed(format!("the finish reason {reason:?} is not known"))),
        }
    }

    /// Reads log-probabilities in the form of completions (`tokens`) or of chats (`content`).
    fn logprobs(
        &mut self,
        index: u32,
        mut logprobs: Map<String, Value>,
    ) -> Result<Option<CompletionLogprobs>, ClientError> {
        let mut read = match logprobs.remove("content") {
            Some(Value::Array(content)) => {
                content.iter().map(chat_logprob).collect::<Option<Vec<_>>>().map(join)
            }
            Some(Value::Null) => None,
            Some(_) => return Err(self.malformed("logprobs.content is no list".into())),
            None => {
                // Null stands for an empty list where a server has none.
                logprobs.retain(|_, value| !value.is_null());
                let read = serde_json::from_value(Value::Object(logprobs))
                    .map_err(|error| self.malformed(format!("logprobs: {error}")))?;
                Some(read)
            }
        };
        if let Some(read) = &mut read {
            let next = self.offsets.entry(index).or_default();
            let mut offsets = Vec::with_capacity(read.tokens.len());
            for token in &read.tokens {
                offsets.push(*next);
                *next = next.saturating_add(u32::try_from(token.chars().count()).unwrap_or(u32::MAX));
            }
            if read.text_offset.len() != read.tokens.len() {
                read.text_offset = offsets;
            }
        }
        Ok(read.filter(|read| !read.tokens.is_empty()))
    }

    fn last(&mut self) -> Option<CompletionResponse> {
        let usage = self.usage.take()?;
        Some(CompletionResponse { usage: Some(usage), choices: Vec::new(), ..self.head.clone() })
    }

    fn malformed(&self, reason: String) -> ClientError {
        ClientError::Malformed { engine: self.engine.clone(), reason }
    }
}

/// One token of a chat: its text, its log-probability, and the best at its place.
type TokenLogprob = (String, Option<f32>, TopLogprobs);

fn chat_logprob(entry: &Value) -> Option<TokenLogprob> {
    let top = entry.get("top_logprobs").and_then(Value::as_array);
    let top = top.into_iter().flatten().filter_map(|top| Some((spelled(top)?, number(top)?))).collect();
    Some((spelled(entry)?, number(entry), TopLogprobs(top)))
}

#[allow(clippy::cast_possible_truncation, reason = "log-probabilities need no more digits")]
fn number(entry: &Value) -> Option<f32> {
    entry.get("logprob")?.as_f64().map(|value| value as f32)
}

/// Returns a token's text; part of a character is spelled by its bytes, as in completions.
fn spelled(entry: &Value) -> Option<String> {
    let text = entry.get("token")?.as_str()?;
    let bytes: Option<Vec<u8>> = entry.get("bytes").and_then(Value::as_array).and_then(|bytes| {
        bytes.iter().map(|byte| byte.as_u64().and_then(|byte| u8::try_from(byte).ok())).collect()
    });
    match bytes {
        Some(bytes) if std::str::from_utf8(&bytes).is_err() => {
            Some(bytes.iter().fold("bytes:".to_owned(), |spelled, byte| format!("{spelled}\\x{byte:02x}")))
        }
        _ => Some(text.to_owned()),
    }
}

fn join(entries: Vec<TokenLogprob>) -> CompletionLogprobs {
    let mut joined = CompletionLogprobs::default();
    for (token, logprob, top) in entries {
        joined.tokens.push(token);
        joined.token_logprobs.push(logprob);
        joined.top_logprobs.push(top);
    }
    joined
}

#[cfg(test)]
mod tests {
    use microserving_protocol::ModelCard;
    use serde_json::json;

    use super::*;

    async fn read(answers: Vec<Value>) -> Result<Vec<CompletionResponse>, ClientError> {
        let answers: Vec<_> = answers
            .into_iter()
            .map(|answer| Ok(serde_json::from_value(answer).expect("an answer")))
            .collect();
        let chunks: Vec<_> = Reader::new("e", false).stream(futures::stream::iter(answers)).collect().await;
        chunks.into_iter().collect()
    }

    #[tokio::test]
    async fn chats_become_completions() {
        let chunks = read(vec![
            json!({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}),
            json!({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "é"}, "logprobs": {"content": [
                {"token": "\u{fffd}", "bytes": [195], "logprob": -0.5, "top_logprobs": []},
                {"token": "\u{fffd}", "bytes": [169], "logprob": -0.25, "top_logprobs": [{"token": "x", "bytes": null, "logprob": -2.0}]},
            ]}}]}),
            json!({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
                   "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": null}}}),
        ])
        .await
        .expect("chunks");
        assert_eq!(chunks.len(), 3, "the role alone is no chunk: {chunks:?}");
        let logprobs = chunks[0].choices[0].logprobs.as_ref().expect("logprobs");
        assert_eq!(logprobs.tokens, ["bytes:\\xc3", "bytes:\\xa9"]);
        assert_eq!(logprobs.to_chat().content[1].bytes, [169]);
        assert_eq!(logprobs.top_logprobs[1].0, [("x".to_owned(), -2.0)]);
        assert_eq!((chunks[1].choices[0].finish_reason, chunks[1].usage), (Some(FinishReason::Stop), None));
        assert_eq!((chunks[2].choices.len(), chunks[2].usage.map(|usage| usage.total_tokens)), (0, Some(5)));
    }

    #[tokio::test]
    async fn null_offsets_are_counted_and_whole_answers_are_chunks() {
        let chunks = read(vec![json!({"id": "1", "created": 1.5, "choices": [{"index": 1, "text": "aé!", "finish_reason": "length",
            "logprobs": {"text_offset": null, "tokens": ["aé", "!"], "token_logprobs": [-1, -2], "top_logprobs": [{"a": -1}, {}]}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})])
        .await
        .expect("chunks");
        assert_eq!(chunks[0].choices[0].logprobs.as_ref().expect("logprobs").text_offset, [0, 2]);
        assert_eq!(chunks[1].usage.map(|usage| usage.completion_tokens), Some(2));
    }

    #[tokio::test]
    async fn unknown_finish_reasons_are_errors() {
        for (reason, expected) in [("tool_calls", "Malformed"), ("abort", "Lost")] {
            let error = read(vec![json!({"choices": [{"text": "", "finish_reason": reason}]})]).await;
            let error = error.expect_err(reason);
            assert!(format!("{error:?}").starts_with(expected), "{error:?}");
        }
    }

    #[test]
    fn names_are_mapped() {
        let list = || ModelList::new(vec![ModelCard::new("org/a", 1, 10), ModelCard::new("org/b", 1, 10)]);
        let own = Names::new(None, None);
        assert_eq!(own.learn(list()).expect("fits").data.len(), 2);
        assert_eq!(own.theirs(Some("org/b")).as_deref(), Some("org/b"));
        let first = Names::new(Some("m".into()), None);
        assert_eq!(first.learn(list()).expect("fits").data[0].id, "m");
        assert_eq!(first.theirs(Some("m")).as_deref(), Some("org/a"));
        let second = Names::new(Some("m".into()), Some("org/b".into()));
        assert_eq!(second.learn(list()).expect("fits").data.len(), 1);
        assert_eq!(second.theirs(None).as_deref(), Some("org/b"));
        let none = Names::new(Some("m".into()), Some("org/c".into()));
        assert!(none.learn(list()).expect_err("not served").contains("org/c"));
    }
}
