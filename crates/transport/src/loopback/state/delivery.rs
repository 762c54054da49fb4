//! How a message that is due changes its receiver, and what a channel does next.

use microserving_protocol::{Generation, KvMemory, KvRange};
use xxhash_rust::xxh3::xxh3_64;

use super::super::channel::{Record, Stopping};
use super::super::memory::LoopbackMemory;
use super::{Incoming, Kind, Message, PeerId, State};
use crate::book::{Accepted, Delivery, Ending};
use crate::{ByteRun, ChannelId, PutRun, Refusal, TransportEvent};

impl State {
    /// Delivers a message. `admitted` is the receiver's judgement of an `Open`.
    pub(in super::super) fn handle(
        &mut self,
        message: Message,
        admitted: Option<Result<Generation, Refusal>>,
    ) {
        let Message { from, to, kind } = message;
        match kind {
            Kind::Open { channel, range, .. } => self.on_open(from, to, channel, range, admitted),
            Kind::Verdict { channel, verdict } => self.on_verdict(to, channel, verdict),
            Kind::Land { channel, run, source } => self.on_land(from, to, channel, run, &source),
            Kind::Finish { channel, num_bytes, records } => {
                self.on_finish(from, to, channel, num_bytes, &records);
            }
            Kind::Finished { channel, result } => self.on_finished(to, channel, result),
            Kind::Stop { channel } => self.stop(to, channel, Stopping::Because(Refusal::Revoked)),
            Kind::Drained { channel } => {
                if let Some(peer) = self.peers.get_mut(&to)
                    && let Some(incoming) = peer.incoming.remove(&(from, channel))
                {
                    peer.book.end(incoming.claim, Ending::Drained);
                }
            }
            Kind::Hangup => self.on_hangup(from, to),
            Kind::Fence => self.on_fence(from, to),
        }
    }

    fn on_open(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        range: KvRange,
        admitted: Option<Result<Generation, Refusal>>,
    ) {
        let verdict = match self.peers.get_mut(&to) {
            None => Err(Refusal::PeerLost),
            Some(peer) => match admitted.unwrap_or(Err(Refusal::BadCredential)) {
                Ok(generation) => {
                    let accepted = peer.book.claim(generation, range, (from, channel));
                    if let Ok(accepted) = &accepted {
                        let incoming = Incoming { claim: accepted.claim, landed_bytes: 0 };
                        peer.incoming.insert((from, channel), incoming);
                    }
                    accepted
                }
                Err(refusal) => {
                    peer.book.count_refused();
                    Err(refusal)
                }
            },
        };
        self.send(to, from, Kind::Verdict { channel, verdict });
    }

