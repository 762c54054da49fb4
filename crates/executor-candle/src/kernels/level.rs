//! Which instructions the kernels use.

use std::fmt;

/// An instruction level of the kernels. Results are the same bytes only within one level, which is therefore part of the
/// layout's `numeric_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelLevel {
    /// Portable code, the reference of the other two.
    Plain,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL with VNNI and BF16.
    Avx512,
}

impl KernelLevel {
    /// All levels, slowest first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Avx2, Self::Avx512];

    /// Returns the best level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_supported()).unwrap_or(Self::Plain)
    }

    /// Says whether this machine has the instructions.
    #[must_use]
    pub fn is_supported(self) -> bool {
        match self {
            Self::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Returns the name used in configuration and in `numeric_mode`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Returns the level of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }
}

impl fmt::Display for KernelLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A level that this machine is known to support: the proof that every call into `avx2` and `avx512` rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernels(KernelLevel);

impl Kernels {
    /// Checks the machine; `None` if it lacks the instructions.
    pub(crate) fn new(level: KernelLevel) -> Option<Self> {
        level.is_supported().then_some(Self(level))
    }

    /// Returns the level.
    pub(crate) const fn level(self) -> KernelLevel {
        self.0
    }
}
