//! Memory that steps reuse; it grows to the largest step seen.

use std::sync::Arc;

use microserving_checkpoint::ModelConfig;
use microserving_kernels::{Arithmetic, Dtype, KernelError};

use crate::accelerator::{Accelerator, Buffer, HostBuffer, Stream};
use crate::inputs::{Inputs, Sequences};

/// Candidates that the device hands out for a row of logits.
pub(crate) const MAX_CANDIDATES: usize = 256;

/// Partial results of attention that there is memory for. A step that would need more has one block walk each row's context instead,
/// which gives the same bits.
const MAX_PARTIAL_BYTES: usize = 256 << 20;

/// Sizes of a model that the memory follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) dtype: Dtype,
    pub(crate) attention: Arithmetic,
    pub(crate) hidden: usize,
    pub(crate) q_width: usize,
    pub(crate) qkv_width: usize,
    pub(crate) intermediate: usize,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab_rows: usize,
}

impl Sizes {
    pub(crate) fn new(
        config: &ModelConfig,
        (dtype, attention): (Dtype, Arithmetic),
        (intermediate, vocab_rows): (usize, usize),
    ) -> Self {
        Self {
            dtype,
            attention,
            hidden: config.hidden,
            q_width: config.q_width(),
            qkv_width: config.q_width() + 2 * config.kv_width(),
            intermediate,
            num_heads: config.num_heads,
            head_dim: config.head_dim,
            vocab_rows,
        }
    }

    /// Returns in how many splits a launch of attention has its contexts computed: none where many rows fill the device anyway.
    pub(crate) fn num_splits(&self, sequences: &Sequences, page_size: u32) -> u32 {
        let num_splits = self.attention.num_splits(sequences.max_pages * page_size);
        let is_decode = sequences.max_new_tokens == 1;
        let bytes = self.partial_bytes(sequences.num_seqs as usize, num_splits);
        if is_decode && num_splits > 1 && bytes <= MAX_PARTIAL_BYTES { num_splits } else { 0 }
    }

    fn partial_bytes(&self, rows: usize, num_splits: u32) -> usize {
        rows * self.num_heads * num_splits as usize * (self.head_dim + 2) * 4
    }
}

/// The buffers, named for what they hold.
#[derive(Debug)]
pub(crate) struct Workspace {
    sizes: Sizes,
    accelerator: Arc<dyn Accelerator>,
    /// A step's words, on the host and on the device.
    pub(crate) host_inputs: HostBuffer,
    pub(crate) inputs: Buffer,
    /// `[rows, hidden]`: the residual stream.
    pub(crate) stream: Buffer,
    /// `[rows, hidden]`: of the rows whose logits are wanted, in the last layer.
    pub(crate) wanted_stream: Buffer,
    /// `[rows, hidden]`
    pub(crate) normed: Buffer,
    /// `[rows, hidden]`: what is to be added to the stream.
    pub(crate) delta: Buffer,
    /// `[rows, qkv_width]`
    pub(crate) qkv: Buffer,
    /// `[rows, q_width]`
    pub(crate) query: Buffer,
    /// `[rows, q_width]`
    pub(crate) attended: Buffer,
    /// `[rows, num_heads, splits, head_dim + 2]`, f32.
    pub(crate) partials: Buffer,
    /// `[rows, 2 * intermediate]`
    pub(crate) gate_up: Buffer,
    /// `[rows, intermediate]`
    pub(crate) gated: Buffer,
    /// `[wanted, vocab_rows]`, f32.
    pub(crate) logits: Buffer,
    /// `[wanted]` each: best logits, sums of weights and of exponentials.
    pub(crate) best_logits: Buffer,
    pub(crate) weights: Buffer,
    pub(crate) sums: Buffer,
    /// What samplers are told, see [`Found`].
    pub(crate) found: Buffer,
    /// `[kept, MAX_CANDIDATES]`, f32: logits of candidates, which nobody asks for.
    pub(crate) candidate_logits: Buffer,
    pub(crate) host_found: HostBuffer,
    /// `[num_all, vocab_rows]`, f32.
    pub(crate) host_logits: HostBuffer,
}