    fn on_verdict(&mut self, to: PeerId, channel: ChannelId, verdict: Result<Accepted, Refusal>) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        match verdict {
            Ok(accepted) => {
                open.accepted = Some(accepted);
                peer.events.push(TransportEvent::Opened { channel });
                self.pump(to, channel);
            }
            Err(refusal) => {
                peer.channels.remove(&channel);
                peer.events.push(TransportEvent::Closed { channel, refusal: Some(refusal) });
            }
        }
    }

    fn on_land(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        run: PutRun,
        source: &LoopbackMemory,
    ) {
        let lost = self.dice.chance(self.faults.lose_writer);
        let corrupt = self.dice.chance(self.faults.corrupt);
        let flip = self.dice.next();
        if let Some(peer) = self.peers.get_mut(&to)
            && let Some(target) = peer.region.clone()
            && !lost
        {
            copy(source, &target, run);
            if corrupt && run.num_bytes > 0 {
                let at = run.remote_offset + (flip >> 3) as usize % run.num_bytes;
                let mut byte = [0];
                target.read(at, &mut byte);
                target.write(at, &[byte[0] ^ (1 << (flip & 7))]);
            }
            if let Some(incoming) = peer.incoming.get_mut(&(from, channel)) {
                incoming.landed_bytes += run.num_bytes as u64;
                peer.book.progress(incoming.claim, incoming.landed_bytes);
            }
        }
        let now = self.now;
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        open.landed(now);
        if lost {
            open.stop(Stopping::Because(Refusal::PeerLost));
        } else {
            peer.bytes_sent += run.num_bytes as u64;
        }
        self.pump(from, channel);
    }

    fn on_finish(
        &mut self,
        from: PeerId,
        to: PeerId,
        channel: ChannelId,
        num_bytes: u64,
        records: &[Record],
    ) {
        let result = match self.peers.get_mut(&to) {
            None => Err(Refusal::PeerLost),
            Some(peer) => match peer.incoming.remove(&(from, channel)) {
                None => Err(Refusal::Stale),
                Some(incoming) => {
                    let intact = peer.region.as_ref().is_some_and(|region| all_match(region, records));
                    peer.book.finish(incoming.claim, Delivery { num_bytes, intact })
                }
            },
        };
        self.send(to, from, Kind::Finished { channel, result });
    }

    fn on_finished(&mut self, to: PeerId, channel: ChannelId, result: Result<(), Refusal>) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let Some(open) = peer.channels.remove(&channel) else { return };
        peer.send_busy += open.busy();
        peer.events.push(match result {
            Ok(()) => TransportEvent::Finished { channel, num_bytes: open.posted_bytes, busy: open.busy() },
            Err(refusal) => TransportEvent::Closed { channel, refusal: Some(refusal) },
        });
    }

    fn on_hangup(&mut self, dead: PeerId, to: PeerId) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        for ((writer, _), incoming) in &peer.incoming {
            if *writer == dead {
                peer.book.end(incoming.claim, Ending::Vanished);
            }
        }
        let lost: Vec<_> = peer
            .channels
            .iter()
            .filter(|(_, open)| open.remote == dead)
            .map(|(channel, _)| *channel)
            .collect();
        for channel in lost {
            peer.channels.remove(&channel);
            let refusal = Some(Refusal::PeerLost);
            peer.events.push(TransportEvent::Closed { channel, refusal });
        }
    }

    fn on_fence(&mut self, dead: PeerId, to: PeerId) {
        let posted = |m: &Message| !m.is_control() && m.from == dead && m.to == to;
        self.queue.retain(|_, message| !posted(message));
        self.held.retain(|message| !posted(message));
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let theirs: Vec<_> = peer.incoming.keys().copied().filter(|(writer, _)| *writer == dead).collect();
        for key in theirs {
            if let Some(incoming) = peer.incoming.remove(&key) {
                peer.book.end(incoming.claim, Ending::Fenced);
            }
        }
    }

    pub(in super::super) fn stop(&mut self, sender: PeerId, channel: ChannelId, why: Stopping) {
        if let Some(open) = self.peers.get_mut(&sender).and_then(|peer| peer.channels.get_mut(&channel)) {
            open.stop(why);
            self.pump(sender, channel);
        }
    }

    /// Posts what may be posted, and finishes or closes a channel whose last run has landed.
    pub(in super::super) fn pump(&mut self, sender: PeerId, channel: ChannelId) {
        let now = self.now;
        loop {
            let Some(peer) = self.peers.get_mut(&sender) else { return };
            let Some(source) = peer.region.clone() else { break };
            let Some(open) = peer.channels.get_mut(&channel) else { return };
            let Some(run) = open.next_run(now) else { break };
            if self.checksum {
                let hash = hash_of(&source, run.local_offset, run.num_bytes);
                let run = ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes };
                open.records.push(Record { run, hash });
            }
            let to = open.remote;
            let due = now + self.delay();
            self.enqueue(due, Message { from: sender, to, kind: Kind::Land { channel, run, source } });
        }
        let Some(peer) = self.peers.get_mut(&sender) else { return };
        let Some(open) = peer.channels.get_mut(&channel) else { return };
        let to = open.remote;
        if let Some(why) = open.stopping {
            if open.in_flight == 0 {
                peer.send_busy += open.busy();
                peer.channels.remove(&channel);
                peer.events.push(TransportEvent::Closed { channel, refusal: why.refusal() });
                self.send(sender, to, Kind::Drained { channel });
            }
        } else if open.may_finish() {
            open.finish_sent = true;
            let records = std::mem::take(&mut open.records);
            let num_bytes = open.posted_bytes;
            self.send(sender, to, Kind::Finish { channel, num_bytes, records });
        }
    }
}

/// Copies by way of a buffer on the stack; a run may be large.
fn copy(source: &LoopbackMemory, target: &LoopbackMemory, run: PutRun) {
    each_chunk(run.num_bytes, |at, chunk| {
        source.read(run.local_offset + at, chunk);
        target.write(run.remote_offset + at, chunk);
    });
}

fn hash_of(memory: &LoopbackMemory, offset: usize, num_bytes: usize) -> u64 {
    let mut bytes = vec![0; num_bytes];
    memory.read(offset, &mut bytes);
    xxh3_64(&bytes)
}

fn all_match(memory: &LoopbackMemory, records: &[Record]) -> bool {
    records.iter().all(|record| hash_of(memory, record.run.offset, record.run.num_bytes) == record.hash)
}

fn each_chunk(num_bytes: usize, mut each: impl FnMut(usize, &mut [u8])) {
    let mut buffer = [0; 4096];
    let mut at = 0;
    while at < num_bytes {
        let len = buffer.len().min(num_bytes - at);
        each(at, &mut buffer[..len]);
        at += len;
    }
}
