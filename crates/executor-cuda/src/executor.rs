//! The executor contract over the walk.

use std::sync::Arc;

use microserving_checkpoint::{LoadProgress, ModelConfig, ModelFormat, load_error, max_context};
use microserving_executor::{Batch, BatchItem, Executor, ExecutorError, ExecutorInfo, StepOutput};
use microserving_kernels::{DevicePtr, KernelError, KvAppend, KvType, PagedAttention, RmsNorm};
use microserving_protocol::{KvGeometry, KvLayout, KvMemory, LayerId, PageId};

use crate::accelerator::Accelerator;
use crate::config::{CudaConfig, CudaDtype, kv_dtype};
use crate::inputs::Inputs;
use crate::model::{Arithmetics, Model, failed};
use crate::region::Region;
use crate::weights::Weights;

/// Rows of a step at most: a grid has no more blocks along its second axis.
const MAX_ROWS: usize = 65_535;

/// Runs one model on one device.
///
/// The files must not change while [`Self::load`] runs; they are not needed afterwards.
#[derive(Debug)]
pub struct CudaExecutor {
    info: ExecutorInfo,
    model: Model,
    region: Option<Region>,
    inputs: Inputs,
    /// Pages written by the step at hand; kept for its memory.
    written: Vec<PageId>,
}

impl CudaExecutor {
    /// Loads a model onto a device, telling `progress` after each tensor.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming the file, key, tensor, option or size that is wrong, or what the device has no memory for.
    pub fn load(
        accelerator: &Arc<dyn Accelerator>,
        config: &CudaConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ExecutorError> {
        if config.page_size == 0 || config.page_size > 1 << 15 {
            return Err(load_error(format!("page_size is {}, outside 1..=32768", config.page_size)));
        }
        if config.max_batch_tokens == 0 || config.max_batch_tokens as usize > MAX_ROWS {
            let asked = config.max_batch_tokens;
            return Err(load_error(format!(
                "max_batch_tokens is {asked}, outside 1..={MAX_ROWS} on this device"
            )));
        }
        if config.dtype == CudaDtype::F32 && config.tensor_cores == Some(true) {
            return Err(load_error("tensor_cores: f32 has none"));
        }
        let format = ModelFormat::of(&config.path)?;
        let source = format.open(&config.path)?;
        let max_context = max_context(source.config(), config.max_context)?;
        check_sizes(source.config()).map_err(|error| {
            load_error(format!("{}: no kernel for the model: {error}", config.path.display()))
        })?;
        let weights = Weights::load(accelerator, &*source, config.dtype, progress)?;
        let shape = source.config().clone();
        drop(source);
        let arithmetics = Arithmetics::choose(weights.dtype, shape.head_dim, config.tensor_cores);
        let form = format!("{:?}", weights.dtype).to_lowercase();
        tracing::info!(
            path = %config.path.display(),
            architecture = shape.architecture.name(),
            form,
            device = accelerator.name(),
            arithmetic = arithmetics.name(),
            weight_bytes = weights.num_bytes,
            "model loaded"
        );
        let layout = KvLayout {
            page_size: config.page_size,
            num_layers: shape.num_layers as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            dtype: kv_dtype(weights.dtype),
            model_hash: weights.hash,
            numeric_mode: format!("{}/{form}/{}", accelerator.name(), arithmetics.name()),
            tp_rank: 0,
            tp_size: 1,
        };
        let info = ExecutorInfo {
            model: config.model.clone().unwrap_or_else(|| format.model_name(&config.path)),
            layout,
            vocab_size: shape.vocab_size as u32,
            max_context,
            eos_tokens: config.eos_tokens.clone().unwrap_or_else(|| shape.eos_tokens.clone()),
        };
        let no_memory =
            |error: KernelError| load_error(format!("the model does not go to the device: {error}"));
        let mut model =
            Model::new(accelerator, shape, weights, arithmetics, max_context).map_err(no_memory)?;
        model.workspace.reserve(config.max_batch_tokens as usize).map_err(no_memory)?;
        Ok(Self { info, model, region: None, inputs: Inputs::default(), written: Vec::new() })
    }

    /// Returns the bytes that the weights take on the device.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.model.weights.num_bytes
    }

    /// Waits for a step, layer by layer.
    fn tell_layers(&self, region: &Region, on_layer: &mut dyn FnMut(LayerId)) -> Result<(), KernelError> {
        let Model { accelerator, written, sent, .. } = &self.model;
        let events = if region.is_sending() { sent } else { written };
        for (layer, &event) in (0..).zip(events) {
            accelerator.wait_on_host(event)?;
            on_layer(LayerId(layer));
        }
        Ok(())
    }

