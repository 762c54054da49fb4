//! Deliberately wrong rules, one at a time, for measuring what the test campaigns notice.
//!
//! Without the feature `mutants` every question is answered `false` at compile time and the wrong branches are gone.

/// A wrong rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "mutants"),
    allow(
        dead_code,
        unreachable_pub,
        reason = "asked for, but neither chosen nor exported, without the feature"
    )
)]
pub enum Mutant {
    /// Pages of an aborted reservation are free at once, whoever may still be writing to them.
    FreeAtOnce,
    /// Quarantined pages are free after one more lease, whether or not the transport released them.
    FreeAfterTtl,
    /// A lower attempt is taken like the current one.
    NoAttemptCheck,
    /// An abort is answered and nothing is done.
    MissingAbort,
    /// A match in the context cache is taken to be one page longer than it is.
    OffByOnePage,
}

/// Which wrong rule an engine follows: none.
#[cfg(not(feature = "mutants"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules;

#[cfg(not(feature = "mutants"))]
impl Rules {
    /// The right rules.
    pub(crate) const RIGHT: Self = Self;

    /// Says whether `mutant` is to be followed.
    #[allow(clippy::unused_self, reason = "the other build asks a field")]
    pub(crate) const fn break_by(self, _: Mutant) -> bool {
        false
    }
}

/// Which wrong rule an engine follows.
#[cfg(feature = "mutants")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) mutant: Option<Mutant>,
}

#[cfg(feature = "mutants")]
impl Rules {
    /// The right rules.
    pub(crate) const RIGHT: Self = Self { mutant: None };

    /// Says whether `mutant` is to be followed.
    pub(crate) fn break_by(self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}
