//! Checks that every executor owes its callers before it touches memory.

use microserving_protocol::KvGeometry;

use crate::{Batch, ExecutorError, ExecutorInfo};

impl Batch<'_> {
    /// Returns the number of new tokens over all items.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.items.iter().map(|item| item.tokens.len()).sum()
    }

    /// Checks every item against the model and the memory; executors call it first. Changes nothing.
    ///
    /// # Errors
    /// [`ExecutorError::MalformedBatch`] naming the first item that is empty, holds a token outside the vocabulary, passes
    /// the context, has too few pages or one outside the region.
    pub fn check(&self, info: &ExecutorInfo, geometry: &KvGeometry) -> Result<(), ExecutorError> {
        for (place, item) in self.items.iter().enumerate() {
            let malformed = |reason| Err(ExecutorError::MalformedBatch { item: place, reason });
            if item.tokens.is_empty() {
                return malformed("it has no tokens".into());
            }
            if let Some(token) = item.tokens.iter().find(|token| token.0 >= info.vocab_size) {
                return malformed(format!("token {token} is not in the vocabulary of {}", info.vocab_size));
            }
            let end = u64::from(item.position) + item.tokens.len() as u64;
            if end > u64::from(info.max_context) {
                return malformed(format!("it ends at {end}, past the context of {}", info.max_context));
            }
            let room = item.pages.len() as u64 * u64::from(geometry.layout.page_size);
            if end > room {
                return malformed(format!("it ends at {end}, past its {} pages", item.pages.len()));
            }
            if let Some(page) = item.pages.iter().find(|page| page.0 >= geometry.num_pages) {
                return malformed(format!("page {page} is not among the {} there are", geometry.num_pages));
            }
        }
        Ok(())
    }
}
