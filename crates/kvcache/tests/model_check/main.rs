//! Every order of events that a small world has, under the transition function that the engine uses.
//!
//! The world: a receiver with one or two pages, two requests, one sending process that may crash and restart once, an order
//! of messages that anything may happen to (late, lost and sent again), and one-sided writes that land whenever they like
//! once they are posted. The receiver's side is [`lifecycle::step`]; mutants replace single lines of it, or the transport's
//! promise behind `Released`. Breadth-first search visits every state, so that
//!
//! - **safe** means: in no reachable state does a write land in a page that serves another request, or one already in use,
//!   and no request reads a page that does not hold its own KV;
//! - **leak free** means: from every reachable state, one is reachable in which all pages are free and nothing is in flight.
//!
//! What the freeing rules are and why is in the crate's documentation.

#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

mod moves;
mod search;
mod world;

use std::collections::BTreeSet;

use expect_test::{Expect, expect};
use microserving_kvcache::lifecycle::{self, Event, PageAction, State, Step};

use crate::search::{FEW, Fence, LARGE, ONE_PAGE, OURS, SIZES, Size, Variant};

/// A mutant must be unsafe; the shortest way there, on one page, is the evidence.
fn check_unsafe(mutant: Variant, shortest: &Expect) {
    shortest.assert_eq(&mutant.search(true).violation.expect("the mutant must be caught"));
    for size in SIZES {
        assert!(mutant.sized(size).search(true).violation.is_some(), "not caught with {size:?}");
    }
}

#[test]
fn drained_or_fenced_is_safe_and_leak_free() {
    let mut used = BTreeSet::new();
    let mut num_states = 0;
    for size in SIZES {
        let verdict = OURS.sized(size).check();
        assert_eq!(verdict.violation, None, "{size:?}");
        assert_eq!(verdict.leak, None, "{size:?}");
        used.extend(verdict.used);
        num_states += verdict.num_states;
    }
    assert!(num_states > 90_000, "the model has shrunk to {num_states} states and proves less than it did");
    // Every line of the function that does anything was taken on the way.
    let states = used.iter().map(|(state, _)| *state).collect::<BTreeSet<_>>();
    for state in states.into_iter().filter(|state| !state.is_final()) {
        for event in Event::ALL {
            let step = lifecycle::step(state, event);
            let does_nothing = step == Step { next: state, revoke: false, pages: PageAction::Keep };
            // A transport that closes a grant by itself has told before that its writer was lost.
            let not_modelled = matches!((state, event), (State::Receiving { .. }, Event::Released));
            assert!(
                does_nothing || not_modelled || used.contains(&(state, event)),
                "{state:?} + {event:?} was never met"
            );
        }
    }
}

#[test]
fn frames_checked_by_the_receiver_are_safe_even_when_pages_are_freed_at_once() {
    for size in [Size { sends: 1, ..ONE_PAGE }, SIZES[2]] {
        let framed = Variant { receiver_checks: true, fence: Fence::Never, ..OURS }.sized(size);
        for rules in [lifecycle::step, free_at_once] {
            let verdict = Variant { rules, ..framed }.check();
            assert_eq!((verdict.violation, verdict.leak), (None, None), "{size:?}");
        }
    }
}

fn free_at_once(state: State, event: Event) -> Step {
    let step = lifecycle::step(state, event);
    match step.pages {
        PageAction::Quarantine => Step { next: State::Over, pages: PageAction::Free, ..step },
        _ => step,
    }
}

