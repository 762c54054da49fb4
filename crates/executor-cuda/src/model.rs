//! The walk through the layers, as launches.

use std::sync::Arc;

use microserving_checkpoint::ModelConfig;
use microserving_executor::ExecutorError;
use microserving_kernels::{
    Arithmetic, Device, DevicePtr, Dtype, Embedding, KernelError, KvAppend, KvType, Matmul, PagedAttention,
    PagedAttentionCombine, RmsNorm, SamplingBest, SamplingCandidates, SamplingWeights, Swiglu,
};

use crate::accelerator::{Accelerator, Buffer, Event, Stream};
use crate::inputs::{Inputs, Section, Sequences};
use crate::region::Region;
use crate::weights::{LayerWeights, Weights};
use crate::workspace::{Found, MAX_CANDIDATES, Sizes, Workspace};

/// A loaded model and what it computes with.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) accelerator: Arc<dyn Accelerator>,
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights,
    pub(crate) workspace: Workspace,
    sizes: Sizes,
    /// Of products.
    arithmetic: Arithmetic,
    /// `[max_context, head_dim / 2]` each, f32.
    cosines: Buffer,
    sines: Buffer,
    /// Passed when a layer's KV is written; one a layer.
    pub(crate) written: Vec<Event>,
    /// Passed when a layer's KV is in host memory, where it is sent from there.
    pub(crate) sent: Vec<Event>,
    /// Passed when what was found of the logits is on the host.
    pub(crate) done: Event,
}

/// How a model's launches add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arithmetics {
    pub(crate) products: Arithmetic,
    pub(crate) attention: Arithmetic,
}

impl Arithmetics {
    /// Chooses: tensor cores if they are wanted, or not said to be unwanted, where there are kernels for them.
    pub(crate) fn choose(dtype: Dtype, head_dim: usize, tensor_cores: Option<bool>) -> Self {
        let products = if tensor_cores.unwrap_or(dtype != Dtype::F32) {
            Arithmetic::TensorCore
        } else {
            Arithmetic::Plain
        };
        let has_heads = [64, 80, 96, 128, 256].contains(&head_dim);
        Self { products, attention: if has_heads { products } else { Arithmetic::Plain } }
    }

    /// Returns the part of the numeric mode that it decides.
    pub(crate) const fn name(self) -> &'static str {
        match (self.products, self.attention) {
            (Arithmetic::Plain, _) => "plain",
            (Arithmetic::TensorCore, Arithmetic::TensorCore) => "tensor_core",
            (Arithmetic::TensorCore, Arithmetic::Plain) => "tensor_core+plain_attention",
        }
    }
}

impl Model {
    /// Checks that every kernel takes the model's sizes, and prepares what all steps need.
    pub(crate) fn new(
        accelerator: &Arc<dyn Accelerator>,
        config: ModelConfig,
        weights: Weights,
        arithmetics: Arithmetics,
        max_context: u32,
    ) -> Result<Self, KernelError> {
        let kinds = (weights.dtype, arithmetics.attention);
        let sizes = Sizes::new(&config, kinds, (weights.intermediate, weights.vocab_rows));
        let (cosines, sines) = angles(accelerator, &config, max_context)?;
        let events =
            |num: usize| (0..num).map(|_| accelerator.event()).collect::<Result<Vec<_>, KernelError>>();
        Ok(Self {
            accelerator: Arc::clone(accelerator),
            sizes,
            arithmetic: arithmetics.products,
            workspace: Workspace::new(accelerator, sizes),
            cosines,
            sines,
            written: events(config.num_layers)?,
            sent: events(config.num_layers)?,
            done: accelerator.event()?,
            config,
            weights,
        })
    }

    /// Ends a step that failed: whatever of it was queued is waited for.
    pub(crate) fn settle(&self) {
        for stream in [Stream::Compute, Stream::Transfer] {
            if let Err(error) = self.accelerator.synchronize(stream) {
                tracing::debug!(%error, "a failed step ends with another failure");
            }
        }
    }

