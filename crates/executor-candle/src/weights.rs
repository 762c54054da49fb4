//! The weights in the forms that the kernels multiply with, all in one run of memory.

use std::ops::Range;

use candle_core::quantized::GgmlDType;
use half::f16;
use memmap2::{Advice, MmapMut};
use microserving_checkpoint::TensorType;
use microserving_executor::ExecutorError;

use crate::kernels::{Activation, BLOCK, KernelLevel, Kernels, MatrixRef, NR, Quants, bf16_bits};

/// The size of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Every piece begins on a cache line.
const ALIGN: usize = 64;

/// Matrices that one product may join: q, k and v.
const MOST_PARTS: usize = 3;

/// The form that a matrix is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Integers with scales.
    Quantised(Quants),
}

impl Form {
    /// Returns the form that keeps a tensor as it is; for a quantised type without tiles of its own, q8_0.
    pub(crate) const fn of(kind: TensorType) -> Self {
        match kind {
            TensorType::F32 => Self::F32,
            TensorType::F16 => Self::F16,
            TensorType::Bf16 | TensorType::F8E4M3 => Self::Bf16,
            TensorType::Quantised(GgmlDType::Q4_0) => Self::Quantised(Quants::Q4_0),
            TensorType::Quantised(GgmlDType::Q4_1) => Self::Quantised(Quants::Q4_1),
            TensorType::Quantised(GgmlDType::Q4K) => Self::Quantised(Quants::Q4K),
            TensorType::Quantised(GgmlDType::Q6K) => Self::Quantised(Quants::Q6K),
            TensorType::Quantised(_) => Self::Quantised(Quants::Q8_0),
        }
    }

    /// Says whether a matrix of this form takes a file's blocks as they are.
    pub(crate) fn keeps(self, kind: TensorType) -> bool {
        match kind {
            TensorType::Quantised(GgmlDType::Q8_0) => self == Self::Quantised(Quants::Q8_0),
            TensorType::Quantised(_) => self == Self::of(kind) && self != Self::Quantised(Quants::Q8_0),
            _ => false,
        }
    }

    /// Returns the name used in `numeric_mode`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Quantised(quants) => quants.name(),
        }
    }

    /// Returns `k` rounded up to what the form's tiles hold.
    pub(crate) const fn padded_k(self, k: usize) -> usize {
        match self {
            Self::F32 | Self::F16 => k,
            Self::Bf16 => k.next_multiple_of(2),
            Self::Quantised(quants) => k.next_multiple_of(quants.unit()),
        }
    }

    /// Returns the bytes of a tile of `k` inputs.
    const fn tile_bytes(self, k: usize) -> usize {
        let k = self.padded_k(k);
        match self {
            Self::F32 => 4 * k * NR,
            Self::F16 | Self::Bf16 => 2 * k * NR,
            Self::Quantised(quants) => quants.tile_bytes(k),
        }
    }

    /// Returns what the form multiplies with at a level.
    pub(crate) const fn activation(self, kernels: Kernels) -> Activation {
        match self {
            Self::F32 | Self::F16 => Activation::F32,
            Self::Bf16 if matches!(kernels.level(), KernelLevel::Avx512Bf16 | KernelLevel::Amx) => {
                Activation::Bf16
            }
            Self::Bf16 => Activation::Rounded,
            Self::Quantised(_) => Activation::Q8,
        }
    }

    /// Puts a row into a lane of a tile, whose padding is zero. Returns `false` if a value is not finite or too large for
    /// the form.
    #[must_use]
    pub(crate) fn pack(self, tile: &mut [u8], lane: usize, row: Row<'_>) -> bool {
        match (self, row) {
            (Self::F32, Row::F32(row)) => {
                for (lanes, x) in tile.as_chunks_mut::<{ 4 * NR }>().0.iter_mut().zip(row) {
                    lanes.as_chunks_mut().0[lane] = x.to_ne_bytes();
                }
                row.iter().all(|x| x.is_finite())
            }
            (Self::F16, Row::F32(row)) => {
                let mut finite = true;
                for (lanes, &x) in tile.as_chunks_mut::<{ 2 * NR }>().0.iter_mut().zip(row) {
                    let x = f16::from_f32(x);
                    finite &= x.is_finite();
                    lanes.as_chunks_mut().0[lane] = x.to_ne_bytes();
                }
                finite
            }
            (Self::Bf16, Row::F32(row)) => {
                let mut finite = true;
                for (lanes, pair) in tile.as_chunks_mut::<{ 4 * NR }>().0.iter_mut().zip(row.chunks(2)) {
                    for (slot, &x) in lanes.as_chunks_mut::<2>().0[2 * lane..].iter_mut().zip(pair) {
                        let bits = bf16_bits(x);
                        finite &= bits & 0x7f80 != 0x7f80;
                        *slot = bits.to_ne_bytes();
                    }
                }
                finite
            }
            (Self::Quantised(Quants::Q8_0), Row::F32(row)) => {
                let mut finite = true;
                for (block, x) in row.chunks(BLOCK).enumerate() {
                    let (scale, quants) = quantise_block(x);
                    finite &= scale.is_finite() && x.iter().all(|x| x.is_finite());
                    Quants::pack_q8(tile, block, lane, scale, &quants);
                }
                finite
            }
            (Self::Quantised(quants), Row::Blocks(row)) => quants.pack(tile, lane, row),
            _ => unreachable!("rows are widened unless the matrix keeps the file's blocks"),
        }
    }
}

