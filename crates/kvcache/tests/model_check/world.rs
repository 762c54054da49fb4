//! The states of the world and the moves between them, by name.

use std::fmt;

use microserving_kvcache::lifecycle::State;

pub(crate) const NUM_REQUESTS: usize = 2;
pub(crate) const MAX_PAGES: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Free,
    Reserved(u8),
    Quarantined(u8),
    Owned(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Page {
    pub(crate) holder: Holder,
    /// Whose KV the page holds, whole.
    pub(crate) content: Option<u8>,
}

/// The receiver's transport on one reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Grant {
    Open,
    Revoked,
    Closed,
}

/// The sender on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Job {
    None,
    Queued,
    Claiming,
    Writing {
        posted: u8,
    },
    /// Told to stop: posts nothing more, acknowledges when nothing of it is in flight.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    /// `None` before `prep_recv`.
    pub(crate) state: Option<State>,
    /// Its pages, as a set of bits.
    pub(crate) pages: u8,
    pub(crate) grant: Grant,
    /// The sender's epoch that was let in.
    pub(crate) claimed: Option<u8>,
    pub(crate) lost_told: bool,
    pub(crate) landed: u8,
    pub(crate) asked_for: bool,
    pub(crate) sends_left: u8,
    pub(crate) job: Job,
    /// Posted writes by the epoch that posted them, as sets of pages.
    pub(crate) flying: [u8; 2],
    pub(crate) claim_sent: bool,
    pub(crate) opened_sent: bool,
    pub(crate) revoke_sent: bool,
    pub(crate) ack_sent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) pages: [Page; MAX_PAGES],
    pub(crate) requests: [Request; NUM_REQUESTS],
    pub(crate) sender_up: bool,
    pub(crate) sender_epoch: u8,
    /// The receiver takes epoch 0's writes for impossible.
    pub(crate) fenced: bool,
}

impl World {
    /// Forgets what can make no difference any more about requests that are over, so that worlds that go on alike are one.
    pub(crate) fn without_the_past(mut self) -> Self {
        for request in &mut self.requests {
            let over = request.state == Some(State::Over)
                || request.pages == 0 && request.state.is_some_and(State::is_final);
            let may_write = matches!(request.job, Job::Writing { .. }) || request.opened_sent;
            if over && request.grant == Grant::Closed && !may_write && request.flying == [0; 2] {
                *request = Request { state: Some(State::Over), ..NEW };
            }
        }
        self
    }
}

pub(crate) const NEW: Request = Request {
    state: None,
    pages: 0,
    grant: Grant::Closed,
    claimed: None,
    lost_told: false,
    landed: 0,
    asked_for: false,
    sends_left: 0,
    job: Job::None,
    flying: [0; 2],
    claim_sent: false,
    opened_sent: false,
    revoke_sent: false,
    ack_sent: false,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Action {
    PrepRecv(u8),
    RemoteSend(u8),
    Claim(u8),
    AdmitClaim(u8),
    RefuseClaim(u8),
    Opened(u8),
    Post(u8, u8),
    DropStale(u8),
    Cancel(u8),
    Land(u8, u8),
    RejectStale(u8, u8),
    Abort(u8),
    LeaseExpired(u8),
    Wanted(u8),
    Finish(u8),
    Revoke(u8),
    Stop(u8),
    Acknowledge(u8),
    Release(u8),
    CloseUnasked(u8),
    TellLost(u8),
    ClearLost(u8),
    Crash,
    Restart,
    Fence,
    Lose(u8, &'static str),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |request: u8| char::from(b'A' + request);
        match *self {
            Self::PrepRecv(r) => write!(f, "receiver reserves for {}", name(r)),
            Self::RemoteSend(r) => write!(f, "sender is asked to send {}", name(r)),
            Self::Claim(r) => write!(f, "sender claims {}", name(r)),
            Self::AdmitClaim(r) => write!(f, "receiver admits the claim on {}", name(r)),
            Self::RefuseClaim(r) => write!(f, "receiver refuses the claim on {}", name(r)),
            Self::Opened(r) => write!(f, "sender learns that {} is open", name(r)),
            Self::Post(r, p) => write!(f, "sender posts {} to page {p}", name(r)),
            Self::DropStale(r) => write!(f, "sender sees that {} is stale", name(r)),
            Self::Cancel(r) => write!(f, "sender gives {} up", name(r)),
            Self::Land(r, p) => write!(f, "a write of {} lands in page {p}", name(r)),
            Self::RejectStale(r, p) => write!(f, "receiver rejects a write of {} to page {p}", name(r)),
            Self::Abort(r) => write!(f, "{} is aborted", name(r)),
            Self::LeaseExpired(r) => write!(f, "the lease of {} expires", name(r)),
            Self::Wanted(r) => write!(f, "{} is to be generated from", name(r)),
            Self::Finish(r) => write!(f, "{} finishes", name(r)),
            Self::Revoke(r) => write!(f, "receiver revokes {} again", name(r)),
            Self::Stop(r) => write!(f, "sender stops {}", name(r)),
            Self::Acknowledge(r) => write!(f, "sender acknowledges that {} is drained", name(r)),
            Self::Release(r) => write!(f, "transport releases {}", name(r)),
            Self::CloseUnasked(r) => write!(f, "transport closes {} by itself", name(r)),
            Self::TellLost(r) => write!(f, "transport tells that the writer of {} is lost", name(r)),
            Self::ClearLost(r) => write!(f, "transport lets others write {}", name(r)),
            Self::Crash => f.write_str("sender crashes"),
            Self::Restart => f.write_str("sender restarts"),
            Self::Fence => f.write_str("receiver takes the old sender for fenced"),
            Self::Lose(r, what) => write!(f, "the {what} of {} is lost", name(r)),
        }
    }
}
