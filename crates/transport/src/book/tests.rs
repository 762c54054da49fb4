use proptest::prelude::*;

use super::*;

fn range(begin: u32, end: u32) -> KvRange {
    KvRange::new(begin, end).expect("ordered")
}

/// A grant of `[0, tokens)` at 8 bytes a token, at the start of the region.
fn grant_of(generation: u64, tokens: u32) -> Grant {
    let num_bytes = tokens as usize * 8;
    Grant {
        generation: Generation(generation),
        range: range(0, tokens),
        token_bytes: 8,
        runs: vec![ByteRun { offset: 0, num_bytes }],
    }
}

fn book() -> GrantBook<u8> {
    let mut book = GrantBook::new();
    book.set_region_bytes(1 << 12);
    book
}

fn events(book: &mut GrantBook<u8>) -> Vec<TransportEvent> {
    let mut events = Vec::new();
    book.drain_events(&mut events);
    events
}

fn whole(num_bytes: u64) -> Delivery {
    Delivery { num_bytes, intact: true }
}

const G: Generation = Generation(1);

#[test]
fn a_broken_connection_releases_nothing_before_the_fence() {
    let mut book = book();
    book.grant(grant_of(1, 4)).unwrap();
    let claim = book.claim(G, range(0, 4), 0).unwrap().claim;
    book.end(claim, Ending::Vanished);
    assert_eq!(
        events(&mut book),
        [TransportEvent::Lost { generation: G, range: range(0, 4), corrupt: false }]
    );
    assert!(book.revoke(G).is_empty(), "there is nobody to tell");
    assert!(events(&mut book).is_empty());
    book.end(claim, Ending::Fenced);
    assert_eq!(events(&mut book), [TransportEvent::Released { generation: G, fenced: true }]);
    assert_eq!(book.revoke(G), []);
    assert_eq!(events(&mut book), [TransportEvent::Released { generation: G, fenced: false }], "forgotten");
}

#[test]
fn signs_of_life_leave_no_trail() {
    let mut book = book();
    book.grant(grant_of(1, 4)).unwrap();
    let writing = book.claim(G, range(0, 4), 0).unwrap().claim;
    for _ in 0..100 {
        let sign = book.claim(G, range(0, 0), 0).unwrap().claim;
        assert_eq!(book.finish(sign, whole(0)), Ok(()));
    }
    assert_eq!((book.grants[&G].claims.len(), book.generation_of.len()), (1, 1));
    assert_eq!(book.finish(writing, whole(32)), Ok(()));
    assert_eq!(events(&mut book), [TransportEvent::Complete { generation: G }]);
}

#[test]
fn a_revoked_grant_waits_for_each_of_its_writers() {
    let mut book = book();
    book.grant(grant_of(1, 4)).unwrap();
    let first = book.claim(G, range(0, 2), 10).unwrap().claim;
    let second = book.claim(G, range(2, 4), 11).unwrap().claim;
    assert_eq!(book.revoke(G), [(first, 10), (second, 11)]);
    assert_eq!(book.claim(G, range(0, 0), 12).unwrap_err(), Refusal::Stale);
    book.end(first, Ending::Drained);
    assert!(events(&mut book).is_empty());
    assert_eq!(book.finish(second, whole(16)), Err(Refusal::Revoked), "it finished before it heard");
    assert_eq!(events(&mut book), [TransportEvent::Released { generation: G, fenced: false }]);
}

#[test]
fn a_lost_range_stays_taken() {
    let mut book = book();
    book.grant(grant_of(1, 4)).unwrap();
    let claim = book.claim(G, range(0, 2), 0).unwrap().claim;
    book.progress(claim, 8);
    book.end(claim, Ending::Drained);
    assert_eq!(book.arrived_bytes(G), 8, "what arrived stays counted");
    assert_eq!(book.claim(G, range(1, 3), 0).unwrap_err(), Refusal::RangeTaken);
    assert!(book.claim(G, range(2, 4), 0).is_ok());
}

#[test]
fn a_claim_that_breaks_its_promise_is_lost() {
    for (delivery, corrupt) in
        [(whole(31), false), (whole(33), false), (Delivery { num_bytes: 32, intact: false }, true)]
    {
        let mut book = book();
        book.grant(grant_of(1, 4)).unwrap();
        let claim = book.claim(G, range(0, 4), 0).unwrap().claim;
        assert_eq!(book.finish(claim, delivery), Err(Refusal::Revoked));
        assert_eq!(events(&mut book), [TransportEvent::Lost { generation: G, range: range(0, 4), corrupt }]);
        book.revoke(G);
        assert_eq!(events(&mut book), [TransportEvent::Released { generation: G, fenced: false }]);
    }
}

