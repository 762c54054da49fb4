//! Which instructions the kernels use.

use std::fmt;

/// An instruction level of the kernels. Results are the same bytes only within one level (`amx` and `avx512` are one for weights without bf16),
/// which is therefore part of the layout's `numeric_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelLevel {
    /// Portable code, the reference of the others.
    Plain,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL with VNNI; bf16 is widened and multiplied in single precision.
    Avx512,
    /// The same with BF16, whose products of pairs are used.
    Avx512Bf16,
    /// `Avx512` with the tiles of AMX for bf16 and for many rows of quantised weights.
    Amx,
}

impl KernelLevel {
    /// All levels, slowest first.
    pub const ALL: [Self; 5] = [Self::Plain, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the best level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        // Intel's processors multiply 32 pairs of bf16 every other cycle, and four times sixteen numbers in single precision; AMD's multiply
        // twice as many in pairs.
        let is_good = |level: &Self| level.is_supported() && (*level != Self::Avx512Bf16 || !is_intel());
        Self::ALL.into_iter().rev().find(is_good).unwrap_or(Self::Plain)
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
            Self::Avx512Bf16 => Self::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_supported() && super::amx::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 | Self::Amx => false,
        }
    }

    /// Returns the level whose bits this one gives, for weights with bf16 among them or without: tiles of bytes sum integers, which no order changes.
    #[must_use]
    pub const fn arithmetic(self, with_bf16: bool) -> Self {
        match self {
            Self::Amx if !with_bf16 => Self::Avx512,
            level => level,
        }
    }

    /// Returns the name used in configuration and in `numeric_mode`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
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

fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// A level that this machine is known to support: the proof that every call into `avx2` and `avx512` rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernels {
    level: KernelLevel,
    /// The processor streams best when it is told what comes next. It changes no result.
    wants_hints: bool,
}

impl Kernels {
    /// Checks the machine; `None` if it lacks the instructions.
    pub(crate) fn new(level: KernelLevel) -> Option<Self> {
        level.is_supported().then(|| Self { level, wants_hints: is_intel() })
    }

    /// Chooses for the processor, so that tests run both ways on any.
    #[cfg(test)]
    pub(crate) const fn with_hints(self, wants_hints: bool) -> Self {
        Self { wants_hints, ..self }
    }

    /// Returns the level.
    pub(crate) const fn level(self) -> KernelLevel {
        self.level
    }

    /// Says whether kernels that stream weights should fetch ahead: up to 2.5 times as fast on a Sapphire Rapids, a third slower on a
    /// Zen 4.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn wants_hints(self) -> bool {
        self.wants_hints
    }
}
