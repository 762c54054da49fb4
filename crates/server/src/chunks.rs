//! An answer's way to a wire that is not HTTP: typed chunks, framed by whoever takes them.

use microserving_protocol::{ApiError, CompletionResponse};

use crate::answer::{Answer, Part};
use crate::deliver::{Delivery, assemble, last_chunk};

/// The chunks of an answer. Dropping it gives the sequence up.
#[derive(Debug)]
pub struct Chunks {
    left: Left,
    include_usage: bool,
}

/// What is left to be given out.
#[derive(Debug)]
enum Left {
    Answer(Box<Answer>),
    Whole(Box<CompletionResponse>),
    Nothing,
}

impl Chunks {
    /// Delivers an answer as it was asked for: chunk by chunk, or as one chunk that holds all of it.
    ///
    /// # Errors
    /// What the engine failed with, if the answer is delivered whole.
    pub(crate) async fn begin(mut answer: Answer, delivery: Delivery) -> Result<Self, ApiError> {
        let left = if delivery.stream {
            Left::Answer(Box::new(answer))
        } else {
            Left::Whole(Box::new(assemble(&mut answer).await?))
        };
        Ok(Self { left, include_usage: delivery.include_usage })
    }

    /// Returns the next chunk, or nothing after the last. The caller's pace decides when a chunk is made.
    ///
    /// # Errors
    /// What the engine failed with; the answer is over then.
    pub async fn next(&mut self) -> Result<Option<CompletionResponse>, ApiError> {
        let outcome = match &mut self.left {
            Left::Nothing => return Ok(None),
            Left::Whole(whole) => Ok(Some(std::mem::take(&mut **whole))),
            Left::Answer(answer) => match answer.next().await {
                Ok(Some(Part::Chunk(chunk))) => return Ok(Some(chunk)),
                Ok(Some(Part::HeldBack)) => unreachable!("no marks are wanted here"),
                Ok(Some(Part::End { usage, stats })) => {
                    Ok(last_chunk(answer, usage, stats, self.include_usage))
                }
                Ok(None) => Err(ApiError::internal("the answer ended early")),
                Err(error) => Err(error),
            },
        };
        self.left = Left::Nothing;
        outcome
    }
}