/// The places of what is found of a step's logits, in bytes.
///
/// ```text
/// [ best: wanted u32 ][ not finite: wanted u32 ][ counts: kept u32 ][ kept: kept u32 ][ weights: kept * 256 u64 ][ tokens: kept * 256 u32 ]
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) best: usize,
    pub(crate) not_finite: usize,
    pub(crate) counts: usize,
    pub(crate) kept: usize,
    pub(crate) weights: usize,
    pub(crate) tokens: usize,
    pub(crate) num_bytes: usize,
}

impl Found {
    pub(crate) fn of(num_wanted: usize, num_kept: usize) -> Self {
        let mut end = 0;
        let mut place = |num_bytes: usize| {
            let begin = end;
            end = (begin + num_bytes).next_multiple_of(16);
            begin
        };
        let (best, not_finite) = (place(4 * num_wanted), place(4 * num_wanted));
        let (counts, kept) = (place(4 * num_kept), place(4 * num_kept));
        let (weights, tokens) = (place(8 * num_kept * MAX_CANDIDATES), place(4 * num_kept * MAX_CANDIDATES));
        Self { best, not_finite, counts, kept, weights, tokens, num_bytes: end }
    }
}

impl Workspace {
    pub(crate) fn new(accelerator: &Arc<dyn Accelerator>, sizes: Sizes) -> Self {
        let none = || Buffer::empty(accelerator);
        Self {
            sizes,
            accelerator: Arc::clone(accelerator),
            host_inputs: HostBuffer::empty(accelerator),
            inputs: none(),
            stream: none(),
            wanted_stream: none(),
            normed: none(),
            delta: none(),
            qkv: none(),
            query: none(),
            attended: none(),
            partials: none(),
            gate_up: none(),
            gated: none(),
            logits: none(),
            best_logits: none(),
            weights: none(),
            sums: none(),
            found: none(),
            candidate_logits: none(),
            host_found: HostBuffer::empty(accelerator),
            host_logits: HostBuffer::empty(accelerator),
        }
    }

    /// Sees that there is memory for steps of so many rows.
    pub(crate) fn reserve(&mut self, rows: usize) -> Result<(), KernelError> {
        let Sizes { dtype, hidden, q_width, qkv_width, intermediate, .. } = self.sizes;
        let row = rows * dtype.num_bytes();
        for buffer in [&mut self.stream, &mut self.wanted_stream, &mut self.normed, &mut self.delta] {
            buffer.fit(row * hidden)?;
        }
        self.qkv.fit(row * qkv_width)?;
        self.query.fit(row * q_width)?;
        self.attended.fit(row * q_width)?;
        self.gate_up.fit(row * 2 * intermediate)?;
        self.gated.fit(row * intermediate)
    }

    /// Sees that there is memory for a step. The one before is over.
    pub(crate) fn fit(&mut self, inputs: &Inputs, page_size: u32) -> Result<(), KernelError> {
        self.reserve(inputs.num_rows as usize)?;
        let (wanted, kept) = (inputs.wanted.len(), inputs.num_kept);
        self.host_inputs.fit(inputs.num_words * 4)?;
        self.inputs.fit(inputs.num_words * 4)?;
        for sequences in &inputs.attention {
            let num_splits = self.sizes.num_splits(sequences, page_size);
            self.partials.fit(self.sizes.partial_bytes(sequences.num_seqs as usize, num_splits))?;
        }
        let row_bytes = self.sizes.vocab_rows * 4;
        self.logits.fit(wanted * row_bytes)?;
        self.best_logits.fit(wanted * 4)?;
        self.weights.fit(wanted * 8)?;
        self.sums.fit(wanted * 8)?;
        self.candidate_logits.fit(kept * MAX_CANDIDATES * 4)?;
        let found = Found::of(wanted, kept).num_bytes;
        self.found.fit(found)?;
        self.host_found.fit(found)?;
        // One row more, for a sampler that turns out to need all after all.
        self.host_logits.fit(inputs.num_all.max(1) * row_bytes)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // A step that failed may have left something queued that copies to or from host memory.
        for stream in [Stream::Compute, Stream::Transfer] {
            let _ = self.accelerator.synchronize(stream);
        }
    }
}
