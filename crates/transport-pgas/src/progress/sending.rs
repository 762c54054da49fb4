//! The sender's half: our claims on the regions of others.

use microserving_protocol::PeId;
use microserving_transport::one_sided::{
    Copied, Frame, MAX_RECORDS, Notice, Record, Slice, Stopping, Target,
};
use microserving_transport::{ByteRun, ChannelId, Refusal};

use super::{Progress, hash};
use crate::clock::now;
use crate::control::NUM_SLOTS;
use crate::pgas::Put;

impl Progress {
    /// Tells a receiver what the channels say.
    pub(super) fn tell(&mut self, notice: Notice) {
        let (Notice::Written(channel) | Notice::Stopped(channel)) = notice;
        let Some(pe) = self.everybody().find(|pe| self.peers[pe.0 as usize].sending.contains_key(&channel))
        else {
            // It was never opened, or its receiver is gone.
            self.shared.channels().close(channel, Some(Refusal::PeerLost));
            return;
        };
        match notice {
            Notice::Written(channel) => {
                // A channel that was stopped meanwhile says `Stopped` next.
                let Some(delivered) = self.shared.channels().delivered(channel) else { return };
                for records in delivered.records.chunks(MAX_RECORDS) {
                    self.send(pe, &Frame::Records { channel: channel.0, records: records.to_vec() });
                }
                self.send(pe, &Frame::Finish { channel: channel.0, num_bytes: delivered.num_bytes });
            }
            Notice::Stopped(channel) => {
                self.peer(pe).sending.remove(&channel);
                self.send(pe, &Frame::Drained { channel: channel.0 });
                self.shared.channels().close(channel, None);
            }
        }
    }

    /// Closes a channel whose receiver is not there.
    pub(super) fn give_up(&self, channel: ChannelId) {
        let mut channels = self.shared.channels();
        if channels.stop(channel, Stopping::Because(Refusal::PeerLost)).is_some() {
            channels.close(channel, None);
        }
    }

    pub(super) fn on_accept(
        &mut self,
        from: PeId,
        channel: ChannelId,
        target: Target<PeId>,
    ) -> Result<(), String> {
        if target.slot >= NUM_SLOTS {
            return Err("a counter that does not exist".into());
        }
        let bounds = self.region.num_bytes();
        let inside = |run: &ByteRun| run.offset.checked_add(run.num_bytes).is_some_and(|end| end <= bounds);
        if !target.runs.iter().all(inside) || !target.runs.is_sorted_by_key(|run| run.offset) {
            return Err("runs outside the region".into());
        }
        // A channel that we gave up meanwhile is drained already, or will be.
        if self.peer(from).sending.contains_key(&channel) {
            let notice = self.shared.channels().accept(channel, target);
            notice.into_iter().for_each(|notice| self.tell(notice));
        }
        Ok(())
    }

    /// Writes the next slice; says whether there was one.
    pub(super) fn write_slice(&mut self) -> bool {
        let (slice, mut notice) = self.shared.channels().next_slice(self.shared.config.slice_bytes);
        let any = slice.is_some() || notice.is_some();
        if let Some(slice) = slice {
            let copied = self.copy(&slice);
            notice = self.shared.channels().copied(slice.channel, copied);
        }
        notice.into_iter().for_each(|notice| self.tell(notice));
        any
    }

    /// Puts a slice's bytes, then the counter, and waits until both are there.
    pub(super) fn copy(&mut self, slice: &Slice<PeId>) -> Copied {
        let begin = now();
        let (mut records, mut num_bytes) = (Vec::new(), 0);
        let Target { memory: pe, slot, checksum, .. } = slice.target;
        for run in &slice.runs {
            if checksum {
                let source = ByteRun { offset: run.local_offset, num_bytes: run.num_bytes };
                let hash = hash(&*self.region, source);
                records.push(Record {
                    run: ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes },
                    hash,
                });
            }
            self.pgas.put(Put {
                pe,
                target: &*self.region,
                target_offset: run.remote_offset,
                source: &*self.region,
                source_offset: run.local_offset,
                num_bytes: run.num_bytes,
            });
            num_bytes += run.num_bytes as u64;
        }
        let total = match self.peers[pe.0 as usize].sending.get_mut(&slice.channel) {
            Some(total) => {
                *total += num_bytes;
                *total
            }
            // Cannot be: a channel is closed behind its last slice.
            None => num_bytes,
        };
        self.pgas.fence();
        self.pgas.put_word(pe, &*self.control, self.layout.arrived(self.me, slot), total);
        self.pgas.quiet();
        Copied { num_bytes, busy: now().saturating_sub(begin), records }
    }
}
