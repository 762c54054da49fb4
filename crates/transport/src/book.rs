//! The receiver's book: which grants are open, who writes under them, and when a page can no longer be written.
//!
//! The rules are the same under every transport, so they stand here once; a transport brings the messages.
//!
//! ```text
//!  claim:   Writing ──finish──▶ Finished                 safe
//!              │  ├──drained──▶ Lost                     safe: the writer says that it posts no more
//!              │  └─vanished──▶ Vanished ──fenced──▶ Lost    unsafe until the writer is known to have exited
//!  grant:   open ── all bytes finished ──▶ Complete (forgotten)
//!             └───── revoked ── every claim safe ──▶ Released (forgotten)
//! ```
//!
//! A connection that broke is never a proof: only the writer's own word or its exit moves a claim to safety.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use microserving_protocol::{Generation, KvRange};

use crate::{ByteRun, Grant, Refusal, TransportEvent};

/// Generations and completed totals that are remembered exactly; older ones count as used.
const REMEMBERED: usize = 4096;

/// A claim in a [`GrantBook`]; never used twice by a book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(pub u64);

/// What an accepted claim allows.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// The claim.
    pub claim: ClaimId,
    /// Bytes that must be written, neither more nor fewer.
    pub num_bytes: u64,
    /// Where bytes may be written: the grant's runs, sorted and joined.
    pub runs: Arc<[ByteRun]>,
}

/// How a claim ended other than by finishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The writer said that it writes no more and that nothing is under way.
    Drained,
    /// The connection is gone, which proves nothing: the writer may still write.
    Vanished,
    /// The writer's process is known to have exited.
    Fenced,
}

/// What a writer says it delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes written.
    pub num_bytes: u64,
    /// False if the bytes were compared with their checksum and differ.
    pub intact: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimState {
    Writing,
    Vanished,
    Finished,
    Lost,
}

#[derive(Debug)]
struct OpenClaim<W> {
    id: ClaimId,
    range: KvRange,
    num_bytes: u64,
    arrived: u64,
    state: ClaimState,
    writer: W,
}

impl<W> OpenClaim<W> {
    /// Says whether no write of the claim can land any more.
    fn is_safe(&self) -> bool {
        matches!(self.state, ClaimState::Finished | ClaimState::Lost)
    }
}

#[derive(Debug)]
struct OpenGrant<W> {
    range: KvRange,
    token_bytes: u64,
    runs: Arc<[ByteRun]>,
    claims: Vec<OpenClaim<W>>,
    revoked: bool,
    fenced: bool,
}

impl<W> OpenGrant<W> {
    fn num_bytes(&self) -> u64 {
        u64::from(self.range.num_tokens()) * self.token_bytes
    }

    fn is_safe(&self) -> bool {
        self.claims.iter().all(OpenClaim::is_safe)
    }

    fn is_complete(&self) -> bool {
        let finished: u64 =
            self.claims.iter().filter(|c| c.state == ClaimState::Finished).map(|c| c.num_bytes).sum();
        self.is_safe() && finished == self.num_bytes()
    }

    fn arrived(&self) -> u64 {
        self.claims.iter().map(|claim| claim.arrived).sum()
    }
}

/// Keeps the grants of one receiver and the claims under them; `W` is how the transport finds a writer.
///
/// ```
/// use microserving_protocol::{Generation, KvRange};
/// use microserving_transport::{ByteRun, Delivery, Grant, GrantBook, TransportEvent};
///
/// let range = KvRange::new(0, 4).expect("ordered");
/// let mut book = GrantBook::new();
/// book.set_region_bytes(64);
/// book.grant(Grant { generation: Generation(1), range, token_bytes: 8, runs: vec![ByteRun { offset: 32, num_bytes: 32 }] })
///     .expect("inside the region");
/// let accepted = book.claim(Generation(1), range, "a writer").expect("free");
/// book.finish(accepted.claim, Delivery { num_bytes: 32, intact: true }).expect("not revoked");
/// let mut events = Vec::new();
/// book.drain_events(&mut events);
/// assert_eq!(events, [TransportEvent::Complete { generation: Generation(1) }]);
/// ```
#[derive(Debug)]
pub struct GrantBook<W> {
    region_bytes: usize,
    grants: BTreeMap<Generation, OpenGrant<W>>,
    generation_of: BTreeMap<ClaimId, Generation>,
    /// Bytes of grants that completed lately, so that a count asked for late does not fall back to 0.
    completed: BTreeMap<Generation, u64>,
    used: BTreeSet<Generation>,
    /// Generations below it are used, whether remembered or not.
    used_below: Generation,
    next_claim: u64,
    events: Vec<TransportEvent>,
    bytes_received: u64,
    claims_refused: u64,
    checksum_failures: u64,
    fences: u64,
}

