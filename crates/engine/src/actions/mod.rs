//! The calls that change something, one file each.

mod abort;
mod commit;
mod finish_choice;
mod pause;
mod prep_recv;
mod remote_send;
mod start_generate;

use microserving_protocol::TokenId;

use crate::{Engine, EngineError};

pub(crate) use remote_send::pages_of;

impl Engine {
    /// Returns the length of a prompt that this engine can hold at all.
    fn check_prompt(&self, prompt: &[TokenId]) -> Result<u32, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::InvalidField { field: "prompt", reason: "it is empty".into() });
        }
        let limit = self.max_len();
        let len = u32::try_from(prompt.len()).ok().filter(|&len| len <= limit);
        let Some(len) = len else {
            return Err(EngineError::TooLong {
                field: "prompt",
                needed: prompt.len() as u64,
                limit: limit.into(),
            });
        };
        let vocab_size = self.info.executor.vocab_size;
        if let Some(token) = prompt.iter().find(|token| token.0 >= vocab_size) {
            let reason = format!("token {token} is not below the vocabulary's {vocab_size}");
            return Err(EngineError::InvalidField { field: "prompt", reason });
        }
        Ok(len)
    }

    /// Returns the longest sequence: what the model can read, and all pages can hold.
    fn max_len(&self) -> u32 {
        let pages = self.config.num_pages.saturating_mul(self.geometry.layout.page_size);
        self.info.executor.max_context.min(pages)
    }
}

/// Refuses a value outside of its bounds.
fn check_bound(field: &'static str, value: u32, holds: bool, bound: &str) -> Result<(), EngineError> {
    if holds {
        Ok(())
    } else {
        Err(EngineError::InvalidField { field, reason: format!("it is {value}, must be {bound}") })
    }
}
