//! One suite for every implementation of [`KvTransport`](crate::KvTransport).
//!
//! An implementation brings a [`Factory`] and gets one `#[test]` per rule:
//!
//! ```ignore
//! microserving_transport::conformance_tests!(MyFactory);
//! ```
//!
//! Each check drives real transports through `poll` until what it waits for has happened (bounded, then it panics with what
//! it saw). That something does *not* happen is checked behind a complete transfer between the same two, which everything
//! sent earlier has preceded.

mod checks;
mod endings;
pub mod remote;
mod rig;

pub use checks::{
    a_bad_credential_writes_nothing, a_transport_sends_to_itself, addresses_of_other_transports_are_refused,
    bytes_arrive_and_complete, checksums_find_damage, claims_of_several_senders_fill_a_grant,
    large_transfers_arrive, many_generations_follow_each_other, misuse_is_named, news_wakes,
    overlapping_claims_are_refused, ranges_of_no_tokens_work, runs_outside_the_grant_end_the_claim,
    what_arrived_can_be_read, without_admission_nobody_is_let_in, wrong_totals_end_the_claim,
};
pub use endings::{
    a_cancelled_claim_is_lost, a_killed_sender_is_fenced, a_revoke_stops_the_writer,
    a_sender_that_leaves_gives_its_claims_up, an_idle_grant_is_released_at_once,
    senders_notice_that_the_receiver_left,
};
pub use rig::{Cluster, Factory, Options};

/// A rule and its name.
pub type Rule = (&'static str, fn(&dyn Factory));

/// Hands the names of all rules to another macro, behind what is in the brackets.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_rules {
    ($then:ident [$($for_it:tt)*]) => {
        $crate::$then! { [$($for_it)*]
            a_bad_credential_writes_nothing
            a_cancelled_claim_is_lost
            a_killed_sender_is_fenced
            a_revoke_stops_the_writer
            a_sender_that_leaves_gives_its_claims_up
            a_transport_sends_to_itself
            addresses_of_other_transports_are_refused
            an_idle_grant_is_released_at_once
            bytes_arrive_and_complete
            checksums_find_damage
            claims_of_several_senders_fill_a_grant
            large_transfers_arrive
            many_generations_follow_each_other
            misuse_is_named
            news_wakes
            overlapping_claims_are_refused
            ranges_of_no_tokens_work
            runs_outside_the_grant_end_the_claim
            senders_notice_that_the_receiver_left
            what_arrived_can_be_read
            without_admission_nobody_is_let_in
            wrong_totals_end_the_claim
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_table {
    ([] $($rule:ident)*) => {
        /// All rules, for those who run them one after the other.
        pub const RULES: &[Rule] = &[$((stringify!($rule), $rule)),*];
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_each {
    ([$factory:expr] $($rule:ident)*) => {
        $(
            #[test]
            fn $rule() {
                $crate::conformance::$rule(&$factory);
            }
        )*
    };
}

crate::conformance_rules!(conformance_table []);

/// Makes one test per rule of the contract for a [`Factory`] expression.
#[macro_export]
macro_rules! conformance_tests {
    ($factory:expr) => {
        $crate::conformance_rules! { conformance_each [$factory] }
    };
}