#[test]
fn grants_are_checked() {
    let mut book = book();
    let reason = |book: &mut GrantBook<u8>, grant| book.grant(grant).unwrap_err();
    let with_runs = |runs: &[(usize, usize)]| Grant {
        runs: runs.iter().map(|&(offset, num_bytes)| ByteRun { offset, num_bytes }).collect(),
        ..grant_of(9, 4)
    };
    assert!(reason(&mut book, with_runs(&[(0, 16), (8, 16)])).contains("overlap"));
    assert!(reason(&mut book, with_runs(&[(4080, 32)])).contains("does not lie in the region"));
    assert!(reason(&mut book, with_runs(&[(usize::MAX, 32)])).contains("does not lie in the region"));
    assert!(reason(&mut book, with_runs(&[(0, 16)])).contains("hold 16 bytes"));
    book.grant(with_runs(&[(16, 16), (0, 16)])).unwrap();
    assert!(reason(&mut book, grant_of(9, 4)).contains("granted before"));
}

#[test]
fn old_generations_count_as_used_even_when_they_are_no_longer_remembered() {
    let mut book = book();
    for generation in 1..=2 * REMEMBERED as u64 {
        book.grant(grant_of(generation, 0)).unwrap();
    }
    for generation in [1, REMEMBERED as u64, 2 * REMEMBERED as u64] {
        assert!(book.grant(grant_of(generation, 0)).is_err());
    }
    assert!(book.used.len() <= REMEMBERED && book.completed.len() <= REMEMBERED);
}

#[test]
fn runs_are_looked_up_whole() {
    let allowed = [ByteRun { offset: 10, num_bytes: 10 }, ByteRun { offset: 40, num_bytes: 2 }];
    for (offset, num_bytes, inside) in [
        (10, 10, true),
        (12, 3, true),
        (9, 2, false),
        (15, 6, false),
        (40, 2, true),
        (20, 1, false),
        (usize::MAX, 2, false),
    ] {
        assert_eq!(run_is_allowed(&allowed, offset, num_bytes), inside, "{offset}+{num_bytes}");
    }
    assert!(!run_is_allowed(&[], 0, 1));
}

#[derive(Clone, Debug)]
enum Op {
    Claim(u32, u32),
    Progress(usize, u64),
    Finish(usize, bool),
    End(usize, u8),
    Revoke,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u32..9, 0u32..9).prop_map(|(a, b)| Op::Claim(a.min(b), a.max(b))),
        (0usize..6, 0u64..80).prop_map(|(claim, n)| Op::Progress(claim, n)),
        (0usize..6, any::<bool>()).prop_map(|(claim, good)| Op::Finish(claim, good)),
        (0usize..6, 0u8..3).prop_map(|(claim, how)| Op::End(claim, how)),
        Just(Op::Revoke),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Whatever happens in whatever order: the pages are given back (released or complete) only when no writer is left, at
    /// most once, and the count of arrived bytes never falls while the grant stands.
    #[test]
    fn nothing_is_given_back_while_a_writer_is_left(ops in proptest::collection::vec(op(), 1..40)) {
        let mut book = book();
        book.grant(grant_of(1, 8)).unwrap();
        // The model: claims in order, each with whether its writer may still write.
        let mut claims: Vec<(ClaimId, u64, bool)> = Vec::new();
        let (mut over, mut arrived) = (false, 0);
        for op in ops {
            match op {
                Op::Claim(a, b) => {
                    if let Ok(accepted) = book.claim(G, range(a, b), 0) {
                        prop_assert!(!over);
                        claims.push((accepted.claim, accepted.num_bytes, true));
                    }
                }
                Op::Progress(at, n) => if let Some((id, ..)) = claims.get(at) { book.progress(*id, n) },
                Op::Finish(at, good) => if let Some((id, n, writing)) = claims.get_mut(at) {
                    let vanished = book.claim_mut(*id).is_some_and(|c| c.state == ClaimState::Vanished);
                    let _ = book.finish(*id, Delivery { num_bytes: *n + u64::from(!good), intact: true });
                    *writing &= vanished;
                },
                Op::End(at, how) => if let Some((id, _, writing)) = claims.get_mut(at) {
                    let ending = [Ending::Drained, Ending::Vanished, Ending::Fenced][how as usize];
                    book.end(*id, ending);
                    *writing &= ending == Ending::Vanished;
                },
                Op::Revoke => if !over { book.revoke(G); },
            }
            for event in events(&mut book) {
                if matches!(event, TransportEvent::Complete { .. } | TransportEvent::Released { .. }) {
                    prop_assert!(!over, "given back twice");
                    over = true;
                    prop_assert!(claims.iter().all(|(.., writing)| !writing), "given back under a writer");
                }
                if matches!(event, TransportEvent::Complete { .. }) {
                    prop_assert_eq!(claims.iter().map(|(_, n, _)| n).sum::<u64>(), 64);
                }
            }
            if !over {
                prop_assert!(book.arrived_bytes(G) >= arrived);
                arrived = book.arrived_bytes(G);
            }
        }
    }
}
