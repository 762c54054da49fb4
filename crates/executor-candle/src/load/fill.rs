//! Filling the arena: each tensor is read once, hashed and packed by all threads at the same time, and dropped from memory.

use std::ops::Range;
use std::sync::Mutex;

use microserving_checkpoint::{Identity, ModelConfig, Place, Tensor, TensorSource, load_error};
use microserving_executor::ExecutorError;

use super::build::{Need, Target};
use crate::kernels::NR;
use crate::pool::{Parts, Pool};
use crate::weights::{Arena, Matrix, Row, Vector};

/// Bytes of a tensor that are packed and then dropped from memory at a time.
const BATCH_BYTES: usize = 8 << 20;

/// Reads tensors into the arena, one after the other.
pub(super) struct Filler<'a> {
    source: &'a dyn TensorSource,
    pool: &'a mut Pool,
    hash: Identity,
    read: u64,
}

/// Rows of a tensor that go into a matrix.
struct Batch<'a> {
    source: &'a dyn TensorSource,
    place: Place,
    tensor: &'a Tensor,
    /// The whole tensor.
    bytes: &'a [u8],
    row_bytes: usize,
    columns: usize,
    matrix: Matrix,
    /// Where the tensor's first row goes.
    first_row: usize,
    /// Rows of the matrix.
    rows: Range<usize>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(source: &'a dyn TensorSource, config: &ModelConfig, pool: &'a mut Pool) -> Self {
        Self { source, pool, hash: Identity::new(config), read: 0 }
    }

    /// Returns a hash of configuration, names, types and weights read so far.
    pub(super) fn hash(&self) -> u64 {
        self.hash.get()
    }

    /// Reads one tensor into its place; returns the bytes read so far.
    pub(super) fn fill(
        &mut self,
        arena: &mut Arena,
        need: &Need,
        tensor: &Tensor,
    ) -> Result<u64, ExecutorError> {
        let bytes = self.source.bytes(tensor)?;
        self.hash.tensor(tensor);
        match need.target {
            Target::Matrix { matrix, first_row } => {
                self.matrix(arena, need, tensor, bytes, matrix, first_row)?;
            }
            Target::Vector { vector, first } => self.vector(arena, need, tensor, bytes, vector, first)?,
        }
        self.read += bytes.len() as u64;
        Ok(self.read)
    }

    fn vector(
        &mut self,
        arena: &mut Arena,
        need: &Need,
        tensor: &Tensor,
        bytes: &[u8],
        vector: Vector,
        first: usize,
    ) -> Result<(), ExecutorError> {
        self.hash.bytes(bytes);
        let mut values = vec![0.0; need.wanted.columns];
        tensor.widen(0, bytes, &mut values, &mut Vec::new())?;
        if values.iter().any(|x| !x.is_finite()) {
            return Err(not_finite(tensor, 0, "f32"));
        }
        for at in 0..need.wanted.columns {
            vector.put(arena, first + at, values[self.source.row_in_file(need.wanted.place, at)]);
        }
        Ok(())
    }

    fn matrix(
        &mut self,
        arena: &mut Arena,
        need: &Need,
        tensor: &Tensor,
        bytes: &[u8],
        matrix: Matrix,
        first_row: usize,
    ) -> Result<(), ExecutorError> {
        let rows = need.wanted.rows.unwrap_or(1);
        let row_bytes = bytes.len() / rows;
        let in_order = (0..rows).all(|row| self.source.row_in_file(need.wanted.place, row) == row);
        // Batches end where tiles do. Rows in another order come from anywhere in the tensor.
        let per_batch = if in_order { BATCH_BYTES / row_bytes.max(1) } else { rows + NR };
        let per_batch = per_batch.max(1).next_multiple_of(NR);
        let mut begin = 0;
        while begin < rows {
            let end = rows.min((first_row + begin + per_batch) / NR * NR - first_row);
            let batch = Batch {
                source: self.source,
                place: need.wanted.place,
                tensor,
                bytes,
                row_bytes,
                columns: need.wanted.columns,
                matrix,
                first_row,
                rows: first_row + begin..first_row + end,
            };
            let read = begin * row_bytes..end * row_bytes;
            pack(&batch, arena, self.pool, (&mut self.hash, &bytes[read.clone()]))?;
            self.source.release(tensor, read);
            begin = end;
        }
        Ok(())
    }
}

/// Packs a batch, one tile a piece; another piece hashes the bytes.
fn pack(
    batch: &Batch<'_>,
    arena: &mut Arena,
    pool: &mut Pool,
    (hash, bytes): (&mut Identity, &[u8]),
) -> Result<(), ExecutorError> {
    let tiles = batch.rows.start / NR..batch.rows.end.div_ceil(NR);
    let all = Parts::new(arena.bytes_mut());
    let hash = Mutex::new(hash);
    let failed: Mutex<Option<(usize, ExecutorError)>> = Mutex::new(None);
    pool.run(tiles.len() + 1, &|piece, _| {
        let Some(piece) = piece.checked_sub(1) else {
            // No piece panics while it holds a lock.
            if let Ok(mut hash) = hash.lock() {
                hash.bytes(bytes);
            }
            return;
        };
        let tile = tiles.start + piece;
        let (_, range) = batch.matrix.tile(tile);
        // SAFETY: each piece has its own tile.
        let data = unsafe { all.get(range) };
        if let Err((row, err)) = batch.pack_tile(tile, data)
            && let Ok(mut failed) = failed.lock()
            && failed.as_ref().is_none_or(|(first, _)| row < *first)
        {
            *failed = Some((row, err));
        }
    });
    match failed.into_inner() {
        Ok(Some((_, err))) => Err(err),
        _ => Ok(()),
    }
}

impl Batch<'_> {
    /// Packs the batch's rows of one tile.
    fn pack_tile(&self, tile: usize, data: &mut [u8]) -> Result<(), (usize, ExecutorError)> {
        let (form, _) = self.matrix.tile(tile);
        let keeps = form.keeps(self.tensor.kind);
        let mut values = vec![0.0; if keeps { 0 } else { self.columns }];
        let mut scratch = Vec::new();
        let rows = self.rows.start.max(tile * NR)..self.rows.end.min((tile + 1) * NR);
        for row in rows {
            let index = self.source.row_in_file(self.place, row - self.first_row);
            let bytes = &self.bytes[index * self.row_bytes..][..self.row_bytes];
            let packed = if keeps {
                Row::Blocks(bytes)
            } else {
                self.tensor.widen(index, bytes, &mut values, &mut scratch).map_err(|err| (index, err))?;
                Row::F32(&values)
            };
            if !form.pack(data, row % NR, packed) {
                return Err((index, not_finite(self.tensor, index, form.name())));
            }
        }
        Ok(())
    }
}

fn not_finite(tensor: &Tensor, row: usize, form: &str) -> ExecutorError {
    let name = &tensor.name;
    load_error(format!("tensor {name} has a value in row {row} that is not finite as {form}"))
}
