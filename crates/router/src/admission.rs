//! Who is served next when there are more requests than may run at once.
//!
//! ```text
//!            high   ─ acme: ▮▮   blue: ▮        highest class first;
//! arrivals ▶ normal ─ acme: ▮▮▮▮ blue: ▮▮       in it, the tenant that was served least;      ▶ at most so many run
//!            low    ─ blue: ▮                   of a tenant, in the order of arrival
//! ```
//!
//! Served is counted in tokens, by the virtual-token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a prompt
//! token counts one, a generated one two. A tenant that comes back after a pause begins where the least served of those that wait is, so
//! nobody saves up a claim to everything. Queues are bounded: what finds its class's queue full is turned away.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use microserving_protocol::ApiError;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{Request, RouterService};

/// What a generated token counts, beside a prompt token's one.
const OUTPUT_WEIGHT: u64 = 2;
/// Generated tokens that may be on the way to the counter.
const BATCH: u64 = 32;
/// Tenants that are remembered while nothing of theirs runs or waits.
const MAX_TENANTS: usize = 4096;

/// The classes, the most urgent one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    High,
    Normal,
    Low,
}

impl Class {
    pub(crate) const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// Returns the class of a request's `priority`.
    pub(crate) const fn of(priority: i64) -> Self {
        match priority {
            1.. => Self::High,
            0 => Self::Normal,
            _ => Self::Low,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// The queue of the request's class is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// The door: lets in as many requests as may run, and the others wait.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Requests that may run at once.
    most_running: usize,
    /// Requests that may wait in each class.
    most_waiting: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    next_ticket: u64,
    classes: [Queue; 3],
}

/// One class.
#[derive(Debug, Default)]
struct Queue {
    tenants: HashMap<Arc<str>, Tenant>,
    num_waiting: usize,
    /// The counter of whoever was let in last: where a tenant begins that comes when nobody waits.
    floor: u64,
}

#[derive(Debug, Default)]
struct Tenant {
    /// Tokens served, weighted.
    served: u64,
    running: usize,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    tokens: u64,
    admit: oneshot::Sender<Slot>,
}

/// A request's leave to run; gives it to the next one when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    admission: Arc<Admission>,
    class: Class,
    tenant: Arc<str>,
    produced: AtomicU64,
}

impl Admission {
    pub(crate) fn new(most_running: usize, most_waiting: usize) -> Self {
        Self { most_running, most_waiting, state: Mutex::new(State::default()) }
    }

    /// Returns how many requests may be inside, running and waiting.
    pub(crate) const fn most_inside(&self) -> usize {
        self.most_running.saturating_add(self.most_waiting.saturating_mul(Class::ALL.len()))
    }

    /// Waits until a request of so many prompt tokens may run. Cancel safe: a request that waits no longer leaves the queue.
    ///
    /// # Errors
    /// If too many of its class wait.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        class: Class,
        tenant: &str,
        tokens: u32,
    ) -> Result<Slot, QueueFull> {
        let tokens = u64::from(tokens);
        let (mut leaving, admitted) = {
            let mut state = self.lock();
            let may_run = state.running < self.most_running;
            let queue = &mut state.classes[class as usize];
            let tenant = queue.arrive(tenant);
            // With a place free nobody waits, but for a moment while one is being called.
            if may_run {
                queue.serve(&tenant, tokens);
                state.running += 1;
                return Ok(self.slot(class, tenant));
            }
            if queue.num_waiting >= self.most_waiting {
                return Err(QueueFull);
            }
            let (admit, admitted) = oneshot::channel();
            queue.num_waiting += 1;
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            let waiter = Waiter { ticket, tokens, admit };
            if let Some(entry) = state.classes[class as usize].tenants.get_mut(&tenant) {
                entry.waiting.push_back(waiter);
            }
            (Leaving { admission: self, class, tenant, ticket, is_waiting: true }, admitted)
        };
        let slot = admitted.await;
        // Whoever got a slot was taken out of the queue by the giver.
        leaving.is_waiting = slot.is_err();
        slot.map_err(|_| QueueFull)
    }

    /// Lets a request run if a place is free just now; its prompt counts nothing yet.
    pub(crate) fn try_enter(self: &Arc<Self>, class: Class, tenant: &str) -> Option<Slot> {
        let mut state = self.lock();
        if state.running >= self.most_running {
            return None;
        }
        state.running += 1;
        let queue = &mut state.classes[class as usize];
        let tenant = queue.arrive(tenant);
        queue.serve(&tenant, 0);
        Some(self.slot(class, tenant))
    }

