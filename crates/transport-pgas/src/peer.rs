//! What is open between this element and another one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use microserving_transport::one_sided::{Records, Writer};
use microserving_transport::{ByteRun, ChannelId, ClaimId};

use crate::control::NUM_SLOTS;
use crate::world::Member;

/// A claim of the other element on us.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) id: ClaimId,
    pub(crate) slot: u32,
    pub(crate) num_bytes: u64,
    pub(crate) runs: Arc<[ByteRun]>,
    pub(crate) records: Records,
}

/// Whether an element is to be spoken with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Here,
    /// It said goodbye: nothing of it is under way.
    Left,
    /// It is not known to be there any more.
    Lost,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) process: Option<Writer>,
    pub(crate) checksum: bool,
    pub(crate) standing: Standing,
    /// Our claims on it, with the bytes written so far.
    pub(crate) sending: BTreeMap<ChannelId, u64>,
    /// Its claims on us, by its number for them.
    pub(crate) claims: BTreeMap<u64, Claim>,
    /// Claims of an element that was lost, which it may still write under until its process has exited.
    pub(crate) vanished: Vec<Claim>,
    pub(crate) free_slots: Vec<u32>,
    /// Its last sign of life, and when it was seen.
    pub(crate) pulse: (u64, Duration),
}

impl Peer {
    pub(crate) fn new(member: Member, pulse: u64, now: Duration) -> Self {
        Self {
            process: member.process,
            checksum: member.checksum,
            standing: Standing::Here,
            sending: BTreeMap::new(),
            claims: BTreeMap::new(),
            vanished: Vec::new(),
            free_slots: (0..NUM_SLOTS).rev().collect(),
            pulse: (pulse, now),
        }
    }

    /// Says whether its process is known to be no more.
    pub(crate) fn has_exited(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.has_exited().unwrap_or(false))
    }

    /// Says whether something is open that is waited for.
    pub(crate) fn is_busy(&self) -> bool {
        !self.sending.is_empty() || !self.claims.is_empty()
    }
}
