//! The weights in the forms that the kernels multiply with, all in one run of memory.

use half::f16;
use memmap2::{Advice, MmapMut};
use microserving_executor::ExecutorError;

use crate::kernels::{MatrixRef, NR, Q8_BLOCK, bf16_bits};

/// The size of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Every piece begins on a cache line.
const ALIGN: usize = 64;

/// The form that a matrix is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of 32 eight-bit weights under a half-precision scale.
    Q8,
}

impl Form {
    /// Returns the name used in `numeric_mode`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8_0",
        }
    }

    /// Returns `k` rounded up to what the form's tiles hold.
    pub(crate) const fn padded_k(self, k: usize) -> usize {
        match self {
            Self::F32 | Self::F16 => k,
            Self::Bf16 => k.next_multiple_of(2),
            Self::Q8 => k.next_multiple_of(Q8_BLOCK),
        }
    }
}

/// A run of bytes in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    fn get<T: Plain>(&self, span: Span) -> &[T] {
        let bytes = &self.map[self.start + span.begin..][..span.len];
        // SAFETY: any bits are a `Plain` value; the arena starts on a huge page and pieces on cache lines, so they are
        // aligned; the map is initialised (zero pages) and borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), span.len / size_of::<T>()) }
    }

    fn get_mut<T: Plain>(&mut self, span: Span) -> &mut [T] {
        let bytes = &mut self.map[self.start + span.begin..][..span.len];
        // SAFETY: as in `get`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), span.len / size_of::<T>()) }
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

    /// Returns the elements for writing.
    pub(crate) fn get_mut<'a>(&self, arena: &'a mut Arena) -> &'a mut [f32] {
        arena.get_mut(self.span)
    }
}

/// One row on its way into a [`Matrix`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Row<'a> {
    /// Values to be brought into the matrix's form.
    F32(&'a [f32]),
    /// Blocks of a q8_0 file (half-precision scale, 32 weights), to be kept to the bit by a q8_0 matrix.
    Q8(&'a [u8]),
}

/// A packed matrix: `n` outputs (rows of the file's tensor) of `k` inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    form: Form,
    n: usize,
    k: usize,
    data: Span,
    scales: Span,
}

impl Matrix {
    /// Plans a matrix.
    pub(crate) fn plan(plan: &mut Plan, form: Form, n: usize, k: usize) -> Self {
        let elements = n.next_multiple_of(NR) * form.padded_k(k);
        let (data, scales) = match form {
            Form::F32 => (4 * elements, 0),
            Form::F16 | Form::Bf16 => (2 * elements, 0),
            Form::Q8 => (elements, elements / Q8_BLOCK * 2),
        };
        Self { form, n, k, data: plan.reserve(data), scales: plan.reserve(scales) }
    }

    /// Makes all weights zero, the padding of the last tile and of `k` included, which no row will write.
    pub(crate) fn clear(&self, arena: &mut Arena) {
        if self.form == Form::Q8 {
            // Zero is biased too; the other forms find their zeros in the fresh memory.
            arena.get_mut::<u8>(self.data).fill(128);
        }
    }

    /// Returns the form.
    pub(crate) const fn form(&self) -> Form {
        self.form
    }

    /// Returns the number of outputs with the last tile's padding: the stride of output rows.
    pub(crate) const fn padded_outputs(&self) -> usize {
        self.n.next_multiple_of(NR)
    }

    /// Returns the tiles.
    pub(crate) const fn num_tiles(&self) -> usize {
        self.n.div_ceil(NR)
    }

    /// Returns the inputs with the form's padding: the length of activation rows.
    pub(crate) const fn padded_k(&self) -> usize {
        self.form.padded_k(self.k)
    }

