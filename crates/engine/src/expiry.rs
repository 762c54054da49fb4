//! What ends because time has passed.

use std::time::Duration;

use microserving_kvcache::lifecycle;
use microserving_protocol::KvRange;
use microserving_transport::{Claim, PeerAddress};

use crate::calls::Fate;
use crate::mutants::Mutant;
use crate::sequence::{Delivery, Sequence, Slot, State, Work};
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
        for sequence in self.sequences.values_mut() {
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
        }
        let overdue: Vec<(Slot, Overdue)> = self
            .sequences
            .iter()
            .filter_map(|(slot, sequence)| {
                let due = self.times(sequence).into_iter().flatten().find(|(at, _)| *at <= self.now);
                due.map(|(_, why)| (*slot, why))
            })
            .collect();
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
        let of_sequences =
            self.sequences.values().flat_map(|s| self.times(s).into_iter().flatten().map(|(at, _)| at));
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

    /// Returns the times at which a sequence ends if nothing happens before.
    fn times(&self, sequence: &Sequence) -> [Option<(Duration, Overdue)>; 3] {
        let deadline = sequence.deadline.map(|at| (at, Overdue::Deadline));
        let second = match &sequence.work {
            Work::Receive(reception) => {
                reception.stage.has_lease().then_some((reception.lease.until(), Overdue::Lease))
            }
            Work::Send(delivery) => {
                delivery.computed_at.map(|at| (at + self.config.lease, Overdue::Transfer))
            }
            Work::Generate(_) => None,
        };
        let waits = sequence.state == State::Waiting && !self.device_lost;
        let third = if waits { self.longest_wait(sequence) } else { None };
        [deadline, second, third.map(|at| (at, Overdue::Wait))]
    }

    /// Returns how long a sequence may wait for its first step.
    ///
    /// A `remote_send` waits only as long as this engine computes something, or half a lease more. Two engines that are full
    /// of reservations for each other's sends would wait for ever: each send wants pages that are promised to another, whose
    /// data is the other engine's send. Whoever gives up first lets the others go on.
    fn longest_wait(&self, sequence: &Sequence) -> Option<Duration> {
        // What was preempted has been admitted before, and is let in again before others.
        if sequence.preemptions > 0 {
            return None;
        }
        let bound = sequence.since + self.config.max_wait;
        match &sequence.work {
            Work::Generate(choice) if choice.behind.is_some() => None,
            Work::Send(_) => Some(bound.min(self.last_computed.max(sequence.since) + self.config.lease / 2)),
            Work::Generate(_) | Work::Receive(_) => Some(bound),
        }
    }
}

/// Returns when a job is to show its receiver that it is alive: three times a lease, so that one may be late.
///
/// The lease is what an address says that may not be ours to verify; the floor keeps a tiny one from keeping us busy.
fn renewal(delivery: &Delivery) -> Duration {
    delivery.renewed + (delivery.address.lease / 3).max(Duration::from_millis(20))
}