    /// Returns how many wait in each class.
    pub(crate) fn waiting(&self) -> [usize; 3] {
        let state = self.lock();
        [0, 1, 2].map(|class: usize| state.classes[class].num_waiting)
    }

    fn slot(self: &Arc<Self>, class: Class, tenant: Arc<str>) -> Slot {
        Slot { admission: self.clone(), class, tenant, produced: AtomicU64::new(0) }
    }

    /// Gives places that are free to those that wait.
    fn fill(self: &Arc<Self>) {
        loop {
            let (slot, admit) = {
                let mut state = self.lock();
                if state.running >= self.most_running {
                    return;
                }
                let next = Class::ALL.into_iter().find_map(|class| {
                    state.classes[class as usize].next().map(|(tenant, admit)| (class, tenant, admit))
                });
                let Some((class, tenant, admit)) = next else { return };
                state.running += 1;
                (self.slot(class, tenant), admit)
            };
            // One that went away just now gives its place back by dropping it, outside the lock.
            drop(admit.send(slot));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Finds or makes a tenant; one that has nothing here begins where the least served of those that wait is.
    fn arrive(&mut self, name: &str) -> Arc<str> {
        let least = self.least_served().map_or(self.floor, |(_, served)| served);
        let known = self.tenants.get_key_value(name).map(|(name, _)| name.clone());
        let name = match known {
            Some(name) => name,
            None => {
                if self.tenants.len() >= MAX_TENANTS {
                    self.tenants.retain(|_, tenant| tenant.running > 0 || !tenant.waiting.is_empty());
                }
                Arc::from(name)
            }
        };
        let tenant = self.tenants.entry(name.clone()).or_default();
        if tenant.waiting.is_empty() && tenant.running == 0 {
            tenant.served = tenant.served.max(least);
        }
        name
    }

    /// Returns whose turn it is: of those that wait, the least served, and of equals the one that came first.
    fn least_served(&self) -> Option<(Arc<str>, u64)> {
        let waiting = self.tenants.iter().filter_map(|(name, tenant)| {
            let first = tenant.waiting.front()?;
            Some(((tenant.served, first.ticket), name))
        });
        waiting.min_by_key(|(key, _)| *key).map(|((served, _), name)| (name.clone(), served))
    }

    fn serve(&mut self, name: &Arc<str>, tokens: u64) {
        let tenant = self.tenants.entry(name.clone()).or_default();
        self.floor = self.floor.max(tenant.served);
        tenant.served = tenant.served.saturating_add(tokens);
        tenant.running += 1;
    }

    /// Takes out the one whose turn it is.
    fn next(&mut self) -> Option<(Arc<str>, oneshot::Sender<Slot>)> {
        let (name, _) = self.least_served()?;
        let waiter = self.tenants.get_mut(&name)?.waiting.pop_front()?;
        self.num_waiting -= 1;
        self.serve(&name, waiter.tokens);
        Some((name, waiter.admit))
    }
}

/// A request's place in the router, from its first byte to its last.
#[derive(Debug)]
pub(crate) struct Place {
    _inside: OwnedSemaphorePermit,
    slot: Slot,
}

impl Place {
    /// Notes a generated token.
    pub(crate) fn note_token(&self) {
        self.slot.note_token();
    }

    /// Notes so many generated tokens.
    pub(crate) fn note_tokens(&self, num_tokens: u32) {
        self.slot.note(num_tokens.into());
    }

    /// Notes the prompt of a request that was let in before anybody knew its length.
    pub(crate) fn note_prompt(&self, num_tokens: u32) {
        self.slot.serve(num_tokens.into());
    }

    /// Takes [`Place::note_prompt`] back: it will be counted when it is known.
    pub(crate) fn take_back_prompt(&self, num_tokens: u32) {
        self.slot.unserve(num_tokens.into());
    }

    /// Gives back the leave to run, and stays inside.
    pub(crate) fn into_inside(self) -> OwnedSemaphorePermit {
        self._inside
    }
}

impl RouterService {
    /// Lets a request into the router, to be read; those that run and those that wait are bounded together.
    pub(crate) fn let_in(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.inside.clone().try_acquire_owned().map_err(|_| self.turn_away("inside"))
    }

    /// Lets a request run at once, if it may.
    pub(crate) fn try_admit(
        &self,
        inside: OwnedSemaphorePermit,
        class: Class,
        tenant: &str,
    ) -> Result<Place, OwnedSemaphorePermit> {
        match self.admission.try_enter(class, tenant) {
            Some(slot) => Ok(Place { _inside: inside, slot }),
            None => Err(inside),
        }
    }

    /// Waits until a request may run.
    pub(crate) async fn admit(
        &self,
        inside: OwnedSemaphorePermit,
        request: &Request,
    ) -> Result<Place, ApiError> {
        self.shed(request)?;
        let class = Class::of(request.priority().into());
        match self.admission.enter(class, request.tenant(), request.len()).await {
            Ok(slot) => Ok(Place { _inside: inside, slot }),
            Err(QueueFull) => Err(self.turn_away("queue")),
        }
    }

    /// Returns how many requests wait in each class of priority.
    #[must_use]
    pub fn num_waiting(&self) -> [(&'static str, usize); 3] {
        let waiting = self.admission.waiting();
        Class::ALL.map(|class| (class.name(), waiting[class as usize]))
    }

    fn turn_away(&self, reason: &str) -> ApiError {
        self.metrics().turned_away(reason);
        let message = "the router serves as many requests at once as it may";
        ApiError::too_many_requests(message, Duration::from_secs(1))
    }

    /// Turns a request away whose first token is predicted to come too late wherever it goes.
    fn shed(&self, request: &Request) -> Result<(), ApiError> {
        let Some(most) = self.cluster().thresholds().max_ttft else { return Ok(()) };
        let engines = self.cluster().decoders(request.model());
        let held = self.shared.placement.hints(&engines, request);
        let predictions = engines.iter().zip(held).map(|(engine, held)| {
            engine.outlook().predict(request.len().saturating_sub(held).max(1), request.len()).ttft
        });
        let Some(best) = predictions.min().filter(|best| *best > most) else { return Ok(()) };
        self.metrics().turned_away("ttft");
        let message = format!(
            "the first token is predicted to take {:.3} s, which is above the bound of {:.3} s",
            best.as_secs_f64(),
            most.as_secs_f64()
        );
        Err(ApiError::too_many_requests(message, best - most).with_code("predicted_ttft"))
    }
}

/// Takes a request that waits no longer out of its queue.
struct Leaving<'a> {
    admission: &'a Admission,
    class: Class,
    tenant: Arc<str>,
    ticket: u64,
    is_waiting: bool,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.is_waiting {
            return;
        }
        let mut state = self.admission.lock();
        let queue = &mut state.classes[self.class as usize];
        let Some(tenant) = queue.tenants.get_mut(&self.tenant) else { return };
        let before = tenant.waiting.len();
        tenant.waiting.retain(|waiter| waiter.ticket != self.ticket);
        // It may have been given a slot that nobody took; that one is not in the queue any more.
        queue.num_waiting -= before - tenant.waiting.len();
    }
}

impl Slot {
    /// Notes a generated token.
    pub(crate) fn note_token(&self) {
        self.note(1);
    }

