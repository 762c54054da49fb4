//! Gathering what the calls of one request did.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use microserving_protocol::{PromptTokensDetails, RemoteSendResponse, ServingStats, Usage};

/// The statistics of one request, written by its seats. Clones share them; a new attempt begins anew.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatsCell(Arc<Mutex<Gathered>>);

#[derive(Debug, Default)]
struct Gathered {
    stats: ServingStats,
    /// Prompt tokens that were cached when the request began, if it has moved since: what the engine that it moved to had was copied there.
    cached_before: Option<u32>,
}

impl StatsCell {
    pub(crate) fn decode_engine(&self, name: &str) {
        self.with(|stats| name.clone_into(&mut stats.decode_engine));
    }

    pub(crate) fn matched(&self, tokens: u32) {
        self.with(|stats| stats.matched_tokens = tokens);
    }

    /// Notes how many prompt tokens were cached when a request began that has moved.
    pub(crate) fn set_cached_before(&self, tokens: u32) {
        self.lock().cached_before = Some(tokens);
    }

    /// Returns how many prompt tokens were cached when the request began, if it has moved.
    pub(crate) fn cached_before(&self) -> Option<u32> {
        self.lock().cached_before
    }

    /// Notes that another pattern serves than the one asked for.
    pub(crate) fn set_pattern(&self, pattern: &str) {
        self.with(|stats| pattern.clone_into(&mut stats.pattern));
    }

    /// Returns the pattern that serves, if it is another one than asked for.
    pub(crate) fn pattern(&self) -> Option<String> {
        self.with(|stats| (!stats.pattern.is_empty()).then(|| stats.pattern.clone()))
    }

    /// Adds one `remote_send`; a program may use several.
    pub(crate) fn sent(&self, engine: &str, answer: &RemoteSendResponse) {
        self.with(|stats| {
            engine.clone_into(&mut stats.prefill_engine);
            stats.prefill_cached_tokens += answer.cached_tokens;
            stats.prefill_computed_tokens += answer.computed_tokens;
            stats.sent_tokens += answer.sent_tokens;
            stats.sent_bytes += answer.bytes;
            stats.transfer_seconds += answer.transfer_seconds;
            stats.exposed_transfer_seconds += answer.exposed_transfer_seconds;
        });
    }

    /// Takes the last chunk's usage and the engine's own statistics, and returns the usage of the whole request.
    ///
    /// A prompt token counts as cached if neither engine computed it. What one engine holds is a prefix of what the other one
    /// needs, so the longer of the two prefixes is the number.
    pub(crate) fn finish(&self, usage: Usage, engine: Option<&ServingStats>) -> Usage {
        let cached_before = self.lock().cached_before;
        self.with(|stats| {
            match engine {
                Some(own) => {
                    stats.matched_tokens = own.matched_tokens;
                    stats.received_tokens = own.received_tokens;
                    stats.computed_tokens = own.computed_tokens;
                }
                None => {
                    stats.matched_tokens = stats.matched_tokens.max(usage.cached_tokens());
                    stats.received_tokens = stats.sent_tokens;
                    let known = stats.matched_tokens.saturating_add(stats.received_tokens);
                    stats.computed_tokens = usage.prompt_tokens.saturating_sub(known);
                }
            }
            let cached =
                cached_before.unwrap_or_else(|| stats.matched_tokens.max(stats.prefill_cached_tokens));
            let cached = cached.min(usage.prompt_tokens);
            Usage { prompt_tokens_details: Some(PromptTokensDetails { cached_tokens: cached }), ..usage }
        })
    }

    pub(crate) fn get(&self) -> ServingStats {
        self.with(|stats| stats.clone())
    }

    fn with<T>(&self, f: impl FnOnce(&mut ServingStats) -> T) -> T {
        f(&mut self.lock().stats)
    }

    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_does_not_tell_is_derived() {
        let stats = StatsCell::default();
        stats.matched(16);
        stats.sent(
            "p",
            &RemoteSendResponse {
                sent_tokens: 30,
                cached_tokens: 32,
                computed_tokens: 14,
                bytes: 7,
                ..Default::default()
            },
        );
        let usage = stats.finish(Usage::new(47, 5, 16), None);
        assert_eq!((usage.cached_tokens(), usage.total_tokens), (32, 52));
        let stats = stats.get();
        assert_eq!((stats.matched_tokens, stats.received_tokens, stats.computed_tokens), (16, 30, 1));
        assert_eq!((stats.prefill_computed_tokens, stats.sent_bytes), (14, 7));
    }

    #[test]
    fn what_it_tells_is_taken() {
        let stats = StatsCell::default();
        let own =
            ServingStats { matched_tokens: 16, received_tokens: 0, computed_tokens: 4, ..Default::default() };
        assert_eq!(stats.finish(Usage::new(20, 1, 16), Some(&own)).cached_tokens(), 16);
        assert_eq!(stats.get().computed_tokens, 4);
    }
}
