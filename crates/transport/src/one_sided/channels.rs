//! The sender's channels: what is queued, what the writer is copying, and when a channel has nothing under way.
//!
//! ```text
//!  put ──▶ queued runs ──▶ the writer: copies a slice, bumps the counter ──▶ Written  (finish called, queue empty)
//!  cancel, Stop, hangup ──▶ stopping: the queue is dropped, the slice under way ends ──▶ Stopped
//! ```
//!
//! `Written` and `Stopped` go to whoever speaks with the receiver and are told to it. Neither is said while a copy is under way: this is
//! what makes a `Drained` true.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Record;
use crate::{ByteRun, ChannelId, PutRun, Refusal, Telemetry, TransportEvent, run_is_allowed};

/// Where an accepted claim is written to; `M` is how the transport reaches the receiver's memory.
#[derive(Clone, Debug)]
pub struct Target<M> {
    /// The receiver's memory.
    pub memory: M,
    /// The receiver's arrival counter for this claim.
    pub slot: u32,
    /// Bytes that must be written, neither more nor fewer.
    pub num_bytes: u64,
    /// Where they may lie, sorted.
    pub runs: Arc<[ByteRun]>,
    /// Whether the receiver wants a checksum of every run.
    pub checksum: bool,
}

/// Why a channel is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopping {
    /// The caller gave it up.
    Cancelled,
    /// Something else ended it.
    Because(Refusal),
}

impl Stopping {
    /// Returns what to report.
    #[must_use]
    pub fn refusal(self) -> Option<Refusal> {
        match self {
            Self::Cancelled => None,
            Self::Because(refusal) => Some(refusal),
        }
    }
}

/// What the receiver must be told about a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Everything is written: tell the receiver.
    Written(ChannelId),
    /// Nothing will be written any more: tell the receiver, and close.
    Stopped(ChannelId),
}

#[derive(Debug)]
struct Channel<M> {
    target: Option<Target<M>>,
    queue: VecDeque<PutRun>,
    /// A slice is being copied.
    writing: bool,
    /// The channel stands in `ready`.
    listed: bool,
    finishing: bool,
    /// `Written` was said.
    written: bool,
    stopping: Option<Stopping>,
    /// `Stopped` was said.
    stopped: bool,
    taken_bytes: u64,
    records: Vec<Record>,
    busy: Duration,
}

impl<M> Default for Channel<M> {
    fn default() -> Self {
        Self {
            target: None,
            queue: VecDeque::new(),
            writing: false,
            listed: false,
            finishing: false,
            written: false,
            stopping: None,
            stopped: false,
            taken_bytes: 0,
            records: Vec::new(),
            busy: Duration::ZERO,
        }
    }
}

/// A slice for the writer.
#[derive(Debug)]
pub struct Slice<M> {
    /// Whose it is.
    pub channel: ChannelId,
    /// Where it goes.
    pub target: Target<M>,
    /// What to copy; every run lies inside the grant.
    pub runs: Vec<PutRun>,
}

/// What the writer made of a slice, or a channel of all of them.
#[derive(Debug)]
pub struct Copied {
    /// Bytes written.
    pub num_bytes: u64,
    /// Time spent writing.
    pub busy: Duration,
    /// The runs with their checksums, where the receiver wants them.
    pub records: Vec<Record>,
}

/// Why runs cannot be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PutError {
    /// `finish` was called before.
    #[error("channel {} was finished", .0.0)]
    Finished(ChannelId),
    /// There is no such channel.
    #[error("channel {} is not open", .0.0)]
    Unknown(ChannelId),
    /// More runs wait than may.
    #[error("more than {max_queued_runs} runs wait on channel {}", .channel.0)]
    QueueFull {
        /// Where.
        channel: ChannelId,
        /// The bound.
        max_queued_runs: usize,
    },
}

/// All channels of one transport, and the sender's events.
#[derive(Debug)]
pub struct Channels<M> {
    open: BTreeMap<ChannelId, Channel<M>>,
    ready: VecDeque<ChannelId>,
    events: Vec<TransportEvent>,
    last: u64,
    bytes_sent: u64,
    busy: Duration,
    shut_down: bool,
}

impl<M> Default for Channels<M> {
    fn default() -> Self {
        Self {
            open: BTreeMap::new(),
            ready: VecDeque::new(),
            events: Vec::new(),
            last: 0,
            bytes_sent: 0,
            busy: Duration::ZERO,
            shut_down: false,
        }
    }
}

