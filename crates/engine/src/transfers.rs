//! What the transport reports, and what it means to whom.

use microserving_kvcache::lifecycle;
use microserving_transport::{ChannelId, Refusal, TransportEvent};
use std::time::Duration;

use crate::calls::SendProgress;
use crate::sequence::{State, Work};
use crate::{Engine, EngineError, Reply};

impl Engine {
    /// Takes what the transport has to say.
    pub(crate) fn hear_transport(&mut self) {
        if self.device_lost {
            return;
        }
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
                TransportEvent::Complete { generation } => {
                    self.grant_event(generation, lifecycle::Event::Complete);
                }
                TransportEvent::Lost { generation, range, corrupt } => {
                    tracing::warn!(%generation, %range, corrupt, "a transfer was lost");
                    self.grant_event(generation, lifecycle::Event::Lost);
                }
                TransportEvent::Released { generation, fenced } => {
                    if fenced {
                        tracing::warn!(%generation, "a writer's exit had to be awaited");
                    }
                    self.grant_event(generation, lifecycle::Event::Released);
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
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