    /// Queues a step: the batch's words, all layers, what samplers need. Nothing is waited for.
    ///
    /// # Safety
    /// `inputs` is of a batch that was checked against the region and the vocabulary, the workspace fits it, and the step before is over.
    pub(crate) unsafe fn queue(&mut self, inputs: &Inputs, region: &Region) -> Result<(), KernelError> {
        let num_bytes = inputs.num_words * 4;
        let (to, from) = (self.workspace.inputs.ptr(), self.workspace.host_inputs.ptr());
        // SAFETY: both hold so many bytes; the host's stay until the step is over.
        unsafe { self.accelerator.copy_in(Stream::Compute, to, from, num_bytes)? };
        let walk = Walk { model: self, inputs, region };
        walk.run()
    }
}

/// One step's launches. All of them use buffers that [`Workspace::fit`] made large enough for `inputs`, weights of the sizes that the
/// model's configuration says, tables of `max_context` rows, and pages that were checked; all are used on one stream, in order.
/// That is what the `SAFETY` comments below mean by *the walk's buffers*.
struct Walk<'a> {
    model: &'a Model,
    inputs: &'a Inputs,
    region: &'a Region,
}

/// Rows on their way through a layer.
#[derive(Clone, Copy)]
struct Rows {
    num: u32,
    /// The residual stream.
    stream: DevicePtr,
    /// What attention made of their queries.
    attended: DevicePtr,
}

