//! The files that are measured with say what they should: our loader and candle's read back what was written.

#[path = "../../examples/make_model/random_gguf.rs"]
mod random_gguf;
#[path = "../../examples/make_model/vocabulary.rs"]
mod vocabulary;

use std::collections::HashSet;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use microserving_executor_candle::{CandleConfig, ReferenceModel};
use random_gguf::{FileType, Shape};

use crate::noise;
use crate::support::{Driver, log_softmax, pages, relative_error, tokens};

fn types() -> [FileType; 5] {
    ["q8_0", "q4_0", "q4_1", "q4_k_m", "bf16"].map(|name| FileType::from_name(name).unwrap())
}

fn small(architecture: &'static str) -> Shape {
    Shape {
        name: "small",
        architecture,
        pre: if architecture == "qwen3" { "qwen2" } else { "llama-bpe" },
        vocab: 1000,
        hidden: 256,
        intermediate: 512,
        num_layers: 9,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        max_context: 128,
        rope_theta: 1e4,
        rms_eps: 1e-6,
    }
}

fn write(shape: &Shape, kind: FileType, path: &Path) {
    let gguf = random_gguf::make(shape, kind).unwrap();
    let metadata: Vec<(&str, &Value)> =
        gguf.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        gguf.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut BufWriter::new(File::create(path).unwrap()), &metadata, &tensors).unwrap();
}

/// The largest error that a type may make, of weights that are one block (or all of which it makes its scales).
fn bound(kind: GgmlDType, block: &[f32]) -> f32 {
    let largest = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let range =
        block.iter().fold(f32::MIN, |max, &x| max.max(x)) - block.iter().fold(f32::MAX, |min, &x| min.min(x));
    // A step is the distance of neighbours; scales are half precision themselves.
    let half_precision = largest / 1024.0;
    match kind {
        GgmlDType::F32 => 0.0,
        GgmlDType::BF16 => largest / 256.0,
        GgmlDType::Q8_0 => largest / 127.0 / 2.0 + half_precision,
        // Eight steps to one side and seven to the other: the far end is cut by one.
        GgmlDType::Q4_0 => largest / 8.0 + half_precision,
        GgmlDType::Q4_1 => range / 15.0 / 2.0 + half_precision,
        // Scales are fitted to the mean square and kept in six bits: a whole step at the ends.
        GgmlDType::Q4K => range / 15.0 * 1.2,
        // The fit tries up to 32.9 steps for the largest, of which 31 are kept at the other end: two are cut there.
        GgmlDType::Q6K => largest / 16.0,
        other => panic!("{other:?} is not written"),
    }
}

#[test]
fn every_type_reads_back_within_its_bound() {
    let directory = tempfile::tempdir().unwrap();
    let shape = small("qwen3");
    for kind in types() {
        let path = directory.path().join(format!("{kind:?}.gguf"));
        write(&shape, kind, &path);
        let mut file = File::open(&path).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert_eq!(content.tensor_infos.len(), shape.tensors().len());
        let mut types = HashSet::new();
        for (name, dimensions) in shape.tensors() {
            let tensor = content.tensor(&mut file, &name, &Device::Cpu).unwrap();
            assert_eq!(tensor.shape().dims(), dimensions);
            let read: Vec<f32> =
                tensor.dequantize(&Device::Cpu).and_then(|tensor| tensor.flatten_all()?.to_vec1()).unwrap();
            let written = random_gguf::weights(&name, &dimensions);
            let block = tensor.dtype().block_size().max(32);
            for (read, written) in read.chunks(block).zip(written.chunks(block)) {
                let bound = bound(tensor.dtype(), written);
                for (read, written) in read.iter().zip(written) {
                    assert!((read - written).abs() <= bound, "{kind:?} {name}: {read} of {written}, {bound}");
                }
            }
            types.insert(format!("{:?}", tensor.dtype()));
        }
        let expected: &[&str] = match kind {
            FileType::Q8_0 => &["F32", "Q8_0"],
            FileType::Q4_0 => &["F32", "Q4_0", "Q6K"],
            FileType::Q4_1 => &["F32", "Q4_1", "Q6K"],
            FileType::Q4KM => &["F32", "Q4K", "Q6K"],
            FileType::Bf16 => &["F32", "BF16"],
        };
        assert_eq!(types, expected.iter().map(|&name| name.to_owned()).collect());
    }
}

#[test]
fn our_loader_runs_what_candle_reads() {
    let directory = tempfile::tempdir().unwrap();
    let prompt = tokens(&[3, 999, 500, 7, 250]);
    for architecture in ["qwen3", "llama"] {
        for kind in types() {
            let path = directory.path().join(format!("{architecture}-{kind:?}.gguf"));
            write(&small(architecture), kind, &path);
            let logits = ReferenceModel::load(&path).unwrap().logits(&prompt).unwrap();
            let last = logits.last().unwrap();
            let largest = last.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            assert!(
                (0.5..50.0).contains(&largest),
                "{architecture} {kind:?}: the largest logit is {largest}"
            );
            let mut driver = Driver::load(&CandleConfig::new(&path), 8);
            let got = driver.log_probs(&prompt, 0, &pages(0..8));
            let exact = log_softmax(last.iter().map(|&x| f64::from(x)));
            let error = relative_error(&got, &exact);
            assert!(error < 0.1, "{architecture} {kind:?}: {error}");
        }
    }
}

#[test]
fn vocabularies_are_of_the_size_asked_for_and_hang_together() {
    for size in [300, 1000, 151_936] {
        let metadata = vocabulary::metadata("qwen2", size);
        let strings = |key: &str| -> Vec<String> {
            let (_, value) = metadata.iter().find(|(name, _)| name == key).unwrap();
            value.to_vec().unwrap().iter().map(|value| value.to_string().unwrap().clone()).collect()
        };
        let (tokens, merges) = (strings("tokenizer.ggml.tokens"), strings("tokenizer.ggml.merges"));
        let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
        assert_eq!((tokens.len(), known.len(), merges.len()), (size, size, size - 256 - 3));
        for merge in &merges {
            let (left, right) = merge.split_once(' ').unwrap();
            assert!(
                known.contains(left)
                    && known.contains(right)
                    && known.contains(merge.replace(' ', "").as_str())
            );
        }
    }
}

#[test]
fn shapes_have_as_many_parameters_as_the_models_they_are_named_for() {
    for (name, parameters) in [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400)] {
        let tensors = Shape::named(name).unwrap().tensors();
        assert_eq!(
            tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>(),
            parameters
        );
    }
    assert!(Shape::named("qwen3").is_none() && FileType::from_name("q2_k").is_none());
}

#[test]
fn weights_of_a_name_are_the_same_every_time_and_others_differ() {
    let weights = |name| random_gguf::weights(name, &[4, 64]);
    assert_eq!(weights("blk.0.attn_q.weight"), weights("blk.0.attn_q.weight"));
    assert_ne!(weights("blk.0.attn_q.weight"), weights("blk.1.attn_q.weight"));
    // The variance of a matrix is one over its inputs.
    let all = random_gguf::weights("token_embd.weight", &[1000, 64]);
    let variance =
        Tensor::new(all, &Device::Cpu).and_then(|all| all.sqr()?.mean_all()?.to_scalar::<f32>()).unwrap();
    assert!((variance * 64.0 - 1.0).abs() < 0.02, "{variance}");
}
