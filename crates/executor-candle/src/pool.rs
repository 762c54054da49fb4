//! A fixed pool of threads that share the steps of a forward pass.
//!
//! A forward pass is some hundreds of short parallel regions, so the pool must start one in about a microsecond and still
//! leave the cores alone when it is idle or when a second process wants them. Hence:
//!
//! - pieces are claimed one by one from a counter, so a thread that is not running when a region starts costs nothing: the
//!   others do its pieces, and the region closes without waiting for it;
//! - only threads that did join are waited for;
//! - a thread without work spins for some microseconds, then parks.
//!
//! Which thread computes a piece never shows in the result: pieces write disjoint places and each is computed alone.

use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Turns of the spin loop before a thread parks: about the length of one layer's serial part.
const SPINS: u32 = 2_000;

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
    /// Claims and does pieces until none is left.
    fn help(&self, thread: usize) {
        let done = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let piece = self.next.fetch_add(1, Ordering::Relaxed);
                if piece >= self.num_pieces {
                    break;
                }
                (self.work)(piece, thread);
            }
        }));
        if done.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
            self.next.store(self.num_pieces, Ordering::Relaxed);
        }
    }
}

/// What the threads share.
struct Shared {
    /// Region number, [`OPEN`], members.
    state: AtomicU64,
    /// The open region; valid while `state` says it is open or has members.
    region: AtomicPtr<Region<'static>>,
    /// One flag a helper: it is parked, or about to be.
    parked: Vec<AtomicBool>,
    stop: AtomicBool,
}

/// The pool; the thread that calls [`Pool::run`] is its thread 0.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    handles: Vec<Thread>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.num_threads()).finish()
    }
}

impl Pool {
    /// Starts `threads - 1` helpers.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn new(threads: NonZeroUsize) -> std::io::Result<Self> {
        let num_helpers = (threads.get() - 1).min(MEMBERS as usize / 2);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            region: AtomicPtr::new(std::ptr::null_mut()),
            parked: (0..num_helpers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, helpers: Vec::new(), handles: Vec::new() };
        for helper in 0..num_helpers {
            let shared = Arc::clone(&pool.shared);
            let thread =
                std::thread::Builder::new().name(format!("forward-{}", helper + 1)).spawn(move || {
                    help_until_stopped(&shared, helper);
                })?;
            pool.handles.push(thread.thread().clone());
            pool.helpers.push(thread);
        }
        Ok(pool)
    }

    /// Returns the number of threads, the caller included.
    pub(crate) fn num_threads(&self) -> usize {
        self.shared.parked.len() + 1
    }

    /// Calls `work(piece, thread)` for each piece, spread over the threads; returns when all are done.
    ///
    /// # Panics
    /// If `work` does.
    pub(crate) fn run(&mut self, num_pieces: usize, work: &Work<'_>) {
        if num_pieces <= 1 || self.helpers.is_empty() {
            for piece in 0..num_pieces {
                work(piece, 0);
            }
            return;
        }
        let region = Region { work, next: AtomicUsize::new(0), num_pieces, panicked: AtomicBool::new(false) };
        let shared = &*self.shared;
        shared.region.store((&raw const region).cast::<Region<'static>>().cast_mut(), Ordering::Relaxed);
        // `&mut self` makes this the only opener, and no member is left of the region before. SeqCst: either a helper
        // that parks sees the region, or this thread sees that it is parked.
        let number = (shared.state.load(Ordering::Relaxed) & !(OPEN | MEMBERS)).wrapping_add(NEXT_REGION);
        shared.state.store(number | OPEN, Ordering::SeqCst);
        for (parked, handle) in shared.parked.iter().zip(&self.handles) {
            if parked.load(Ordering::SeqCst) {
                handle.unpark();
            }
        }
        region.help(0);
        // No one joins from here on; those inside finish the pieces they have claimed.
        shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0_u32;
        while shared.state.load(Ordering::Acquire) & MEMBERS != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // The last member has lost its core to someone else; let it have ours.
                std::thread::yield_now();
            }
        }
        assert!(!region.panicked.load(Ordering::Relaxed), "a piece of the forward pass panicked");
    }
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
}

/// The life of a helper: join each region once, otherwise spin, then park.
fn help_until_stopped(shared: &Shared, helper: usize) {
    let mut last_region = 0;
    let mut spins = 0_u32;
    while !shared.stop.load(Ordering::SeqCst) {
        let state = shared.state.load(Ordering::SeqCst);
        let number = state & !(OPEN | MEMBERS);
        if state & OPEN != 0 && number != last_region {
            if shared.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                last_region = number;
                // SAFETY: this thread is a member, so `run` has not returned and the region on its stack is alive.
                let region = unsafe { &*shared.region.load(Ordering::Relaxed) };
                region.help(helper + 1);
                shared.state.fetch_sub(1, Ordering::Release);
                spins = 0;
            }
            continue;
        }
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
            continue;
        }
        let parked = &shared.parked[helper];
        parked.store(true, Ordering::SeqCst);
        let state = shared.state.load(Ordering::SeqCst);
        let news = state & OPEN != 0 && state & !(OPEN | MEMBERS) != last_region;
        if !news && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        parked.store(false, Ordering::SeqCst);
        spins = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_piece_is_done_once() {
        for threads in [1, 2, 5] {
            let mut pool = pool(threads);
            for num_pieces in [0, 1, 2, 7, 100] {
                for _ in 0..200 {
                    let counts: Vec<AtomicUsize> = (0..num_pieces).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(num_pieces, &|piece, thread| {
                        assert!(thread < threads);
                        counts[piece].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn parked_helpers_are_woken() {
        let mut pool = pool(3);
        for _ in 0..5 {
            while !pool.shared.parked.iter().all(|parked| parked.load(Ordering::SeqCst)) {
                std::thread::yield_now();
            }
            // Each piece waits for the others, so the region ends only if all three threads take part.
            let arrived = AtomicUsize::new(0);
            pool.run(3, &|_, _| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 3 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = pool(2);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(50, &|piece, _| assert!(piece != 20, "as planned"));
        }));
        assert!(result.is_err());
        let done = AtomicUsize::new(0);
        pool.run(50, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 50);
    }
}
