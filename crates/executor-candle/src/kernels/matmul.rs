//! Choosing a kernel for a product, and cutting the product into blocks that fit the caches.

use std::marker::PhantomData;
use std::ops::Range;

use super::{BLOCK, KernelLevel, Kernels, NR, Q8Block, Quants, plain};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};

/// Activations of one row block that should stay in the L2 cache while weight tiles stream past.
const ROW_BLOCK_BYTES: usize = 256 * 1024;

/// The same for processors with AMX, which have 2 MiB of it, and unpack weights anew for each block.
const AMX_ROW_BLOCK_BYTES: usize = 1024 * 1024;

/// A packed matrix of `num_tiles * 16` output columns and `k` inputs; see the module's drawing for the layouts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatrixRef<'a> {
    /// Single precision.
    F32 { data: &'a [f32], k: usize },
    /// Half precision, widened when used.
    F16 { data: &'a [u16], k: usize },
    /// bfloat16; `k` is even.
    Bf16 { data: &'a [u16], k: usize },
    /// Integers with scales; `k` is a multiple of the type's unit.
    Quantised { quants: Quants, data: &'a [u8], k: usize },
}

impl MatrixRef<'_> {
    /// Returns the number of tiles.
    pub(crate) fn num_tiles(&self) -> usize {
        match *self {
            Self::F32 { data, k } => data.len() / (k * NR),
            Self::F16 { data, k } | Self::Bf16 { data, k } => data.len() / (k * NR),
            Self::Quantised { quants, data, k } => data.len() / quants.tile_bytes(k),
        }
    }
}

/// Activation rows in the form that a matrix form multiplies with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowsRef<'a> {
    /// `[rows][k]`, for f32 and f16 weights, and rounded for bf16 weights at the levels without products of them.
    F32(&'a [f32]),
    /// `[rows][k]` bfloat16, for bf16 weights.
    Bf16(&'a [u16]),
    /// `[rows][stride]`, of which each row's first `k / 32` count, for quantised weights.
    Q8 { blocks: &'a [Q8Block], stride: usize },
}

/// Where a product goes: `[rows][stride]` f32, of which each caller writes the columns of its own tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<'a> {
    pub(super) base: *mut f32,
    pub(super) len: usize,
    pub(super) stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a `&mut [f32]` that several threads may hold; who writes which columns is the contract of `matmul`.
unsafe impl Send for Output<'_> {}
// SAFETY: as above; nothing is readable through a shared `Output`.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Borrows `rows` as rows of `stride` elements.
    pub(crate) fn new(rows: &'a mut [f32], stride: usize) -> Self {
        Self { base: rows.as_mut_ptr(), len: rows.len(), stride, lifetime: PhantomData }
    }

    /// Returns the same rows without the columns of their first `tiles`.
    ///
    /// # Panics
    /// If there are not as many.
    pub(crate) fn skip_tiles(self, tiles: usize) -> Self {
        let columns = tiles * NR;
        assert!(columns <= self.stride && columns <= self.len, "no such column");
        // SAFETY: inside the borrowed slice, or at its end.
        Self { base: unsafe { self.base.add(columns) }, len: self.len - columns, ..self }
    }
}

/// One plain f32 product with free strides: the core of the packed f32 form, and of forms that are unpacked first.
///
/// `c[i][16 t + j] (+)= sum over x < k of a[i * lda + x] * w[t * tile + x * ldw + j]`
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(super) struct F32Product<'a> {
    /// Left rows.
    pub(crate) a: &'a [f32],
    /// Elements between left rows.
    pub(crate) lda: usize,
    /// Right tiles.
    pub(crate) w: &'a [f32],
    /// Elements between tiles.
    pub(crate) tile: usize,
    /// Elements between steps of `k` in a tile.
    pub(crate) ldw: usize,
    /// Length of the sums.
    pub(crate) k: usize,
    /// Add to what is there instead of overwriting it.
    pub(crate) accumulate: bool,
}

impl Kernels {
    /// Computes the columns of `tiles` for all `num_rows` rows: `out[i] = rows[i] * matrix^T`.
    ///
    /// # Safety
    /// No one else may access the columns `16 * tiles` of `out` meanwhile.
    ///
    /// # Panics
    /// If rows, matrix and output do not fit each other.
    pub(crate) unsafe fn matmul(
        self,
        matrix: MatrixRef<'_>,
        rows: RowsRef<'_>,
        num_rows: usize,
        tiles: Range<usize>,
        out: Output<'_>,
    ) {
        if num_rows == 0 || tiles.is_empty() {
            return;
        }
        assert!(tiles.end <= matrix.num_tiles(), "tiles past the end of the matrix");
        assert!(
            (num_rows - 1) * out.stride + tiles.end * NR <= out.len && tiles.end * NR <= out.stride,
            "output ends early"
        );
        let row_bytes = match (matrix, rows) {
            (
                MatrixRef::F32 { k, .. } | MatrixRef::F16 { k, .. } | MatrixRef::Bf16 { k, .. },
                RowsRef::F32(a),
            ) => {
                assert!(num_rows * k <= a.len(), "rows end early");
                4 * k
            }
            (MatrixRef::Bf16 { k, .. }, RowsRef::Bf16(a)) => {
                assert!(num_rows * k <= a.len() && k % 2 == 0, "rows end early");
                2 * k
            }
            (MatrixRef::Quantised { quants, k, .. }, RowsRef::Q8 { blocks, stride }) => {
                assert!(k % quants.unit() == 0, "tiles hold whole units");
                assert!((num_rows - 1) * stride + k / BLOCK <= blocks.len(), "rows end early");
                stride * size_of::<Q8Block>()
            }
            _ => unreachable!("rows are prepared for the matrix they meet"),
        };
        // A multiple of the tallest kernels, so that only the last block leaves a remainder.
        let (block_bytes, tallest) =
            if self.level() == KernelLevel::Amx { (AMX_ROW_BLOCK_BYTES, 48) } else { (ROW_BLOCK_BYTES, 24) };
        let step = (block_bytes / row_bytes / tallest).max(1) * tallest;
        let mut begin = 0;
        while begin < num_rows {
            let block = begin..(begin + step).min(num_rows);
            begin = block.end;
            match self.level() {
                // SAFETY: all sizes were checked above; exclusive access is the caller's promise.
                KernelLevel::Plain => unsafe { plain::matmul(matrix, rows, block, tiles.clone(), out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above, and `Kernels` proves the instructions are there. These kernels cut `k` instead of the
                // rows, so that more rows share what is unpacked.
                KernelLevel::Avx2 => unsafe {
                    begin = num_rows;
                    avx2::matmul(matrix, rows, 0..num_rows, tiles.clone(), out);
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                KernelLevel::Avx512 | KernelLevel::Avx512Bf16 => unsafe {
                    avx512::matmul(matrix, rows, block, tiles.clone(), out, self.wants_hints());
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                KernelLevel::Amx => unsafe {
                    amx::matmul(matrix, rows, block, tiles.clone(), out, self.wants_hints());
                },
                #[cfg(not(target_arch = "x86_64"))]
                // SAFETY: as above; other levels cannot be constructed on this machine.
                _ => unsafe { plain::matmul(matrix, rows, block, tiles.clone(), out) },
            }
        }
    }
}
