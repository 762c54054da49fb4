//! A connection to a receiver, at its sender.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Frame, MAX_RECORDS, Notice, Stopping, Target, VERSION};
use microserving_transport::{ChannelId, Refusal};

use crate::link::{Link, LinkError, Received};
use crate::memory::PeerMemory;
use crate::shared::Shared;

/// One connection serves all claims on a receiver; its region is mapped once.
pub(crate) struct Outbound {
    name: String,
    link: Link,
    memory: Option<Arc<PeerMemory>>,
    channels: BTreeSet<ChannelId>,
}

impl Outbound {
    /// Connects to a receiver and says who we are.
    pub(crate) fn connect(name: String, start_time: u64, checksum: bool) -> Result<Self, LinkError> {
        let mut link = Link::connect(&name)?;
        link.send(&Frame::Hello { version: VERSION, start_time, checksum }, Vec::new())?;
        Ok(Self { name, link, memory: None, channels: BTreeSet::new() })
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Says whether the channel's claim is on this receiver.
    pub(crate) fn has(&self, channel: ChannelId) -> bool {
        self.channels.contains(&channel)
    }

    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        self.link.flush()
    }

    pub(crate) fn open(
        &mut self,
        channel: ChannelId,
        range: KvRange,
        credential: Vec<u8>,
    ) -> Result<(), LinkError> {
        self.channels.insert(channel);
        self.link.send(&Frame::Open { channel: channel.0, range, credential }, Vec::new())
    }

    /// Tells the receiver that everything was written.
    pub(crate) fn written(&mut self, shared: &Shared, channel: ChannelId) -> Result<(), LinkError> {
        // A channel that was stopped meanwhile says `Stopped` next.
        let Some(delivered) = shared.channels().delivered(channel) else { return Ok(()) };
        for records in delivered.records.chunks(MAX_RECORDS) {
            self.link.send(&Frame::Records { channel: channel.0, records: records.to_vec() }, Vec::new())?;
        }
        tracing::trace!(channel = channel.0, delivered.num_bytes, ?delivered.busy, "all written");
        self.link.send(&Frame::Finish { channel: channel.0, num_bytes: delivered.num_bytes }, Vec::new())
    }

    /// Tells the receiver that nothing of the claim can land any more.
    pub(crate) fn drained(&mut self, channel: ChannelId) -> Result<(), LinkError> {
        self.channels.remove(&channel);
        self.link.send(&Frame::Drained { channel: channel.0 }, Vec::new())
    }

    /// Reads and handles at most `max_packets` packets. What is to be done about channels is added to `notices`.
    pub(crate) fn read(
        &mut self,
        shared: &Shared,
        max_packets: usize,
        notices: &mut Vec<Notice>,
    ) -> Result<(), LinkError> {
        for _ in 0..max_packets {
            match self.link.receive()? {
                None => return Ok(()),
                Some(None) => {}
                Some(Some(received)) => notices.extend(self.handle(shared, received)?),
            }
        }
        Ok(())
    }

    /// Ends all channels: the receiver is gone. Those being written end when the writer is done with them.
    pub(crate) fn hang_up(&self, shared: &Shared, why: &LinkError) -> Vec<Notice> {
        let met = self.memory.is_some() || why.is_nobody();
        let refusal = if met { Refusal::PeerLost } else { Refusal::Unreachable };
        let mut channels = shared.channels();
        self.channels
            .iter()
            .filter_map(|channel| channels.stop(*channel, Stopping::Because(refusal)))
            .collect()
    }

    fn handle(&mut self, shared: &Shared, received: Received) -> Result<Option<Notice>, LinkError> {
        let Received { frame, fds } = received;
        match frame {
            Frame::Accept { channel, slot, num_bytes, checksum, runs } => {
                let memory = self.memory(fds)?;
                if !memory.has_slot(slot) {
                    return Err(LinkError::Protocol("a counter that does not exist"));
                }
                let inside = |run: &microserving_transport::ByteRun| {
                    run.offset
                        .checked_add(run.num_bytes)
                        .is_some_and(|end| end <= memory.region().num_bytes())
                };
                if !runs.iter().all(inside) || !runs.is_sorted_by_key(|run| run.offset) {
                    return Err(LinkError::Protocol("runs outside the region"));
                }
                let target = Target { memory, slot, num_bytes, runs: runs.into(), checksum };
                let channel = ChannelId(channel);
                // A channel that we gave up meanwhile is drained already, or will be.
                if !self.channels.contains(&channel) {
                    return Ok(None);
                }
                let notice = shared.channels().accept(channel, target);
                shared.work.notify_one();
                Ok(notice)
            }
            Frame::Refuse { channel, refusal } => {
                let channel = ChannelId(channel);
                let mut channels = shared.channels();
                if channels.is_accepted(channel) {
                    return Err(LinkError::Protocol("a claim is refused after it was accepted"));
                }
                if self.channels.remove(&channel) {
                    channels.close(channel, Some(refusal));
                }
                Ok(None)
            }
            Frame::Stop { channel } => {
                let channel = ChannelId(channel);
                let known = self.channels.contains(&channel);
                Ok(known
                    .then(|| shared.channels().stop(channel, Stopping::Because(Refusal::Revoked)))
                    .flatten())
            }
            Frame::Finished { channel, refusal } => {
                let channel = ChannelId(channel);
                if !self.channels.contains(&channel) {
                    return Ok(None);
                }
                let mut channels = shared.channels();
                if !channels.is_written(channel) {
                    return Err(LinkError::Protocol("a claim is finished before it was written"));
                }
                self.channels.remove(&channel);
                match refusal {
                    None => channels.complete(channel),
                    Some(refusal) => channels.close(channel, Some(refusal)),
                }
                Ok(None)
            }
            Frame::Reject { reason } => {
                tracing::warn!(reason, "the receiver turned us away");
                Err(LinkError::Rejected)
            }
            Frame::Hello { .. }
            | Frame::Open { .. }
            | Frame::Records { .. }
            | Frame::Finish { .. }
            | Frame::Drained { .. } => Err(LinkError::Protocol("a receiver sent a sender's frame")),
        }
    }

    /// Returns the receiver's memory, mapped when it is first sent.
    fn memory(&mut self, fds: Vec<OwnedFd>) -> Result<Arc<PeerMemory>, LinkError> {
        if let Some(memory) = &self.memory {
            return Ok(memory.clone());
        }
        let [region, counters] = fds.as_slice() else {
            return Err(LinkError::Protocol("the first acceptance brings no memory"));
        };
        let memory = Arc::new(PeerMemory::map(region, counters)?);
        self.memory = Some(memory.clone());
        Ok(memory)
    }
}
