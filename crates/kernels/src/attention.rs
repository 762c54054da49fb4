//! Attention over paged KV, by one block for all splits or one for each.

use crate::launch::{Checks, launch};
use crate::{Arithmetic, Device, DevicePtr, Dtype, KernelError, KvType, Launch, Params};

/// Threads of a block of the plain form.
const PLAIN_THREADS: u32 = 128;

/// Attention of new tokens over their sequences' pages (`kernels/paged_attention.h`).
///
/// With `num_splits` 0 one block walks all splits of its rows and writes `out`; otherwise each split has its own block and
/// writes to `partials`, which [`PagedAttentionCombine`] merges. The result is the same to the bit.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct PagedAttention {
    /// `[num_tokens, num_heads, head_dim]`. Written if `num_splits` is 0.
    pub out: DevicePtr,
    /// `[num_tokens, num_heads, num_splits, head_dim + 2]`, f32. Written if `num_splits` is not 0.
    pub partials: DevicePtr,
    /// `[num_tokens, num_heads, head_dim]`.
    pub query: DevicePtr,
    /// One layer of the region.
    pub kv: DevicePtr,
    /// `[num_seqs, max_pages]`, u32. Entries past the context are not read.
    pub page_table: DevicePtr,
    /// `[num_seqs + 1]`, u32, ascending: where each sequence's new tokens begin in the batch, and their number.
    pub query_starts: DevicePtr,
    /// `[num_seqs]`, u32: tokens of the sequence, the new ones included.
    pub context_lens: DevicePtr,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Columns of the page table.
    pub max_pages: u32,
    /// 0, or at least [`Arithmetic::num_splits`] of the longest context.
    pub num_splits: u32,
    /// Multiplies scores; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Keys are what the KV holds times this; 1 unless KV is e4m3.
    pub k_scale: f32,
    /// The same for values.
    pub v_scale: f32,
    /// Unused: fills the struct up to a multiple of eight bytes.
    pub reserved: u32,
}

// SAFETY: seven addresses and ten words, no padding; `PagedAttentionParams` is the same, its last word being padding.
unsafe impl Params for PagedAttention {}

impl PagedAttention {
    /// Checks the sizes and returns the launch. `max_new_tokens` is the largest number of new tokens of a sequence.
    ///
    /// # Errors
    /// [`KernelError::Shape`], or [`KernelError::NotCompiled`] if the arithmetic has no kernel for the types or the head's size.
    pub fn plan(
        &self,
        arithmetic: Arithmetic,
        (dtype, kv_type): (Dtype, KvType),
        (num_seqs, max_new_tokens): (u32, u32),
    ) -> Result<Launch, KernelError> {
        let checks = Checks("paged_attention");
        let holds = self.head_dim.is_multiple_of(8) && (8..=256).contains(&self.head_dim);
        checks.that(holds, "head_dim", self.head_dim.into(), "a multiple of 8, 8 to 256")?;
        checks.that(
            (1..=65_535).contains(&self.num_kv_heads),
            "num_kv_heads",
            self.num_kv_heads.into(),
            "1 to 65535",
        )?;
        let holds =
            (1..=65_535).contains(&self.num_heads) && self.num_heads.is_multiple_of(self.num_kv_heads);
        checks.that(
            holds,
            "num_heads",
            self.num_heads.into(),
            "a multiple of num_kv_heads, at most 65535",
        )?;
        checks.that(self.page_size > 0, "page_size", 0, "at least 1")?;
        checks.that(self.num_splits <= 65_535, "num_splits", self.num_splits.into(), "at most 65535")?;
        let capacity = u64::from(self.max_pages) * u64::from(self.page_size);
        let holds = (1..=u64::from(u32::MAX) - 1024).contains(&capacity);
        checks.that(holds, "max_pages * page_size", capacity, "1 to 2^32 - 1025")?;
        let splits = u64::from(self.num_splits) * u64::from(arithmetic.split_size());
        let holds = self.num_splits == 0 || splits >= capacity;
        checks.that(
            holds,
            "num_splits",
            self.num_splits.into(),
            "0 or enough for max_pages * page_size positions",
        )?;
        checks.scale("k_scale", self.k_scale, kv_type == KvType::E4m3)?;
        checks.scale("v_scale", self.v_scale, kv_type == KvType::E4m3)?;
        checks.blocks("num_seqs", num_seqs)?;

        let group = self.num_heads / self.num_kv_heads;
        let max_rows = u64::from(max_new_tokens) * u64::from(group);
        let (kernel, rows, threads, shared_bytes) = match arithmetic {
            Arithmetic::Plain => self.plain(dtype, kv_type, max_rows)?,
            Arithmetic::TensorCore => self.tensor_core(dtype, kv_type, max_rows)?,
        };
        let blocks = max_rows.div_ceil(rows.into()) * u64::from(self.num_kv_heads);
        let grid = [checks.many_blocks("blocks of rows", blocks)?, self.num_splits.max(1), num_seqs];
        Ok(Launch { kernel, grid, threads, shared_bytes })
    }

