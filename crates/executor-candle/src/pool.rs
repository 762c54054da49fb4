//! A fixed pool of threads that share the steps of a forward pass.
//!
//! A forward pass is some hundreds of short parallel regions, so the pool must start one in about a microsecond and still
//! leave the cores alone when it is idle or when someone else wants them. Hence:
//!
//! - pieces are claimed one by one from a counter, so a thread that is not running when a region starts costs nothing: the
//!   others do its pieces, and the region closes without waiting for it;
//! - only threads that did join are waited for, first spinning, then asleep, so that whoever holds their core can be moved to ours;
//! - a thread without work spins for some microseconds, then parks;
//! - a thread that lost its core in the middle of a piece holds the region up for a whole time slice of the other. With a core
//!   short, that happens all the time, and two threads are slower than one. So those who held the others up are left out for a while,
//!   and the longer the sooner the last hold-up was: see [`Bench`].
//!
//! Which thread computes a piece never shows in the result: pieces write disjoint places and each is computed alone. So the clock,
//! which says who takes part, has no say in what comes out.

use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread, ThreadId};
use std::time::Duration;

/// The real clock: a thread that lost its core has lost it in real time.
#[expect(clippy::disallowed_types, reason = "decides who computes, never what")]
type Clock = std::time::Instant;

/// Turns of the spin loop before a thread parks: about the length of one layer's serial part.
const SPINS: u32 = 2_000;

/// A wait beyond some pieces' time that only a lost core explains.
const HELD_UP: Duration = Duration::from_micros(500);

/// How long a thread is left out after a hold-up at first, and at most.
const BENCH: Duration = Duration::from_millis(10);
const LONGEST_BENCH: Duration = Duration::from_millis(160);

/// Set in [`Shared::state`] while a region may be joined. Below it the number of threads inside, above it the region's number.
const OPEN: u64 = 1 << 16;
const MEMBERS: u64 = OPEN - 1;
const NEXT_REGION: u64 = 1 << 17;

/// A piece of work: called with the piece's number and the calling thread's.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A region in the making, on the stack of [`Pool::run`].
struct Region<'a> {
    work: &'a Work<'a>,
    next: AtomicUsize,
    num_pieces: usize,
    panicked: AtomicBool,
}

impl Region<'_> {
    /// Claims and does pieces until none is left; returns their number.
    fn help(&self, thread: usize) -> u32 {
        let mut num_done = 0;
        let done = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let piece = self.next.fetch_add(1, Ordering::Relaxed);
                if piece >= self.num_pieces {
                    break;
                }
                (self.work)(piece, thread);
                num_done += 1;
            }
        }));
        if done.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
            self.next.store(self.num_pieces, Ordering::Relaxed);
        }
        num_done
    }
}

/// What the threads share.
struct Shared {
    /// Region number, [`OPEN`], members.
    state: AtomicU64,
    /// The open region; valid while `state` says it is open or has members.
    region: AtomicPtr<Region<'static>>,
    members: Vec<Member>,
    /// The caller sleeps until the last member leaves, or is about to.
    caller_waits: AtomicBool,
    /// Who that is.
    caller: Mutex<Option<Thread>>,
    stop: AtomicBool,
}

/// What the others know of a helper.
#[derive(Debug, Default)]
struct Member {
    /// It is parked, or about to be.
    parked: AtomicBool,
    /// It is in a region.
    inside: AtomicBool,
    /// It was inside when the caller went to sleep.
    late: AtomicBool,
    /// It is left out.
    benched: AtomicBool,
}

impl Shared {
    fn has_members(&self, order: Ordering) -> bool {
        self.state.load(order) & MEMBERS != 0
    }

    /// Ends a helper's membership.
    fn leave(&self, helper: usize) {
        self.members[helper].inside.store(false, Ordering::Relaxed);
        // SeqCst: either this thread sees that the caller waits, or the caller sees that no member is left.
        let before = self.state.fetch_sub(1, Ordering::SeqCst);
        if before & MEMBERS == 1 && self.caller_waits.load(Ordering::SeqCst) {
            let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(caller) = &*caller {
                caller.unpark();
            }
        }
    }

