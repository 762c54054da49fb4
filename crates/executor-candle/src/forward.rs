//! The walk through the layers.

use std::ops::Range;

use microserving_checkpoint::ModelConfig;
use microserving_executor::{BatchItem, SampleError, Sampled};
use microserving_protocol::{LayerId, PageId};

use crate::attention::{Heads, KvRegion, Units, attend};
use crate::kernels::{Kernels, WideState};
use crate::load::{LayerWeights, ModelWeights};
use crate::pool::{Parts, Pool};
use crate::products::{Inputs, cut, grow, multiply};

/// Rows that go through a layer's products together: their activations stay in the caches, and scratch stays small for a
/// large batch. Rows do not meet outside attention, so the cut does not show.
const ROW_BLOCK: usize = 256;

/// Rows whose logits are computed together.
const LOGIT_BLOCK: usize = 64;

/// What a sampler drew.
pub(crate) type Drawn = Result<Sampled, SampleError>;

/// A loaded model with all that a step needs.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) weights: ModelWeights,
    heads: Heads,
    inverse_frequencies: Vec<f64>,
    kernels: Kernels,
    pool: Pool,
    buffers: Buffers,
    /// One a thread.
    attention: Vec<WideState>,
}

/// Where a row of the batch keeps its KV.
#[derive(Clone, Copy, Debug)]
struct Slot {
    page: PageId,
    slot: u32,
}

/// A row whose logits are wanted.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    row: usize,
    item: usize,
}

/// Memory that steps reuse; it grows to the largest batch seen.
#[derive(Debug, Default)]
struct Buffers {
    /// `[rows][hidden]`, the residual stream.
    x: Vec<f32>,
    /// `[rows][q_width]`, queries and then what attention made of them.
    q: Vec<f32>,
    /// `[rows][head_dim / 2]` each.
    cos: Vec<f32>,
    sin: Vec<f32>,
    slots: Vec<Slot>,
    units: Units,
    /// The units of the last layer: past the KV cache it is of use only to rows whose logits are wanted.
    last_units: Units,
    /// Those rows, and the items that they belong to.
    wanted: Vec<Wanted>,
    inputs: Inputs,
    /// `[ROW_BLOCK][..]`, what a product returned.
    outputs: Vec<f32>,
    /// `[LOGIT_BLOCK][padded vocabulary]`.
    logits: Vec<f32>,
}

/// Cuts `rows` into pieces for the pool: `each(row)` for every row.
fn for_rows(pool: &mut Pool, rows: usize, each: &(dyn Fn(usize) + Sync)) {
    let pieces = if pool.num_threads() == 1 { 1 } else { rows.min(4 * pool.num_threads()) };
    pool.run(pieces, &|piece, _| {
        for row in cut(rows, pieces, piece) {
            each(row);
        }
    });
}

impl Model {
    pub(crate) fn new(config: ModelConfig, weights: ModelWeights, kernels: Kernels, pool: Pool) -> Self {
        let heads = Heads {
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        };
        Self {
            inverse_frequencies: config.inverse_frequencies(),
            attention: (0..pool.num_threads()).map(|_| WideState::new(config.head_dim)).collect(),
            buffers: Buffers::default(),
            config,
            weights,
            heads,
            kernels,
            pool,
        }
    }

