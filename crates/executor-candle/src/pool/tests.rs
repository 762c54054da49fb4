//! The pool under threads that come late, leave early and panic.

use super::*;

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

/// Runs a piece a thread, of which one helper keeps its own for `time` and a multiple of what the region took so far, counted from
/// when the caller is done. Returns that helper's number.
fn hold_up(pool: &mut Pool, time: Duration) -> usize {
    let (arrived, late, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let num_threads = pool.num_threads();
    let begin = Clock::now();
    pool.run(num_threads, &|_, thread| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < num_threads {
            std::thread::yield_now();
        }
        if thread == 0 {
            done.store(true, Ordering::SeqCst);
        } else if late.compare_exchange(0, thread, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            while !done.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            let so_far = begin.elapsed();
            while !time.is_zero() && begin.elapsed() < time + 5 * so_far {
                std::hint::spin_loop();
            }
        }
    });
    late.into_inner()
}

#[test]
fn who_held_the_others_up_is_left_out_for_a_while() {
    let mut pool = pool(2);
    hold_up(&mut pool, HELD_UP * 20);
    let begin = Clock::now();
    assert!(pool.bench.last.is_some(), "the hold-up was not noticed");
    let shares = [AtomicUsize::new(0), AtomicUsize::new(0)];
    pool.run(100, &|_, thread| {
        shares[thread].fetch_add(1, Ordering::Relaxed);
    });
    if begin.elapsed() < BENCH / 2 {
        assert_eq!(shares.map(AtomicUsize::into_inner), [100, 0]);
    }
    while pool.bench.until.is_some_and(|until| Clock::now() < until) {
        std::thread::yield_now();
    }
    // Returns only if the helper takes part again.
    hold_up(&mut pool, Duration::ZERO);
}

/// Three threads of which one is late: the other two go on together.
#[test]
fn only_who_is_late_is_left_out() {
    let mut pool = pool(3);
    let late = hold_up(&mut pool, HELD_UP * 20);
    let benched: Vec<usize> =
        (1..3).filter(|helper| pool.shared.members[helper - 1].benched.load(Ordering::SeqCst)).collect();
    assert!(benched.contains(&late), "{late} is not among {benched:?}");
    assert_eq!(pool.bench.num_threads, benched.len());
}

#[test]
fn hold_ups_in_a_row_make_it_longer() {
    let (mut bench, mut now) = (Bench::default(), Clock::now());
    let mut lengths = Vec::new();
    for _ in 0..6 {
        bench.add(1, now);
        lengths.push(bench.length);
        now += bench.length + BENCH;
        bench.clear();
    }
    assert_eq!(lengths, [1, 2, 4, 8, 16, 16].map(|times| BENCH * times));
    bench.add(1, now + 4 * LONGEST_BENCH);
    assert_eq!(bench.length, BENCH);
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
        while !pool.shared.members.iter().all(|member| member.parked.load(Ordering::SeqCst)) {
            std::thread::yield_now();
        }
        // On a busy machine one may have held up the others.
        pool.recall();
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