#[test]
fn freeing_at_once_is_caught() {
    check_unsafe(
        Variant { rules: free_at_once, ..OURS },
        &expect![[r#"
        receiver reserves for A
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        A is aborted
        sender learns that A is open
        sender posts A to page 0
        receiver reserves for B
        a write of A lands in page 0
        => page 0 is Reserved(1)
    "#]],
    );
}

#[test]
fn freeing_after_a_time_is_caught() {
    fn ttl(state: State, event: Event) -> Step {
        match (state, event) {
            (State::Quarantined, Event::LeaseExpired) => {
                Step { next: State::Over, revoke: false, pages: PageAction::Drain }
            }
            _ => lifecycle::step(state, event),
        }
    }
    check_unsafe(
        Variant { rules: ttl, ..OURS },
        &expect![[r#"
        receiver reserves for A
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        A is aborted
        the lease of A expires
        sender learns that A is open
        sender posts A to page 0
        receiver reserves for B
        a write of A lands in page 0
        => page 0 is Reserved(1)
    "#]],
    );
}

#[test]
fn a_generation_check_at_the_sender_alone_is_caught() {
    check_unsafe(
        Variant { rules: free_at_once, sender_checks: true, ..OURS },
        &expect![[r#"
        receiver reserves for A
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        sender learns that A is open
        sender posts A to page 0
        A is aborted
        receiver reserves for B
        a write of A lands in page 0
        => page 0 is Reserved(1)
    "#]],
    );
}

#[test]
fn a_fence_declared_from_a_missed_heartbeat_is_caught() {
    check_unsafe(
        Variant { fence: Fence::OnMissedHeartbeat, ..OURS },
        &expect![[r#"
        receiver reserves for A
        A is to be generated from
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        sender learns that A is open
        sender posts A to page 0
        receiver takes the old sender for fenced
        transport tells that the writer of A is lost
        transport releases A
        a write of A lands in page 0
        => page 0 is Owned(0)
    "#]],
    );
}

#[test]
fn computing_into_lost_pages_without_waiting_is_caught() {
    fn impatient(state: State, event: Event) -> Step {
        let step = lifecycle::step(state, event);
        match step.next {
            State::Reclaiming if state != State::Reclaiming => Step {
                next: State::Accepted { received: false },
                revoke: true,
                pages: PageAction::AcceptUnreceived,
            },
            _ => step,
        }
    }
    check_unsafe(
        Variant { rules: impatient, ..OURS },
        &expect![[r#"
        receiver reserves for A
        A is to be generated from
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        sender learns that A is open
        sender posts A to page 0
        sender crashes
        transport tells that the writer of A is lost
        a write of A lands in page 0
        => page 0 is Owned(0)
    "#]],
    );
}

#[test]
fn an_abort_that_skips_quarantine_while_reclaiming_is_caught() {
    fn forgetful(state: State, event: Event) -> Step {
        match (state, event) {
            (State::Reclaiming, Event::Abort) => {
                Step { next: State::Over, revoke: false, pages: PageAction::Free }
            }
            _ => lifecycle::step(state, event),
        }
    }
    check_unsafe(
        Variant { rules: forgetful, ..OURS },
        &expect![[r#"
        receiver reserves for A
        A is to be generated from
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        sender learns that A is open
        sender posts A to page 0
        sender crashes
        transport tells that the writer of A is lost
        A is aborted
        receiver reserves for B
        a write of A lands in page 0
        => page 0 is Reserved(1)
    "#]],
    );
}

#[test]
fn generating_before_everything_has_arrived_is_caught() {
    fn hasty(state: State, event: Event) -> Step {
        match (state, event) {
            (State::Reserved { .. } | State::Receiving { .. }, Event::Wanted) => Step {
                next: State::Accepted { received: true },
                revoke: false,
                pages: PageAction::AcceptReceived,
            },
            _ => lifecycle::step(state, event),
        }
    }
    check_unsafe(
        Variant { rules: hasty, ..OURS },
        &expect![[r#"
        receiver reserves for A
        A is to be generated from
        => page 0 is read and holds None
    "#]],
    );
}

#[test]
fn waiting_for_a_dead_senders_acknowledgement_is_safe_but_leaks() {
    for size in FEW {
        let verdict = Variant { fence: Fence::Never, ..OURS }.sized(size).check();
        assert_eq!(verdict.violation, None, "{size:?}");
        assert!(verdict.leak.is_some(), "{size:?}");
    }
    let leak = Variant { fence: Fence::Never, ..OURS }.check().leak.unwrap();
    expect![[r#"
        receiver reserves for A
        sender is asked to send A
        sender claims A
        receiver admits the claim on A
        sender crashes
    "#]]
    .assert_eq(&leak);
}

#[test]
fn never_revoking_leaks() {
    fn silent(state: State, event: Event) -> Step {
        Step { revoke: false, ..lifecycle::step(state, event) }
    }
    for size in FEW {
        let verdict = Variant { rules: silent, ..OURS }.sized(size).check();
        assert!(verdict.leak.is_some(), "{size:?}");
    }
}

#[test]
fn the_large_worlds_are_safe_and_leak_free() {
    if std::env::var_os("MICROSERVING_FULL").is_none_or(|full| full != "1") {
        eprintln!("SKIPPED: over a million states, set MICROSERVING_FULL=1 to visit them");
        return;
    }
    let mut num_states = 0;
    for size in LARGE {
        let verdict = OURS.sized(size).check();
        assert_eq!((verdict.violation, verdict.leak), (None, None), "{size:?}");
        num_states += verdict.num_states;
    }
    assert!(num_states > 900_000, "the model has shrunk to {num_states} states");
}