impl Walk<'_> {
    fn run(&self) -> Result<(), KernelError> {
        let Model { weights, workspace, written, config, .. } = self.model;
        let mut rows = Rows {
            num: self.inputs.num_rows,
            stream: workspace.stream.ptr(),
            attended: workspace.attended.ptr(),
        };
        self.gather(
            weights.embedding.ptr(),
            config.vocab_size,
            &self.inputs.tokens,
            config.hidden,
            rows.stream,
        )?;
        for (number, layer) in weights.layers.iter().enumerate() {
            self.write_kv(layer, number, rows)?;
            self.model.accelerator.record(written[number], Stream::Compute)?;
            self.send(number)?;
            let is_last = number + 1 == weights.layers.len();
            if is_last && self.inputs.wanted.is_empty() {
                return Ok(());
            }
            self.attend(number)?;
            if is_last {
                rows = self.keep_wanted(rows)?;
            }
            self.finish_layer(layer, rows)?;
        }
        self.find(rows)
    }

    fn device(&self) -> &dyn Device {
        self.model.accelerator.kernels()
    }

    fn dtype(&self) -> Dtype {
        self.model.weights.dtype
    }

    fn words(&self, section: &Section) -> DevicePtr {
        self.model.workspace.inputs.at(section.start * 4)
    }

    /// Queues the copy of a layer's KV to the host, for items that are sent.
    fn send(&self, layer: usize) -> Result<(), KernelError> {
        let Model { accelerator, written, sent, .. } = self.model;
        if self.region.is_sending() {
            accelerator.wait(Stream::Transfer, written[layer])?;
            self.region.send_layer(layer)?;
            accelerator.record(sent[layer], Stream::Transfer)?;
        }
        Ok(())
    }

    /// Copies rows of a table: embeddings of tokens, or rows of the batch.
    fn gather(
        &self,
        table: DevicePtr,
        table_rows: usize,
        which: &Section,
        width: usize,
        out: DevicePtr,
    ) -> Result<(), KernelError> {
        let gather = Embedding {
            out,
            table,
            tokens: self.words(which),
            hidden: width as u32,
            vocab_size: table_rows as u32,
        };
        // SAFETY: the walk's buffers; rows that the table has.
        unsafe { gather.launch(self.device(), self.dtype(), which.len() as u32) }
    }

    fn matmul(
        &self,
        (out, out_features): (DevicePtr, usize),
        (x, in_features): (DevicePtr, usize),
        weight: DevicePtr,
        num_rows: u32,
        out_is_f32: bool,
    ) -> Result<(), KernelError> {
        let matmul = Matmul {
            out,
            x,
            weight,
            num_rows,
            out_features: out_features as u32,
            in_features: in_features as u32,
            out_is_f32: out_is_f32.into(),
        };
        // SAFETY: the walk's buffers; no output is an input.
        unsafe { matmul.launch(self.device(), self.model.arithmetic, self.dtype()) }
    }

    /// Normalises the stream into `normed`, after adding `delta` to it if there is one.
    fn norm(&self, rows: Rows, delta: Option<DevicePtr>, weight: &Buffer) -> Result<(), KernelError> {
        let norm = RmsNorm {
            out: self.model.workspace.normed.ptr(),
            x: delta.unwrap_or(rows.stream),
            residual: delta.map_or(DevicePtr::NULL, |_| rows.stream),
            weight: weight.ptr(),
            hidden: self.model.config.hidden as u32,
            eps: self.model.config.rms_eps,
        };
        // SAFETY: the walk's buffers.
        unsafe { norm.launch(self.device(), self.dtype(), rows.num) }
    }

    /// The first half of a layer up to the KV cache. The stream has taken in what the layer before added.
    fn write_kv(&self, layer: &LayerWeights, number: usize, rows: Rows) -> Result<(), KernelError> {
        let Model { config, workspace, sizes, cosines, sines, .. } = self.model;
        let delta = (number > 0).then(|| workspace.delta.ptr());
        self.norm(rows, delta, &layer.attention_norm)?;
        let (normed, qkv) = (workspace.normed.ptr(), workspace.qkv.ptr());
        self.matmul((qkv, sizes.qkv_width), (normed, sizes.hidden), layer.qkv.ptr(), rows.num, false)?;
        let optional = |buffer: &Option<Buffer>| buffer.as_ref().map_or(DevicePtr::NULL, Buffer::ptr);
        let append = KvAppend {
            query: workspace.query.ptr(),
            kv: self.region.layer(number),
            qkv,
            bias: optional(&layer.qkv_bias),
            q_norm: optional(&layer.q_norm),
            k_norm: optional(&layer.k_norm),
            cosines: cosines.ptr(),
            sines: sines.ptr(),
            positions: self.words(&self.inputs.positions),
            slots: self.words(&self.inputs.slots),
            num_heads: config.num_heads as u32,
            num_kv_heads: config.num_kv_heads as u32,
            head_dim: config.head_dim as u32,
            page_size: self.region.geometry().layout.page_size,
            qkv_stride: sizes.qkv_width as u32,
            eps: config.rms_eps,
            k_scale: 1.0,
            v_scale: 1.0,
        };
        // SAFETY: the walk's buffers; slots differ, as no two items write a page.
        unsafe { append.launch(self.device(), self.dtype(), KvType::Same, rows.num) }
    }

    fn attend(&self, layer: usize) -> Result<(), KernelError> {
        for sequences in self.inputs.attention.iter().filter(|sequences| sequences.num_seqs > 0) {
            self.attend_sequences(layer, sequences)?;
        }
        Ok(())
    }

    fn attend_sequences(&self, layer: usize, sequences: &Sequences) -> Result<(), KernelError> {
        let Model { config, workspace, sizes, .. } = self.model;
        let page_size = self.region.geometry().layout.page_size;
        let num_splits = sizes.num_splits(sequences, page_size);
        let attention = PagedAttention {
            out: workspace.attended.ptr(),
            partials: workspace.partials.ptr(),
            query: workspace.query.ptr(),
            kv: self.region.layer(layer),
            page_table: self.words(&sequences.table),
            query_starts: self.words(&sequences.starts),
            context_lens: self.words(&sequences.contexts),
            num_heads: config.num_heads as u32,
            num_kv_heads: config.num_kv_heads as u32,
            head_dim: config.head_dim as u32,
            page_size,
            max_pages: sequences.max_pages,
            num_splits,
            scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
            k_scale: 1.0,
            v_scale: 1.0,
            reserved: 0,
        };
        let (types, counts) = ((self.dtype(), KvType::Same), (sequences.num_seqs, sequences.max_new_tokens));
        // SAFETY: the walk's buffers; the context's KV was written by earlier launches, or came with an import that was waited for.
        unsafe { attention.launch(self.device(), sizes.attention, types, counts)? };
        if num_splits == 0 {
            return Ok(());
        }
        let combine = PagedAttentionCombine {
            out: workspace.attended.ptr(),
            partials: workspace.partials.ptr(),
            num_heads: config.num_heads as u32,
            head_dim: config.head_dim as u32,
            num_splits,
            v_scale: 1.0,
        };
        // Sequences of one token each are the first rows of the batch, so partial results begin where outputs do.
        // SAFETY: the walk's buffers.
        unsafe { combine.launch(self.device(), self.dtype(), sequences.num_seqs) }
    }

    /// Goes on with the rows whose logits are wanted: past the last layer's KV, the others are of no use.
    fn keep_wanted(&self, rows: Rows) -> Result<Rows, KernelError> {
        let Model { workspace, sizes, .. } = self.model;
        let (wanted, of) = (&self.inputs.wanted_rows, rows.num as usize);
        let kept = Rows {
            num: wanted.len() as u32,
            stream: workspace.wanted_stream.ptr(),
            attended: workspace.query.ptr(),
        };
        self.gather(rows.stream, of, wanted, sizes.hidden, kept.stream)?;
        self.gather(rows.attended, of, wanted, sizes.q_width, kept.attended)?;
        Ok(kept)
    }

    /// The second half of a layer; what it adds to the stream is left in `delta`.
    fn finish_layer(&self, layer: &LayerWeights, rows: Rows) -> Result<(), KernelError> {
        let Model { workspace, sizes, .. } = self.model;
        let (delta, normed) = (workspace.delta.ptr(), workspace.normed.ptr());
        let (gate_up, gated) = (workspace.gate_up.ptr(), workspace.gated.ptr());
        let Sizes { hidden, q_width, intermediate, .. } = *sizes;
        self.matmul((delta, hidden), (rows.attended, q_width), layer.output.ptr(), rows.num, false)?;
        self.norm(rows, Some(delta), &layer.mlp_norm)?;
        self.matmul((gate_up, 2 * intermediate), (normed, hidden), layer.gate_up.ptr(), rows.num, false)?;
        let swiglu = Swiglu {
            out: gated,
            gate: gate_up,
            up: workspace.gate_up.at(intermediate * self.dtype().num_bytes()),
            intermediate: intermediate as u32,
            in_stride: 2 * intermediate as u32,
        };
        // SAFETY: the walk's buffers.
        unsafe { swiglu.launch(self.device(), self.dtype(), rows.num)? };
        self.matmul((delta, hidden), (gated, intermediate), layer.down.ptr(), rows.num, false)
    }

    /// Computes the logits of the wanted rows and what samplers need of them, and queues its copy to the host.
    fn find(&self, rows: Rows) -> Result<(), KernelError> {
        let Model { accelerator, weights, workspace, sizes, .. } = self.model;
        self.norm(rows, Some(workspace.delta.ptr()), &weights.final_norm)?;
        let (logits, normed) = (workspace.logits.ptr(), workspace.normed.ptr());
        self.matmul((logits, sizes.vocab_rows), (normed, sizes.hidden), weights.output(), rows.num, true)?;
        let found = Found::of(rows.num as usize, self.inputs.num_kept);
        let best = SamplingBest {
            logits,
            tokens: workspace.found.at(found.best),
            best: workspace.best_logits.ptr(),
            not_finite: workspace.found.at(found.not_finite),
            vocab_size: self.model.config.vocab_size as u32,
            row_stride: sizes.vocab_rows as u32,
        };
        // SAFETY: the walk's buffers.
        unsafe { best.launch(self.device(), Dtype::F32, rows.num)? };
        if self.inputs.num_kept > 0 {
            self.find_kept(&best, &found)?;
        }
        let row_bytes = sizes.vocab_rows * 4;
        let first_all = rows.num as usize - self.inputs.num_all;
        let (from, num_bytes) = (workspace.logits.at(first_all * row_bytes), self.inputs.num_all * row_bytes);
        // SAFETY: the walk's buffers, on the host likewise; nobody reads those before the step is over.
        unsafe {
            let to = workspace.host_found.ptr();
            accelerator.copy_out(Stream::Compute, to, workspace.found.ptr(), found.num_bytes)?;
            if num_bytes > 0 {
                accelerator.copy_out(Stream::Compute, workspace.host_logits.ptr(), from, num_bytes)?;
            }
        }
        accelerator.record(self.model.done, Stream::Compute)
    }

    /// What `top_k` and `top_p` keep of the first rows.
    fn find_kept(&self, best: &SamplingBest, found: &Found) -> Result<(), KernelError> {
        let workspace = &self.model.workspace;
        let (vocab_size, row_stride) = (best.vocab_size, best.row_stride);
        let temperatures = self.words(&self.inputs.temperatures);
        let weights = SamplingWeights {
            logits: best.logits,
            best: best.best,
            temperatures,
            weights: workspace.weights.ptr(),
            sums: workspace.sums.ptr(),
            vocab_size,
            row_stride,
        };
        let candidates = SamplingCandidates {
            logits: best.logits,
            best: best.best,
            temperatures,
            top_ks: self.words(&self.inputs.top_ks),
            top_ps: self.words(&self.inputs.top_ps),
            total_weights: workspace.weights.ptr(),
            tokens: workspace.found.at(found.tokens),
            candidate_logits: workspace.candidate_logits.ptr(),
            weights: workspace.found.at(found.weights),
            counts: workspace.found.at(found.counts),
            kept: workspace.found.at(found.kept),
            vocab_size,
            row_stride,
            max_candidates: MAX_CANDIDATES as u32,
            reserved: 0,
        };
        let num_rows = self.inputs.num_kept as u32;
        // SAFETY: the walk's buffers.
        unsafe {
            weights.launch(self.device(), Dtype::F32, num_rows)?;
            candidates.launch(self.device(), Dtype::F32, num_rows)
        }
    }
}

