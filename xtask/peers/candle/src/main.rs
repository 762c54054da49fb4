//! Runs candle's quantised model of a GGUF file over prompts of token ids, greedily, and prints the seconds of each.
//!
//! `candle_alone MODEL OUTPUT PROMPT...`; a prompt is ids with commas between.

use std::error::Error;
use std::fs::File;
use std::time::Instant;

use candle_core::quantized::gguf_file::Content;
use candle_core::{D, Device, Tensor};
use candle_transformers::models::{quantized_llama, quantized_qwen3};

enum Model {
    Llama(quantized_llama::ModelWeights),
    Qwen3(quantized_qwen3::ModelWeights),
}

impl Model {
    fn load(path: &str) -> Result<Self, Box<dyn Error>> {
        let mut file = File::open(path)?;
        let content = Content::read(&mut file)?;
        let architecture = content.metadata.get("general.architecture").ok_or("the file does not say its architecture")?;
        let architecture = architecture.to_string()?.clone();
        match architecture.as_str() {
            "llama" => Ok(Self::Llama(quantized_llama::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?)),
            "qwen3" => Ok(Self::Qwen3(quantized_qwen3::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?)),
            other => Err(format!("{other} is not measured").into()),
        }
    }

    /// Runs tokens at a position (0 begins anew) and returns the greedy next one.
    fn step(&mut self, tokens: &[u32], position: usize) -> candle_core::Result<u32> {
        let tokens = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let logits = match self {
            Self::Llama(model) => model.forward(&tokens, position)?,
            Self::Qwen3(model) => {
                if position == 0 {
                    model.clear_kv_cache();
                }
                model.forward(&tokens, position)?
            }
        };
        logits.flatten_all()?.argmax(D::Minus1)?.to_scalar()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut model = Model::load(&args.next().ok_or("usage: candle_alone MODEL OUTPUT PROMPT...")?)?;
    let output: usize = args.next().ok_or("how many tokens?")?.parse()?;
    // The weights are repacked on first use.
    model.step(&[1, 2, 3], 0)?;
    for prompt in args {
        let prompt = prompt.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
        let begin = Instant::now();
        let mut token = model.step(&prompt, 0)?;
        let first = begin.elapsed();
        for step in 0..output - 1 {
            token = model.step(&[token], prompt.len() + step)?;
        }
        let rest = begin.elapsed() - first;
        println!("{{\"first_seconds\": {}, \"rest_seconds\": {}}}", first.as_secs_f64(), rest.as_secs_f64());
    }
    Ok(())
}