/// A run of bytes in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    begin: usize,
    len: usize,
}

/// Memory for all weights of a model, in huge pages where the system has them: streaming weights through 4 KiB pages costs
/// nearly half the bandwidth. It is one run because huge pages round up, once rather than per matrix.
#[derive(Debug)]
pub(crate) struct Arena {
    map: MmapMut,
    start: usize,
    num_bytes: usize,
}

/// The places of all weights, handed out before there is memory, so that nothing is allocated for files that do not fit.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    used: usize,
}

impl Plan {
    fn reserve(&mut self, len: usize) -> Span {
        let begin = self.used;
        self.used = begin.saturating_add(len.next_multiple_of(ALIGN));
        Span { begin, len }
    }
}

impl Arena {
    /// Takes memory for what was planned, all zero.
    pub(crate) fn new(plan: &Plan) -> Result<Self, ExecutorError> {
        let num_bytes = plan.used;
        let refused = |err: std::io::Error| ExecutorError::Load {
            reason: format!("no memory for {num_bytes} bytes of weights: {err}"),
        };
        let map = MmapMut::map_anon(num_bytes.saturating_add(HUGE_PAGE)).map_err(refused)?;
        // Small pages work as well, only slower, so a kernel without huge pages is no error.
        #[cfg(target_os = "linux")]
        let _ = map.advise(Advice::HugePage);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        Ok(Self { map, start, num_bytes })
    }

    /// Returns the bytes that hold weights.
    pub(crate) const fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Returns all bytes for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.num_bytes]
    }

    fn get<T: Plain>(&self, span: Span) -> &[T] {
        let bytes = &self.map[self.start + span.begin..][..span.len];
        // SAFETY: any bits are a `Plain` value; the arena starts on a huge page and pieces on cache lines, so they are
        // aligned; the map is initialised (zero pages) and borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), span.len / size_of::<T>()) }
    }
}

/// A type of which any bits are a value.
///
/// # Safety
/// That is so, and its alignment divides [`ALIGN`].
unsafe trait Plain: Copy {}
// SAFETY: a plain number.
unsafe impl Plain for u8 {}
// SAFETY: a plain number.
unsafe impl Plain for u16 {}
// SAFETY: a plain number.
unsafe impl Plain for f32 {}

/// A vector of f32 in the arena: a norm's weights or a bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    span: Span,
}

impl Vector {
    /// Plans `len` elements.
    pub(crate) fn plan(plan: &mut Plan, len: usize) -> Self {
        Self { span: plan.reserve(4 * len) }
    }

    /// Returns the elements.
    pub(crate) fn get<'a>(&self, arena: &'a Arena) -> &'a [f32] {
        arena.get(self.span)
    }

    /// Puts an element into its place.
    pub(crate) fn put(&self, arena: &mut Arena, at: usize, x: f32) {
        let bytes = &mut arena.bytes_mut()[self.span.begin..][..self.span.len];
        bytes.as_chunks_mut().0[at] = x.to_ne_bytes();
    }
}

/// One row on its way into a [`Matrix`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Row<'a> {
    /// Values to be brought into the matrix's form.
    F32(&'a [f32]),
    /// Blocks of the file in the matrix's own type, kept to the bit.
    Blocks(&'a [u8]),
}

/// Some tiles of a matrix, all of one form.
#[derive(Clone, Copy, Debug)]
struct Part {
    form: Form,
    first_tile: usize,
    num_tiles: usize,
    data: Span,
}

/// A packed matrix: `n` outputs (rows of the file's tensor) of `k` inputs. Tensors that are multiplied with the same
/// activations lie one below the other, each part in its own form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    k: usize,
    parts: [Option<Part>; MOST_PARTS],
}

impl Matrix {
    /// Plans a matrix of one form.
    pub(crate) fn plan(plan: &mut Plan, form: Form, n: usize, k: usize) -> Self {
        Self::plan_parts(plan, &[(form, n)], k)
    }

    /// Plans a matrix of up to three parts with their outputs; all but the last fill their tiles.
    pub(crate) fn plan_parts(plan: &mut Plan, parts: &[(Form, usize)], k: usize) -> Self {
        let mut all = Self { k, parts: [None; MOST_PARTS] };
        let mut first_tile = 0;
        for (slot, &(form, n)) in all.parts.iter_mut().zip(parts) {
            let num_tiles = n.div_ceil(NR);
            let data = plan.reserve(num_tiles.saturating_mul(form.tile_bytes(k)));
            *slot = Some(Part { form, first_tile, num_tiles, data });
            first_tile += num_tiles;
        }
        all
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().flatten()
    }

