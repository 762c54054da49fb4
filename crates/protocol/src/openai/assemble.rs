//! From the chunks of a stream to one answer.

use super::{CompletionChoice, CompletionResponse};

/// Puts the chunks of one completion together, so that streaming or not, an answer is made in one way.
#[derive(Debug, Default)]
pub struct CompletionAssembler {
    whole: Option<CompletionResponse>,
}

impl CompletionAssembler {
    /// Begins an answer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends the next chunk.
    pub fn push(&mut self, chunk: CompletionResponse) {
        let whole =
            self.whole.get_or_insert_with(|| CompletionResponse { choices: Vec::new(), ..chunk.clone() });
        if chunk.usage.is_some() {
            whole.usage = chunk.usage;
        }
        if chunk.microserving.is_some() {
            whole.microserving = chunk.microserving;
        }
        for new in chunk.choices {
            match whole.choices.iter_mut().find(|choice| choice.index == new.index) {
                Some(choice) => append(choice, new),
                None => whole.choices.push(new),
            }
        }
    }

    /// Appends the chunks in some whole events, as [`crate::sse_event`] frames them.
    ///
    /// # Errors
    /// If one is no chunk; those before it have been appended.
    pub fn push_events(&mut self, events: &[u8]) -> serde_json::Result<()> {
        for line in events.split(|&byte| byte == b'\n') {
            if let Some(data) = line.strip_prefix(b"data: ") {
                self.push(serde_json::from_slice(data)?);
            }
        }
        Ok(())
    }

    /// Returns the answer, choices in order; `None` if no chunk came.
    #[must_use]
    pub fn finish(self) -> Option<CompletionResponse> {
        let mut whole = self.whole?;
        whole.choices.sort_by_key(|choice| choice.index);
        Some(whole)
    }
}

fn append(choice: &mut CompletionChoice, new: CompletionChoice) {
    choice.text.push_str(&new.text);
    choice.finish_reason = new.finish_reason.or(choice.finish_reason);
    match (&mut choice.logprobs, new.logprobs) {
        (Some(logprobs), Some(later)) => logprobs.extend(later),
        (none, later) => *none = none.take().or(later),
    }
    match (&mut choice.token_ids, new.token_ids) {
        (Some(tokens), Some(later)) => tokens.extend(later),
        (none, later) => *none = none.take().or(later),
    }
}
