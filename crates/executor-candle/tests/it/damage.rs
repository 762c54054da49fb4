//! Damaged and unsupported files end in an error that names what is wrong, never in a panic.

use std::path::Path;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use microserving_executor::ExecutorError;
use microserving_executor_candle::{CandleConfig, CandleExecutor, ReferenceModel};
use microserving_protocol::KvDtype;
use serde_json::json;

use crate::tiny::{Tiny, tiny};

fn load(path: &Path) -> Result<(), String> {
    match CandleExecutor::load(&CandleConfig::new(path), &mut |_| ()) {
        Ok(_) => Ok(()),
        Err(ExecutorError::Load { reason }) => Err(reason),
        Err(other) => panic!("not a load error: {other}"),
    }
}

#[track_caller]
fn refused(path: &Path, what: &str) {
    let reason = load(path).expect_err(what);
    assert!(reason.contains(what), "{reason}");
}

/// Lengths that cut a file in its header, at its borders and in its data.
fn cuts(len: usize) -> impl Iterator<Item = usize> {
    (0..64).chain((64..len).step_by(len / 97 + 1)).chain([len - 1])
}

#[test]
fn truncated_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = tiny("qwen2");
    let gguf = directory.path().join("tiny.gguf");
    model.write_gguf(&gguf, GgmlDType::Q8_0);
    let hub = directory.path().join("hub");
    model.write_directory(&hub, DType::F16, 1);
    for (path, file) in
        [(&gguf, gguf.clone()), (&hub, hub.join("model.safetensors")), (&hub, hub.join("config.json"))]
    {
        let whole = std::fs::read(&file).unwrap();
        load(path).unwrap();
        for len in cuts(whole.len()) {
            std::fs::write(&file, &whole[..len]).unwrap();
            // GGUF pads the last tensor, so the very last bytes may be missing.
            if *path != gguf || len + 32 < whole.len() {
                assert!(load(path).is_err(), "{} cut to {len}", file.display());
                assert!(ReferenceModel::load(path).is_err() || file.ends_with("model.safetensors"));
            }
        }
        std::fs::write(&file, &whole).unwrap();
        load(path).unwrap();
    }
}

#[test]
fn flipped_bytes_never_panic() {
    let directory = tempfile::tempdir().unwrap();
    let model = tiny("llama_tied");
    let gguf = directory.path().join("tiny.gguf");
    model.write_gguf(&gguf, GgmlDType::Q4_1);
    let hub = directory.path().join("hub");
    model.write_directory(&hub, DType::BF16, 1);
    let mut seed = 1_u64;
    let mut random = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    for (path, file) in
        [(&gguf, gguf.clone()), (&hub, hub.join("model.safetensors")), (&hub, hub.join("config.json"))]
    {
        let whole = std::fs::read(&file).unwrap();
        let header = whole.len().min(4096);
        for _ in 0..400 {
            let mut broken = whole.clone();
            for _ in 0..=random() % 3 {
                broken[random() % header] = random() as u8;
            }
            std::fs::write(&file, broken).unwrap();
            let _ = load(path);
        }
        std::fs::write(&file, &whole).unwrap();
        load(path).unwrap();
    }
}

