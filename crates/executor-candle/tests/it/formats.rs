//! The same weights through different files, and what loading says about them.

use std::num::NonZeroUsize;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use microserving_executor::Executor;
use microserving_executor_candle::{
    CandleConfig, CandleExecutor, KernelLevel, ModelFormat, ReferenceModel, WeightDtype,
};
use microserving_protocol::{KvDtype, TokenId};

use crate::support::{Driver, levels, log_softmax, pages, relative_error};
use crate::tiny::{references, tiny};

#[test]
fn gguf_and_safetensors_of_the_same_weights_give_the_same_bits() {
    for expected in references() {
        for (dtype, kind, mode) in [
            (DType::F32, GgmlDType::F32, "f32/"),
            (DType::F16, GgmlDType::F16, "f16/"),
            (DType::BF16, GgmlDType::BF16, "bf16/"),
        ] {
            if expected.name == "llama3_scaled_untied" {
                // Its GGUF file carries the divisors in single precision, the directory the formula.
                continue;
            }
            let directory = tempfile::tempdir().unwrap();
            expected.tiny.write_directory(directory.path(), dtype, 3);
            let path = directory.path().join("tiny.gguf");
            // The directory has its vectors in `dtype` too, so the file gets the rounded ones.
            let mut rounded = expected.tiny.clone();
            for (_, values) in rounded.tensors.values_mut() {
                for x in values {
                    *x = match dtype {
                        DType::F16 => half::f16::from_f32(*x).to_f32(),
                        DType::BF16 => half::bf16::from_f32(*x).to_f32(),
                        _ => *x,
                    };
                }
            }
            rounded.write_gguf(&path, kind);
            let results = [directory.path(), &path].map(|path| {
                let mut driver = Driver::load(&CandleConfig::new(path), 8);
                let info = driver.executor.info();
                assert!(info.layout.numeric_mode.starts_with(mode), "{}", info.layout.numeric_mode);
                assert_eq!(info.eos_tokens, [TokenId(2)]);
                let log_probs = driver.log_probs(&expected.tokens, 0, &pages(0..5));
                let generated = driver.greedy(&expected.tokens, 20, 512, &pages(0..6));
                (log_probs.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), generated)
            });
            assert_eq!(results[0], results[1], "{} {dtype:?}", expected.name);
        }
    }
}

#[test]
fn auto_follows_the_file() {
    let tiny = tiny("llama_tied");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    for (kind, mode) in [
        (GgmlDType::F32, "f32"),
        (GgmlDType::F16, "f16"),
        (GgmlDType::BF16, "bf16"),
        (GgmlDType::Q8_0, "q8_0"),
        (GgmlDType::Q4_0, "q4_0"),
        (GgmlDType::Q4_1, "q4_1"),
        (GgmlDType::Q5_0, "q8_0"),
    ] {
        tiny.write_gguf(&path, kind);
        for (dtype, mode) in
            [(WeightDtype::Auto, mode), (WeightDtype::F32, "f32"), (WeightDtype::Q8_0, "q8_0")]
        {
            let mut config = CandleConfig::new(&path);
            config.dtype = dtype;
            let executor = CandleExecutor::load(&config, &mut |_| ()).unwrap();
            let level = KernelLevel::detect().arithmetic(mode == "bf16");
            assert_eq!(executor.info().layout.numeric_mode, format!("{mode}/{level}"));
        }
    }
}

