//! Makes GGUF files to measure with: `cargo run --release -p microserving-executor-candle --example make_model --`
//!
//! - `random SHAPE TYPE OUT`: random weights in the shape of a model that people run, `qwen3-0.6b` or `llama-3.2-1b`;
//! - `requantise IN TYPE OUT`: the matrices of a file brought to another type.
//!
//! Types: `q8_0`, `q4_0`, `q4_1`, `q4_k_m`, `bf16`. The same arguments make the same bytes. `cargo xtask model` calls it and keeps the files.
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

#[path = "../../tests/it/noise.rs"]
mod noise;
mod random_gguf;
mod vocabulary;

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{self, Content, Value};

use random_gguf::{FileType, Gguf, Shape};

const USAGE: &str = "usage: make_model random SHAPE TYPE OUT | make_model requantise IN TYPE OUT";

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [verb, from, kind, out] = args.as_slice() else { return Err(USAGE.into()) };
    let kind = FileType::from_name(kind).ok_or_else(|| format!("unknown type {kind}; {USAGE}"))?;
    let gguf = match verb.as_str() {
        "random" => {
            let shape = Shape::named(from).ok_or_else(|| format!("unknown shape {from}; {USAGE}"))?;
            random_gguf::make(&shape, kind)?
        }
        "requantise" => requantise(Path::new(from), kind)?,
        _ => return Err(USAGE.into()),
    };
    save(&gguf, Path::new(out))
}

/// Brings the matrices of a file to another type.
fn requantise(path: &Path, kind: FileType) -> Result<Gguf, Box<dyn Error>> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    let mut metadata: Vec<(String, Value)> =
        content.metadata.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    metadata.retain(|(key, _)| key != "general.file_type");
    metadata.push(("general.file_type".into(), Value::U32(kind.number())));
    metadata.sort_by(|a, b| a.0.cmp(&b.0));
    let num_layers = metadata
        .iter()
        .find(|(key, _)| key.ends_with(".block_count"))
        .and_then(|(_, value)| value.to_u32().ok())
        .ok_or("the file does not say its number of layers")?;
    let tied = !content.tensor_infos.contains_key("output.weight");
    let mut infos: Vec<_> = content.tensor_infos.iter().collect();
    infos.sort_by_key(|(_, info)| info.offset);
    let mut tensors = Vec::new();
    for (name, info) in infos {
        let values = content.tensor(&mut file, name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        let dtype = kind.of_tensor(name, info.shape.rank(), num_layers, tied);
        tensors.push((name.clone(), QTensor::quantize(&values, dtype)?));
    }
    Ok(Gguf { metadata, tensors })
}

/// Writes under another name first, so that a file that is there is whole.
fn save(gguf: &Gguf, out: &Path) -> Result<(), Box<dyn Error>> {
    let fresh = PathBuf::from(format!("{}.{}", out.display(), std::process::id()));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&fresh)?);
    let metadata: Vec<(&str, &Value)> =
        gguf.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        gguf.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut file, &metadata, &tensors)?;
    file.flush()?;
    std::fs::rename(&fresh, out)?;
    println!("{}: {} tensors, {} bytes", out.display(), tensors.len(), std::fs::metadata(out)?.len());
    Ok(())
}
