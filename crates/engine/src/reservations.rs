//! A reservation's way from its promise to its end: this engine's eyes and hands for [`lifecycle::step`], which decides.

use std::time::Duration;

use microserving_kvcache::lifecycle::{self, Event, PageAction};
use microserving_protocol::{Generation, KvRange};

use crate::actions::pages_of;
use crate::mutants::Mutant;
use crate::sequence::{Choice, Pages, Slot, Work};
use crate::{Engine, EngineError};

/// Pages that wait for a peer's last write, after their sequence is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quarantined {
    stage: lifecycle::State,
    /// When it began.
    pub(crate) since: Duration,
}

impl Engine {
    /// Tells a reservation what happened, and does with grant and pages what its lifecycle says.
    pub(crate) fn reservation_event(&mut self, slot: Slot, event: Event) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Receive(reception) = &mut sequence.work else { return };
        let step = lifecycle::step(reception.stage, event);
        reception.stage = step.next;
        if step.revoke
            && let Some(generation) = reception.generation
        {
            self.gate.close(generation);
            self.transport.revoke(generation);
        }
        if !step.next.may_be_written()
            && let Some(generation) = reception.generation
        {
            self.gate.close(generation);
            self.receiving.remove(&generation);
        }
        if step.pages == PageAction::Keep {
            return;
        }
        let Pages::Promised(reservation) = sequence.pages.take() else { return };
        let generation = reservation.generation();
        match step.pages {
            PageAction::AcceptReceived | PageAction::AcceptUnreceived => {
                let received = step.pages == PageAction::AcceptReceived;
                sequence.computed = if received { reception.end } else { reception.matched };
                match self.cache.accept(reservation) {
                    Ok(table) => sequence.pages = Pages::Table(table),
                    Err(error) => tracing::error!(%error, "a reservation is not this cache's"),
                }
            }
            PageAction::Quarantine if !self.rules.break_by(Mutant::FreeAtOnce) => {
                self.receiving.remove(&generation);
                if self.cache.quarantine(reservation) > 0 {
                    let waiting = Quarantined { stage: step.next, since: self.now };
                    self.quarantined.insert(generation, waiting);
                }
            }
            PageAction::Quarantine | PageAction::Free => {
                self.receiving.remove(&generation);
                if let Err(error) = self.cache.cancel(reservation) {
                    tracing::error!(%error, "a reservation is not this cache's");
                }
            }
            // Only what was quarantined is drained, and that is not a sequence's any more.
            PageAction::Drain | PageAction::Keep => {}
        }
    }

    /// Takes what the transport says of a grant.
    pub(crate) fn grant_event(&mut self, generation: Generation, event: Event) {
        if let Some(quarantined) = self.quarantined.get_mut(&generation) {
            let step = lifecycle::step(quarantined.stage, event);
            quarantined.stage = step.next;
            if step.pages == PageAction::Drain {
                self.release_quarantine(generation);
            }
            return;
        }
        let Some(&slot) = self.receiving.get(&generation) else { return };
        // What the device cannot take over is computed here instead.
        let event = if event == Event::Complete && !self.import(slot) { Event::Lost } else { event };
        match event {
            Event::Lost => self.counters.transfers_lost += 1,
            Event::Complete => self.note_arrival(slot),
            _ => {}
        }
        self.reservation_event(slot, event);
        self.proceed(slot);
    }

    /// Frees what was quarantined under a generation.
    pub(crate) fn release_quarantine(&mut self, generation: Generation) {
        self.quarantined.remove(&generation);
        if let Err(error) = self.cache.drained(generation) {
            tracing::error!(%error, "the quarantine lists differ");
        }
    }

    /// Has the executor take over what has arrived for a reservation; says whether it could.
    fn import(&mut self, slot: Slot) -> bool {
        let Some(sequence) = self.sequences.get(&slot) else { return true };
        let Work::Receive(reception) = &sequence.work else { return true };
        let Some(range) = KvRange::new(reception.matched, reception.end) else { return true };
        let pages = pages_of(sequence.pages.list(), self.geometry.layout.page_size, range);
        match self.executor.import(pages) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "received pages cannot be taken over");
                false
            }
        }
    }

    fn note_arrival(&mut self, slot: Slot) {
        let token_bytes = self.geometry.layout.token_bytes() as u64;
        if let Some(sequence) = self.sequences.get_mut(&slot)
            && let Work::Receive(reception) = &mut sequence.work
        {
            let num_tokens = u64::from(reception.end - reception.matched);
            self.counters.bytes_received += num_tokens * token_bytes;
            reception.lease.renew(self.now);
        }
    }

    /// Lets a reservation go where it is wanted, once its pages are its own.
    pub(crate) fn proceed(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Receive(reception) = &mut sequence.work else { return };
        let lifecycle::State::Accepted { received } = reception.stage else { return };
        let Some(start) = reception.start.take() else {
            self.finish_commit(slot, received);
            return;
        };
        let (matched, end) = (reception.matched, reception.end);
        let (computed, id) = (sequence.computed, start.request);
        sequence.work =
            Work::Generate(Choice { request: id, index: 0, sampler: Some(start.sampler), behind: None });
        sequence.since = self.now;
        sequence.happen(crate::sequence::Event::Started);
        if let Some(record) = self.calls.get_mut(&sequence.key.seq_id) {
            record.receiving = None;
        }
        if let Some(request) = self.requests.get_mut(&id) {
            let prompt = request.usage.prompt_tokens;
            request.usage.cached_tokens = matched.min(prompt);
            request.usage.received_tokens = if received { end - matched } else { 0 };
            request.usage.computed_tokens = prompt.saturating_sub(computed);
            if request.paused {
                sequence.happen(crate::sequence::Event::Paused);
            }
        }
        self.share_pages(slot);
    }

    /// Says that a `start_generate` or a `commit` asks for a reservation.
    pub(crate) fn want(&mut self, slot: Slot) {
        self.reservation_event(slot, Event::Wanted);
        self.proceed(slot);
    }

    /// Says what a `commit` hears of data that did not come.
    pub(crate) fn lost_error(seq_id: &microserving_protocol::SeqId) -> EngineError {
        EngineError::TransferLost { seq_id: seq_id.clone() }
    }
}