    fn note(&self, num_tokens: u64) {
        if self.produced.fetch_add(num_tokens, Ordering::Relaxed) + num_tokens >= BATCH {
            self.charge(&mut self.admission.lock());
        }
    }

    fn serve(&self, tokens: u64) {
        self.change(|served| served.saturating_add(tokens));
    }

    fn unserve(&self, tokens: u64) {
        self.change(|served| served.saturating_sub(tokens));
    }

    fn change(&self, change: impl FnOnce(u64) -> u64) {
        let mut state = self.admission.lock();
        if let Some(tenant) = state.classes[self.class as usize].tenants.get_mut(&self.tenant) {
            tenant.served = change(tenant.served);
        }
    }

    fn charge(&self, state: &mut State) {
        let produced = self.produced.swap(0, Ordering::Relaxed);
        if let Some(tenant) = state.classes[self.class as usize].tenants.get_mut(&self.tenant) {
            tenant.served = tenant.served.saturating_add(produced.saturating_mul(OUTPUT_WEIGHT));
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut state = self.admission.lock();
            self.charge(&mut state);
            state.running -= 1;
            if let Some(tenant) = state.classes[self.class as usize].tenants.get_mut(&self.tenant) {
                tenant.running -= 1;
            }
        }
        self.admission.fill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets requests in one after the other and returns whose they were.
    async fn order(admission: &Arc<Admission>, arrivals: &[(&'static str, Class, u32)]) -> Vec<&'static str> {
        let first = admission.enter(Class::Normal, "first", 1).await.expect("a place is free");
        let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
        let mut tasks = tokio::task::JoinSet::new();
        for (tenant, class, tokens) in arrivals.iter().copied() {
            let (admission, served) = (admission.clone(), served.clone());
            tasks.spawn(async move {
                let slot = admission.enter(class, tenant, tokens).await.expect("room to wait");
                served.send(tenant).expect("somebody listens");
                drop(slot);
            });
            tokio::task::yield_now().await;
        }
        drop((first, served));
        while tasks.join_next().await.is_some() {}
        let mut found = Vec::new();
        while let Some(tenant) = order.recv().await {
            found.push(tenant);
        }
        assert_eq!(admission.waiting(), [0, 0, 0]);
        assert_eq!(admission.lock().running, 0);
        found
    }

    #[tokio::test]
    async fn classes_go_first_and_tenants_share() {
        let admission = Arc::new(Admission::new(1, 100));
        let normal = |tenant| (tenant, Class::Normal, 100);
        let arrivals = [
            normal("acme"),
            normal("acme"),
            normal("acme"),
            normal("acme"),
            ("late", Class::Low, 1),
            normal("blue"),
            normal("blue"),
            ("boss", Class::High, 5),
        ];
        let expected = ["boss", "acme", "blue", "acme", "blue", "acme", "acme", "late"];
        assert_eq!(order(&admission, &arrivals).await, expected);
    }

    #[tokio::test]
    async fn shares_are_counted_in_tokens() {
        let admission = Arc::new(Admission::new(1, 100));
        let mut arrivals = vec![("large", Class::Normal, 300); 3];
        arrivals.extend([("small", Class::Normal, 100); 6]);
        let order = order(&admission, &arrivals).await;
        assert_eq!(order, ["large", "small", "small", "small", "large", "small", "small", "small", "large"]);
    }

    #[tokio::test]
    async fn generated_tokens_count_and_a_pause_saves_nothing_up() {
        let admission = Arc::new(Admission::new(1, 100));
        let slot = admission.enter(Class::Normal, "talker", 10).await.expect("free");
        for _ in 0..100 {
            slot.note_token();
        }
        drop(slot);
        let served = |tenant: &str| admission.lock().classes[1].tenants[tenant].served;
        assert_eq!(served("talker"), 210);
        let one = admission.enter(Class::Normal, "busy", 5000).await.expect("free");
        drop(one);
        drop(admission.enter(Class::Normal, "busy", 1).await.expect("free"));
        drop(admission.enter(Class::Normal, "new", 1).await.expect("free"));
        assert!(served("new") >= 5000, "it begins where the others are");
    }

    #[tokio::test(start_paused = true)]
    async fn queues_are_bounded_and_who_goes_away_leaves_them() {
        let admission = Arc::new(Admission::new(1, 2));
        let running = admission.enter(Class::Normal, "a", 1).await.expect("free");
        let mut waiting: Vec<_> = (0..2).map(|_| Box::pin(admission.enter(Class::Normal, "a", 1))).collect();
        for wait in &mut waiting {
            assert!(tokio::time::timeout(Duration::from_millis(1), wait).await.is_err());
        }
        assert_eq!(admission.waiting(), [0, 2, 0]);
        assert_eq!(admission.enter(Class::Normal, "b", 1).await.expect_err("full"), QueueFull);
        let mut urgent = Box::pin(admission.enter(Class::High, "b", 1));
        assert!(
            tokio::time::timeout(Duration::from_millis(1), &mut urgent).await.is_err(),
            "a class of its own"
        );
        drop(waiting.remove(0));
        drop(urgent);
        assert_eq!(admission.waiting(), [0, 1, 0]);
        drop(running);
        // The place went to one that does not look any more; it comes back.
        assert_eq!(admission.waiting(), [0, 0, 0]);
        drop(waiting);
        assert_eq!(admission.lock().running, 0);
        drop(admission.enter(Class::Low, "c", 1).await.expect("free"));
    }

    #[tokio::test]
    async fn tenants_are_forgotten_when_they_are_too_many() {
        let admission = Arc::new(Admission::new(1, 2));
        for number in 0..2 * MAX_TENANTS {
            drop(admission.enter(Class::Normal, &format!("t{number}"), 1).await.expect("free"));
        }
        assert!(admission.lock().classes[1].tenants.len() <= MAX_TENANTS);
    }
}