    fn plain(
        &self,
        dtype: Dtype,
        kv_type: KvType,
        max_rows: u64,
    ) -> Result<(&'static str, u32, u32, u32), KernelError> {
        macro_rules! by_rows {
            ($types:literal) => {
                [
                    concat!("paged_attention_", $types, "_r1"),
                    concat!("paged_attention_", $types, "_r4"),
                    concat!("paged_attention_", $types, "_r8"),
                ]
            };
        }
        let kernels = match (dtype, kv_type) {
            (dtype, KvType::Same) => dtype.pick(by_rows!("f32"), by_rows!("f16"), by_rows!("bf16")),
            (Dtype::F16, KvType::E4m3) => by_rows!("f16_e4m3"),
            (Dtype::Bf16, KvType::E4m3) => by_rows!("bf16_e4m3"),
            (Dtype::F32, KvType::E4m3) => {
                return Err(KernelError::NotCompiled {
                    kernel: "paged_attention",
                    what: "f32 with e4m3".into(),
                });
            }
        };
        let (kernel, rows) = match max_rows {
            0..=1 => (kernels[0], 1),
            2..=4 => (kernels[1], 4),
            _ => (kernels[2], 8),
        };
        Ok((kernel, rows, PLAIN_THREADS, rows * (2 * self.head_dim + 256 + 6 + 1024) * 4))
    }

    fn tensor_core(
        &self,
        dtype: Dtype,
        kv_type: KvType,
        max_rows: u64,
    ) -> Result<(&'static str, u32, u32, u32), KernelError> {
        let kernel = match (dtype, kv_type, self.head_dim) {
            (Dtype::F16, KvType::Same, 64) => "paged_attention_mma_f16_d64",
            (Dtype::F16, KvType::Same, 80) => "paged_attention_mma_f16_d80",
            (Dtype::F16, KvType::Same, 96) => "paged_attention_mma_f16_d96",
            (Dtype::F16, KvType::Same, 128) => "paged_attention_mma_f16_d128",
            (Dtype::F16, KvType::Same, 256) => "paged_attention_mma_f16_d256",
            (Dtype::Bf16, KvType::Same, 64) => "paged_attention_mma_bf16_d64",
            (Dtype::Bf16, KvType::Same, 80) => "paged_attention_mma_bf16_d80",
            (Dtype::Bf16, KvType::Same, 96) => "paged_attention_mma_bf16_d96",
            (Dtype::Bf16, KvType::Same, 128) => "paged_attention_mma_bf16_d128",
            (Dtype::Bf16, KvType::Same, 256) => "paged_attention_mma_bf16_d256",
            _ => {
                let what =
                    format!("{dtype:?} with KV {kv_type:?} and head_dim {} on tensor cores", self.head_dim);
                return Err(KernelError::NotCompiled { kernel: "paged_attention", what });
            }
        };
        // A warp has 16 rows, which are enough for one new token of most models.
        let warps = if max_rows <= 16 { 1 } else { 4 };
        let rows = warps * 16;
        let tile = if self.head_dim > 128 { 16 } else { 64 };
        let merged = if self.head_dim > 128 { rows * self.head_dim * 4 } else { 0 };
        Ok((kernel, rows, warps * 32, (rows + 2 * tile) * (self.head_dim + 8) * 2 + merged))
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// All addresses are of `device`, aligned to 16 bytes, and hold what the fields say, of the types given; no sequence has more than
    /// `max_new_tokens` new tokens, nor more of them than its context, nor a context of more than `max_pages * page_size`; the pages lie in the
    /// region and hold the context. No one else writes to any, or reads what is written, until the kernel has run.
    pub unsafe fn launch(
        &self,
        device: &dyn Device,
        arithmetic: Arithmetic,
        types: (Dtype, KvType),
        sizes: (u32, u32),
    ) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(arithmetic, types, sizes)?, self) }
    }
}

/// Merges what the blocks of the splits wrote (`kernels/paged_attention.cu`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct PagedAttentionCombine {
    /// `[num_tokens, num_heads, head_dim]`. Written.
    pub out: DevicePtr,
    /// `[num_tokens, num_heads, num_splits, head_dim + 2]`, f32.
    pub partials: DevicePtr,
    /// Query heads.
    pub num_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// As in [`PagedAttention`].
    pub num_splits: u32,
    /// As in [`PagedAttention`].
    pub v_scale: f32,
}

// SAFETY: two addresses and four words, no padding; `PagedAttentionCombineParams` is the same.
unsafe impl Params for PagedAttentionCombine {}

impl PagedAttentionCombine {
    /// Checks the sizes and returns the launch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn plan(&self, dtype: Dtype, num_tokens: u32) -> Result<Launch, KernelError> {
        let checks = Checks("paged_attention_combine");
        checks.that((1..=256).contains(&self.head_dim), "head_dim", self.head_dim.into(), "1 to 256")?;
        checks.blocks("num_tokens", num_tokens)?;
        checks.blocks("num_splits", self.num_splits)?;
        let kernel = dtype.pick(
            "paged_attention_combine_f32",
            "paged_attention_combine_f16",
            "paged_attention_combine_bf16",
        );
        let grid = [checks.many_blocks("num_heads", self.num_heads.into())?, num_tokens, 1];
        Ok(Launch { kernel, grid, threads: PLAIN_THREADS, shared_bytes: 0 })
    }

    /// Launches it.
    ///
    /// # Errors
    /// As [`Self::plan`] and [`Device::launch`].
    ///
    /// # Safety
    /// Both addresses are of `device`, aligned to 16 bytes, and hold what the fields say; `partials` were written by launches of
    /// [`PagedAttention`] for the same tokens. No one else writes to either, or reads `out`, until the kernel has run.
    pub unsafe fn launch(
        &self,
        device: &dyn Device,
        dtype: Dtype,
        num_tokens: u32,
    ) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        unsafe { launch(device, &self.plan(dtype, num_tokens)?, self) }
    }
}