impl<W: Clone + fmt::Debug> Default for GrantBook<W> {
    fn default() -> Self {
        Self::new()
    }
}

impl<W: Clone + fmt::Debug> GrantBook<W> {
    /// Makes an empty book for a region of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self {
            region_bytes: 0,
            grants: BTreeMap::new(),
            generation_of: BTreeMap::new(),
            completed: BTreeMap::new(),
            used: BTreeSet::new(),
            used_below: Generation(0),
            next_claim: 1,
            events: Vec::new(),
            bytes_received: 0,
            claims_refused: 0,
            checksum_failures: 0,
            fences: 0,
        }
    }

    /// Sets the size of the region that grants must lie in.
    pub fn set_region_bytes(&mut self, num_bytes: usize) {
        self.region_bytes = num_bytes;
    }

    /// Opens a grant. A grant of no tokens is complete at once.
    ///
    /// # Errors
    /// The reason, if the generation was used before, a run lies outside the region, or the runs cannot hold the range.
    pub fn grant(&mut self, grant: Grant) -> Result<(), String> {
        let Grant { generation, range, token_bytes, runs } = grant;
        if generation < self.used_below || self.used.contains(&generation) {
            return Err(format!("generation {generation} was granted before"));
        }
        let runs = sorted_runs(runs, self.region_bytes)?;
        let room: usize = runs.iter().map(|run| run.num_bytes).sum();
        let needed = (range.num_tokens() as usize).checked_mul(token_bytes);
        let Some(needed) = needed.filter(|needed| *needed <= room) else {
            return Err(format!(
                "the grant's runs hold {room} bytes, too few for {range} of {token_bytes} bytes each"
            ));
        };
        self.remember_used(generation);
        if needed == 0 {
            self.complete(generation, 0);
        } else {
            let grant = OpenGrant {
                range,
                token_bytes: token_bytes as u64,
                runs: runs.into(),
                claims: Vec::new(),
                revoked: false,
                fenced: false,
            };
            self.grants.insert(generation, grant);
        }
        Ok(())
    }

    /// Opens a claim for a writer whose credential was found good for `generation`.
    ///
    /// # Errors
    /// [`Refusal::Stale`] if the grant is not open (any more), [`Refusal::RangeTaken`] if part of the range was claimed
    /// before or lies outside the grant. What a lost claim covered stays taken: its content is undefined.
    pub fn claim(&mut self, generation: Generation, range: KvRange, writer: W) -> Result<Accepted, Refusal> {
        let accepted = self.try_claim(generation, range, writer);
        if accepted.is_err() {
            self.claims_refused += 1;
        }
        accepted
    }

    fn try_claim(&mut self, generation: Generation, range: KvRange, writer: W) -> Result<Accepted, Refusal> {
        let grant = self.grants.get_mut(&generation).filter(|grant| !grant.revoked).ok_or(Refusal::Stale)?;
        if !grant.range.contains(range) || grant.claims.iter().any(|claim| shares_tokens(claim.range, range))
        {
            return Err(Refusal::RangeTaken);
        }
        let id = ClaimId(self.next_claim);
        self.next_claim += 1;
        let num_bytes = u64::from(range.num_tokens()) * grant.token_bytes;
        grant.claims.push(OpenClaim { id, range, num_bytes, arrived: 0, state: ClaimState::Writing, writer });
        self.generation_of.insert(id, generation);
        Ok(Accepted { claim: id, num_bytes, runs: grant.runs.clone() })
    }

    /// Counts a claim refused before it came to the book (no admission, bad credential).
    pub fn count_refused(&mut self) {
        self.claims_refused += 1;
    }

    /// Notes how many bytes of a claim have arrived so far; a smaller number than before changes nothing.
    pub fn progress(&mut self, claim: ClaimId, arrived: u64) {
        let Some(open) = self.claim_mut(claim) else { return };
        let arrived = arrived.min(open.num_bytes);
        let gained = arrived.saturating_sub(open.arrived);
        open.arrived += gained;
        self.bytes_received += gained;
    }

    /// Ends a claim whose writer says that everything is written; nothing of it is under way any more.
    ///
    /// # Errors
    /// [`Refusal::Revoked`] if the grant was revoked meanwhile, or if the claim broke its promise (too few or too many bytes,
    /// or damaged ones) and is lost; [`Refusal::Stale`] if the claim is not open.
    pub fn finish(&mut self, claim: ClaimId, delivery: Delivery) -> Result<(), Refusal> {
        self.progress(claim, delivery.num_bytes);
        let Some(open) = self.claim_mut(claim).filter(|open| open.state == ClaimState::Writing) else {
            return Err(Refusal::Stale);
        };
        let whole = open.num_bytes == delivery.num_bytes;
        let kept = whole && delivery.intact;
        open.state = if kept { ClaimState::Finished } else { ClaimState::Lost };
        let range = open.range;
        if !delivery.intact {
            self.checksum_failures += 1;
        }
        let generation = self.generation_of[&claim];
        let revoked = self.grants[&generation].revoked;
        if kept && range.is_empty() {
            // A sign of life, one of many: a long transfer must not leave a trail of them.
            self.generation_of.remove(&claim);
            if let Some(grant) = self.grants.get_mut(&generation) {
                grant.claims.retain(|open| open.id != claim);
            }
        }
        if !kept && !revoked {
            self.events.push(TransportEvent::Lost { generation, range, corrupt: !delivery.intact });
        }
        self.settle(generation);
        if revoked || !kept { Err(Refusal::Revoked) } else { Ok(()) }
    }

    /// Ends a claim otherwise. An ending of a claim that is over changes nothing.
    pub fn end(&mut self, claim: ClaimId, ending: Ending) {
        let Some(open) = self.claim_mut(claim).filter(|open| !open.is_safe()) else { return };
        let was = open.state;
        open.state = if ending == Ending::Vanished { ClaimState::Vanished } else { ClaimState::Lost };
        let range = open.range;
        let generation = self.generation_of[&claim];
        if let Some(grant) = self.grants.get_mut(&generation) {
            grant.fenced |= ending == Ending::Fenced;
            if !grant.revoked && was == ClaimState::Writing {
                self.events.push(TransportEvent::Lost { generation, range, corrupt: false });
            }
        }
        self.settle(generation);
    }

    /// Revokes a grant and returns the writers that must be told to stop; the release is reported once all claims are safe.
    pub fn revoke(&mut self, generation: Generation) -> Vec<(ClaimId, W)> {
        let Some(grant) = self.grants.get_mut(&generation) else {
            self.events.push(TransportEvent::Released { generation, fenced: false });
            return Vec::new();
        };
        if grant.revoked {
            return Vec::new();
        }
        grant.revoked = true;
        let writing = |claim: &&OpenClaim<W>| claim.state == ClaimState::Writing;
        let writers =
            grant.claims.iter().filter(writing).map(|claim| (claim.id, claim.writer.clone())).collect();
        self.settle(generation);
        writers
    }

    /// Returns the bytes that have arrived under a grant, as far as [`GrantBook::progress`] was told.
    #[must_use]
    pub fn arrived_bytes(&self, generation: Generation) -> u64 {
        match self.grants.get(&generation) {
            Some(grant) => grant.arrived(),
            None => self.completed.get(&generation).copied().unwrap_or(0),
        }
    }

    /// Returns the claims of a grant that are being written, for transports that look up the progress themselves.
    pub fn writers(&self, generation: Generation) -> impl Iterator<Item = (ClaimId, &W)> {
        self.grants
            .get(&generation)
            .into_iter()
            .flat_map(|grant| &grant.claims)
            .filter(|claim| !claim.is_safe())
            .map(|claim| (claim.id, &claim.writer))
    }

    /// Returns the bytes that a claim must deliver and where they may lie, if it is being written.
    #[must_use]
    pub fn allowed(&self, claim: ClaimId) -> Option<(u64, Arc<[ByteRun]>)> {
        let grant = self.grants.get(self.generation_of.get(&claim)?)?;
        let open = grant.claims.iter().find(|open| open.id == claim && !open.is_safe())?;
        Some((open.num_bytes, grant.runs.clone()))
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

    /// Writes the receiver's counters into `telemetry`, leaving the sender's as they are.
    pub fn count_into(&self, telemetry: &mut crate::Telemetry) {
        telemetry.bytes_received = self.bytes_received;
        telemetry.claims_refused = self.claims_refused;
        telemetry.checksum_failures = self.checksum_failures;
        telemetry.fences = self.fences;
    }

    fn claim_mut(&mut self, claim: ClaimId) -> Option<&mut OpenClaim<W>> {
        let grant = self.grants.get_mut(self.generation_of.get(&claim)?)?;
        grant.claims.iter_mut().find(|open| open.id == claim)
    }

    /// Completes or releases a grant whose last condition has come true.
    fn settle(&mut self, generation: Generation) {
        let Some(grant) = self.grants.get(&generation) else { return };
        if grant.revoked && grant.is_safe() {
            let fenced = grant.fenced;
            self.fences += u64::from(fenced);
            self.forget(generation);
            self.events.push(TransportEvent::Released { generation, fenced });
        } else if !grant.revoked && grant.is_complete() {
            let num_bytes = grant.num_bytes();
            self.forget(generation);
            self.complete(generation, num_bytes);
        }
    }

    fn complete(&mut self, generation: Generation, num_bytes: u64) {
        self.completed.insert(generation, num_bytes);
        if self.completed.len() > REMEMBERED {
            self.completed.pop_first();
        }
        self.events.push(TransportEvent::Complete { generation });
    }

    fn forget(&mut self, generation: Generation) {
        if let Some(grant) = self.grants.remove(&generation) {
            for claim in grant.claims {
                self.generation_of.remove(&claim.id);
            }
        }
    }

    fn remember_used(&mut self, generation: Generation) {
        self.used.insert(generation);
        if self.used.len() > REMEMBERED
            && let Some(oldest) = self.used.pop_first()
        {
            self.used_below = Generation(oldest.0.saturating_add(1));
        }
    }
}

