//! The whole table, and what must be true of each of its lines.

use std::fmt::Write as _;

use expect_test::expect;

use super::*;

const STATES: [State; 11] = [
    State::Reserved { wanted: false },
    State::Reserved { wanted: true },
    State::Receiving { wanted: false },
    State::Receiving { wanted: true },
    State::Broken,
    State::Complete,
    State::Reclaiming,
    State::Quarantined,
    State::Accepted { received: true },
    State::Accepted { received: false },
    State::Over,
];

/// Whether the cache holds the reservation's pages as reserved, in each state: what the page actions must agree with.
fn is_reserved(state: State) -> bool {
    matches!(
        state,
        State::Reserved { .. }
            | State::Receiving { .. }
            | State::Broken
            | State::Complete
            | State::Reclaiming
    )
}

#[test]
fn pages_leave_a_writers_reach_only_when_the_transport_says_so() {
    for state in STATES {
        for event in Event::ALL {
            let step = step(state, event);
            let says_so = matches!(event, Event::Released | Event::Complete);
            assert!(
                !state.may_be_written() || step.next.may_be_written() || says_so,
                "{state:?} + {event:?} = {step:?}"
            );
        }
    }
}

#[test]
fn page_actions_agree_with_states() {
    for state in STATES {
        for event in Event::ALL {
            let step = step(state, event);
            let fits = match step.pages {
                PageAction::Keep => is_reserved(state) == is_reserved(step.next),
                PageAction::AcceptReceived => {
                    is_reserved(state) && step.next == State::Accepted { received: true }
                }
                PageAction::AcceptUnreceived => {
                    is_reserved(state) && step.next == State::Accepted { received: false }
                }
                PageAction::Quarantine => is_reserved(state) && step.next == State::Quarantined,
                PageAction::Drain => state == State::Quarantined && step.next == State::Over,
                PageAction::Free => is_reserved(state) && !state.may_be_written() && step.next == State::Over,
            };
            assert!(fits, "{state:?} + {event:?} = {step:?}");
        }
    }
}

#[test]
fn whatever_waits_for_release_has_been_revoked_exactly_once() {
    let waits = |state| matches!(state, State::Reclaiming | State::Quarantined);
    for state in STATES {
        for event in Event::ALL {
            let step = step(state, event);
            assert_eq!(step.revoke, !waits(state) && waits(step.next), "{state:?} + {event:?} = {step:?}");
        }
    }
}

#[test]
fn final_states_are_final() {
    for state in STATES.into_iter().filter(|state| state.is_final()) {
        for event in Event::ALL {
            assert_eq!(step(state, event), Step::keep(state));
        }
    }
}

#[test]
fn nothing_to_receive_is_complete_from_the_start() {
    assert_eq!(State::begin(false), State::Complete);
    assert_eq!(step(State::begin(false), Event::Wanted).pages, PageAction::AcceptReceived);
    assert_eq!(step(State::begin(false), Event::LeaseExpired).pages, PageAction::Free);
    assert_eq!(State::begin(true), State::Reserved { wanted: false });
}

/// The whole function on one page: whoever changes it changes this, and sees what else moved.
#[test]
fn the_table() {
    let mut table = String::new();
    for state in STATES.into_iter().filter(|state| !state.is_final()) {
        for event in Event::ALL {
            let Step { next, revoke, pages } = step(state, event);
            if next != state || revoke || pages != PageAction::Keep {
                let revoke = if revoke { ", revoke" } else { "" };
                writeln!(table, "{state:?} + {event:?} -> {next:?}: {pages:?}{revoke}").unwrap();
            }
        }
    }
    expect![[r#"
        Reserved { wanted: false } + Arrived -> Receiving { wanted: false }: Keep
        Reserved { wanted: false } + Complete -> Complete: Keep
        Reserved { wanted: false } + Lost -> Broken: Keep
        Reserved { wanted: false } + Wanted -> Reserved { wanted: true }: Keep
        Reserved { wanted: false } + Abort -> Quarantined: Quarantine, revoke
        Reserved { wanted: false } + LeaseExpired -> Quarantined: Quarantine, revoke
        Reserved { wanted: false } + Released -> Broken: Keep
        Reserved { wanted: true } + Arrived -> Receiving { wanted: true }: Keep
        Reserved { wanted: true } + Complete -> Accepted { received: true }: AcceptReceived
        Reserved { wanted: true } + Lost -> Reclaiming: Keep, revoke
        Reserved { wanted: true } + Abort -> Quarantined: Quarantine, revoke
        Reserved { wanted: true } + LeaseExpired -> Quarantined: Quarantine, revoke
        Reserved { wanted: true } + Released -> Accepted { received: false }: AcceptUnreceived
        Receiving { wanted: false } + Complete -> Complete: Keep
        Receiving { wanted: false } + Lost -> Broken: Keep
        Receiving { wanted: false } + Wanted -> Receiving { wanted: true }: Keep
        Receiving { wanted: false } + Abort -> Quarantined: Quarantine, revoke
        Receiving { wanted: false } + LeaseExpired -> Quarantined: Quarantine, revoke
        Receiving { wanted: false } + Released -> Broken: Keep
        Receiving { wanted: true } + Complete -> Accepted { received: true }: AcceptReceived
        Receiving { wanted: true } + Lost -> Reclaiming: Keep, revoke
        Receiving { wanted: true } + Abort -> Quarantined: Quarantine, revoke
        Receiving { wanted: true } + LeaseExpired -> Quarantined: Quarantine, revoke
        Receiving { wanted: true } + Released -> Accepted { received: false }: AcceptUnreceived
        Broken + Complete -> Complete: Keep
        Broken + Wanted -> Reclaiming: Keep, revoke
        Broken + Abort -> Quarantined: Quarantine, revoke
        Broken + LeaseExpired -> Quarantined: Quarantine, revoke
        Complete + Wanted -> Accepted { received: true }: AcceptReceived
        Complete + Abort -> Over: Free
        Complete + LeaseExpired -> Over: Free
        Reclaiming + Abort -> Quarantined: Quarantine
        Reclaiming + LeaseExpired -> Quarantined: Quarantine
        Reclaiming + Released -> Accepted { received: false }: AcceptUnreceived
        Quarantined + Released -> Over: Drain
    "#]]
    .assert_eq(&table);
}
