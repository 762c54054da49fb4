//! The sender's side of one claim.

use std::collections::VecDeque;
use std::time::Duration;

use crate::book::{Accepted, run_is_allowed};
use crate::{ByteRun, PutRun, Refusal};

use super::state::PeerId;

/// A run that was written, with the checksum of its source at the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) run: ByteRun,
    pub(super) hash: u64,
}

/// Why a channel is being closed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stopping {
    Cancelled,
    Because(Refusal),
}

impl Stopping {
    pub(super) fn refusal(self) -> Option<Refusal> {
        match self {
            Self::Cancelled => None,
            Self::Because(refusal) => Some(refusal),
        }
    }
}

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) remote: PeerId,
    /// Set by the receiver's verdict; nothing is posted before.
    pub(super) accepted: Option<Accepted>,
    /// Put, not posted.
    pub(super) pending: VecDeque<PutRun>,
    /// Posted, not landed.
    pub(super) in_flight: usize,
    pub(super) posted_bytes: u64,
    pub(super) records: Vec<Record>,
    pub(super) finishing: bool,
    pub(super) finish_sent: bool,
    pub(super) stopping: Option<Stopping>,
    busy: Duration,
    busy_since: Option<Duration>,
}

impl Channel {
    pub(super) fn new(remote: PeerId) -> Self {
        Self {
            remote,
            accepted: None,
            pending: VecDeque::new(),
            in_flight: 0,
            posted_bytes: 0,
            records: Vec::new(),
            finishing: false,
            finish_sent: false,
            stopping: None,
            busy: Duration::ZERO,
            busy_since: None,
        }
    }

    /// Takes the next run to post. A run that the grant does not allow stops the channel instead.
    pub(super) fn next_run(&mut self, now: Duration) -> Option<PutRun> {
        let accepted = self.accepted.as_ref().filter(|_| self.stopping.is_none())?;
        let run = self.pending.pop_front()?;
        let fits = self.posted_bytes + run.num_bytes as u64 <= accepted.num_bytes;
        if !fits || !run_is_allowed(&accepted.runs, run.remote_offset, run.num_bytes) {
            self.stop(Stopping::Because(Refusal::Revoked));
            return None;
        }
        self.posted_bytes += run.num_bytes as u64;
        self.in_flight += 1;
        self.busy_since.get_or_insert(now);
        Some(run)
    }

    /// Notes that a posted run landed or was lost.
    pub(super) fn landed(&mut self, now: Duration) {
        self.in_flight -= 1;
        if self.in_flight == 0
            && let Some(since) = self.busy_since.take()
        {
            self.busy += now.saturating_sub(since);
        }
    }

    /// Begins to close the channel; the first reason counts.
    pub(super) fn stop(&mut self, why: Stopping) {
        self.stopping.get_or_insert(why);
        self.pending.clear();
    }

    /// Says whether everything is written and the receiver may be told.
    pub(super) fn may_finish(&self) -> bool {
        self.finishing
            && !self.finish_sent
            && self.accepted.is_some()
            && self.pending.is_empty()
            && self.in_flight == 0
    }

    pub(super) fn busy(&self) -> Duration {
        self.busy
    }
}
