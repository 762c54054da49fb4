//! A tiny model of Qwen3's kind: weights, and its formulas in f64 over all tokens at once.

use microserving_kernels::Dtype;

use crate::numbers::{Numbers, rounded};

pub(crate) const HIDDEN: usize = 48;
pub(crate) const INTERMEDIATE: usize = 72;
pub(crate) const HEAD_DIM: usize = 64;
pub(crate) const NUM_HEADS: usize = 4;
pub(crate) const NUM_KV_HEADS: usize = 2;
pub(crate) const NUM_LAYERS: usize = 2;
pub(crate) const VOCAB_SIZE: usize = 96;
pub(crate) const EPS: f32 = 1e-6;

/// The weights of a layer, `[out][in]`, rounded to their type.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: Vec<f32>,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) k_norm: Vec<f32>,
    pub(crate) output: Vec<f32>,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate_up: Vec<f32>,
    pub(crate) down: Vec<f32>,
}

/// The weights; the embedding serves as output matrix.
pub(crate) struct Weights {
    pub(crate) embedding: Vec<f32>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
}

impl Weights {
    pub(crate) fn new(dtype: Dtype) -> Self {
        let mut numbers = Numbers::new(11);
        let mut matrix = |out: usize, inner: usize| {
            let values: Vec<f32> =
                numbers.take(out * inner).iter().map(|x| x / (inner as f32).sqrt()).collect();
            rounded(dtype, &values)
        };
        let layers = (0..NUM_LAYERS)
            .map(|_| Layer {
                attention_norm: matrix(HIDDEN, 1),
                qkv: matrix((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
                q_norm: matrix(HEAD_DIM, 1),
                k_norm: matrix(HEAD_DIM, 1),
                output: matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
                mlp_norm: matrix(HIDDEN, 1),
                gate_up: matrix(2 * INTERMEDIATE, HIDDEN),
                down: matrix(HIDDEN, INTERMEDIATE),
            })
            .collect();
        Self { embedding: matrix(VOCAB_SIZE, HIDDEN), layers, final_norm: matrix(HIDDEN, 1) }
    }

    /// Cosines and sines, `[positions][HEAD_DIM / 2]`.
    pub(crate) fn angles(&self, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let half = HEAD_DIM / 2;
        let angle = |at: usize| (at / half) as f64 * 10_000_f64.powf(-((at % half) as f64) / half as f64);
        (0..positions * half).map(|at| (angle(at).cos() as f32, angle(at).sin() as f32)).unzip()
    }

    /// The logits of the last of some tokens.
    pub(crate) fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let mut stream: Vec<Vec<f64>> =
            tokens.iter().map(|&token| widen(&self.embedding[token as usize * HIDDEN..][..HIDDEN])).collect();
        for layer in &self.layers {
            self.attend(layer, &mut stream);
            for x in &mut stream {
                let both = product(&layer.gate_up, &norm(x, &layer.mlp_norm));
                let (gate, up) = both.split_at(INTERMEDIATE);
                let gated: Vec<f64> =
                    gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
                add(x, &product(&layer.down, &gated));
            }
        }
        product(&self.embedding, &norm(stream.last().expect("a token"), &self.final_norm))
    }

    fn attend(&self, layer: &Layer, stream: &mut [Vec<f64>]) {
        let (cosines, sines) = self.angles(stream.len());
        let heads: Vec<Vec<Vec<f64>>> = stream
            .iter()
            .enumerate()
            .map(|(position, x)| {
                let qkv = product(&layer.qkv, &norm(x, &layer.attention_norm));
                let finish = |(head, x): (usize, &[f64])| {
                    if head >= NUM_HEADS + NUM_KV_HEADS {
                        return x.to_vec();
                    }
                    let x = norm(x, if head < NUM_HEADS { &layer.q_norm } else { &layer.k_norm });
                    let half = HEAD_DIM / 2;
                    let of = |angles: &[f32], i: usize| f64::from(angles[position * half + i % half]);
                    let turned = |i: usize| if i < half { -x[i + half] } else { x[i - half] };
                    (0..HEAD_DIM).map(|i| x[i] * of(&cosines, i) + turned(i) * of(&sines, i)).collect()
                };
                qkv.chunks(HEAD_DIM).enumerate().map(finish).collect()
            })
            .collect();
        for (position, x) in stream.iter_mut().enumerate() {
            let mut attended = Vec::new();
            for head in 0..NUM_HEADS {
                let kv_head = NUM_HEADS + head / (NUM_HEADS / NUM_KV_HEADS);
                let query = &heads[position][head];
                let score = |t: usize| dot(query, &heads[t][kv_head]) / (HEAD_DIM as f64).sqrt();
                let weights: Vec<f64> = (0..=position).map(|t| score(t).exp()).collect();
                let sum: f64 = weights.iter().sum();
                attended.extend((0..HEAD_DIM).map(|d| {
                    let value: f64 =
                        (0..=position).map(|t| weights[t] * heads[t][kv_head + NUM_KV_HEADS][d]).sum();
                    value / sum
                }));
            }
            add(x, &product(&layer.output, &attended));
        }
    }
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn product(weight: &[f32], x: &[f64]) -> Vec<f64> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let factor = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(x, &weight)| x * factor * f64::from(weight)).collect()
}
