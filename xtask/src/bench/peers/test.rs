//! What is measured, and what the ratios should be.

use anyhow::{Context as _, Result, bail};

/// Tokens that every sequence has before a batched test, and steps of it.
pub(super) const BATCHED_PROMPT: usize = 128;
pub(super) const BATCHED_STEPS: usize = 32;

/// A measurement that both sides make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// A prompt of so many tokens from an empty context.
    Prompt(usize),
    /// So many tokens, one at a time, from an empty context.
    Generate(usize),
    /// So many sequences at a time, each behind a prompt of its own.
    Batched(usize),
}

impl Test {
    pub(super) fn named(name: &str) -> Result<Self> {
        let (make, size): (fn(usize) -> Self, &str) = if let Some(size) = name.strip_prefix("pp") {
            (Self::Prompt, size)
        } else if let Some(size) = name.strip_prefix("tg") {
            (Self::Generate, size)
        } else if let Some(size) = name.strip_prefix("batched") {
            (Self::Batched, size)
        } else {
            bail!("there is no test {name}");
        };
        let size = size.parse().ok().filter(|&size| size > 0);
        Ok(make(size.with_context(|| format!("there is no test {name}"))?))
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Prompt(size) => format!("pp{size}"),
            Self::Generate(size) => format!("tg{size}"),
            Self::Batched(size) => format!("batched{size}"),
        }
    }

    /// Returns what ours over theirs should be at least; nothing for sizes that no target was set for.
    pub(super) fn target(self, kind: Kind) -> Option<f64> {
        match (self, kind) {
            (Self::Prompt(_), Kind::Bf16 | Kind::Q4K) => Some(1.5),
            (Self::Prompt(_), Kind::Block) => Some(2.0),
            (Self::Generate(_), Kind::Bf16) => Some(1.0),
            (Self::Generate(_), _) => Some(1.1),
            (Self::Batched(4), Kind::Bf16) => Some(1.6),
            (Self::Batched(4), _) => Some(2.0),
            (Self::Batched(8), _) => Some(2.5),
            (Self::Batched(16), _) => Some(3.0),
            (Self::Batched(_), _) => None,
        }
    }
}

/// Forms of weights that have targets of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Q8_0, Q4_0 and Q4_1: one scale a block of 32.
    Block,
    /// Q4_K and Q6_K: scales within scales.
    Q4K,
    Bf16,
}

impl Kind {
    /// Returns the kind by a model's name; the demo model is Q4_1.
    pub(super) fn of(model: &str) -> Self {
        if model.ends_with("-bf16") {
            Self::Bf16
        } else if model.ends_with("-q4_k_m") {
            Self::Q4K
        } else {
            Self::Block
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["pp512", "pp2048", "tg128", "batched4"] {
            assert_eq!(Test::named(name).map(Test::name).ok().as_deref(), Some(name));
        }
        for name in ["pp", "pp0", "tg-1", "batched4x", "server", ""] {
            assert!(Test::named(name).is_err(), "{name}");
        }
    }

    #[test]
    fn targets_are_the_issue_s() {
        let target = |test: &str, model: &str| {
            Test::named(test).map(|test| test.target(Kind::of(model))).ok().flatten()
        };
        assert_eq!(target("pp512", "demo"), Some(2.0));
        assert_eq!(target("pp2048", "qwen3-0.6b-q4_k_m"), Some(1.5));
        assert_eq!(target("tg128", "qwen3-0.6b-bf16"), Some(1.0));
        assert_eq!(target("batched4", "qwen3-0.6b-bf16"), Some(1.6));
        assert_eq!(target("batched16", "qwen3-0.6b-q8_0"), Some(3.0));
        assert_eq!(target("batched32", "demo"), None);
    }
}