    /// Returns the forms.
    pub(crate) fn forms(&self) -> impl Iterator<Item = Form> + '_ {
        self.parts().map(|part| part.form)
    }

    /// Returns the number of outputs with the last tile's padding: the stride of output rows.
    pub(crate) fn padded_outputs(&self) -> usize {
        self.num_tiles() * NR
    }

    /// Returns the tiles.
    pub(crate) fn num_tiles(&self) -> usize {
        self.parts().map(|part| part.num_tiles).sum()
    }

    /// Returns the inputs with the forms' padding: the length of activation rows.
    pub(crate) fn padded_k(&self) -> usize {
        self.forms().map(|form| form.padded_k(self.k)).max().unwrap_or(self.k)
    }

    /// Returns what the matrix multiplies with; its parts agree.
    pub(crate) fn activation(&self, kernels: Kernels) -> Activation {
        self.forms().next().map_or(Activation::F32, |form| form.activation(kernels))
    }

    /// Cuts a range of tiles at the parts: `each(part, tiles within it, first tile of it)`.
    pub(crate) fn for_parts(
        &self,
        arena: &Arena,
        tiles: Range<usize>,
        mut each: impl FnMut(MatrixRef<'_>, Range<usize>, usize),
    ) {
        for part in self.parts() {
            let begin = tiles.start.max(part.first_tile);
            let end = tiles.end.min(part.first_tile + part.num_tiles);
            if begin < end {
                let tiles = begin - part.first_tile..end - part.first_tile;
                each(part.get(arena, self.k), tiles, part.first_tile);
            }
        }
    }

    /// Returns the part that a tile lies in: its form, and the bytes of the tile in the arena.
    pub(crate) fn tile(&self, tile: usize) -> (Form, Range<usize>) {
        let part = self.parts().filter(|part| part.first_tile <= tile).last();
        let part = part.expect("the first part begins at tile 0");
        let bytes = part.form.tile_bytes(self.k);
        let begin = part.data.begin + (tile - part.first_tile) * bytes;
        (part.form, begin..begin + bytes)
    }

    /// Reads a row back, widened to f32: the embedding of a token.
    pub(crate) fn unpack(&self, arena: &Arena, index: usize, row: &mut [f32]) {
        let lane = index % NR;
        self.for_parts(arena, index / NR..index / NR + 1, |matrix, tiles, _| {
            let tile = tiles.start;
            match matrix {
                MatrixRef::F32 { data, k } => {
                    let data = &data[tile * k * NR..];
                    for (x, lanes) in row.iter_mut().zip(data.chunks_exact(NR)) {
                        *x = lanes[lane];
                    }
                }
                MatrixRef::F16 { data, k } => {
                    let data = &data[tile * k * NR..];
                    for (x, lanes) in row.iter_mut().zip(data.chunks_exact(NR)) {
                        *x = f16::from_bits(lanes[lane]).to_f32();
                    }
                }
                MatrixRef::Bf16 { data, k } => {
                    let data = &data[tile * k * NR..];
                    for (x, pairs) in row.chunks_mut(2).zip(data.chunks_exact(2 * NR)) {
                        for (x, &bits) in x.iter_mut().zip(&pairs[2 * lane..]) {
                            *x = f32::from_bits(u32::from(bits) << 16);
                        }
                    }
                }
                MatrixRef::Quantised { quants, data, k } => {
                    let data = &data[tile * quants.tile_bytes(k)..];
                    for (block, row) in row.chunks_mut(BLOCK).enumerate() {
                        let decoded = quants.decode(data, block, lane..lane + 1);
                        for (x, q) in row.iter_mut().zip(&decoded.q) {
                            *x = q[lane] as f32 * decoded.d[lane] + decoded.m[lane];
                        }
                    }
                }
            }
        });
    }
}

impl Part {
    /// Returns the part for multiplying.
    fn get<'a>(&self, arena: &'a Arena, k: usize) -> MatrixRef<'a> {
        let k = self.form.padded_k(k);
        match self.form {
            Form::F32 => MatrixRef::F32 { data: arena.get(self.data), k },
            Form::F16 => MatrixRef::F16 { data: arena.get(self.data), k },
            Form::Bf16 => MatrixRef::Bf16 { data: arena.get(self.data), k },
            Form::Quantised(quants) => MatrixRef::Quantised { quants, data: arena.get(self.data), k },
        }
    }
}

/// Rounds to the nearest integer, halves to even, if it is below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
fn round(x: f32) -> f32 {
    (x + 12_582_912.0) - 12_582_912.0
}

/// Quantises up to 32 weights: the scale is rounded to half precision first, so that the weights are rounded against the
/// scale that will be multiplied back.
fn quantise_block(x: &[f32]) -> (f16, [i8; BLOCK]) {
    let max = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let scale = f16::from_f32(max / 127.0);
    let divisor = scale.to_f32();
    let mut quants = [0; BLOCK];
    if divisor > 0.0 {
        for (quant, &x) in quants.iter_mut().zip(x) {
            *quant = round(x / divisor).clamp(-127.0, 127.0) as i8;
        }
    }
    (scale, quants)
}