impl<M: Clone> Channels<M> {
    /// Makes a channel that waits to be accepted; puts are queued meanwhile.
    pub fn open(&mut self) -> ChannelId {
        self.last += 1;
        let id = ChannelId(self.last);
        self.open.insert(id, Channel::default());
        id
    }

    /// Queues runs for the writer. Says whether it did: runs for a channel that is closing, or was closed with the news on the way, are
    /// dropped.
    ///
    /// # Errors
    /// [`PutError`] if there is no such channel, it was finished, or more than `max_queued_runs` would wait.
    pub fn put(&mut self, id: ChannelId, runs: &[PutRun], max_queued_runs: usize) -> Result<bool, PutError> {
        let Some(channel) = self.open.get_mut(&id) else {
            return if self.closed_unseen(id) { Ok(false) } else { Err(PutError::Unknown(id)) };
        };
        if channel.finishing {
            return Err(PutError::Finished(id));
        }
        if channel.stopping.is_some() {
            return Ok(false);
        }
        if channel.queue.len() + runs.len() > max_queued_runs {
            return Err(PutError::QueueFull { channel: id, max_queued_runs });
        }
        channel.queue.extend(runs.iter().filter(|run| run.num_bytes > 0));
        self.list(id);
        Ok(true)
    }

    /// Says that no more puts follow; answers a notice if nothing is left to write.
    pub fn finish(&mut self, id: ChannelId) -> Option<Notice> {
        self.open.get_mut(&id)?.finishing = true;
        self.settle(id)
    }

    /// Begins to close a channel; the first reason counts.
    pub fn stop(&mut self, id: ChannelId, why: Stopping) -> Option<Notice> {
        let channel = self.open.get_mut(&id)?;
        channel.stopping.get_or_insert(why);
        channel.queue.clear();
        self.settle(id)
    }

    /// The receiver accepted: queued runs are now being written.
    pub fn accept(&mut self, id: ChannelId, target: Target<M>) -> Option<Notice> {
        let channel = self.open.get_mut(&id)?;
        channel.target = Some(target);
        if channel.stopping.is_none() {
            self.events.push(TransportEvent::Opened { channel: id });
        }
        self.list(id);
        self.settle(id)
    }

    /// Takes the next slice, of at most about `slice_bytes`, and what to say about channels found to break their promise.
    pub fn next_slice(&mut self, slice_bytes: usize) -> (Option<Slice<M>>, Option<Notice>) {
        while let Some(id) = self.ready.pop_front() {
            let Some(channel) = self.open.get_mut(&id) else { continue };
            channel.listed = false;
            match channel.take(slice_bytes) {
                Ok(runs) if runs.is_empty() => {}
                Ok(runs) => {
                    channel.writing = true;
                    let target = channel.target.clone().expect("only accepted channels give out runs");
                    return (Some(Slice { channel: id, target, runs }), None);
                }
                Err(OutsideGrant) => {
                    let notice = self.stop(id, Stopping::Because(Refusal::Revoked));
                    if notice.is_some() {
                        return (None, notice);
                    }
                }
            }
        }
        (None, None)
    }

    /// Notes what became of a slice.
    pub fn copied(&mut self, id: ChannelId, copied: Copied) -> Option<Notice> {
        self.bytes_sent += copied.num_bytes;
        self.busy += copied.busy;
        let channel = self.open.get_mut(&id)?;
        channel.writing = false;
        channel.busy += copied.busy;
        channel.records.extend(copied.records);
        self.list(id);
        self.settle(id)
    }

    /// Says whether the receiver accepted the claim.
    #[must_use]
    pub fn is_accepted(&self, id: ChannelId) -> bool {
        self.open.get(&id).is_some_and(|channel| channel.target.is_some())
    }

    /// Says whether `Written` was said: the writer has nothing to do with the channel any more.
    #[must_use]
    pub fn is_written(&self, id: ChannelId) -> bool {
        self.open.get(&id).is_some_and(|channel| channel.written)
    }

    /// Takes what a written channel delivered, to be told to the receiver.
    pub fn delivered(&mut self, id: ChannelId) -> Option<Copied> {
        let channel = self.open.get_mut(&id).filter(|channel| channel.stopping.is_none())?;
        Some(Copied {
            num_bytes: channel.taken_bytes,
            busy: channel.busy,
            records: std::mem::take(&mut channel.records),
        })
    }