/// Says whether two ranges share a token; one of no tokens shares none, wherever it lies.
fn shares_tokens(a: KvRange, b: KvRange) -> bool {
    !a.is_empty() && !b.is_empty() && a.overlaps(b)
}

/// Sorts and joins runs, and checks that they lie in the region and do not overlap.
fn sorted_runs(mut runs: Vec<ByteRun>, region_bytes: usize) -> Result<Vec<ByteRun>, String> {
    runs.retain(|run| run.num_bytes > 0);
    runs.sort_unstable_by_key(|run| run.offset);
    let mut joined: Vec<ByteRun> = Vec::with_capacity(runs.len());
    for run in runs {
        let end = run.offset.checked_add(run.num_bytes).filter(|end| *end <= region_bytes);
        if end.is_none() {
            return Err(format!(
                "run of {} bytes at {} does not lie in the region of {region_bytes} bytes",
                run.num_bytes, run.offset
            ));
        }
        match joined.last_mut() {
            Some(last) if last.offset + last.num_bytes > run.offset => {
                return Err(format!("two runs of the grant overlap at {}", run.offset));
            }
            Some(last) if last.offset + last.num_bytes == run.offset => last.num_bytes += run.num_bytes,
            _ => joined.push(run),
        }
    }
    Ok(joined)
}

/// Says whether a run lies wholly inside one of `allowed`, which are sorted and joined as in [`Accepted::runs`].
#[must_use]
pub fn run_is_allowed(allowed: &[ByteRun], offset: usize, num_bytes: usize) -> bool {
    let Some(end) = offset.checked_add(num_bytes) else { return false };
    let after = allowed.partition_point(|run| run.offset <= offset);
    after.checked_sub(1).is_some_and(|at| end <= allowed[at].offset + allowed[at].num_bytes)
}

#[cfg(test)]
mod tests;
