//! What the transport reports, and what it means to whom.

use microserving_protocol::Generation;
use microserving_transport::{ChannelId, Refusal, TransportEvent};
use std::time::Duration;

use crate::calls::SendProgress;
use crate::sequence::{Arrival, Event, Pages, Slot, State, Work};
use crate::{Engine, EngineError, Reply};

impl Engine {
    /// Takes what the transport has to say.
    pub(crate) fn hear_transport(&mut self) {
        let mut events = Vec::new();
        self.transport.poll(self.now, &mut events);
        for sequence in self.sequences.values_mut() {
            // A step's computing is over when the next one begins.
            if sequence.state == State::Sending
                && let Work::Send(delivery) = &mut sequence.work
            {
                delivery.computed_at.get_or_insert(self.now);
            }
        }
        for event in events {
            tracing::debug!(?event, "transport");
            match event {
                TransportEvent::Opened { .. } => {}
                TransportEvent::Finished { channel, num_bytes, busy } => {
                    self.delivered(channel, num_bytes, busy);
                }
                TransportEvent::Closed { channel, refusal } => self.closed(channel, refusal),
                TransportEvent::Complete { generation } => self.arrived(generation),
                TransportEvent::Lost { generation, range, corrupt } => {
                    tracing::warn!(%generation, %range, corrupt, "a transfer was lost");
                    self.lost(generation);
                }
                TransportEvent::Released { generation, fenced } => {
                    if fenced {
                        tracing::warn!(%generation, "a writer's exit had to be awaited");
                    }
                    self.released(generation);
                }
            }
        }
    }

    /// Sender: the receiver can read everything.
    fn delivered(&mut self, channel: ChannelId, num_bytes: u64, busy: Duration) {
        self.closing.remove(&channel);
        let Some(slot) = self.channels.remove(&channel) else { return };
        let now = self.now;
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Send(delivery) = &mut sequence.work else { return };
        let mut reply = delivery.reply;
        reply.bytes = num_bytes;
        reply.transfer = busy;
        reply.exposed_transfer = now.saturating_sub(delivery.computed_at.unwrap_or(now));
        let calls = std::mem::take(&mut delivery.calls);
        let range = delivery.range;
        let seq_id = sequence.key.seq_id.clone();
        self.counters.bytes_sent += num_bytes;
        self.counters.transfer_micros += micros(busy);
        self.counters.exposed_transfer_micros += micros(reply.exposed_transfer);
        if let Some(record) = self.calls.get_mut(&seq_id)
            && let Some(sending) = record.sends.get_mut(&range)
        {
            sending.progress = SendProgress::Done(reply);
        }
        for call in calls {
            self.reply(call, Ok(Reply::RemoteSend(reply)));
        }
        self.retire(slot);
    }

    /// Sender: nothing more is written, and our pages are ours again.
    fn closed(&mut self, channel: ChannelId, refusal: Option<Refusal>) {
        if self.closing.remove(&channel).is_some() {
            self.cache.collect();
        }
        let Some(slot) = self.channels.remove(&channel) else { return };
        let Some(sequence) = self.sequences.get(&slot) else { return };
        let Work::Send(delivery) = &sequence.work else { return };
        let error = match refusal {
            Some(refusal) => Self::refusal(delivery.address.generation, refusal),
            None => EngineError::Aborted { seq_id: sequence.key.seq_id.clone() },
        };
        self.counters.transfers_lost += 1;
        self.fail_send(slot, &error);
    }

    /// Receiver: all of it is here and nobody can write any more.
    fn arrived(&mut self, generation: Generation) {
        if self.release_quarantine(generation) {
            return;
        }
        let token_bytes = self.geometry.layout.token_bytes() as u64;
        let Some(slot) = self.settle_arrival(generation, Arrival::Complete) else { return };
        if let Some(sequence) = self.sequences.get(&slot)
            && let Work::Receive(reception) = &sequence.work
        {
            let num_tokens = u64::from(reception.end - reception.matched);
            self.counters.bytes_received += num_tokens * token_bytes;
        }
        self.proceed(slot);
    }

    /// Receiver: part of it will not come, or is damaged. Everyone is told to stop writing.
    fn lost(&mut self, generation: Generation) {
        let Some(&slot) = self.receiving.get(&generation) else { return };
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Receive(reception) = &mut sequence.work else { return };
        if reception.arrival != Arrival::Pending {
            return;
        }
        reception.arrival = Arrival::Revoking;
        self.counters.transfers_lost += 1;
        self.gate.close(generation);
        self.transport.revoke(generation);
    }

    /// Receiver: nobody can write under this generation any more.
    fn released(&mut self, generation: Generation) {
        if self.release_quarantine(generation) {
            return;
        }
        if let Some(slot) = self.settle_arrival(generation, Arrival::Lost) {
            self.proceed(slot);
        }
    }

    /// Frees what was quarantined under a generation, if anything was.
    pub(crate) fn release_quarantine(&mut self, generation: Generation) -> bool {
        if self.quarantined.remove(&generation).is_none() {
            return false;
        }
        if let Err(error) = self.cache.drained(generation) {
            tracing::error!(%error, "the quarantine lists differ");
        }
        true
    }

    /// Makes a reservation's pages its sequence's own.
    fn settle_arrival(&mut self, generation: Generation, arrival: Arrival) -> Option<Slot> {
        let slot = self.receiving.remove(&generation)?;
        self.gate.close(generation);
        let sequence = self.sequences.get_mut(&slot)?;
        let Work::Receive(reception) = &mut sequence.work else { return None };
        // A grant can only be released after it was revoked, and a completed one is not revoked; whatever the transport
        // says, bytes are trusted only if it said that all of them are here.
        reception.arrival = arrival;
        let computed = if arrival == Arrival::Complete { reception.end } else { reception.matched };
        reception.lease.renew(self.now);
        if let Pages::Promised(reservation) = sequence.pages.take() {
            match self.cache.accept(reservation) {
                Ok(table) => {
                    sequence.pages = Pages::Table(table);
                    sequence.computed = computed;
                }
                Err(error) => tracing::error!(%error, "a reservation is not this cache's"),
            }
        }
        Some(slot)
    }

    /// Lets a reservation go where it is wanted, once nobody can write to it any more.
    pub(crate) fn proceed(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Receive(reception) = &mut sequence.work else { return };
        if !reception.arrival.is_settled() {
            return;
        }
        if let Some(start) = reception.start.take() {
            let (matched, end, arrival) = (reception.matched, reception.end, reception.arrival);
            if arrival == Arrival::Nothing {
                sequence.computed = matched;
            }
            let computed = sequence.computed;
            let request = start.request;
            sequence.work = Work::Generate(crate::sequence::Choice {
                request,
                index: 0,
                sampler: Some(start.sampler),
                behind: None,
            });
            sequence.since = self.now;
            sequence.happen(Event::Started);
            let seq_id = sequence.key.seq_id.clone();
            if let Some(record) = self.calls.get_mut(&seq_id) {
                record.receiving = None;
            }
            let received = if arrival == Arrival::Complete { end - matched } else { 0 };
            if let Some(request) = self.requests.get_mut(&request) {
                let prompt = request.usage.prompt_tokens;
                request.usage.cached_tokens = matched.min(prompt);
                request.usage.received_tokens = received;
                request.usage.computed_tokens = prompt.saturating_sub(computed);
                if request.paused
                    && let Some(sequence) = self.sequences.get_mut(&slot)
                {
                    sequence.happen(Event::Paused);
                }
            }
            self.share_pages(slot);
        } else if !reception.commits.is_empty() {
            self.finish_commit(slot);
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