/// A file of several types keeps each; where a product joins tensors that cannot share their activations, all of it is q8_0.
#[test]
fn auto_keeps_the_types_of_a_mixed_file() {
    let mut config = tiny("qwen3").config;
    config["hidden_size"] = 256.into();
    config["intermediate_size"] = 256.into();
    config["head_dim"] = 64.into();
    let tiny = crate::tiny::Tiny::new(config);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let prompt: Vec<TokenId> = (0..40).map(|i| TokenId((i * 37 + 11) % 85)).collect();
    let with_values = |values: GgmlDType| {
        move |name: &str| match name {
            "token_embd.weight" => GgmlDType::Q6K,
            "blk.0.attn_v.weight" => values,
            "blk.1.ffn_up.weight" => GgmlDType::Q4_1,
            _ => GgmlDType::Q4K,
        }
    };
    for (values, mode) in [(GgmlDType::Q6K, "q4_1+q4_k+q6_k"), (GgmlDType::F16, "q8_0+q4_1+q4_k+q6_k")] {
        tiny.write_gguf_with(&path, with_values(values), |_| ());
        let reference = ReferenceModel::load(&path).unwrap().logits(&prompt).unwrap().pop().unwrap();
        let reference = log_softmax(reference.into_iter().map(f64::from));
        for level in levels() {
            let mut config = CandleConfig::new(&path);
            config.kernel_level = Some(level);
            config.kv_dtype = KvDtype::F32;
            let mut driver = Driver::load(&config, 4);
            let arithmetic = level.arithmetic(mode.contains("bf16"));
            assert_eq!(driver.executor.info().layout.numeric_mode, format!("{mode}/{arithmetic}"));
            let error = relative_error(&driver.log_probs(&prompt, 0, &pages(0..3)), &reference);
            assert!(error <= 0.1, "{mode}/{level}: off by {error}");
        }
    }
}

#[test]
fn info_tells_what_was_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("A-Model-0.6B");
    tiny("qwen3").write_directory(&path, DType::BF16, 1);
    std::fs::write(path.join("generation_config.json"), r#"{"eos_token_id": [5, 2]}"#).unwrap();
    assert_eq!(ModelFormat::of(&path).unwrap(), ModelFormat::Safetensors);

    let mut config = CandleConfig::new(&path);
    config.page_size = 8;
    config.max_context = Some(100);
    let mut steps = Vec::new();
    let executor = CandleExecutor::load(&config, &mut |progress| steps.push(progress)).unwrap();
    let info = executor.info();
    assert_eq!(info.model, "A-Model-0.6B");
    assert_eq!(info.vocab_size, 85);
    assert_eq!(info.max_context, 100);
    assert_eq!(info.eos_tokens, [TokenId(5), TokenId(2)]);
    assert_eq!((info.layout.page_size, info.layout.num_layers), (8, 2));
    assert_eq!((info.layout.num_kv_heads, info.layout.head_dim), (2, 32));
    assert_eq!((info.layout.tp_rank, info.layout.tp_size), (0, 1));
    assert!(steps.windows(2).all(|pair| pair[0].bytes <= pair[1].bytes));
    let last = steps.last().unwrap();
    assert!(last.bytes <= last.total_bytes && last.bytes * 10 > last.total_bytes * 8, "{last:?}");

    config.model = Some("another".into());
    config.eos_tokens = Some(vec![TokenId(9)]);
    let executor = CandleExecutor::load(&config, &mut |_| ()).unwrap();
    assert_eq!(
        (executor.info().model.as_str(), executor.info().eos_tokens.as_slice()),
        ("another", &[TokenId(9)][..])
    );
}

#[test]
fn the_model_hash_follows_the_weights_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let hash = |name: &str, change: &dyn Fn(&mut crate::tiny::Tiny), threads| {
        let path = directory.path().join(name);
        let mut tiny = tiny("llama_tied");
        change(&mut tiny);
        tiny.write_directory(&path, DType::F32, 1);
        let mut config = CandleConfig::new(path);
        config.threads = NonZeroUsize::new(threads).unwrap();
        CandleExecutor::load(&config, &mut |_| ()).unwrap().info().layout.model_hash
    };
    let base = hash("a", &|_| (), 1);
    assert_eq!(base, hash("b", &|_| (), 2));
    let one_weight = |tiny: &mut crate::tiny::Tiny| {
        tiny.tensors.get_mut("model.norm.weight").unwrap().1[3] += 0.5;
    };
    assert_ne!(base, hash("c", &one_weight, 1));
    let one_constant = |tiny: &mut crate::tiny::Tiny| tiny.config["rope_theta"] = 20_000.0.into();
    assert_ne!(base, hash("d", &one_constant, 1));
}