    /// Closes a channel whose end is certain and reports it.
    ///
    /// A channel that is still being written stays until the writer is done with it, whatever the receiver said.
    pub fn close(&mut self, id: ChannelId, refusal: Option<Refusal>) {
        let Some(channel) = self.open.remove(&id) else { return };
        debug_assert!(!channel.writing, "closed under the writer");
        let refusal = channel.stopping.map_or(refusal, Stopping::refusal);
        self.events.push(TransportEvent::Closed { channel: id, refusal });
    }

    /// Ends a channel whose bytes the receiver acknowledged.
    pub fn complete(&mut self, id: ChannelId) {
        let Some(channel) = self.open.remove(&id) else { return };
        let (num_bytes, busy) = (channel.taken_bytes, channel.busy);
        self.events.push(TransportEvent::Finished { channel: id, num_bytes, busy });
    }

    /// Begins to close all channels.
    pub fn stop_all(&mut self, why: Stopping) -> Vec<Notice> {
        let ids: Vec<_> = self.open.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.stop(id, why)).collect()
    }

    /// Says that the transport ends.
    pub fn shut_down(&mut self) {
        self.shut_down = true;
    }

    /// Says whether the transport ends.
    #[must_use]
    pub fn is_shut_down(&self) -> bool {
        self.shut_down
    }

    /// Says whether events wait to be drained.
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Moves the events so far to `into`, in order.
    pub fn drain_events(&mut self, into: &mut Vec<TransportEvent>) {
        into.append(&mut self.events);
    }

    /// Writes the sender's counters into `telemetry`, leaving the receiver's as they are.
    pub fn count_into(&self, telemetry: &mut Telemetry) {
        telemetry.bytes_sent = self.bytes_sent;
        telemetry.send_busy = self.busy;
    }

    fn closed_unseen(&self, id: ChannelId) -> bool {
        let names_it = |event: &TransportEvent| matches!(event, TransportEvent::Closed { channel, .. } if *channel == id);
        self.events.iter().any(names_it)
    }

    /// Puts a channel in line if the writer has something to do for it.
    fn list(&mut self, id: ChannelId) {
        let Some(channel) = self.open.get_mut(&id) else { return };
        if channel.target.is_some() && !channel.queue.is_empty() && !channel.writing && !channel.listed {
            channel.listed = true;
            self.ready.push_back(id);
        }
    }

    /// Says each notice once, when it has become true.
    fn settle(&mut self, id: ChannelId) -> Option<Notice> {
        let channel = self.open.get_mut(&id)?;
        if channel.writing {
            return None;
        }
        if channel.stopping.is_some() {
            return (!std::mem::replace(&mut channel.stopped, true)).then_some(Notice::Stopped(id));
        }
        let written = channel.finishing && channel.target.is_some() && channel.queue.is_empty();
        (written && !std::mem::replace(&mut channel.written, true)).then_some(Notice::Written(id))
    }
}

/// A run that the grant does not allow, or one byte too many.
struct OutsideGrant;

impl<M> Channel<M> {
    /// Takes runs of about `slice_bytes` from the queue, cutting the last one to fit.
    fn take(&mut self, slice_bytes: usize) -> Result<Vec<PutRun>, OutsideGrant> {
        let Some(target) = self.target.as_ref().filter(|_| self.stopping.is_none()) else {
            return Ok(Vec::new());
        };
        let mut runs = Vec::new();
        let mut room = slice_bytes.max(1);
        while room > 0 {
            let Some(run) = self.queue.front_mut() else { break };
            let fits = self.taken_bytes + run.num_bytes as u64 <= target.num_bytes;
            if !fits || !run_is_allowed(&target.runs, run.remote_offset, run.num_bytes) {
                return Err(OutsideGrant);
            }
            let num_bytes = run.num_bytes.min(room);
            runs.push(PutRun { num_bytes, ..*run });
            self.taken_bytes += num_bytes as u64;
            room -= num_bytes;
            if num_bytes == run.num_bytes {
                self.queue.pop_front();
            } else {
                run.local_offset += num_bytes;
                run.remote_offset += num_bytes;
                run.num_bytes -= num_bytes;
            }
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests;