    /// Waits until no member is left; says whether it had to sleep, after which [`Member::late`] holds.
    fn wait(&self) -> bool {
        for _ in 0..SPINS {
            if !self.has_members(Ordering::Acquire) {
                return false;
            }
            std::hint::spin_loop();
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        self.caller_waits.store(true, Ordering::SeqCst);
        for member in &self.members {
            member.late.store(member.inside.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        while self.has_members(Ordering::SeqCst) {
            std::thread::park();
        }
        self.caller_waits.store(false, Ordering::SeqCst);
        true
    }
}

/// How long threads are left out.
#[derive(Debug, Default)]
struct Bench {
    /// Threads left out.
    num_threads: usize,
    until: Option<Clock>,
    /// The length of the last time; doubled as long as hold-ups follow each other closely.
    length: Duration,
    last: Option<Clock>,
}

impl Bench {
    /// Says whether the time is over for those left out.
    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Clock::now() >= until)
    }

    /// Leaves out some more, after a hold-up.
    fn add(&mut self, num_threads: usize, now: Clock) {
        let is_soon = self.last.is_some_and(|last| now - last < 4 * self.length);
        self.length = if is_soon { (2 * self.length).min(LONGEST_BENCH) } else { BENCH };
        self.last = Some(now);
        self.until = Some(now + self.length);
        self.num_threads += num_threads;
    }

    /// Lets all take part again.
    fn clear(&mut self) {
        (self.num_threads, self.until) = (0, None);
    }
}

/// The pool; the thread that calls [`Pool::run`] is its thread 0.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
    bench: Bench,
    pins: Option<Pins>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.num_threads()).finish()
    }
}

impl Pool {
    /// Starts `threads - 1` helpers; with `is_pinned`, each stays on a core of its own, and one is left for the caller.
    ///
    /// # Errors
    /// If the system refuses a thread, or there are more threads than cores to pin them to.
    pub(crate) fn new(threads: NonZeroUsize, is_pinned: bool) -> std::io::Result<Self> {
        let num_helpers = (threads.get() - 1).min(MEMBERS as usize / 2);
        let pins = if is_pinned { Some(Pins::new(num_helpers + 1)?) } else { None };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            region: AtomicPtr::new(std::ptr::null_mut()),
            members: (0..num_helpers).map(|_| Member::default()).collect(),
            caller_waits: AtomicBool::new(false),
            caller: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let bench = Bench::default();
        let mut pool = Self { shared, helpers: Vec::new(), handles: Vec::new(), bench, pins };
        for helper in 0..num_helpers {
            let shared = Arc::clone(&pool.shared);
            let core = pool.pins.as_ref().map(|pins| pins.cores[helper + 1]);
            let thread =
                std::thread::Builder::new().name(format!("forward-{}", helper + 1)).spawn(move || {
                    if let Some(core) = core {
                        pin_to(core);
                    }
                    help_until_stopped(&shared, helper);
                })?;
            pool.handles.push(thread.thread().clone());
            pool.helpers.push(thread);
        }
        Ok(pool)
    }

    /// Returns the number of threads, the caller included.
    pub(crate) fn num_threads(&self) -> usize {
        self.shared.members.len() + 1
    }

    /// Pins the calling thread to its core, if the pool is pinned: the one that will call [`Self::run`] step by step.
    pub(crate) fn pin_caller(&mut self) {
        if let Some(pins) = &mut self.pins {
            pins.pin_caller();
        }
    }