    /// Computes all layers: the KV of all rows is in the pages afterwards, and the last hidden states of those whose logits
    /// are wanted are the first rows of the buffer.
    ///
    /// # Safety
    /// - The items were checked: tokens in the vocabulary, enough pages, all inside the region, no page written by two items.
    /// - No one else writes the items' pages or reads the positions that are written, meanwhile.
    pub(crate) unsafe fn run_layers(
        &mut self,
        items: &[BatchItem<'_>],
        kv: KvRegion<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) {
        self.pool.pin_caller();
        let rows = self.prepare(items, kv.geometry.layout.page_size);
        for layer in 0..self.config.num_layers {
            let weights = self.weights.layers[layer];
            let id = LayerId(layer as u32);
            for block in blocks(rows) {
                // SAFETY: as the caller promises.
                unsafe { self.write_kv(&weights, id, block, kv) };
            }
            on_layer(id);
            let is_last = layer + 1 == self.config.num_layers;
            // SAFETY: as the caller promises; the layer's KV is written.
            unsafe { self.attend_all(id, kv, is_last) };
            let rows = if is_last { self.keep_wanted() } else { rows };
            for block in blocks(rows) {
                self.finish_layer(&weights, block);
            }
        }
    }

    /// Moves the rows whose logits are wanted to the front; returns their number.
    fn keep_wanted(&mut self) -> usize {
        let (hidden, q_width) = (self.config.hidden, self.config.q_width());
        let Buffers { x, q, wanted, .. } = &mut self.buffers;
        // Rows are in order, so none is overwritten before it has moved.
        for (to, &Wanted { row: from, .. }) in wanted.iter().enumerate() {
            x.copy_within(from * hidden..(from + 1) * hidden, to * hidden);
            q.copy_within(from * q_width..(from + 1) * q_width, to * q_width);
        }
        wanted.len()
    }

    /// Looks up embeddings, angles, slots and units of the batch; returns its rows.
    fn prepare(&mut self, items: &[BatchItem<'_>], page_size: u32) -> usize {
        let rows = items.iter().map(|item| item.tokens.len()).sum();
        let (hidden, half) = (self.config.hidden, self.config.head_dim / 2);
        let buffers = &mut self.buffers;
        grow(&mut buffers.x, rows * hidden);
        grow(&mut buffers.q, rows * self.config.q_width());
        grow(&mut buffers.cos, rows * half);
        grow(&mut buffers.sin, rows * half);
        buffers.slots.clear();
        buffers.units.clear();
        buffers.last_units.clear();
        buffers.wanted.clear();
        let mut row = 0;
        for (index, item) in items.iter().enumerate() {
            let first_row = row;
            for (i, token) in item.tokens.iter().enumerate() {
                let x = &mut buffers.x[row * hidden..][..hidden];
                self.weights.embedding.unpack(&self.weights.arena, token.0 as usize, x);
                let position = item.position + i as u32;
                for (at, frequency) in self.inverse_frequencies.iter().enumerate() {
                    let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                    buffers.cos[row * half + at] = cos as f32;
                    buffers.sin[row * half + at] = sin as f32;
                }
                buffers.slots.push(Slot {
                    page: item.pages[(position / page_size) as usize],
                    slot: position % page_size,
                });
                row += 1;
            }
            let (num_tokens, position) = (item.tokens.len(), item.position as usize);
            buffers.units.add(&self.heads, item.pages, (first_row, num_tokens, position));
            if item.sampler.is_some() {
                let last = (row - 1, 1, position + num_tokens - 1);
                buffers.last_units.add(&self.heads, item.pages, last);
                buffers.wanted.push(Wanted { row: row - 1, item: index });
            }
        }
        rows
    }

    /// The first half of a layer up to the KV cache, for a block of rows.
    ///
    /// # Safety
    /// As [`Self::run_layers`].
    unsafe fn write_kv(
        &mut self,
        weights: &LayerWeights,
        layer: LayerId,
        block: Range<usize>,
        kv: KvRegion<'_>,
    ) {
        let Self { config, weights: all, kernels, pool, buffers, .. } = self;
        let (kernels, arena) = (*kernels, &all.arena);
        let (hidden, head_dim, half) = (config.hidden, config.head_dim, config.head_dim / 2);
        let (q_width, kv_width) = (config.q_width(), config.kv_width());
        let rows = block.len();
        let norm = weights.attention_norm.get(arena);
        let inputs = buffers.inputs.parts(kernels, &weights.qkv, rows);
        let x = &buffers.x[block.start * hidden..];
        grow(&mut buffers.outputs, rows * hidden);
        let normed = Parts::new(&mut buffers.outputs);
        for_rows(pool, rows, &|row| {
            // SAFETY: each row is visited once.
            unsafe {
                let normed = normed.get(row * hidden..(row + 1) * hidden);
                kernels.rms_norm(&x[row * hidden..][..hidden], norm, config.rms_eps, normed);
                inputs.put(kernels, row, normed);
            }
        });
        multiply(kernels, pool, arena, &weights.qkv, &buffers.inputs, rows, &mut buffers.outputs);

        let stride = weights.qkv.padded_outputs();
        let bias = weights.qkv_bias.map(|bias| bias.get(arena));
        let q_norm = weights.q_norm.map(|norm| norm.get(arena));
        let k_norm = weights.k_norm.map(|norm| norm.get(arena));
        let outputs = Parts::new(&mut buffers.outputs);
        let queries = Parts::new(&mut buffers.q);
        let (cos, sin, slots) = (&buffers.cos, &buffers.sin, &buffers.slots);
        for_rows(pool, rows, &|row| {
            let at = block.start + row;
            // SAFETY: each row is visited once.
            let output = unsafe { outputs.get(row * stride..row * stride + q_width + 2 * kv_width) };
            if let Some(bias) = bias {
                kernels.add(output, bias);
            }
            let (cos, sin) = (&cos[at * half..][..half], &sin[at * half..][..half]);
            for (head, x) in output[..q_width + kv_width].chunks_exact_mut(head_dim).enumerate() {
                if let Some(norm) = if head < config.num_heads { q_norm } else { k_norm } {
                    kernels.rms_norm_in_place(x, norm, config.rms_eps);
                }
                kernels.rope(x, cos, sin);
            }
            let (q, k_and_v) = output.split_at(q_width);
            let (k, v) = k_and_v.split_at(kv_width);
            let slot = (layer, slots[at].page, slots[at].slot);
            // SAFETY: each row has its own queries and its own slot: items write no page in common, and the rows of an
            // item no position in common.
            unsafe {
                queries.get(at * q_width..(at + 1) * q_width).copy_from_slice(q);
                kv.store(kernels, slot, 0, k);
                kv.store(kernels, slot, 1, v);
            }
        });
    }

    /// Attention of all rows, or in the last layer of those whose logits are wanted.
    ///
    /// # Safety
    /// As [`Self::run_layers`], and the layer's KV is written.
    unsafe fn attend_all(&mut self, layer: LayerId, kv: KvRegion<'_>, is_last: bool) {
        let Self { heads, kernels, pool, buffers, attention, .. } = self;
        let Buffers { q, units, last_units, .. } = buffers;
        let units = if is_last { last_units } else { units };
        // SAFETY: as the caller promises.
        unsafe { attend((*kernels, pool), heads, (kv, layer), units, q, attention) };
    }

    /// The second half of a layer, for a block of rows.
    fn finish_layer(&mut self, weights: &LayerWeights, block: Range<usize>) {
        let Self { config, weights: all, kernels, pool, buffers, .. } = self;
        let (kernels, arena) = (*kernels, &all.arena);
        let (hidden, q_width, rows) = (config.hidden, config.q_width(), block.len());

        let inputs = buffers.inputs.parts(kernels, &weights.output, rows);
        let attended = &buffers.q[block.start * q_width..];
        for_rows(pool, rows, &|row| {
            // SAFETY: each row is visited once.
            unsafe { inputs.put(kernels, row, &attended[row * q_width..][..q_width]) };
        });
        multiply(kernels, pool, arena, &weights.output, &buffers.inputs, rows, &mut buffers.outputs);

        let norm = weights.mlp_norm.get(arena);
        let stride = weights.output.padded_outputs();
        let inputs = buffers.inputs.parts(kernels, &weights.gate_up, rows);
        let x = Parts::new(&mut buffers.x[block.start * hidden..block.end * hidden]);
        let outputs = Parts::new(&mut buffers.outputs);
        for_rows(pool, rows, &|row| {
            // SAFETY: each row is visited once.
            unsafe {
                let x = x.get(row * hidden..(row + 1) * hidden);
                let output = outputs.get(row * stride..row * stride + hidden);
                kernels.add(x, output);
                kernels.rms_norm(x, norm, config.rms_eps, output);
                inputs.put(kernels, row, output);
            }
        });
        multiply(kernels, pool, arena, &weights.gate_up, &buffers.inputs, rows, &mut buffers.outputs);

        let stride = weights.gate_up.padded_outputs();
        let inputs = buffers.inputs.parts(kernels, &weights.down, rows);
        let outputs = Parts::new(&mut buffers.outputs);
        for_rows(pool, rows, &|row| {
            // SAFETY: each row is visited once.
            unsafe {
                let (gate, up) = outputs.get(row * stride..(row + 1) * stride).split_at_mut(stride / 2);
                let gate = &mut gate[..config.intermediate];
                kernels.silu_mul(gate, up);
                inputs.put(kernels, row, gate);
            }
        });
        multiply(kernels, pool, arena, &weights.down, &buffers.inputs, rows, &mut buffers.outputs);

        let stride = weights.down.padded_outputs();
        let x = Parts::new(&mut buffers.x[block.start * hidden..block.end * hidden]);
        let outputs = &buffers.outputs;
        for_rows(pool, rows, &|row| {
            // SAFETY: each row is visited once.
            let x = unsafe { x.get(row * hidden..(row + 1) * hidden) };
            kernels.add(x, &outputs[row * stride..][..hidden]);
        });
    }

    /// Computes the logits of the hidden states that [`Self::run_layers`] left, and lets each item's sampler draw from them.
    /// `sampled` has an entry an item.
    pub(crate) fn sample(&mut self, items: &mut [BatchItem<'_>], sampled: &mut [Option<Drawn>]) {
        let Self { config, weights, kernels, pool, buffers, .. } = self;
        let (kernels, arena, hidden) = (*kernels, &weights.arena, config.hidden);
        let norm = weights.final_norm.get(arena);
        let stride = weights.output.padded_outputs();
        let (items, sampled) = (Parts::new(items), Parts::new(sampled));
        for begin in (0..buffers.wanted.len()).step_by(LOGIT_BLOCK) {
            let wanted = &buffers.wanted[begin..buffers.wanted.len().min(begin + LOGIT_BLOCK)];
            let rows = wanted.len();
            let inputs = buffers.inputs.parts(kernels, &weights.output, rows);
            grow(&mut buffers.outputs, rows * hidden);
            let normed = Parts::new(&mut buffers.outputs);
            let x = &buffers.x;
            for_rows(pool, rows, &|row| {
                // SAFETY: each row is visited once.
                unsafe {
                    let normed = normed.get(row * hidden..(row + 1) * hidden);
                    kernels.rms_norm(&x[(begin + row) * hidden..][..hidden], norm, config.rms_eps, normed);
                    inputs.put(kernels, row, normed);
                }
            });
            multiply(kernels, pool, arena, &weights.output, &buffers.inputs, rows, &mut buffers.logits);
            let logits = Parts::new(&mut buffers.logits);
            pool.run(rows, &|row, _| {
                let item = wanted[row].item;
                // SAFETY: each row is visited once, and items have a row each.
                unsafe {
                    let logits = logits.get(row * stride..row * stride + config.vocab_size);
                    let sampler = items.get(item..item + 1)[0].sampler.as_mut();
                    sampled.get(item..item + 1)[0] = sampler.map(|sampler| sampler.sample(logits));
                }
            });
        }
    }
}

/// Cuts rows into blocks.
fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(ROW_BLOCK).map(move |begin| begin..(begin + ROW_BLOCK).min(rows))
}
