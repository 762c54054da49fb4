//! One stream of tokens that owns KV, whatever it is being kept for.
//!
//! ```text
//!              prep_recv                                    (no reservation) start_generate, remote_send
//!                  │                                                        │
//!              Receiving ── data here and start_generate ────────────────▶ Waiting ◀── preempted ──┐
//!                  │                                                        │ admitted             │
//!                  │ commit                                             Prefilling ────────────────┤
//!                  ▼                                     remote_send   │         │ start_generate   │
//!              Finished ◀── delivered ───────────────────── Sending ◀──┘         └──▶ Decoding ─────┘
//!                  ▲                                                                   │    │ pause
//!                  └───────────────────────────── last token ──────────────────────────┘    ▼
//!                  └───────────────────────────── abort ────────────────────────────────  Paused
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use microserving_executor::Sampler;
use microserving_kvcache::{PageTable, ReplacedPages, Reservation, lifecycle};
use microserving_protocol::{Generation, KvAddrInfo, KvRange, PageId, SeqId, TokenId};
use microserving_transport::ChannelId;

use crate::lease::Lease;
use crate::{CallId, CallKey, RemoteSendReply};

/// A sequence's place in the engine; never used twice, and in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u64);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a sequence is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// On a receiver: pages are promised to a transfer; a `start_generate` or a `commit` is awaited, or the data.
    Receiving,
    /// Wants to be computed and is not admitted yet. Was preempted if its count says so.
    Waiting,
    /// Admitted: has pages for all of its tokens and some of them are not computed yet.
    Prefilling,
    /// Yields a token a step.
    Decoding,
    /// On a sender: everything is computed, the receiver cannot read all of it yet.
    Sending,
    /// Stopped by `pause`; keeps its pages until it is aborted.
    Paused,
    /// Over; nothing follows.
    Finished,
}

/// What can happen to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its data is here (or given up on) and a `start_generate` wants it.
    Started,
    /// It was given pages for all of its tokens.
    Admitted,
    /// The last of its tokens is computed and the first new one is drawn.
    Drew,
    /// The last of its tokens is computed and put; the transport has the rest.
    Put,
    /// Its pages were taken for another.
    Preempted,
    /// `pause`.
    Paused,
    /// It ended, well or badly.
    Ended,
}

impl State {
    /// Returns the state after `event`, or `None` if the event cannot happen in this state.
    pub(crate) fn after(self, event: Event) -> Option<Self> {
        match (self, event) {
            (Self::Finished, _) => None,
            (_, Event::Ended) => Some(Self::Finished),
            (Self::Receiving, Event::Started) | (Self::Prefilling | Self::Decoding, Event::Preempted) => {
                Some(Self::Waiting)
            }
            // Giving back what was received while it still waits for the rest of its pages.
            (Self::Waiting, Event::Preempted) => Some(Self::Waiting),
            (Self::Waiting, Event::Admitted) => Some(Self::Prefilling),
            (Self::Prefilling | Self::Decoding, Event::Drew) => Some(Self::Decoding),
            (Self::Prefilling, Event::Put) => Some(Self::Sending),
            (Self::Waiting | Self::Prefilling | Self::Decoding | Self::Paused, Event::Paused) => {
                Some(Self::Paused)
            }
            _ => None,
        }
    }

    /// Returns the word that `GET /microserving/sequences` shows.
    pub(crate) fn word(self, preemptions: u32) -> &'static str {
        match self {
            Self::Receiving => "receiving",
            Self::Waiting if preemptions > 0 => "preempted",
            Self::Waiting => "waiting",
            Self::Prefilling => "prefilling",
            Self::Decoding => "decoding",
            Self::Sending => "sending",
            Self::Paused => "paused",
            Self::Finished => "finished",
        }
    }
}

/// A sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) key: CallKey,
    pub(crate) salt: Arc<str>,
    pub(crate) priority: i32,
    /// When it was asked for; with the priority, its place in the order.
    pub(crate) arrived: Duration,
    /// When it began to wait; bounds its wait.
    pub(crate) since: Duration,
    /// When its caller gives up.
    pub(crate) deadline: Option<Duration>,
    /// Prompt, then output.
    pub(crate) tokens: Vec<TokenId>,
    /// How many of them came with the call.
    pub(crate) prompt_len: u32,
    /// KV of `[0, computed)` is in its pages.
    pub(crate) computed: u32,
    pub(crate) pages: Pages,
    pub(crate) state: State,
    pub(crate) work: Work,
    pub(crate) preemptions: u32,
}

impl Sequence {
    /// Returns how many tokens it has.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("prompts are bounded by the context at the door")
    }

    /// Returns the tokens whose KV it wants: all, or up to the end of what it sends.
    pub(crate) fn goal(&self) -> u32 {
        match &self.work {
            Work::Send(delivery) => delivery.range.end(),
            Work::Receive(reception) => reception.end,
            Work::Generate(_) => self.len(),
        }
    }

    /// Makes the step that `event` says.
    pub(crate) fn happen(&mut self, event: Event) {
        match self.state.after(event) {
            Some(next) => {
                tracing::trace!(seq_id = %self.key.seq_id, ?event, from = ?self.state, to = ?next, "sequence");
                self.state = next;
            }
            // Every caller looks at the state first; going on in the old state keeps the engine serving.
            None => {
                debug_assert!(false, "{event:?} cannot happen to a sequence in {:?}", self.state);
                tracing::error!(seq_id = %self.key.seq_id, ?event, state = ?self.state, "impossible event");
            }
        }
    }
}