    /// Calls `work(piece, thread)` for each piece, spread over the threads; returns when all are done.
    ///
    /// # Panics
    /// If `work` does.
    pub(crate) fn run(&mut self, num_pieces: usize, work: &Work<'_>) {
        if self.bench.is_over() {
            self.recall();
        }
        if num_pieces <= 1 || self.helpers.len() == self.bench.num_threads {
            for piece in 0..num_pieces {
                work(piece, 0);
            }
            return;
        }
        let begin = Clock::now();
        let region = Region { work, next: AtomicUsize::new(0), num_pieces, panicked: AtomicBool::new(false) };
        let shared = &*self.shared;
        shared.region.store((&raw const region).cast::<Region<'static>>().cast_mut(), Ordering::Relaxed);
        // `&mut self` makes this the only opener, and no member is left of the region before. SeqCst: either a helper
        // that parks sees the region, or this thread sees that it is parked.
        let number = (shared.state.load(Ordering::Relaxed) & !(OPEN | MEMBERS)).wrapping_add(NEXT_REGION);
        shared.state.store(number | OPEN, Ordering::SeqCst);
        for (member, handle) in shared.members.iter().zip(&self.handles) {
            if member.parked.load(Ordering::SeqCst) && !member.benched.load(Ordering::Relaxed) {
                handle.unpark();
            }
        }
        let num_done = region.help(0);
        // No one joins from here on; those inside finish the pieces they have claimed.
        let state = shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        if state & MEMBERS != 0 {
            let done = Clock::now();
            let has_slept = shared.wait();
            let now = Clock::now();
            // A thread left alone with the region's last piece is waited for as long as a piece takes.
            if has_slept && now - done > HELD_UP + 2 * (done - begin) / num_done.max(1) {
                let late = shared.members.iter().filter(|member| member.late.load(Ordering::Relaxed));
                let mut num_late = 0;
                for member in late {
                    member.benched.store(true, Ordering::SeqCst);
                    num_late += 1;
                }
                self.bench.add(num_late, now);
            }
        }
        assert!(!region.panicked.load(Ordering::Relaxed), "a piece of the forward pass panicked");
    }

    /// Lets all threads take part again.
    fn recall(&mut self) {
        self.bench.clear();
        for member in &self.shared.members {
            member.benched.store(false, Ordering::SeqCst);
        }
    }
}

/// The cores of a pinned pool.
#[derive(Debug)]
struct Pins {
    /// One a thread.
    cores: Vec<usize>,
    /// The thread that called last, which is pinned to the first core.
    caller: Option<ThreadId>,
}

impl Pins {
    /// Takes the first cores that this process may run on.
    #[cfg(target_os = "linux")]
    fn new(num_threads: usize) -> std::io::Result<Self> {
        use rustix::thread::{CpuSet, sched_getaffinity};

        let allowed = sched_getaffinity(None)?;
        let cores: Vec<usize> =
            (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).take(num_threads).collect();
        if cores.len() < num_threads {
            let reason = format!("{num_threads} threads cannot be pinned to {} cores", cores.len());
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, reason));
        }
        Ok(Self { cores, caller: None })
    }

    #[cfg(not(target_os = "linux"))]
    fn new(_: usize) -> std::io::Result<Self> {
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "threads cannot be pinned on this system"))
    }

    /// Pins the calling thread, if it did not call last.
    fn pin_caller(&mut self) {
        let caller = std::thread::current().id();
        if self.caller != Some(caller) {
            self.caller = Some(caller);
            pin_to(self.cores[0]);
        }
    }
}

/// Keeps the calling thread on a core. One that was taken away since is no reason to stop.
fn pin_to(core: usize) {
    #[cfg(target_os = "linux")]
    {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(core);
        if let Err(err) = rustix::thread::sched_setaffinity(None, &cores) {
            tracing::warn!(core, %err, "a thread could not be pinned");
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for handle in &self.handles {
            handle.unpark();
        }
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its work, so there is none to report.
            let _ = helper.join();
        }
    }
}

/// A mutable slice that the pieces of a region share, each in its own part.
#[derive(Debug)]
pub(crate) struct Parts<'a, T> {
    base: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` handed out in parts; that the parts are disjoint is the contract of `get`.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// Borrows a slice.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { base: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// Returns a part.
    ///
    /// # Safety
    /// No other part in use overlaps it.
    ///
    /// # Panics
    /// If it does not lie inside the slice.
    #[expect(clippy::mut_from_ref, reason = "the parts are disjoint, as the caller promises")]
    pub(crate) unsafe fn get(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part outside the slice");
        // SAFETY: inside the borrowed slice, and disjoint from every other part as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }

    /// Returns a part that others may read too.
    ///
    /// # Safety
    /// No part that [`Self::get`] returned and that is in use overlaps it.
    ///
    /// # Panics
    /// If it does not lie inside the slice.
    pub(crate) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "part outside the slice");
        // SAFETY: inside the borrowed slice, and no one writes it, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start), range.len()) }
    }
}

/// The life of a helper: join each region once, otherwise spin, then park.
fn help_until_stopped(shared: &Shared, helper: usize) {
    let mut last_region = 0;
    let mut spins = 0_u32;
    while !shared.stop.load(Ordering::SeqCst) {
        let state = shared.state.load(Ordering::SeqCst);
        let number = state & !(OPEN | MEMBERS);
        let member = &shared.members[helper];
        let is_open = state & OPEN != 0 && number != last_region;
        if is_open && !member.benched.load(Ordering::SeqCst) {
            if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                last_region = number;
                member.inside.store(true, Ordering::Relaxed);
                // SAFETY: this thread is a member, so `run` has not returned and the region on its stack is alive.
                let region = unsafe { &*shared.region.load(Ordering::Relaxed) };
                region.help(helper + 1);
                shared.leave(helper);
                spins = 0;
            }
            continue;
        }
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
            continue;
        }
        member.parked.store(true, Ordering::SeqCst);
        let state = shared.state.load(Ordering::SeqCst);
        let is_open = state & OPEN != 0 && state & !(OPEN | MEMBERS) != last_region;
        let is_news = is_open && !member.benched.load(Ordering::SeqCst);
        if !is_news && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        member.parked.store(false, Ordering::SeqCst);
        spins = 0;
    }
}

#[cfg(test)]
#[path = "pool/tests.rs"]
mod tests;
