//! What the machine's ceilings allow: streaming every weight once a step, and multiplying with it.

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::number;
use super::test::{BATCHED_PROMPT, BATCHED_STEPS, Kind, Test};

/// Tokens of a step in prefill, on both sides.
const CHUNK: usize = 512;
/// Bytes of an element of the KV cache, f16 on both sides.
const KV_BYTES: f64 = 2.0;

/// What a file's matrices hold, as `like_llama_bench` tells it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shape {
    layer_weights: f64,
    layer_bytes: f64,
    logits_weights: f64,
    logits_bytes: f64,
    /// Elements of the queries of a token in all layers.
    queries: f64,
    /// Elements of the keys (or values) of a token in all layers.
    keys: f64,
}

impl Shape {
    pub(super) fn read(value: &Value) -> Result<Self> {
        let get = |key: &str| number(value, key);
        let per_head = get("num_layers")? * get("head_dim")?;
        Ok(Self {
            layer_weights: get("layer_weights")?,
            layer_bytes: get("layer_bytes")?,
            logits_weights: get("logits_weights")?,
            logits_bytes: get("logits_bytes")?,
            queries: per_head * get("num_heads")?,
            keys: per_head * get("num_kv_heads")?,
        })
    }
}

/// What a test must at least read and compute.
#[derive(Debug, PartialEq)]
struct Work {
    tokens: f64,
    bytes: f64,
    matrix_operations: f64,
    attention_operations: f64,
}

impl Work {
    fn of(test: Test, shape: &Shape) -> Self {
        let all_bytes = shape.layer_bytes + shape.logits_bytes;
        let all_weights = shape.layer_weights + shape.logits_weights;
        // Positions that are attended to, over all tokens: the first token sees itself.
        let seen = |first: usize, tokens: usize| (first + 1..=first + tokens).sum::<usize>() as f64;
        let (tokens, steps, positions) = match test {
            Test::Prompt(len) => (len as f64, len.div_ceil(CHUNK) as f64, seen(0, len)),
            Test::Generate(len) => (len as f64, len as f64, seen(0, len)),
            Test::Batched(sequences) => (
                (sequences * BATCHED_STEPS) as f64,
                BATCHED_STEPS as f64,
                sequences as f64 * seen(BATCHED_PROMPT, BATCHED_STEPS),
            ),
        };
        // A multiplication and an addition each for the scores and for the values.
        let attention_operations = 4.0 * shape.queries * positions;
        match test {
            Test::Prompt(_) => Self {
                tokens,
                // Within a chunk, keys are read from the caches.
                bytes: steps * shape.layer_bytes + shape.logits_bytes,
                matrix_operations: 2.0 * (shape.layer_weights * tokens + shape.logits_weights),
                attention_operations,
            },
            Test::Generate(_) | Test::Batched(_) => Self {
                tokens,
                bytes: steps * all_bytes + 2.0 * KV_BYTES * shape.keys * positions,
                matrix_operations: 2.0 * all_weights * tokens,
                attention_operations,
            },
        }
    }
}

/// What `ceilings` measured, a number of threads each.
#[derive(Debug)]
pub(super) struct Ceilings {
    each: Vec<Value>,
}

impl Ceilings {
    pub(super) const fn new(each: Vec<Value>) -> Self {
        Self { each }
    }

    pub(super) fn all(&self) -> &[Value] {
        &self.each
    }

    /// Returns what to print of them.
    pub(super) fn lines(&self) -> Vec<String> {
        let rate = |ceiling: &Value, what: &str| {
            let rate = ceiling[format!("{what}_gop_per_second")].as_f64()?;
            let instruction = ceiling[format!("{what}_instruction")].as_str()?;
            Some(format!("{what} {rate:.0} GOP/s ({instruction})"))
        };
        let line = |ceiling: &Value| {
            let rates: Vec<String> =
                ["int8", "bf16", "f32"].iter().filter_map(|what| rate(ceiling, what)).collect();
            let read = ceiling["read_gb_per_second"].as_f64().unwrap_or(0.0);
            format!("ceilings with {} threads: read {read:.1} GB/s, {}", ceiling["threads"], rates.join(", "))
        };
        self.each.iter().map(line).collect()
    }

    /// Returns the tokens a second that nobody can exceed who reads the file's weights each step and uses these instructions: the longer of reading
    /// and computing. Nothing if a ceiling is not known here.
    pub(super) fn tokens_per_second(
        &self,
        test: Test,
        shape: &Shape,
        kind: Kind,
        threads: usize,
    ) -> Option<f64> {
        let ceiling = self.each.iter().find(|ceiling| ceiling["threads"].as_u64() == Some(threads as u64))?;
        let giga = |key: &str| ceiling[key].as_f64().map(|value| value * 1e9);
        let matrix = if kind == Kind::Bf16 {
            // Widened where pairs are slower.
            giga("bf16_gop_per_second")?.max(giga("f32_gop_per_second").unwrap_or(0.0))
        } else {
            giga("int8_gop_per_second")?
        };
        let work = Work::of(test, shape);
        let reading = work.bytes / giga("read_gb_per_second")?;
        let computing =
            work.matrix_operations / matrix + work.attention_operations / giga("f32_gop_per_second")?;
        Some(work.tokens / reading.max(computing))
    }
}

/// Reads the shape among what a program printed.
pub(super) fn shape_in(objects: &[Value]) -> Result<Shape> {
    let shape = objects.iter().find(|object| object.get("layer_bytes").is_some());
    Shape::read(shape.context("the program did not tell the model's shape")?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shape() -> Shape {
        Shape::read(
            &json!({"layer_weights": 1e8, "layer_bytes": 1e8, "logits_weights": 1e7, "logits_bytes": 1e7,
            "num_layers": 10, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}),
        )
        .expect("a shape")
    }

    #[test]
    fn work_is_counted_by_hand() {
        let work = Work::of(Test::Generate(2), &shape());
        // Positions 1 and 2, keys and values of 10 layers, 2 heads, 64 elements, 2 bytes.
        let expected = Work {
            tokens: 2.0,
            bytes: 2.2e8 + 3.0 * 2.0 * 2.0 * 1280.0,
            matrix_operations: 4.4e8,
            attention_operations: 4.0 * 5120.0 * 3.0,
        };
        assert_eq!(work, expected);
        let work = Work::of(Test::Prompt(513), &shape());
        assert_eq!((work.bytes, work.matrix_operations), (2.1e8, 2.0 * (513e8 + 1e7)));
    }

    #[test]
    fn the_longer_of_reading_and_computing_bounds() {
        let ceilings = |read: f64| {
            Ceilings::new(vec![
                json!({"threads": 1, "read_gb_per_second": read, "int8_gop_per_second": 100.0,
                "bf16_gop_per_second": 50.0, "f32_gop_per_second": 50.0}),
            ])
        };
        let rate =
            |read, test, kind| ceilings(read).tokens_per_second(test, &shape(), kind, 1).expect("known");
        let decode = rate(11.0, Test::Generate(1), Kind::Block);
        assert!((decode - 100.0).abs() < 0.1, "{decode}");
        let decode = rate(1e6, Test::Generate(1), Kind::Block);
        assert!((decode - 1e11 / 2.2e8).abs() < 1.0, "{decode}");
        assert!(rate(11.0, Test::Prompt(512), Kind::Block) > 1.9 * rate(11.0, Test::Prompt(512), Kind::Bf16));
        assert_eq!(ceilings(1.0).tokens_per_second(Test::Generate(1), &shape(), Kind::Block, 2), None);
    }
}