/// The pages that a sequence holds.
#[derive(Debug)]
pub(crate) enum Pages {
    /// None: it waits to be admitted, or was preempted.
    Nothing,
    /// Promised to a transfer: peers may be writing.
    Promised(Reservation),
    /// Its own, and the context that it shares.
    Table(PageTable),
}

impl Pages {
    /// Returns them in order of positions.
    pub(crate) fn list(&self) -> &[PageId] {
        match self {
            Self::Nothing => &[],
            Self::Promised(reservation) => reservation.pages(),
            Self::Table(table) => table.pages(),
        }
    }

    /// Takes them out.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Nothing)
    }
}

/// What a sequence is kept for.
#[derive(Debug)]
pub(crate) enum Work {
    /// To be received into.
    Receive(Reception),
    /// To be sent.
    Send(Delivery),
    /// To be generated from.
    Generate(Choice),
}

/// A receiver's side of one `prep_recv`.
#[derive(Debug)]
pub(crate) struct Reception {
    pub(crate) end: u32,
    pub(crate) matched: u32,
    /// The grant's number; `None` if nothing is to be received.
    pub(crate) generation: Option<Generation>,
    /// How far it has come.
    pub(crate) stage: lifecycle::State,
    pub(crate) lease: Lease,
    /// The id was minted here, so a `start_generate` without a key may adopt it.
    pub(crate) minted: bool,
    /// The call that made it, so that it can be taken back if nobody heard the answer.
    pub(crate) made_by: CallId,
    /// A `start_generate` that waits for the data.
    pub(crate) start: Option<PendingStart>,
    /// `commit` calls that wait for the data.
    pub(crate) commits: Vec<CallId>,
}

/// A `start_generate` that found its reservation and waits for the data.
#[derive(Debug)]
pub(crate) struct PendingStart {
    /// The request it made.
    pub(crate) request: RequestId,
    /// The sampler of the first choice.
    pub(crate) sampler: Sampler,
}

/// A sender's side of one `remote_send`.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) range: KvRange,
    pub(crate) address: Arc<KvAddrInfo>,
    /// The address as it came.
    pub(crate) credential: Vec<u8>,
    pub(crate) channel: ChannelId,
    /// Who waits for the answer.
    pub(crate) calls: Vec<CallId>,
    /// When the receiver was last shown that this job is alive.
    pub(crate) renewed: Duration,
    /// Pages that the context cache had already when ours were committed; puts may still be reading them.
    pub(crate) replaced: Vec<ReplacedPages>,
    /// When everything was computed: the first step after it.
    pub(crate) computed_at: Option<Duration>,
    pub(crate) reply: RemoteSendReply,
}

/// One choice of a generation.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) request: RequestId,
    pub(crate) index: u32,
    /// Taken while a step computes.
    pub(crate) sampler: Option<Sampler>,
    /// The first choice, whose prefill this one waits for so as to share its pages.
    pub(crate) behind: Option<Slot>,
}

/// A generation's name inside the engine; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestId(pub(crate) u64);

/// Makes sequence ids for callers that have none.
#[derive(Debug)]
pub(crate) struct Mint {
    state: u64,
}

impl Mint {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns an id that this engine never returned before.
    pub(crate) fn next(&mut self) -> SeqId {
        SeqId::new(format!("minted-{:016x}{:016x}", self.draw(), self.draw()))
    }

    /// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).
    pub(crate) fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transition_is_the_drawings() {
        use Event::{Admitted, Drew, Ended, Preempted, Put, Started};
        use State::{Decoding, Finished, Paused, Prefilling, Receiving, Sending, Waiting};
        const EVENTS: [Event; 7] = [Started, Admitted, Drew, Put, Preempted, Event::Paused, Ended];
        let drawn: [(State, [Option<State>; 7]); 7] = [
            (Receiving, [Some(Waiting), None, None, None, None, None, Some(Finished)]),
            (Waiting, [None, Some(Prefilling), None, None, Some(Waiting), Some(Paused), Some(Finished)]),
            (
                Prefilling,
                [None, None, Some(Decoding), Some(Sending), Some(Waiting), Some(Paused), Some(Finished)],
            ),
            (Decoding, [None, None, Some(Decoding), None, Some(Waiting), Some(Paused), Some(Finished)]),
            (Sending, [None, None, None, None, None, None, Some(Finished)]),
            (Paused, [None, None, None, None, None, Some(Paused), Some(Finished)]),
            (Finished, [None; 7]),
        ];
        for (state, afters) in drawn {
            for (event, after) in EVENTS.into_iter().zip(afters) {
                assert_eq!(state.after(event), after, "{state:?} after {event:?}");
            }
        }
    }

    #[test]
    fn minted_ids_differ() {
        let mut mint = Mint::new(7);
        let ids: std::collections::BTreeSet<_> = (0..1000).map(|_| mint.next()).collect();
        assert_eq!(ids.len(), 1000);
    }
}
