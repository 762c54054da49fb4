//! The executor contract over the walk.

use std::sync::Arc;

use microserving_checkpoint::{LoadProgress, ModelFormat, load_error, max_context};
use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput};
use microserving_protocol::{KvDtype, KvGeometry, KvLayout, KvMemory, LayerId, MemoryKind, PageId};

use crate::attention::KvRegion;
use crate::config::CandleConfig;
use crate::forward::Model;
use crate::kernels::{KernelLevel, Kernels, WIDE_ROWS};
use crate::load::build;
use crate::pool::Pool;
use crate::weights::Form;

/// Runs one model on the CPU.
///
/// The files must not change while [`Self::load`] runs; they are not needed afterwards.
#[derive(Debug)]
pub struct CandleExecutor {
    info: ExecutorInfo,
    model: Model,
    kv: Option<(KvGeometry, Arc<dyn KvMemory>)>,
    /// Pages written by the step at hand; kept for its memory.
    written: Vec<PageId>,
}

impl CandleExecutor {
    /// Loads a model, telling `progress` after each tensor.
    ///
    /// # Errors
    /// [`ExecutorError::Load`] naming the file, key, tensor or option that is wrong; [`ExecutorError::Device`] if the
    /// machine lacks the instructions asked for or refuses threads.
    pub fn load(
        config: &CandleConfig,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ExecutorError> {
        if config.page_size == 0 || config.page_size > 1 << 16 {
            return Err(load_error(format!("page_size is {}, outside 1..=65536", config.page_size)));
        }
        if config.kv_dtype == KvDtype::U64 {
            return Err(load_error("kv_dtype u64 is not a number format; use f32, f16 or bf16"));
        }
        let level = config.kernel_level.unwrap_or_else(KernelLevel::detect);
        let kernels = Kernels::new(level).ok_or_else(|| ExecutorError::Device {
            reason: format!("kernel_level: this machine lacks the instructions of {level}"),
        })?;
        let format = ModelFormat::of(&config.path)?;
        let source = format.open(&config.path)?;
        let max_context = max_context(source.config(), config.max_context)?;
        let group = source.config().num_heads / source.config().num_kv_heads;
        if group > WIDE_ROWS {
            return Err(load_error(format!(
                "{}: {group} heads share a KV head, at most {WIDE_ROWS} can share one",
                config.path.display()
            )));
        }
        let mut pool = Pool::new(config.threads, config.pin_threads)
            .map_err(|err| ExecutorError::Device { reason: format!("threads: {err}") })?;
        let weights = build(&*source, config.dtype, &mut pool, progress)?;
        let shape = source.config().clone();
        let forms = weights.forms.iter().map(|form| form.name()).collect::<Vec<_>>().join("+");
        let arithmetic = level.arithmetic(weights.forms.contains(&Form::Bf16));
        tracing::info!(
            path = %config.path.display(),
            architecture = shape.architecture.name(),
            forms,
            kernels = level.name(),
            weight_bytes = weights.arena.num_bytes(),
            "model loaded"
        );
        let layout = KvLayout {
            page_size: config.page_size,
            num_layers: shape.num_layers as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            dtype: config.kv_dtype,
            model_hash: weights.hash,
            numeric_mode: format!("{forms}/{arithmetic}"),
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
        let model = Model::new(shape, weights, kernels, pool);
        Ok(Self { info, model, kv: None, written: Vec::new() })
    }

    /// Returns the bytes that the weights take.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.model.weights.arena.num_bytes()
    }
}

impl Executor for CandleExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        let memory_error = |reason: String| Err(ExecutorError::Memory { reason });
        if geometry.layout != self.info.layout {
            return memory_error("the geometry's layout is not the model's".into());
        }
        if memory.kind() != MemoryKind::Host {
            return memory_error(format!("{:?} memory, only host memory can be addressed", memory.kind()));
        }
        if memory.num_bytes() < geometry.region_bytes() {
            return memory_error(format!(
                "{} bytes, {} pages need {}",
                memory.num_bytes(),
                geometry.num_pages,
                geometry.region_bytes()
            ));
        }
        if !memory.base_address().is_multiple_of(64) {
            return memory_error("the region does not begin on a multiple of 64 bytes".into());
        }
        self.kv = Some((geometry, memory));
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let Self { info, model, kv, written } = self;
        let (geometry, memory) =
            kv.as_ref().ok_or_else(|| ExecutorError::Memory { reason: "attach was not called".into() })?;
        batch.check_writes(info, geometry.num_pages, written)?;
        let region = KvRegion { base: memory.base_address() as *mut u8, geometry };
        // SAFETY: the batch was checked; `memory` keeps the region mapped, is large enough and aligned by `attach`; that no
        // peer touches pages being written, and that pages read are written, is the contract of `forward`.
        unsafe { model.run_layers(&batch.items, region, on_layer) };
        let mut sampled = Vec::new();
        sampled.resize_with(batch.items.len(), || None);
        model.sample(&mut batch.items, &mut sampled);
        Ok(StepOutput { sampled, modelled: None })
    }
}
