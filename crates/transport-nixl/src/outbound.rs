//! A connection to a receiver, at its sender.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{
    Copied, Frame, MAX_MESSAGE, MAX_RECORDS, Notice, Record, Slice, Stopping, Target,
};
use microserving_transport::{ByteRun, ChannelId, Refusal};

use crate::address::Address;
use crate::clock::now;
use crate::link::{Link, LinkError};
use crate::memory::Region;
use crate::message::{Introduction, MAX_PUT_RUNS, Message};
use crate::shared::{ConnId, Shared};

/// What was announced on a channel and is not taken yet.
#[derive(Debug)]
struct Announced {
    num_puts: usize,
    num_bytes: u64,
    records: Vec<Record>,
    begun: Duration,
}

/// One connection serves all claims on a receiver.
pub(crate) struct Outbound {
    id: ConnId,
    address: Address,
    link: Link,
    /// The receiver let a claim in.
    met: bool,
    channels: BTreeSet<ChannelId>,
    announced: BTreeMap<ChannelId, Announced>,
}

impl Outbound {
    /// Begins to connect to a receiver, and says how to read from here.
    pub(crate) fn connect(
        id: ConnId,
        address: Address,
        introduction: Introduction,
    ) -> Result<Self, LinkError> {
        let mut link = Link::connect(address.listen)?;
        link.send(&Message::Introduce(introduction))?;
        Ok(Self { id, address, link, met: false, channels: BTreeSet::new(), announced: BTreeMap::new() })
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    pub(crate) fn link_mut(&mut self) -> &mut Link {
        &mut self.link
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Says whether the channel's claim is on this receiver.
    pub(crate) fn has(&self, channel: ChannelId) -> bool {
        self.channels.contains(&channel)
    }

    /// Says whether the receiver may be reading from here, or has not been told yet that it should not.
    pub(crate) fn is_busy(&self) -> bool {
        !self.announced.is_empty() || !self.link.is_flushed()
    }

    fn send(&mut self, frame: Frame) -> Result<(), LinkError> {
        self.link.send(&Message::Frame(frame))
    }

    pub(crate) fn open(
        &mut self,
        channel: ChannelId,
        range: KvRange,
        credential: Vec<u8>,
    ) -> Result<(), LinkError> {
        self.channels.insert(channel);
        self.send(Frame::Open { channel: channel.0, range, credential })
    }

    /// Announces a slice: the receiver is to read it.
    pub(crate) fn announce(&mut self, region: &Region, slice: &Slice<ConnId>) -> Result<(), LinkError> {
        let mut records = Vec::new();
        if slice.target.checksum {
            records.extend(slice.runs.iter().map(|run| Record {
                run: ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes },
                hash: region.hash(run.local_offset, run.num_bytes),
            }));
        }
        let puts = slice.runs.chunks(MAX_PUT_RUNS);
        let num_bytes = slice.runs.iter().map(|run| run.num_bytes as u64).sum();
        let announced = Announced { num_puts: puts.len(), num_bytes, records, begun: now() };
        self.announced.insert(slice.channel, announced);
        for runs in puts {
            self.link.send(&Message::Put { channel: slice.channel.0, runs: runs.to_vec() })?;
        }
        Ok(())
    }

    /// Tells the receiver that everything was announced, which it has said that it has read.
    pub(crate) fn written(&mut self, shared: &Shared, channel: ChannelId) -> Result<(), LinkError> {
        // A channel that was stopped meanwhile says `Stopped` next.
        let Some(delivered) = shared.state().channels.delivered(channel) else { return Ok(()) };
        for records in delivered.records.chunks(MAX_RECORDS) {
            self.send(Frame::Records { channel: channel.0, records: records.to_vec() })?;
        }
        self.send(Frame::Finish { channel: channel.0, num_bytes: delivered.num_bytes })
    }

    /// Tells the receiver that nothing more of the claim follows.
    pub(crate) fn drained(&mut self, channel: ChannelId) -> Result<(), LinkError> {
        self.channels.remove(&channel);
        self.send(Frame::Drained { channel: channel.0 })
    }

    /// Handles what was read. What is to be done about channels is added to `notices`.
    pub(crate) fn handle_all(&mut self, shared: &Shared, notices: &mut Vec<Notice>) -> Result<(), LinkError> {
        while let Some(message) = self.link.next(MAX_MESSAGE)? {
            notices.extend(self.handle(shared, message)?);
        }
        Ok(())
    }

    /// Ends all channels: the receiver is gone, or taken for it. What it is reading still will not pass for complete without a word of ours.
    pub(crate) fn hang_up(&mut self, shared: &Shared, why: &LinkError) -> Vec<Notice> {
        let lost = self.met || why.is_nobody();
        let refusal = if lost { Refusal::PeerLost } else { Refusal::Unreachable };
        let channels = &mut shared.state().channels;
        let mut notices = Vec::new();
        for channel in &self.channels {
            notices.extend(channels.stop(*channel, Stopping::Because(refusal)));
        }
        for (channel, announced) in std::mem::take(&mut self.announced) {
            let busy = now().saturating_sub(announced.begun);
            notices.extend(channels.copied(channel, Copied { num_bytes: 0, busy, records: Vec::new() }));
        }
        notices
    }

    fn handle(&mut self, shared: &Shared, message: Message) -> Result<Option<Notice>, LinkError> {
        let frame = match message {
            Message::Frame(frame) => frame,
            Message::Taken { channel, num_bytes } => {
                return self.on_taken(shared, ChannelId(channel), num_bytes);
            }
            Message::Beat => return Ok(None),
            Message::Introduce(_) | Message::Put { .. } => {
                return Err(LinkError::Protocol("a receiver sent a sender's message"));
            }
        };
        match frame {
            Frame::Accept { channel, num_bytes, checksum, runs, .. } => {
                if !runs.is_sorted_by_key(|run| run.offset) {
                    return Err(LinkError::Protocol("runs that are not in order"));
                }
                self.met = true;
                let channel = ChannelId(channel);
                // A channel that we gave up meanwhile is drained already, or will be.
                if !self.channels.contains(&channel) {
                    return Ok(None);
                }
                let target = Target { memory: self.id, slot: 0, num_bytes, runs: runs.into(), checksum };
                Ok(shared.state().channels.accept(channel, target))
            }
            Frame::Refuse { channel, refusal } => {
                let channel = ChannelId(channel);
                let channels = &mut shared.state().channels;
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
                if !self.channels.contains(&channel) {
                    return Ok(None);
                }
                Ok(shared.state().channels.stop(channel, Stopping::Because(Refusal::Revoked)))
            }
            Frame::Finished { channel, refusal } => {
                let channel = ChannelId(channel);
                let channels = &mut shared.state().channels;
                if !self.channels.contains(&channel) {
                    return Ok(None);
                }
                if !channels.is_written(channel) {
                    return Err(LinkError::Protocol("a claim is finished before all of it was announced"));
                }
                self.channels.remove(&channel);
                match refusal {
                    None => channels.complete(channel),
                    refusal => channels.close(channel, refusal),
                }
                Ok(None)
            }
            Frame::Reject { reason } => {
                tracing::warn!(reason, "a receiver turned us away");
                Err(LinkError::Rejected)
            }
            Frame::Hello { .. }
            | Frame::Open { .. }
            | Frame::Records { .. }
            | Frame::Finish { .. }
            | Frame::Drained { .. } => Err(LinkError::Protocol("a receiver sent a sender's frame")),
        }
    }

    fn on_taken(
        &mut self,
        shared: &Shared,
        channel: ChannelId,
        num_bytes: u64,
    ) -> Result<Option<Notice>, LinkError> {
        let Some(announced) = self.announced.get_mut(&channel) else {
            return Err(LinkError::Protocol("more is taken than was announced"));
        };
        announced.num_puts -= 1;
        if num_bytes == 0 {
            // The claim has ended there, which it says, or said.
            announced.num_bytes = 0;
        }
        if announced.num_puts > 0 {
            return Ok(None);
        }
        let Some(announced) = self.announced.remove(&channel) else { return Ok(None) };
        let busy = now().saturating_sub(announced.begun);
        let Announced { num_bytes, records, .. } = announced;
        Ok(shared.state().channels.copied(channel, Copied { num_bytes, busy, records }))
    }
}
