//! What may happen next in a state of the world.

use std::collections::BTreeSet;

use microserving_kvcache::lifecycle::{Event, PageAction, State, Step};

use crate::search::{Fence, Variant};
use crate::world::{Action, Grant, Holder, Job, MAX_PAGES, NUM_REQUESTS, Page, Request, World};

/// The moves out of one state.
pub(crate) struct Moves<'a> {
    pub(crate) variant: Variant,
    pub(crate) from: World,
    pub(crate) found: Vec<(Action, Result<World, String>)>,
    pub(crate) used: &'a mut BTreeSet<(State, Event)>,
}

impl Moves<'_> {
    /// Adds a move that changes one request and nothing else.
    fn change(&mut self, action: Action, r: u8, change: impl FnOnce(&mut Request)) {
        let mut world = self.from;
        change(&mut world.requests[usize::from(r)]);
        self.found.push((action, Ok(world)));
    }

    fn lose(&mut self, r: u8, what: &'static str, change: impl FnOnce(&mut Request)) {
        if self.variant.size.lossy {
            self.change(Action::Lose(r, what), r, change);
        }
    }

    /// Adds a move that changes a request and then is an event to the receiver's engine.
    fn event(&mut self, action: Action, r: u8, event: Event, change: impl FnOnce(&mut World)) {
        let mut world = self.from;
        change(&mut world);
        let outcome = self.happen(&mut world, r, event).map(|()| world);
        self.found.push((action, outcome));
    }

    /// What the engine does: one step of the function, and its actions on pages and transport.
    fn happen(&mut self, world: &mut World, r: u8, event: Event) -> Result<(), String> {
        let request = &mut world.requests[usize::from(r)];
        let Some(state) = request.state else { return Ok(()) };
        self.used.insert((state, event));
        let Step { next, revoke, pages } = (self.variant.rules)(state, event);
        request.state = Some(next);
        if revoke {
            request.grant = Grant::Revoked;
            request.revoke_sent = true;
        }
        let mine = request.pages;
        for (at, page) in world.pages.iter_mut().enumerate().filter(|(at, _)| mine & (1 << at) != 0) {
            match pages {
                PageAction::Keep => {}
                PageAction::AcceptReceived => {
                    if page.content != Some(r) {
                        return Err(format!("page {at} is read and holds {:?}", page.content));
                    }
                    page.holder = Holder::Owned(r);
                }
                PageAction::AcceptUnreceived => {
                    *page = Page { holder: Holder::Owned(r), content: Some(r) };
                }
                PageAction::Quarantine => page.holder = Holder::Quarantined(r),
                PageAction::Drain | PageAction::Free => *page = Page { holder: Holder::Free, content: None },
            }
        }
        Ok(())
    }

    pub(crate) fn explore(&mut self) {
        for r in 0..NUM_REQUESTS {
            let r = u8::try_from(r).unwrap();
            let request = self.from.requests[usize::from(r)];
            self.receiver(r, request);
            self.sender(r, request);
            self.messages(r, request);
            self.writes(r, request);
            self.transport(r, request);
        }
        self.processes();
    }

    fn receiver(&mut self, r: u8, request: Request) {
        let Some(state) = request.state else {
            let free =
                (0..self.variant.size.num_pages).filter(|at| self.from.pages[*at].holder == Holder::Free);
            let need = usize::from(self.variant.size.needs[usize::from(r)]);
            let pages: Vec<usize> = free.take(need).collect();
            if pages.len() == need {
                let mut world = self.from;
                let request = &mut world.requests[usize::from(r)];
                request.state = Some(State::begin(true));
                request.grant = Grant::Open;
                for at in pages {
                    request.pages |= 1 << at;
                    world.pages[at].holder = Holder::Reserved(r);
                }
                self.found.push((Action::PrepRecv(r), Ok(world)));
            }
            return;
        };
        if !state.is_final() {
            self.event(Action::Abort(r), r, Event::Abort, |_| ());
            self.event(Action::LeaseExpired(r), r, Event::LeaseExpired, |_| ());
            if !request.asked_for {
                self.event(Action::Wanted(r), r, Event::Wanted, |world| {
                    world.requests[usize::from(r)].asked_for = true;
                });
            }
        }
        if matches!(state, State::Accepted { .. }) && request.pages != 0 {
            let mut world = self.from;
            let mut outcome = Ok(());
            for (at, page) in world.pages.iter_mut().enumerate() {
                if request.pages & (1 << at) != 0 {
                    if page.content != Some(r) {
                        outcome = Err(format!("page {at} is read and holds {:?}", page.content));
                    }
                    *page = Page { holder: Holder::Free, content: None };
                }
            }
            world.requests[usize::from(r)].pages = 0;
            self.found.push((Action::Finish(r), outcome.map(|()| world)));
        }
    }

    fn sender(&mut self, r: u8, request: Request) {
        if !self.from.sender_up {
            return;
        }
        match request.job {
            Job::None if request.sends_left > 0 && request.state.is_some() => {
                self.change(Action::RemoteSend(r), r, |request| {
                    request.sends_left -= 1;
                    request.job = Job::Queued;
                });
            }
            Job::Queued => self.change(Action::Claim(r), r, |request| {
                request.job = Job::Claiming;
                request.claim_sent = true;
            }),
            Job::Claiming if !request.claim_sent && !request.opened_sent => {
                self.change(Action::Claim(r), r, |request| request.claim_sent = true);
            }
            Job::Writing { posted } => {
                self.change(Action::Cancel(r), r, |request| request.job = Job::Stopped);
                for page in (0..MAX_PAGES).filter(|at| request.pages & !posted & (1 << at) != 0) {
                    let page = u8::try_from(page).unwrap();
                    let epoch = usize::from(self.from.sender_epoch);
                    if self.variant.sender_checks && request.grant != Grant::Open {
                        self.change(Action::DropStale(r), r, |request| request.job = Job::Stopped);
                        continue;
                    }
                    self.change(Action::Post(r, page), r, |request| {
                        request.job = Job::Writing { posted: posted | 1 << page };
                        request.flying[epoch] |= 1 << page;
                    });
                }
            }
            Job::None | Job::Claiming | Job::Stopped => {}
        }
    }

    fn messages(&mut self, r: u8, request: Request) {
        let World { sender_up, sender_epoch, .. } = self.from;
        if request.claim_sent {
            let current = request.claimed == Some(sender_epoch);
            if request.grant == Grant::Open && (request.claimed.is_none() || current) {
                self.change(Action::AdmitClaim(r), r, |request| {
                    request.claim_sent = false;
                    request.claimed = Some(sender_epoch);
                    request.opened_sent = true;
                });
            } else {
                self.change(Action::RefuseClaim(r), r, |request| {
                    request.claim_sent = false;
                    request.job = Job::None;
                });
            }
            self.lose(r, "claim", |request| request.claim_sent = false);
        }
        if request.opened_sent && sender_up {
            self.change(Action::Opened(r), r, |request| {
                request.opened_sent = false;
                if request.job == Job::Claiming {
                    request.job = Job::Writing { posted: 0 };
                }
            });
        }
        if request.opened_sent {
            self.lose(r, "admission", |request| request.opened_sent = false);
        }
        if request.revoke_sent {
            // A sender of another epoch knows nothing of the job and cannot say that its writes are over.
            if sender_up && request.claimed == Some(sender_epoch) {
                self.change(Action::Stop(r), r, |request| {
                    request.revoke_sent = false;
                    request.job = Job::Stopped;
                });
            }
            self.lose(r, "revocation", |request| request.revoke_sent = false);
        } else if request.grant == Grant::Revoked && request.claimed.is_some() && !request.ack_sent {
            self.change(Action::Revoke(r), r, |request| request.revoke_sent = true);
        }
        let drained = request.flying[usize::from(sender_epoch)] == 0;
        if request.job == Job::Stopped && sender_up && drained && !request.ack_sent {
            self.change(Action::Acknowledge(r), r, |request| request.ack_sent = true);
        }
        if request.ack_sent {
            self.lose(r, "acknowledgement", |request| request.ack_sent = false);
        }
    }

    fn writes(&mut self, r: u8, request: Request) {
        for epoch in 0..2 {
            for page in (0..MAX_PAGES).filter(|at| request.flying[epoch] & (1 << at) != 0) {
                let number = u8::try_from(page).unwrap();
                let action = Action::Land(r, number);
                let mut world = self.from;
                let mine = &mut world.requests[usize::from(r)];
                mine.flying[epoch] &= !(1 << page);
                if self.variant.receiver_checks && request.grant != Grant::Open {
                    self.found.push((Action::RejectStale(r, number), Ok(world)));
                    continue;
                }
                let outcome = match world.pages[page].holder {
                    Holder::Free | Holder::Quarantined(_) => Ok(world),
                    Holder::Reserved(holder) if holder == r => {
                        world.pages[page].content = Some(r);
                        if request.grant == Grant::Open {
                            mine.landed |= 1 << page;
                            let all = mine.landed == mine.pages;
                            if all {
                                mine.grant = Grant::Closed;
                                mine.claimed = None;
                            }
                            let event = if all { Event::Complete } else { Event::Arrived };
                            self.happen(&mut world, r, event).map(|()| world)
                        } else {
                            Ok(world)
                        }
                    }
                    holder => Err(format!("page {page} is {holder:?}")),
                };
                self.found.push((action, outcome));
            }
        }
    }

    fn transport(&mut self, r: u8, request: Request) {
        let World { sender_up, sender_epoch, fenced, .. } = self.from;
        let is_dead = |epoch: u8| epoch < sender_epoch || !sender_up;
        let is_fenced = |epoch: u8| epoch == 0 && fenced;
        if request.grant == Grant::Revoked {
            let over = match request.claimed {
                None => true,
                Some(epoch) => request.ack_sent || is_fenced(epoch) || self.variant.receiver_checks,
            };
            if over {
                self.event(Action::Release(r), r, Event::Released, |world| {
                    let request = &mut world.requests[usize::from(r)];
                    request.grant = Grant::Closed;
                    request.claimed = None;
                    request.revoke_sent = false;
                    request.ack_sent = false;
                });
            }
        }
        if request.grant != Grant::Open {
            return;
        }
        match request.claimed {
            None => self.event(Action::CloseUnasked(r), r, Event::Released, |world| {
                world.requests[usize::from(r)].grant = Grant::Closed;
            }),
            Some(epoch) if !request.lost_told && (is_dead(epoch) || is_fenced(epoch)) => {
                self.event(Action::TellLost(r), r, Event::Lost, |world| {
                    world.requests[usize::from(r)].lost_told = true;
                });
            }
            // Only a writer that certainly writes no more is replaced by another.
            Some(_) if request.ack_sent => {
                self.event(Action::TellLost(r), r, Event::Lost, |world| {
                    let request = &mut world.requests[usize::from(r)];
                    request.claimed = None;
                    request.lost_told = false;
                    request.landed = 0;
                    request.ack_sent = false;
                    request.job = Job::None;
                });
            }
            Some(epoch) if request.lost_told && is_fenced(epoch) => {
                self.change(Action::ClearLost(r), r, |request| {
                    request.claimed = None;
                    request.lost_told = false;
                    request.landed = 0;
                });
            }
            Some(_) => {}
        }
    }

    fn processes(&mut self) {
        let World { sender_up, sender_epoch, fenced, .. } = self.from;
        if sender_up && sender_epoch == 0 {
            let mut world = self.from;
            world.sender_up = false;
            for request in &mut world.requests {
                // What the process had queued or agreed is forgotten; what it posted is in the network card's hands.
                request.job = Job::None;
                request.claim_sent = false;
                request.opened_sent = false;
            }
            self.found.push((Action::Crash, Ok(world)));
        }
        if !sender_up {
            let mut world = self.from;
            world.sender_up = true;
            world.sender_epoch = 1;
            self.found.push((Action::Restart, Ok(world)));
        }
        let is_dead = !sender_up || sender_epoch > 0;
        let may_fence = match self.variant.fence {
            Fence::Proven => is_dead,
            Fence::Never => false,
            Fence::OnMissedHeartbeat => true,
        };
        if may_fence && !fenced {
            let mut world = self.from;
            world.fenced = true;
            if self.variant.fence == Fence::Proven {
                for request in &mut world.requests {
                    request.flying[0] = 0;
                }
            }
            self.found.push((Action::Fence, Ok(world)));
        }
    }
}
