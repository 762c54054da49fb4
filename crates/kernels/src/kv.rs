//! What is done to pages of KV beside attention.

use crate::launch::{Checks, launch};
use crate::{Device, DevicePtr, Dtype, KernelError, KvType, Launch, Params};

/// The slot of a token whose KV is not kept: padding of a fixed batch.
pub const NO_SLOT: u32 = u32::MAX;

/// Bias, norm and rotation of new tokens' queries and keys; their keys and values go into pages (`kernels/kv_append.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct KvAppend {
    /// `[num_tokens, num_heads, head_dim]`. Written.
    pub query: DevicePtr,
    /// One layer of the region. The tokens' slots are written.
    pub kv: DevicePtr,
    /// `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, rows `qkv_stride` elements apart: q heads, k heads, v heads.
    pub qkv: DevicePtr,
    /// `[num_heads + 2 * num_kv_heads, head_dim]`, or null.
    pub bias: DevicePtr,
    /// `[head_dim]`, or null: the weight that each head of q is normalised with.
    pub q_norm: DevicePtr,
    /// `[head_dim]`, or null: the same for k.
    pub k_norm: DevicePtr,
    /// `[positions, head_dim / 2]`, f32.
    pub cosines: DevicePtr,
    /// `[positions, head_dim / 2]`, f32.
    pub sines: DevicePtr,
    /// `[num_tokens]`, u32, rows of `cosines` and `sines`.
    pub positions: DevicePtr,
    /// `[num_tokens]`, u32: `page * page_size + slot`, or [`NO_SLOT`].
    pub slots: DevicePtr,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Elements from one token's row of `qkv` to the next.
    pub qkv_stride: u32,
    /// Added to the mean square where heads are normalised.
    pub eps: f32,
    /// What is kept is the key divided by this; 1 unless KV is e4m3.
    pub k_scale: f32,
    /// The same for values.
    pub v_scale: f32,
}

// SAFETY: ten addresses and eight words, no padding; `KvAppendParams` is the same.
unsafe impl Params for KvAppend {}

impl KvAppend {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`], or [`KernelError::NotCompiled`] for types that do not go together.
    pub fn plan(&self, dtype: Dtype, kv_type: KvType, num_tokens: u32) -> Result<Launch, KernelError> {
        let checks = Checks("kv_append");
        let holds = self.head_dim.is_multiple_of(2) && (2..=256).contains(&self.head_dim);
        checks.that(holds, "head_dim", self.head_dim.into(), "even, 2 to 256")?;
        for (field, value) in [
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("page_size", self.page_size),
        ] {
            checks.that((1..=65_535).contains(&value), field, value.into(), "1 to 65535")?;
        }
        let num_heads = self.num_heads + 2 * self.num_kv_heads;
        let holds = u64::from(self.qkv_stride) >= u64::from(num_heads) * u64::from(self.head_dim);
        checks.that(holds, "qkv_stride", self.qkv_stride.into(), "at least the heads of a token")?;
        checks.scale("k_scale", self.k_scale, kv_type == KvType::E4m3)?;
        checks.scale("v_scale", self.v_scale, kv_type == KvType::E4m3)?;
        checks.blocks("num_tokens", num_tokens)?;
        let kernel = match (dtype, kv_type) {
            (dtype, KvType::Same) => dtype.pick("kv_append_f32", "kv_append_f16", "kv_append_bf16"),
            (Dtype::F16, KvType::E4m3) => "kv_append_f16_e4m3",
            (Dtype::Bf16, KvType::E4m3) => "kv_append_bf16_e4m3",
            (Dtype::F32, KvType::E4m3) => {
                return Err(KernelError::NotCompiled { kernel: "kv_append", what: "f32 with e4m3".into() });
            }
        };
        Ok(Launch { kernel, grid: [num_heads.div_ceil(4), num_tokens, 1], threads: 128, shared_bytes: 0 })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to 16 bytes, and hold what the fields say, of the types given; positions are rows of the tables;
    /// slots differ and lie in the region. No one else writes to any, or reads `query` or those slots, until the kernel has run.
    pub unsafe fn launch(
        &self,
        device: &dyn Device,
        dtype: Dtype,
        kv_type: KvType,
        num_tokens: u32,
    ) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, kv_type, num_tokens)?, self) }
    }
}

/// Pages of some layers, copied into one run or back (`kernels/kv_pages.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct KvPages {
    /// The whole region: `[layer][page][page_bytes]`. Read by gathering, written by scattering.
    pub region: DevicePtr,
    /// `[num_layers, num_listed, page_bytes]`. Written by gathering, read by scattering.
    pub run: DevicePtr,
    /// `[num_listed]`, u32.
    pub pages: DevicePtr,
    /// Pages in the list.
    pub num_listed: u32,
    /// Pages of the region.
    pub num_pages: u32,
    /// Bytes of one page of one layer.
    pub page_bytes: u32,
    /// The first of the layers.
    pub first_layer: u32,
}

// SAFETY: three addresses and four words, no padding; `KvPagesParams` is the same.
unsafe impl Params for KvPages {}

impl KvPages {
    /// Checks the sizes and returns the launch that gathers.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan_gather(&self, num_layers: u32) -> Result<Launch, KernelError> {
        self.plan("kv_pages_gather", num_layers)
    }

    /// Checks the sizes and returns the launch that scatters.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan_scatter(&self, num_layers: u32) -> Result<Launch, KernelError> {
        self.plan("kv_pages_scatter", num_layers)
    }

    fn plan(&self, kernel: &'static str, num_layers: u32) -> Result<Launch, KernelError> {
        let checks = Checks(kernel);
        let holds = self.page_bytes.is_multiple_of(16) && self.page_bytes > 0;
        checks.that(holds, "page_bytes", self.page_bytes.into(), "a multiple of 16, at least 16")?;
        checks.blocks("num_layers", num_layers)?;
        let grid = [checks.many_blocks("num_listed", self.num_listed.into())?, num_layers, 1];
        Ok(Launch { kernel, grid, threads: 256, shared_bytes: 0 })
    }

    /// Copies the pages into the run.
    ///
    /// # Errors
    /// As [`Self::plan_gather`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to 16 bytes, and hold what the fields say; the listed pages are below `num_pages`, and the
    /// layers the region's. No one else writes to the pages, or accesses the run, until the kernel has run.
    pub unsafe fn gather(&self, device: &dyn Device, num_layers: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan_gather(num_layers)?, self) }
    }

    /// Copies the run into the pages.
    ///
    /// # Errors
    /// As [`Self::plan_scatter`] and [`Device::launch`].
    ///
    /// # Safety
    /// As of [`Self::gather`], but that no one else accesses the pages, or writes to the run; and the listed pages differ.
    pub unsafe fn scatter(&self, device: &dyn Device, num_layers: u32) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan_scatter(num_layers)?, self) }
    }
}
