//! Directories with eight-bit weights and their scales, as compressed-tensors, FBGEMM and block-wise checkpoints have them.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use microserving_executor::Executor;
use microserving_executor_candle::{CandleConfig, CandleExecutor, WeightDtype};
use microserving_protocol::TokenId;
use serde_json::json;

use crate::support::{Driver, pages};
use crate::tiny::{Tiny, tiny};

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shared {
    Tensor,
    Row,
    Block(usize, usize),
    /// No scales at all.
    Nothing,
}

impl Shared {
    /// Returns the rows and columns of a block of a matrix.
    fn block(self, (rows, columns): (usize, usize)) -> (usize, usize) {
        match self {
            Self::Tensor | Self::Nothing => (rows, columns),
            Self::Row => (1, columns),
            Self::Block(rows, columns) => (rows, columns),
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Block(..) => "_scale_inv",
            _ => "_scale",
        }
    }
}

const ALL: [Shared; 4] = [Shared::Tensor, Shared::Row, Shared::Block(16, 24), Shared::Nothing];

/// Writes a directory with the layers' matrices in eight bits; returns the model that it is.
fn write(directory: &Path, tiny: &Tiny, shared: Shared, tensors: &mut HashMap<String, Tensor>) -> Tiny {
    let mut rounded = tiny.clone();
    for (name, (shape, values)) in &mut rounded.tensors {
        let tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &Device::Cpu).unwrap();
        if shape.len() < 2 || name.contains("embed") || name.contains("lm_head") {
            let tensor = tensor.to_dtype(DType::BF16).unwrap();
            *values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            tensors.insert(name.clone(), tensor);
            continue;
        }
        let (rows, columns) = (shape[0], shape[1]);
        let block = shared.block((rows, columns));
        let per_row = columns.div_ceil(block.1);
        let mut scales = vec![0.0_f32; rows.div_ceil(block.0) * per_row];
        let at = |i: usize| i / columns / block.0 * per_row + i % columns / block.1;
        for (i, x) in values.iter().enumerate() {
            let scale = if shared == Shared::Nothing { 1.0 } else { x.abs() / 448.0 };
            scales[at(i)] = scales[at(i)].max(scale);
        }
        let scaled: Vec<f32> = values.iter().enumerate().map(|(i, x)| x / scales[at(i)]).collect();
        let eight = Tensor::from_vec(scaled, (rows, columns), &Device::Cpu).unwrap();
        let eight = eight.to_dtype(DType::F8E4M3).unwrap();
        let widened: Vec<f32> = eight.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        for (i, x) in values.iter_mut().enumerate() {
            *x = widened[i] * scales[at(i)];
        }
        tensors.insert(name.clone(), eight);
        let shape = match shared {
            Shared::Tensor => vec![1],
            Shared::Row => vec![rows, 1],
            Shared::Block(..) => vec![rows.div_ceil(block.0), per_row],
            Shared::Nothing => continue,
        };
        let scales = Tensor::from_vec(scales, shape, &Device::Cpu).unwrap();
        tensors.insert(format!("{name}{}", shared.suffix()), scales);
        let input = Tensor::new(&[0.5_f32], &Device::Cpu).unwrap();
        tensors.insert(name.replace(".weight", ".input_scale"), input);
    }
    let mut config = tiny.config.clone();
    if let Shared::Block(rows, columns) = shared {
        config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [rows, columns]});
    }
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    save(directory, tensors);
    rounded
}

fn save(directory: &Path, tensors: &HashMap<String, Tensor>) {
    candle_core::safetensors::save(tensors, directory.join("model.safetensors")).unwrap();
}

fn prompt() -> Vec<TokenId> {
    (0..40).map(|i| TokenId((i * 37 + 11) % 85)).collect()
}

#[test]
fn eight_bit_weights_are_the_products_of_numbers_and_scales() {
    let tiny = tiny("qwen3");
    for shared in ALL {
        let (eight, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let rounded = write(eight.path(), &tiny, shared, &mut HashMap::new());
        rounded.write_directory(plain.path(), DType::F32, 1);
        let results = [eight.path(), plain.path()].map(|path| {
            let mut config = CandleConfig::new(path);
            config.dtype = WeightDtype::F32;
            let log_probs = Driver::load(&config, 8).log_probs(&prompt(), 0, &pages(0..5));
            log_probs.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert!(results[0] == results[1], "{shared:?}");
        let executor = CandleExecutor::load(&CandleConfig::new(eight.path()), &mut |_| ()).unwrap();
        assert!(executor.info().layout.numeric_mode.starts_with("bf16/"), "{shared:?}");
    }
}

#[test]
fn scales_are_part_of_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let mut tensors = HashMap::new();
    write(directory.path(), &tiny("llama_tied"), Shared::Row, &mut tensors);
    let hash = || {
        let executor = CandleExecutor::load(&CandleConfig::new(directory.path()), &mut |_| ()).unwrap();
        executor.info().layout.model_hash
    };
    let before = hash();
    let scale = tensors.get_mut("model.layers.1.mlp.up_proj.weight_scale").unwrap();
    *scale = (&*scale * 1.5).unwrap();
    save(directory.path(), &tensors);
    assert_ne!(before, hash());
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let refusal = |shared: Shared, change: &dyn Fn(&mut HashMap<String, Tensor>, &Path)| {
        let directory = tempfile::tempdir().unwrap();
        let mut tensors = HashMap::new();
        write(directory.path(), &tiny("llama_tied"), shared, &mut tensors);
        change(&mut tensors, directory.path());
        save(directory.path(), &tensors);
        CandleExecutor::load(&CandleConfig::new(directory.path()), &mut |_| ()).unwrap_err().to_string()
    };
    let scales = |shape: &[usize], value: f32| Tensor::full(value, shape, &Device::Cpu).unwrap();

    let message = refusal(Shared::Row, &|tensors, _| {
        tensors.insert(format!("{name}_scale"), scales(&[3, 1], 1.0));
    });
    assert!(message.contains("q_proj.weight_scale") && message.contains("weight_block_size"), "{message}");
    let message = refusal(Shared::Block(16, 24), &|tensors, _| {
        tensors.insert(format!("{name}_scale_inv"), scales(&[1, 7], 1.0));
    });
    assert!(message.contains("q_proj.weight_scale_inv") && message.contains("[1, 7]"), "{message}");
    let message = refusal(Shared::Tensor, &|tensors, _| {
        tensors.insert(format!("{name}_scale"), scales(&[1], f32::INFINITY));
    });
    assert!(message.contains("inf is no scale"), "{message}");
    let message = refusal(Shared::Block(16, 24), &|_, directory| {
        let path = directory.join("config.json");
        let config = std::fs::read_to_string(&path).unwrap().replace("[16,24]", "[0,24]");
        std::fs::write(&path, config).unwrap();
    });
    assert!(message.contains("weight_block_size is [0, 24]"), "{message}");
}
