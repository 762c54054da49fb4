//! What ends because time has passed.

use std::time::Duration;

use microserving_kvcache::lifecycle;
use microserving_protocol::KvRange;
use microserving_transport::{Claim, PeerAddress};

use crate::calls::Fate;
use crate::mutants::Mutant;
use crate::sequence::{Delivery, Pages, Sequence, Slot, State, Work};
use crate::{Engine, EngineError};

/// Why a sequence has run out of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overdue {
    Deadline,
    Lease,
    Wait,
    Transfer,
}

impl Engine {
    /// Renews the leases of transfers that have got further, and ends whatever has run out.
    pub(crate) fn expire(&mut self) {
        let mut overdue = Vec::new();
        for (&slot, sequence) in &mut self.sequences {
            if let Work::Receive(reception) = &mut sequence.work
                && reception.stage.may_be_written()
                && let Some(generation) = reception.generation
            {
                let arrived = self.transport.arrived_bytes(generation);
                reception.lease.observe(self.now, arrived, self.gate.claims(generation));
                if arrived > 0 {
                    reception.stage = lifecycle::step(reception.stage, lifecycle::Event::Arrived).next;
                }
            }
            let due = times(sequence, self.config.max_wait, self.config.lease);
            if let Some((_, why)) = due.into_iter().flatten().find(|(at, _)| *at <= self.now) {
                overdue.push((slot, why));
            }
        }
        for (slot, why) in overdue {
            self.end_overdue(slot, why);
        }
        self.renew_leases();
        if self.rules.break_by(Mutant::FreeAfterTtl) {
            let (now, ttl) = (self.now, self.config.lease);
            let old: Vec<_> = self
                .quarantined
                .iter()
                .filter(|(_, since)| since.since + ttl <= now)
                .map(|(g, _)| *g)
                .collect();
            for generation in old {
                self.release_quarantine(generation);
            }
        }
    }

    /// Shows receivers that jobs which wait or compute are alive, so that leases do not run out meanwhile.
    ///
    /// The sign of life is a claim of no tokens: the address is presented again and nothing is written. Data that arrives is
    /// a sign of life itself, but a job may be queued for longer than a lease before its first byte.
    fn renew_leases(&mut self) {
        for sequence in self.sequences.values_mut() {
            let Work::Send(delivery) = &mut sequence.work else { continue };
            if self.now < renewal(delivery) {
                continue;
            }
            delivery.renewed = self.now;
            let address = &delivery.address;
            let begin = delivery.range.begin();
            let claim = Claim {
                peer: PeerAddress { transport: address.transport.clone(), bytes: address.peer.clone() },
                credential: delivery.credential.clone(),
                range: KvRange::new(begin, begin).expect("ordered"),
            };
            match self.transport.open(claim) {
                // Whatever becomes of it is nobody's news: the job has its own channel.
                Ok(channel) => self.transport.finish(channel),
                Err(error) => tracing::debug!(%error, "a lease could not be renewed"),
            }
        }
    }

    /// Returns when time alone makes work: the earliest deadline, lease or bound; `None` if nothing waits for time.
    ///
    /// Asks nothing of the transport: whoever drives a transport in virtual time asks that for its own next event.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Duration> {
        let of_sequences = self.sequences.values().flat_map(|sequence| {
            times(sequence, self.config.max_wait, self.config.lease).into_iter().flatten().map(|(at, _)| at)
        });
        let renewals = self.sequences.values().filter_map(|sequence| match &sequence.work {
            Work::Send(delivery) => Some(renewal(delivery)),
            Work::Receive(_) | Work::Generate(_) => None,
        });
        of_sequences.chain(renewals).chain(self.calls.next_sweep()).min()
    }

    fn end_overdue(&mut self, slot: Slot, why: Overdue) {
        // An earlier one of the same request may have taken this one with it.
        let Some(sequence) = self.sequences.get(&slot) else { return };
        let seq_id = sequence.key.seq_id.clone();
        tracing::info!(%seq_id, ?why, state = ?sequence.state, "out of time");
        match why {
            Overdue::Lease => {
                self.counters.leases_expired += 1;
                let error = EngineError::LeaseExpired { seq_id: seq_id.clone() };
                self.end_record(&seq_id, Fate::LeaseExpired, &error);
            }
            Overdue::Deadline => self.fail(slot, &EngineError::DeadlineExceeded { seq_id }),
            Overdue::Wait => {
                let error = self.no_room("waited too long for pages and computing time");
                self.fail(slot, &error);
            }
            Overdue::Transfer => {
                self.counters.transfers_lost += 1;
                self.fail(slot, &EngineError::TransferLost { seq_id });
            }
        }
    }
}

/// Returns when a job is to show its receiver that it is alive: three times a lease, so that one may be late.
fn renewal(delivery: &Delivery) -> Duration {
    delivery.renewed + (delivery.address.lease / 3).max(Duration::from_millis(1))
}

/// Returns the times at which a sequence ends if nothing happens before.
fn times(sequence: &Sequence, max_wait: Duration, lease: Duration) -> [Option<(Duration, Overdue)>; 3] {
    let deadline = sequence.deadline.map(|at| (at, Overdue::Deadline));
    let second = match &sequence.work {
        Work::Receive(reception) => {
            reception.stage.has_lease().then_some((reception.lease.until(), Overdue::Lease))
        }
        Work::Send(delivery) => delivery.computed_at.map(|at| (at + lease, Overdue::Transfer)),
        Work::Generate(_) => None,
    };
    // Bounded only until the first step: what was preempted has been admitted, and is let in again before others.
    let waits = sequence.state == State::Waiting
        && sequence.preemptions == 0
        && matches!(sequence.pages, Pages::Nothing)
        && !matches!(&sequence.work, Work::Generate(choice) if choice.behind.is_some());
    let wait = waits.then(|| (sequence.since + max_wait, Overdue::Wait));
    [deadline, second, wait]
}
