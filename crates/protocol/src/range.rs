//! Half-open ranges of token positions.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Token positions `[begin, end)` of a prompt; `begin <= end` always holds.
///
/// ```
/// use microserving_protocol::KvRange;
/// let range = KvRange::new(16, 40).expect("ordered");
/// assert_eq!(range.num_tokens(), 24);
/// assert_eq!(range.to_string(), "[16, 40)");
/// assert!(KvRange::new(2, 1).is_none());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct KvRange {
    begin: u32,
    end: u32,
}

impl KvRange {
    /// Makes `[begin, end)`, or nothing if `begin > end`.
    #[must_use]
    pub const fn new(begin: u32, end: u32) -> Option<Self> {
        if begin <= end { Some(Self { begin, end }) } else { None }
    }

    /// Returns the first position.
    #[must_use]
    pub const fn begin(self) -> u32 {
        self.begin
    }

    /// Returns the position after the last.
    #[must_use]
    pub const fn end(self) -> u32 {
        self.end
    }

    /// Returns how many tokens the range holds.
    #[must_use]
    pub const fn num_tokens(self) -> u32 {
        self.end - self.begin
    }

    /// Says whether the range holds no token.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.begin == self.end
    }

    /// Says whether the two ranges share a position.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        !self.is_empty() && !other.is_empty() && self.begin < other.end && other.begin < self.end
    }

    /// Says whether `other` lies inside this range.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.begin <= other.begin && other.end <= self.end
    }
}

impl fmt::Display for KvRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.begin, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_if_they_share_a_position() {
        let range = |begin, end| KvRange::new(begin, end).expect("ordered");
        for (a, b, expected) in [
            (range(0, 4), range(3, 5), true),
            (range(0, 4), range(4, 5), false),
            (range(2, 3), range(0, 9), true),
            (range(2, 2), range(0, 9), false),
            (range(0, 9), range(2, 2), false),
        ] {
            assert_eq!(a.overlaps(b), expected, "{a} {b}");
            assert_eq!(b.overlaps(a), expected, "{b} {a}");
        }
    }
}
