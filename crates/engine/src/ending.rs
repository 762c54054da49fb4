//! How sequences and requests end, and what becomes of their pages.
//!
//! Whatever ends a sequence ends it here, so that each kind of page has one way back: shared pages stay cached, own pages
//! become free, pages that a peer may still write to are quarantined, pages that a transfer still reads wait for its end.

use microserving_kvcache::lifecycle;
use microserving_protocol::SeqId;
use microserving_transport::Refusal;

use crate::calls::Fate;
use crate::engine::Closing;
use crate::mutants::Mutant;
use crate::request::Ending;
use crate::sequence::{Event, Pages, RequestId, Slot, State, Work};
use crate::{CallId, Engine, EngineError};

impl Engine {
    /// Takes a sequence out and gives its pages back, each kind its own way. Tells nobody.
    pub(crate) fn retire(&mut self, slot: Slot) {
        // A reservation's end is decided by how far it has come.
        self.reservation_event(slot, lifecycle::Event::Abort);
        let Some(mut sequence) = self.sequences.remove(&slot) else { return };
        if sequence.state != State::Finished {
            sequence.happen(Event::Ended);
        }
        let pages = sequence.pages.take();
        match sequence.work {
            Work::Send(delivery) => {
                let table = match pages {
                    Pages::Table(table) => Some(table),
                    Pages::Promised(_) | Pages::Nothing => None,
                };
                if self.channels.remove(&delivery.channel).is_some() {
                    // Queued puts read these pages until the transport says that it is over.
                    self.closing.insert(delivery.channel, Closing::new(table, delivery.replaced));
                    self.transport.cancel(delivery.channel);
                } else if let Some(table) = table {
                    drop(delivery.replaced);
                    self.cache.release_table(table);
                }
            }
            Work::Receive(_) | Work::Generate(_) => {
                if let Pages::Table(table) = pages {
                    self.cache.release_table(table);
                }
            }
        }
        let seq_id = sequence.key.seq_id;
        if let Some(record) = self.calls.get_mut(&seq_id)
            && record.receiving == Some(slot)
        {
            record.receiving = None;
        }
        self.calls.end_life(&seq_id, self.now);
    }

    /// Ends all that lives under a record, telling everyone who waits `error`, and notes how it ended.
    pub(crate) fn end_record(&mut self, seq_id: &SeqId, fate: Fate, error: &EngineError) {
        let Some(record) = self.calls.get_mut(seq_id) else { return };
        record.fate = fate;
        let receiving = record.receiving;
        let generation = record.generation;
        let sends: Vec<Slot> = record
            .sends
            .values()
            .filter_map(|sending| match sending.progress {
                crate::calls::SendProgress::Running(slot) => Some(slot),
                crate::calls::SendProgress::Done(_) => None,
            })
            .collect();
        for slot in sends {
            self.fail_send(slot, error);
        }
        if let Some(request) = generation {
            self.fail_request(request, error);
        }
        if let Some(slot) = receiving {
            self.fail_reception(slot, error);
        }
        self.calls.bury(seq_id, self.now);
    }

    /// Ends whatever a sequence is part of, telling everyone who waits `error`. The request may be tried again.
    pub(crate) fn fail(&mut self, slot: Slot, error: &EngineError) {
        let Some(sequence) = self.sequences.get(&slot) else { return };
        match &sequence.work {
            Work::Send(_) => self.fail_send(slot, error),
            Work::Generate(choice) => {
                let request = choice.request;
                self.fail_request(request, error);
            }
            Work::Receive(reception) => match &reception.start {
                Some(start) => {
                    let request = start.request;
                    self.fail_request(request, error);
                    self.fail_reception(slot, error);
                }
                None => self.fail_reception(slot, error),
            },
        }
    }

    /// Ends a `remote_send`.
    pub(crate) fn fail_send(&mut self, slot: Slot, error: &EngineError) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Send(delivery) = &mut sequence.work else { return };
        let calls = std::mem::take(&mut delivery.calls);
        let range = delivery.range;
        let seq_id = sequence.key.seq_id.clone();
        for call in calls {
            self.reply(call, Err(error.clone()));
        }
        if let Some(record) = self.calls.get_mut(&seq_id) {
            record.sends.remove(&range);
        }
        self.retire(slot);
    }

    /// Ends a generation with all its choices, and the reservation that it waits for.
    pub(crate) fn fail_request(&mut self, id: RequestId, error: &EngineError) {
        let Some(mut request) = self.requests.remove(&id) else { return };
        request.end(Ending::Failed(error.clone()), &mut self.effects);
        if let Some(record) = self.calls.get_mut(&request.key.seq_id)
            && record.generation == Some(id)
        {
            record.generation = None;
            // What it was prepared with is used up.
            record.prepared = None;
        }
        for slot in request.slots() {
            self.retire(slot);
        }
    }

    /// Ends a reservation, telling the `commit` calls that wait for it.
    pub(crate) fn fail_reception(&mut self, slot: Slot, error: &EngineError) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let seq_id = sequence.key.seq_id.clone();
        let Work::Receive(reception) = &mut sequence.work else { return };
        let commits = std::mem::take(&mut reception.commits);
        for call in commits {
            self.reply(call, Err(error.clone()));
        }
        if let Some(record) = self.calls.get_mut(&seq_id) {
            record.prepared = None;
        }
        self.retire(slot);
    }

    /// Hears that a caller has gone away; what nobody waits for any more is given up.
    pub(crate) fn cancel(&mut self, call: CallId) {
        self.drains.retain(|&drain| drain != call);
        let abandoned = self
            .requests
            .iter_mut()
            .find_map(|(_, request)| request.detach(call).then(|| request.key.seq_id.clone()));
        if let Some(seq_id) = abandoned {
            self.counters.aborted += 1;
            if self.rules.break_by(Mutant::MissingAbort) {
                return;
            }
            let error = EngineError::Aborted { seq_id: seq_id.clone() };
            self.end_record(&seq_id, Fate::Aborted, &error);
            return;
        }
        let Some((slot, unheard)) = self.sequences.iter_mut().find_map(|(slot, sequence)| {
            match &mut sequence.work {
                Work::Send(delivery) => {
                    let before = delivery.calls.len();
                    delivery.calls.retain(|&waiting| waiting != call);
                    (delivery.calls.len() < before).then_some((*slot, delivery.calls.is_empty()))
                }
                Work::Receive(reception) => {
                    reception.commits.retain(|&waiting| waiting != call);
                    // Nobody heard the address, so nobody can use it.
                    let unheard = reception.made_by == call && reception.start.is_none();
                    unheard.then_some((*slot, true))
                }
                Work::Generate(_) => None,
            }
        }) else {
            return;
        };
        if unheard {
            let Some(seq_id) = self.sequences.get(&slot).map(|s| s.key.seq_id.clone()) else { return };
            self.counters.aborted += 1;
            self.fail(slot, &EngineError::Aborted { seq_id: seq_id.clone() });
            // The record stays, and stays open: the same call may come again after a lost connection, while a late echo of a
            // lower attempt, or of one that was aborted, is refused as before.
        }
    }

    /// Says what a transport's refusal means to the caller of `remote_send`.
    pub(crate) fn refusal(generation: microserving_protocol::Generation, refusal: Refusal) -> EngineError {
        match refusal {
            Refusal::Stale => EngineError::AddressExpired { generation },
            refusal => EngineError::Refused { refusal },
        }
    }
}
