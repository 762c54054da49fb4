//! What an engine shows of itself.

use microserving_protocol::SeqId;

use crate::sequence::{Sequence, State, Work};
use crate::{Engine, EngineCounters, EngineError, EngineState, PageCounts, SequenceInfo};

impl Engine {
    /// Returns the load.
    #[must_use]
    pub fn state(&self) -> EngineState {
        let count = |wanted: fn(&Sequence) -> bool| {
            let number = self.sequences.values().filter(|sequence| wanted(sequence)).count();
            u32::try_from(number).unwrap_or(u32::MAX)
        };
        let queued =
            self.sequences.values().filter(|s| matches!(s.state, State::Waiting | State::Prefilling));
        EngineState {
            engine_id: self.info.engine_id.clone(),
            incarnation: self.info.incarnation,
            pages: self.page_counts(),
            page_size: self.geometry.layout.page_size,
            waiting: count(|s| s.state == State::Waiting),
            running: count(|s| matches!(s.state, State::Prefilling | State::Decoding)),
            receiving: count(|s| s.state == State::Receiving),
            sending: count(|s| matches!(s.work, Work::Send(_))),
            queued_prefill_tokens: queued.map(|s| u64::from(s.goal().saturating_sub(s.computed))).sum(),
            draining: self.draining,
            counters: self.counters(),
        }
    }

    /// Returns the counters since boot.
    #[must_use]
    pub fn counters(&self) -> EngineCounters {
        let stats = self.cache.stats();
        EngineCounters {
            matched_tokens: stats.matched_tokens,
            lookup_tokens: stats.lookup_tokens,
            evicted_pages: stats.evicted_pages,
            ..self.counters
        }
    }

    /// Returns the pages by state.
    #[must_use]
    pub fn page_counts(&self) -> PageCounts {
        let counts = self.cache.counts();
        PageCounts {
            free: counts.free,
            reserved: counts.reserved,
            owned: counts.owned,
            cached: counts.cached,
            quarantined: counts.quarantined,
            total: counts.total,
        }
    }

    pub(crate) fn show(&self, sequence: &Sequence) -> SequenceInfo {
        let lease = match &sequence.work {
            Work::Receive(reception) => Some(reception.lease.left(self.now)),
            Work::Send(_) | Work::Generate(_) => None,
        };
        SequenceInfo {
            key: sequence.key.clone(),
            state: sequence.state.word(sequence.preemptions),
            lease,
            num_pages: u32::try_from(sequence.pages.list().len()).unwrap_or(u32::MAX),
            prompt_tokens: sequence.prompt_len,
            output_tokens: sequence.len() - sequence.prompt_len,
        }
    }

    /// Returns the first live sequence of a request, its generation or reservation before its sends.
    pub(crate) fn show_request(&self, seq_id: &SeqId) -> Result<SequenceInfo, EngineError> {
        let mut of_request = self.sequences.values().filter(|s| s.key.seq_id == *seq_id);
        let first = of_request.next().ok_or_else(|| Self::unknown(seq_id))?;
        if !matches!(first.work, Work::Send(_)) {
            return Ok(self.show(first));
        }
        let main = of_request.find(|s| !matches!(s.work, Work::Send(_)));
        Ok(self.show(main.unwrap_or(first)))
    }
}
