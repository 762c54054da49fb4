//! Types of elements, arithmetic, and addresses.

/// The type of activations and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns whichever of three belongs to this type.
    pub(crate) const fn pick<T: Copy>(self, f32: T, f16: T, bf16: T) -> T {
        match self {
            Self::F32 => f32,
            Self::F16 => f16,
            Self::Bf16 => bf16,
        }
    }
}

/// The type of the KV region's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// The activations' own.
    Same,
    /// FP8 of OCP's E4M3, one byte, with one scale for keys and one for values. Saturates at 448 times the scale.
    E4m3,
}

impl KvType {
    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn num_bytes(self, activations: Dtype) -> usize {
        match self {
            Self::Same => activations.num_bytes(),
            Self::E4m3 => 1,
        }
    }
}

/// How products are added up; results are the same to the bit within one, not between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// In a fixed order by fused multiply-add: all sizes and types, the same bits on CPU and GPU.
    Plain,
    /// On tensor cores, from sm_80 on: f16 and bf16, and in attention head sizes 64, 80, 96, 128 and 256.
    TensorCore,
}

impl Arithmetic {
    /// Returns the positions that attention computes by themselves: a split.
    #[must_use]
    pub const fn split_size(self) -> u32 {
        match self {
            Self::Plain => 256,
            Self::TensorCore => 512,
        }
    }

    /// Returns the splits of a context.
    #[must_use]
    pub const fn num_splits(self, max_context: u32) -> u32 {
        max_context.div_ceil(self.split_size())
    }
}

/// An address in the device's memory; of the host, where the kernels run on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// For what is optional and not there.
    pub const NULL: Self = Self(0);
}