    /// Returns the matrix for multiplying.
    pub(crate) fn get<'a>(&self, arena: &'a Arena) -> MatrixRef<'a> {
        let k = self.padded_k();
        match self.form {
            Form::F32 => MatrixRef::F32 { data: arena.get(self.data), k },
            Form::F16 => MatrixRef::F16 { data: arena.get(self.data), k },
            Form::Bf16 => MatrixRef::Bf16 { data: arena.get(self.data), k },
            Form::Q8 => MatrixRef::Q8 { quants: arena.get(self.data), scales: arena.get(self.scales), k },
        }
    }

    /// Puts a row into its lane. Returns `false` if a value is not finite or too large for the form.
    #[must_use]
    pub(crate) fn pack(&self, arena: &mut Arena, index: usize, row: Row<'_>) -> bool {
        let (tile, lane) = (index / NR, index % NR);
        match (self.form, row) {
            (Form::F32, Row::F32(row)) => {
                let data = &mut arena.get_mut::<f32>(self.data)[tile * self.k * NR..][..self.k * NR];
                for (lanes, &x) in data.chunks_exact_mut(NR).zip(row) {
                    lanes[lane] = x;
                }
                row.iter().all(|x| x.is_finite())
            }
            (Form::F16, Row::F32(row)) => {
                let data = &mut arena.get_mut::<u16>(self.data)[tile * self.k * NR..][..self.k * NR];
                let mut finite = true;
                for (lanes, &x) in data.chunks_exact_mut(NR).zip(row) {
                    let x = f16::from_f32(x);
                    finite &= x.is_finite();
                    lanes[lane] = x.to_bits();
                }
                finite
            }
            (Form::Bf16, Row::F32(row)) => {
                let size = self.padded_k() * NR;
                let data = &mut arena.get_mut::<u16>(self.data)[tile * size..][..size];
                let mut finite = true;
                for (pairs, x) in data.chunks_exact_mut(2 * NR).zip(row.chunks(2)) {
                    for (slot, &x) in pairs[2 * lane..].iter_mut().zip(x) {
                        *slot = bf16_bits(x);
                        finite &= *slot & 0x7f80 != 0x7f80;
                    }
                }
                finite
            }
            (Form::Q8, Row::F32(row)) => {
                let mut finite = true;
                for (block, x) in row.chunks(Q8_BLOCK).enumerate() {
                    let (scale, quants) = quantise_block(x);
                    finite &= scale.is_finite() && x.iter().all(|x| x.is_finite());
                    self.put_block(arena, tile, lane, block, scale, &quants);
                }
                finite
            }
            (Form::Q8, Row::Q8(bytes)) => {
                let mut finite = true;
                for (block, bytes) in bytes.chunks_exact(2 + Q8_BLOCK).enumerate() {
                    let scale = f16::from_le_bytes([bytes[0], bytes[1]]);
                    finite &= scale.is_finite();
                    let mut quants = [0; Q8_BLOCK];
                    for (quant, &byte) in quants.iter_mut().zip(&bytes[2..]) {
                        *quant = byte as i8;
                    }
                    self.put_block(arena, tile, lane, block, scale, &quants);
                }
                finite
            }
            (_, Row::Q8(_)) => unreachable!("raw blocks are asked for only by q8_0 matrices"),
        }
    }

    fn put_block(
        &self,
        arena: &mut Arena,
        tile: usize,
        lane: usize,
        block: usize,
        scale: f16,
        quants: &[i8; Q8_BLOCK],
    ) {
        let at = tile * (self.padded_k() / Q8_BLOCK) + block;
        arena.get_mut::<u16>(self.scales)[at * NR + lane] = scale.to_bits();
        let data = &mut arena.get_mut::<u8>(self.data)[at * Q8_BLOCK * NR..][..Q8_BLOCK * NR];
        for (group, quants) in data.chunks_exact_mut(4 * NR).zip(quants.chunks_exact(4)) {
            for (slot, &quant) in group[4 * lane..].iter_mut().zip(quants) {
                *slot = quant as u8 ^ 128;
            }
        }
    }

    /// Reads a row back, widened to f32: the embedding of a token.
    pub(crate) fn unpack(&self, arena: &Arena, index: usize, row: &mut [f32]) {
        let (tile, lane) = (index / NR, index % NR);
        match self.get(arena) {
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
            MatrixRef::Q8 { quants, scales, k } => {
                let blocks = k / Q8_BLOCK;
                for (block, row) in row.chunks_mut(Q8_BLOCK).enumerate() {
                    let at = tile * blocks + block;
                    let scale = f16::from_bits(scales[at * NR + lane]).to_f32();
                    let data = &quants[at * Q8_BLOCK * NR..];
                    for (row, group) in row.chunks_mut(4).zip(data.chunks_exact(4 * NR)) {
                        for (x, &quant) in row.iter_mut().zip(&group[4 * lane..]) {
                            *x = f32::from((quant ^ 128) as i8) * scale;
                        }
                    }
                }
            }
        }
    }

    /// Prepares activation rows for this matrix. `rows: [n][k]` is what the kernels of f32 and f16 take as it is.
    pub(crate) const fn activation(&self) -> Activation {
        match self.form {
            Form::F32 | Form::F16 => Activation::F32,
            Form::Bf16 => Activation::Bf16,
            Form::Q8 => Activation::Q8,
        }
    }
}

/// What a matrix form multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// f32 rows as they are.
    F32,
    /// Rows rounded to bfloat16.
    Bf16,
    /// Rows quantised per block of 32.
    Q8,
}

/// Rounds to the nearest integer, halves to even, if it is below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
fn round(x: f32) -> f32 {
    (x + 12_582_912.0) - 12_582_912.0
}

/// Quantises up to 32 weights: the scale is rounded to half precision first, so that the weights are rounded against the
/// scale that will be multiplied back.
fn quantise_block(x: &[f32]) -> (f16, [i8; Q8_BLOCK]) {
    let max = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let scale = f16::from_f32(max / 127.0);
    let divisor = scale.to_f32();
    let mut quants = [0; Q8_BLOCK];
    if divisor > 0.0 {
        for (quant, &x) in quants.iter_mut().zip(x) {
            *quant = round(x / divisor).clamp(-127.0, 127.0) as i8;
        }
    }
    (scale, quants)
}
