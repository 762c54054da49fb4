//! Checks that every executor owes its callers before it touches memory.

use microserving_protocol::{KvGeometry, PageId};

use crate::{Batch, BatchItem, ExecutorError, ExecutorInfo};

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

    /// As [`Self::check`] for executors that address memory by what a batch says: pages past an item's end may be anything, and
    /// no page is written twice. `written` is scratch: the pages that the step writes.
    ///
    /// # Errors
    /// [`ExecutorError::MalformedBatch`], naming the first item that is wrong.
    pub fn check_writes(
        &self,
        info: &ExecutorInfo,
        num_pages: u32,
        written: &mut Vec<PageId>,
    ) -> Result<(), ExecutorError> {
        let page_size = info.layout.page_size;
        written.clear();
        for (item, entry) in self.items.iter().enumerate() {
            let malformed = |reason: String| ExecutorError::MalformedBatch { item, reason };
            if entry.tokens.is_empty() {
                return Err(malformed("it has no tokens".into()));
            }
            let end = entry.position as usize + entry.tokens.len();
            if end > info.max_context as usize {
                return Err(malformed(format!(
                    "it ends at position {end}, the context holds {}",
                    info.max_context
                )));
            }
            let needed = end.div_ceil(page_size as usize);
            if entry.pages.len() < needed {
                return Err(malformed(format!("it has {} pages, {needed} are needed", entry.pages.len())));
            }
            if let Some(token) = entry.tokens.iter().find(|token| token.0 >= info.vocab_size) {
                return Err(malformed(format!(
                    "token {token} is outside the vocabulary of {}",
                    info.vocab_size
                )));
            }
            if let Some(page) = entry.pages[..needed].iter().find(|page| page.0 >= num_pages) {
                return Err(malformed(format!("page {page} is outside the region of {num_pages}")));
            }
            written.extend_from_slice(&entry.pages[(entry.position / page_size) as usize..needed]);
        }
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            let page = pair[0];
            let writes =
                |entry: &BatchItem<'_>| entry.pages[(entry.position / page_size) as usize..].contains(&page);
            let item = self.items.iter().rposition(writes).unwrap_or(0);
            return Err(ExecutorError::MalformedBatch {
                item,
                reason: format!("page {page} would be written twice"),
            });
        }
        Ok(())
    }
}
