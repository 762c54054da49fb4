//! Logits against two references: numbers computed by a script in float64, and the same model in candle's operations.

use std::num::NonZeroUsize;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use microserving_executor_candle::{CandleConfig, KernelLevel, ReferenceModel, WeightDtype};
use microserving_protocol::KvDtype;

use crate::support::{Driver, levels, log_softmax, pages, relative_error};
use crate::tiny::{Expected, references, tiny};

/// The error that each form may have, as a share of the logits' spread. The random models amplify errors about tenfold; a
/// wrong row, scale or rotation makes an error of the order of 1.
fn tolerance(dtype: WeightDtype, kv_dtype: KvDtype) -> f64 {
    let weights = match dtype {
        WeightDtype::F32 => 1e-5,
        WeightDtype::F16 => 2e-3,
        _ => 0.1,
    };
    let kv = match kv_dtype {
        KvDtype::F32 => 0.0,
        KvDtype::F16 => 2e-3,
        _ => 0.05,
    };
    weights + kv
}

fn check(
    path: &std::path::Path,
    expected: &Expected,
    level: KernelLevel,
    dtype: WeightDtype,
    kv_dtype: KvDtype,
) {
    let mut config = CandleConfig::new(path);
    config.dtype = dtype;
    config.kv_dtype = kv_dtype;
    config.kernel_level = Some(level);
    config.threads = NonZeroUsize::new(2).unwrap();
    let mut driver = Driver::load(&config, 8);
    let pages = pages([6, 0, 3, 1, 4]);
    for (at, logits) in &expected.logits {
        let got = driver.log_probs(&expected.tokens[..=*at], 0, &pages);
        let error = relative_error(&got, &log_softmax(logits.iter().copied()));
        assert!(
            error <= tolerance(dtype, kv_dtype),
            "{} at {at}, {dtype}/{level} kv {kv_dtype}: off by {error}",
            expected.name
        );
    }
}

#[test]
fn every_architecture_and_form_agrees_with_the_script() {
    for expected in references() {
        let directory = tempfile::tempdir().unwrap();
        expected.tiny.write_directory(directory.path(), DType::F32, 1);
        for level in levels() {
            for dtype in [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16, WeightDtype::Q8_0] {
                check(directory.path(), &expected, level, dtype, KvDtype::F32);
            }
            for kv_dtype in [KvDtype::F16, KvDtype::Bf16] {
                check(directory.path(), &expected, level, WeightDtype::F32, kv_dtype);
            }
        }
    }
}

#[test]
fn gguf_files_agree_with_the_script() {
    for expected in references() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny.gguf");
        expected.tiny.write_gguf(&path, GgmlDType::F32);
        for level in levels() {
            check(&path, &expected, level, WeightDtype::F32, KvDtype::F32);
        }
    }
}

#[test]
fn the_candle_reference_agrees_with_the_script() {
    for expected in references() {
        let directory = tempfile::tempdir().unwrap();
        expected.tiny.write_directory(directory.path(), DType::F32, 2);
        let path = directory.path().join("tiny.gguf");
        expected.tiny.write_gguf(&path, GgmlDType::F32);
        for path in [directory.path(), &path] {
            let all = ReferenceModel::load(path).unwrap().logits(&expected.tokens).unwrap();
            for (at, logits) in &expected.logits {
                let error = relative_error(&all[*at], logits);
                assert!(error < 1e-5, "{} at {at}: off by {error}", expected.name);
            }
        }
    }
}

/// Every type of a GGUF file, against candle's own dequantisation of the same file.
#[test]
fn quantised_files_agree_with_the_candle_reference() {
    // K-quants take rows of 256.
    let mut config = tiny("qwen3").config;
    config["hidden_size"] = 256.into();
    config["intermediate_size"] = 512.into();
    config["head_dim"] = 64.into();
    let tiny = crate::tiny::Tiny::new(config.clone());
    config["model_type"] = "llama".into();
    let llama = crate::tiny::Tiny::new(config);
    let prompt: Vec<_> = (0..40).map(|i| microserving_protocol::TokenId((i * 37 + 11) % 85)).collect();
    let directory = tempfile::tempdir().unwrap();
    for kind in [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q8_0,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ] {
        for (name, model) in [("qwen3", &tiny), ("llama", &llama)] {
            let path = directory.path().join(format!("{name}.gguf"));
            model.write_gguf(&path, kind);
            let reference = ReferenceModel::load(&path).unwrap().logits(&prompt).unwrap().pop().unwrap();
            let reference = log_softmax(reference.into_iter().map(f64::from));
            // f32 keeps what the file says; `auto` adds the noise of 8-bit weights and activations.
            let forms = [(WeightDtype::F32, 1e-5), (WeightDtype::Auto, 0.1), (WeightDtype::Q8_0, 0.1)];
            for (level, (dtype, tolerance)) in
                levels().into_iter().flat_map(|level| forms.map(|form| (level, form)))
            {
                let mut config = CandleConfig::new(&path);
                config.dtype = dtype;
                config.kernel_level = Some(level);
                config.kv_dtype = KvDtype::F32;
                let mut driver = Driver::load(&config, 4);
                let got = driver.log_probs(&prompt, 0, &pages(0..3));
                let error = relative_error(&got, &reference);
                assert!(error <= tolerance, "{name} {kind:?} as {dtype}/{level}: off by {error}");
            }
        }
    }
}