/// Computes cosines and sines of all positions, in f64 and rounded once, as the executor for the CPU does.
fn angles(
    accelerator: &Arc<dyn Accelerator>,
    config: &ModelConfig,
    max_context: u32,
) -> Result<(Buffer, Buffer), KernelError> {
    let frequencies = config.inverse_frequencies();
    let num_words = frequencies.len() * max_context as usize;
    let (cosines, sines) =
        (Buffer::new(accelerator, num_words * 4)?, Buffer::new(accelerator, num_words * 4)?);
    let mut staged = crate::accelerator::HostBuffer::empty(accelerator);
    staged.fit(num_words * 4)?;
    for (buffer, of) in [(&cosines, f64::cos as fn(f64) -> f64), (&sines, f64::sin)] {
        // SAFETY: the copy of the turn before was waited for.
        let words = unsafe { staged.words(num_words) };
        let angles = (0..max_context)
            .flat_map(|position| frequencies.iter().map(move |frequency| f64::from(position) * frequency));
        for (word, angle) in words.iter_mut().zip(angles) {
            *word = (of(angle) as f32).to_bits();
        }
        // SAFETY: both hold so many bytes, and the host's wait for the copy.
        unsafe { accelerator.copy_in(Stream::Transfer, buffer.ptr(), staged.ptr(), num_words * 4)? };
        accelerator.synchronize(Stream::Transfer)?;
    }
    Ok((cosines, sines))
}

/// Makes a failure of the device the executor's.
pub(crate) fn failed(error: KernelError) -> ExecutorError {
    ExecutorError::Compute { reason: error.to_string() }
}
