//! Models from files: a GGUF file, or a directory in the Hugging Face layout.

use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::{Context, Result};
use microserving_daemon::Refused;
use microserving_executor::Executor;
use microserving_executor_candle::{CandleConfig, CandleExecutor, LoadProgress, WeightDtype};
use microserving_executor_cuda::{CudaConfig, CudaDtype, CudaExecutor};
use microserving_protocol::KvDtype;
use microserving_server::ModelText;
use microserving_text::TextBundle;
use tracing::info;

use crate::device::Chosen;
use crate::model::LoadedModel;
use crate::options::{KvForm, Options, WeightForm};

/// Loads text side and weights; `name` is for files that do not name their model. Blocks for as long as it takes to read
/// the files.
pub(crate) fn files(
    (options, device): (&Options, &Chosen),
    path: &Path,
    name: Option<&str>,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<LoadedModel> {
    let context = || format!("cannot load {}", path.display());
    let text = text_of(path, tell)?;
    let bundle = &text.0;
    let model = options.served_model_name.as_deref().or(name).map(str::to_owned);
    // The text side knows all tokens that end a turn; the weights' files often name but one.
    let eos_tokens = Some(bundle.eos_token_ids.clone()).filter(|tokens| !tokens.is_empty());
    let mut told = Told::default();
    let mut tell = |progress| told.tell(progress, tell);
    let executor: Box<dyn Executor> = match device {
        Chosen::Cpu => {
            let usual = CandleConfig::new(path);
            let config = CandleConfig {
                model,
                dtype: options.dtype.map_or(usual.dtype, weight_dtype),
                kv_dtype: options.kv_dtype.map_or(usual.kv_dtype, kv_dtype),
                threads: threads(options),
                pin_threads: options.pin_threads,
                max_context: options.max_context,
                page_size: options.page_size,
                eos_tokens,
                ..usual
            };
            Box::new(CandleExecutor::load(&config, &mut tell).with_context(context)?)
        }
        Chosen::Cuda(gpu) => {
            let config = CudaConfig {
                model,
                dtype: cuda_dtype(options.dtype),
                max_context: options.max_context,
                page_size: options.page_size,
                eos_tokens,
                max_batch_tokens: options.max_batch_tokens,
                ..CudaConfig::new(path)
            };
            let executor = CudaExecutor::load(gpu, &config, &mut tell).with_context(context)?;
            let kept = executor.info().layout.dtype;
            if options.kv_dtype.is_some_and(|asked| kv_dtype(asked) != kept) {
                return Err(
                    Refused(format!("kv_dtype: a GPU keeps KV in the weights' type, here {kept}")).into()
                );
            }
            Box::new(executor)
        }
    };
    let text = text.named(&executor.info().model).with_context(context)?;
    Ok(LoadedModel { executor, text })
}

/// The text side, from files that need not name their model.
pub(crate) struct TextFiles(TextBundle);

impl TextFiles {
    pub(crate) fn named(mut self, model: &str) -> Result<ModelText> {
        model.clone_into(&mut self.0.model);
        Ok(ModelText::new(&self.0)?)
    }
}

/// Loads the text side alone.
pub(crate) fn text_of(path: &Path, tell: &(dyn Fn(&str) + Sync)) -> Result<TextFiles> {
    tell("loading the tokenizer");
    let bundle =
        TextBundle::load(path, "model").with_context(|| format!("cannot load {}", path.display()))?;
    Ok(TextFiles(bundle))
}

fn threads(options: &Options) -> NonZeroUsize {
    match options.threads.and_then(|threads| NonZeroUsize::new(threads as usize)) {
        Some(threads) => threads,
        None => std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
    }
}

fn weight_dtype(form: WeightForm) -> WeightDtype {
    match form {
        WeightForm::Auto => WeightDtype::Auto,
        WeightForm::F32 => WeightDtype::F32,
        WeightForm::F16 => WeightDtype::F16,
        WeightForm::Bf16 => WeightDtype::Bf16,
        WeightForm::Q8_0 => WeightDtype::Q8_0,
    }
}

/// The form on a GPU; the quantised one was refused.
fn cuda_dtype(form: Option<WeightForm>) -> CudaDtype {
    match form {
        None | Some(WeightForm::Auto | WeightForm::Q8_0) => CudaDtype::Auto,
        Some(WeightForm::F32) => CudaDtype::F32,
        Some(WeightForm::F16) => CudaDtype::F16,
        Some(WeightForm::Bf16) => CudaDtype::Bf16,
    }
}

fn kv_dtype(form: KvForm) -> KvDtype {
    match form {
        KvForm::F32 => KvDtype::F32,
        KvForm::F16 => KvDtype::F16,
        KvForm::Bf16 => KvDtype::Bf16,
    }
}

/// What was told of the load so far: whoever waits hears of every percent, the log of every tenth.
#[derive(Default)]
struct Told {
    percent: Option<u64>,
}

impl Told {
    fn tell(&mut self, progress: LoadProgress, tell: &dyn Fn(&str)) {
        let percent = (progress.bytes * 100).checked_div(progress.total_bytes).unwrap_or(100);
        if self.percent == Some(percent) {
            return;
        }
        tell(&format!("loading the weights: {percent} %"));
        if self.percent.is_none_or(|told| told / 10 < percent / 10) {
            info!(percent, bytes = progress.bytes, "loading the weights");
        }
        self.percent = Some(percent);
    }
}