#[test]
fn what_is_missing_or_misshapen_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let base = tiny("llama_tied");
    let mut number = 0;
    let mut with = |change: &dyn Fn(&mut Tiny)| {
        number += 1;
        let path = directory.path().join(number.to_string());
        let mut tiny = base.clone();
        change(&mut tiny);
        tiny.write_directory(&path, DType::F32, 2);
        path
    };
    let up = "model.layers.1.mlp.up_proj.weight";
    refused(&with(&|tiny| drop(tiny.tensors.remove(up))), &format!("tensor {up} is missing"));
    refused(&with(&|tiny| tiny.tensors.get_mut(up).unwrap().0 = vec![64, 96]), up);
    refused(&with(&|tiny| tiny.tensors.get_mut(up).unwrap().1[77] = f32::NAN), up);
    let bias = |tiny: &mut Tiny| {
        tiny.tensors.insert("model.layers.0.self_attn.o_proj.bias".into(), (vec![64], vec![0.0; 64]));
    };
    refused(&with(&bias), "o_proj.bias");
    refused(&with(&|tiny| tiny.config["num_hidden_layers"] = 3.into()), "model.layers.2.");
    refused(&with(&|tiny| tiny.config["num_hidden_layers"] = (1 << 24).into()), "layers");
    refused(&with(&|tiny| tiny.config["num_hidden_layers"] = 1.into()), "model.layers.1.");
    for (key, value, what) in [
        ("model_type", json!("gpt2"), "model_type gpt2"),
        ("model_type", json!(null), "model_type is missing"),
        ("hidden_act", json!("gelu"), "hidden_act gelu"),
        ("hidden_size", json!("wide"), "config.json"),
        ("hidden_size", json!(0), "hidden"),
        ("hidden_size", json!(1_u64 << 40), "hidden size"),
        ("vocab_size", json!(91), "model.embed_tokens.weight"),
        ("num_key_value_heads", json!(3), "3 KV heads"),
        ("num_key_value_heads", json!(0), "KV heads"),
        ("num_attention_heads", json!(0), "head"),
        ("head_dim", json!(15), "odd"),
        ("rope_theta", json!(-1.0), "rotary"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0}), "rope_type yarn"),
        ("rope_scaling", json!({"rope_type": "linear"}), "rope_scaling.factor"),
        ("rope_scaling", json!({"type": "dynamic", "rope_type": "yarn", "factor": 2.0}), "rope_type yarn"),
        ("rope_scaling", json!({"type": "dynamic", "factor": 2.0}), "rope_type dynamic"),
        ("sliding_window", json!(64), "sliding_window 64"),
        ("attention_bias", json!(true), "attention_bias"),
        ("rms_norm_eps", json!(-1.0), "epsilon"),
        ("max_position_embeddings", json!(0), "context"),
    ] {
        refused(&with(&|tiny| tiny.config[key] = value.clone()), what);
    }

    let shard = with(&|_| ());
    std::fs::remove_file(shard.join("model-00002-of-00002.safetensors")).unwrap();
    refused(&shard, "model-00002-of-00002.safetensors");
    let index = with(&|_| ());
    std::fs::write(
        index.join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "../../etc/passwd"}}"#,
    )
    .unwrap();
    refused(&index, "weight_map names the file");
    refused(&directory.path().join("nowhere"), "nowhere");
    refused(directory.path(), "without a config.json");
    let text = directory.path().join("text");
    std::fs::write(&text, "not a model").unwrap();
    refused(&text, "is not a GGUF file");
}

#[test]
fn gguf_metadata_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let model = tiny("llama_tied");
    let text = |text: &str| Some(Value::String(text.into()));
    for (key, value, what) in [
        ("general.architecture", text("gpt2"), "general.architecture gpt2"),
        ("general.architecture", None, "general.architecture is missing"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.block_count", text("two"), "llama.block_count is not a whole number"),
        ("llama.block_count", Some(Value::I32(-2)), "llama.block_count is not a whole number"),
        ("llama.block_count", Some(Value::U64(u64::MAX)), "number of layers"),
        ("llama.attention.layer_norm_rms_epsilon", None, "epsilon is missing"),
        ("llama.attention.sliding_window", Some(Value::U32(128)), "sliding_window is not supported"),
        ("llama.expert_count", Some(Value::U32(8)), "expert_count is not supported"),
        ("llama.rope.dimension_count", Some(Value::U32(8)), "rope.dimension_count is 8"),
        ("llama.rope.scaling.type", text("yarn"), "rope.scaling.type yarn"),
        ("llama.rope.scaling.type", text("linear"), "rope.scaling.factor is missing"),
        ("split.count", Some(Value::U16(3)), "split.count"),
        ("general.alignment", Some(Value::U32(0)), "damaged"),
        ("general.alignment", Some(Value::U32(u32::MAX)), "past the end"),
        ("llama.attention.head_count", Some(Value::U32(3)), "3 heads cannot share"),
    ] {
        model.write_gguf_with(
            &path,
            |_| GgmlDType::F32,
            |metadata| {
                match value {
                    Some(value) => metadata.insert(key.into(), value),
                    None => metadata.remove(key),
                };
            },
        );
        refused(&path, what);
    }
}

#[test]
fn options_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    tiny("llama_tied").write_directory(directory.path(), DType::F32, 1);
    let check = |change: &dyn Fn(&mut CandleConfig), what: &str| {
        let mut config = CandleConfig::new(directory.path());
        change(&mut config);
        let reason = CandleExecutor::load(&config, &mut |_| ()).unwrap_err().to_string();
        assert!(reason.contains(what), "{reason}");
    };
    check(&|config| config.page_size = 0, "page_size is 0");
    check(&|config| config.kv_dtype = KvDtype::U64, "kv_dtype");
    check(&|config| config.max_context = Some(0), "max_context is 0");
    check(&|config| config.max_context = Some(257), "1..=256");
}
