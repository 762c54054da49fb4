//! The pool under threads that come late, leave early and panic.

use super::*;

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

/// Runs two pieces, of which a helper takes one and keeps it for `time` after the caller is done with its own.
fn hold_up(pool: &mut Pool, time: Duration) {
    let arrived = AtomicUsize::new(0);
    let done = AtomicBool::new(false);
    pool.run(2, &|_, thread| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        if thread == 0 {
            done.store(true, Ordering::SeqCst);
            return;
        }
        while !done.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let begin = Clock::now();
        while begin.elapsed() < time {
            std::hint::spin_loop();
        }
    });
}

#[test]
fn after_a_hold_up_the_caller_computes_alone_for_a_while() {
    let mut pool = pool(2);
    assert!(!pool.solo.lasts());
    hold_up(&mut pool, HELD_UP * 20);
    let begin = Clock::now();
    assert!(pool.solo.last.is_some(), "the hold-up was not noticed");
    let shares = [AtomicUsize::new(0), AtomicUsize::new(0)];
    pool.run(100, &|_, thread| {
        shares[thread].fetch_add(1, Ordering::Relaxed);
    });
    if begin.elapsed() < SOLO / 2 {
        assert_eq!(shares.map(AtomicUsize::into_inner), [100, 0]);
    }
    while pool.solo.lasts() {
        std::thread::yield_now();
    }
    // Returns only if the helper takes part again.
    hold_up(&mut pool, Duration::ZERO);
}

#[test]
fn hold_ups_in_a_row_make_it_longer() {
    let (mut solo, mut now) = (Solo::default(), Clock::now());
    let mut lengths = Vec::new();
    for _ in 0..6 {
        solo.begin(now);
        lengths.push(solo.length);
        now += solo.length + SOLO;
    }
    assert_eq!(lengths, [1, 2, 4, 8, 16, 16].map(|times| SOLO * times));
    solo.begin(now + 4 * LONGEST_SOLO);
    assert_eq!(solo.length, SOLO);
}

#[cfg(target_os = "linux")]
#[test]
fn pinned_threads_have_a_core_each() {
    // On a thread of its own, which stays pinned.
    std::thread::spawn(|| {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap().count();
        let cores = NonZeroUsize::new(allowed as usize).unwrap();
        assert!(Pool::new(cores.checked_add(1).unwrap(), true).is_err());
        let mut pool = Pool::new(cores, true).unwrap();
        pool.pin_caller();
        let seen: Vec<Mutex<Vec<usize>>> = (0..cores.get()).map(|_| Mutex::default()).collect();
        for _ in 0..200 {
            pool.run(4 * cores.get(), &|_, thread| {
                seen[thread].lock().unwrap().push(rustix::thread::sched_getcpu());
            });
        }
        let cores_of: Vec<usize> = pool.pins.as_ref().unwrap().cores.clone();
        for (seen, core) in seen.iter().zip(cores_of) {
            assert!(seen.lock().unwrap().iter().all(|&at| at == core));
        }
    })
    .join()
    .unwrap();
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