    /// Computes a batch that was checked.
    fn step(
        &mut self,
        region: &mut Region,
        items: &mut [BatchItem<'_>],
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let page_size = self.info.layout.page_size;
        self.inputs.plan(items, page_size, self.info.vocab_size);
        self.model.workspace.fit(&self.inputs, page_size).map_err(failed)?;
        // SAFETY: the step before is over, also one that failed: nothing that is queued reads the words.
        let words = unsafe { self.model.workspace.host_inputs.words(self.inputs.num_words) };
        self.inputs.write(items, page_size, words);
        let sent = items.iter().filter(|item| item.is_sent);
        region.send(sent.flat_map(|item| written_pages(item, page_size)).copied());
        // SAFETY: the batch was checked; the workspace fits; the step before is over.
        unsafe { self.model.queue(&self.inputs, region) }.map_err(failed)?;
        self.tell_layers(region, on_layer).map_err(failed)?;
        let mut output = StepOutput::default();
        output.sampled.resize_with(items.len(), || None);
        if !self.inputs.wanted.is_empty() {
            self.model.sample(&self.inputs, items, &mut output.sampled)?;
        }
        Ok(output)
    }
}

impl Executor for CudaExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        if geometry.layout != self.info.layout {
            return Err(ExecutorError::Memory { reason: "the geometry's layout is not the model's".into() });
        }
        self.region = Some(Region::new(&self.model.accelerator, geometry, memory)?);
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let mut region = self.region.take().ok_or_else(not_attached)?;
        let num_pages = region.geometry().num_pages;
        let checked = batch.check_writes(&self.info, num_pages, &mut self.written);
        let result = checked.and_then(|()| {
            if batch.items.is_empty() {
                (0..self.info.layout.num_layers).map(LayerId).for_each(&mut *on_layer);
                return Ok(StepOutput::default());
            }
            if batch.num_tokens() > MAX_ROWS {
                let reason = format!("a step of {} tokens, this device takes {MAX_ROWS}", batch.num_tokens());
                return Err(ExecutorError::Compute { reason });
            }
            self.step(&mut region, &mut batch.items, on_layer)
        });
        if result.is_err() {
            self.model.settle();
        }
        self.region = Some(region);
        result
    }

    fn import(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.region.as_mut().ok_or_else(not_attached)?.import(pages)
    }

    fn export(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.region.as_mut().ok_or_else(not_attached)?.export(pages)
    }
}

fn not_attached() -> ExecutorError {
    ExecutorError::Memory { reason: "attach was not called".into() }
}

/// Returns the pages that an item's new tokens lie in.
fn written_pages<'a>(item: &BatchItem<'a>, page_size: u32) -> &'a [PageId] {
    let end = item.position + item.tokens.len() as u32;
    &item.pages[(item.position / page_size) as usize..end.div_ceil(page_size) as usize]
}

/// Asks every kernel that bounds a model's sizes before anything is read.
fn check_sizes(config: &ModelConfig) -> Result<(), KernelError> {
    let (null, dtype) = (DevicePtr::NULL, microserving_kernels::Dtype::F32);
    let hidden = config.hidden as u32;
    let norm = RmsNorm { out: null, x: null, residual: null, weight: null, hidden, eps: config.rms_eps };
    norm.plan(dtype, 1)?;
    let (num_heads, num_kv_heads) = (config.num_heads as u32, config.num_kv_heads as u32);
    let head_dim = config.head_dim as u32;
    let append = KvAppend {
        query: null,
        kv: null,
        qkv: null,
        bias: null,
        q_norm: null,
        k_norm: null,
        cosines: null,
        sines: null,
        positions: null,
        slots: null,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size: 1,
        qkv_stride: (config.q_width() + 2 * config.kv_width()) as u32,
        eps: config.rms_eps,
        k_scale: 1.0,
        v_scale: 1.0,
    };
    append.plan(dtype, KvType::Same, 1)?;
    let attention = PagedAttention {
        out: null,
        partials: null,
        query: null,
        kv: null,
        page_table: null,
        query_starts: null,
        context_lens: null,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size: 1,
        max_pages: 1,
        num_splits: 0,
        scale: 1.0,
        k_scale: 1.0,
        v_scale: 1.0,
        reserved: 0,
    };
    attention.plan(microserving_kernels::Arithmetic::Plain, (dtype, KvType::Same), (1, 1)).map(|_| ())
}
