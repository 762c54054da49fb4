//! How long a step takes: a roofline over data sheets and published kernel efficiencies. Nothing in it was fitted to the
//! figures that it is used to predict.

use std::time::Duration;

/// One run of new tokens behind a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens to compute.
    pub num_tokens: u32,
    /// Tokens before them.
    pub context: u32,
}

/// What a step computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Prefill chunks.
    pub prefills: Vec<Chunk>,
    /// The context lengths of the decodes: one new token each.
    pub decodes: Vec<u32>,
}

impl StepShape {
    /// Returns new tokens over all chunks and decodes.
    #[must_use]
    pub fn num_tokens(&self) -> u64 {
        let prefill: u64 = self.prefills.iter().map(|chunk| u64::from(chunk.num_tokens)).sum();
        prefill + self.decodes.len() as u64
    }
}

/// The sizes of a dense decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Layers.
    pub num_layers: f64,
    /// Width of the residual stream.
    pub hidden: f64,
    /// KV heads over all ranks.
    pub num_kv_heads: f64,
    /// Width of a head.
    pub head_dim: f64,
    /// Width of the feed-forward block.
    pub feed_forward: f64,
    /// Vocabulary.
    pub vocab_size: f64,
    /// Bytes of one weight of the layers.
    pub weight_bytes: f64,
    /// Bytes of one weight of the output head.
    pub head_weight_bytes: f64,
    /// Bytes of one element of the KV cache.
    pub kv_element_bytes: f64,
}

impl ModelShape {
    /// Returns the weights of one layer's attention projections.
    fn attention_params(&self) -> f64 {
        2.0 * self.hidden * self.hidden + 2.0 * self.hidden * self.num_kv_heads * self.head_dim
    }

    /// Returns the weights of all layers.
    fn layer_params(&self) -> f64 {
        self.num_layers * (self.attention_params() + 3.0 * self.hidden * self.feed_forward)
    }

    /// Returns the bytes that one token's KV takes over all layers and ranks.
    #[must_use]
    pub fn kv_token_bytes(&self) -> f64 {
        2.0 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_element_bytes
    }
}

/// What one device can do at most, from its data sheet.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRates {
    /// Dense operations a second in the weights' format.
    pub matmul_flops: f64,
    /// Dense operations a second in 16-bit formats: attention and the output head.
    pub half_flops: f64,
    /// Bytes a second from device memory.
    pub memory_bytes_per_second: f64,
}

/// A model on a group of devices, and how much of the data sheet its kernels reach.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// What it describes.
    pub name: &'static str,
    /// The model.
    pub model: ModelShape,
    /// One device of the group.
    pub device: DeviceRates,
    /// Devices that share each layer.
    pub num_ranks: f64,
    /// Share of `matmul_flops` that large matrix products reach.
    pub matmul_efficiency: f64,
    /// Share of `half_flops` that prefill attention reaches.
    pub attention_efficiency: f64,
    /// Share of the memory rate at which decode attention streams KV.
    pub kv_efficiency: f64,
    /// Share of the memory rate at which weights are streamed, one token in the step.
    pub single_weight_efficiency: f64,
    /// The same, several tokens in the step.
    pub weight_efficiency: f64,
    /// Share of `half_flops` that the output head reaches.
    pub head_efficiency: f64,
    /// Share of the memory rate that norms, residuals, rotary embeddings and activations reach.
    pub element_efficiency: f64,
    /// Bytes a second of a large all-reduce.
    pub all_reduce_bytes_per_second: f64,
    /// Seconds of latency of an all-reduce below 1 MiB.
    pub small_all_reduce_seconds: f64,
    /// Seconds of latency of a larger one.
    pub large_all_reduce_seconds: f64,
    /// Seconds for the small kernels of a step.
    pub kernel_seconds: f64,
    /// Seconds of launch gaps that a step with a prefill adds, as prefill does not run from a captured graph.
    pub eager_seconds: f64,
    /// Seconds for sampling and host work.
    pub host_seconds: f64,
}

impl HardwareProfile {
    /// Llama-3.1-70B with FP8 weights and an FP16 cache on four H100 SXM5.
    ///
    /// | constant | from |
    /// |---|---|
    /// | model sizes | the model's public `config.json` |
    /// | 1979 / 989.4 TFLOP/s, 3.35 TB/s | NVIDIA's H100 SXM5 data sheet, dense |
    /// | matmul 0.56 | CUTLASS FP8 baselines of DeepGEMM's first README, weighted over the shapes of four shards |
    /// | attention 0.35 | FlashAttention-2 on H100, as the FlashAttention-3 paper measures it |
    /// | KV 0.70 | assumed; 0.6–0.8 is usual for paged decode kernels |
    /// | weights 0.80 / 0.63 | a matrix–vector product streams at 0.8; skinny CUTLASS products at 1.45–1.9 TB/s and above |
    /// | element-wise 0.80 | assumed of fused element-wise passes |
    /// | all-reduce 330 GB/s, 20 µs / 8 µs | NCCL bus bandwidth around 50 MB; its latency, and that of one-shot kernels |
    /// | 12 kernels of 1.8 µs a layer, 0.6 ms; 15 gaps of 3 µs a layer; 0.7 ms | small kernels in a graph and attention launches; eager launches; sampling and host, about 3 % of a decode step |
    #[must_use]
    pub fn llama3_70b_fp8_h100_tp4() -> Self {
        Self {
            name: "llama3-70b-fp8-h100-tp4",
            model: ModelShape {
                num_layers: 80.0,
                hidden: 8192.0,
                num_kv_heads: 8.0,
                head_dim: 128.0,
                feed_forward: 28672.0,
                vocab_size: 128_256.0,
                weight_bytes: 1.0,
                head_weight_bytes: 2.0,
                kv_element_bytes: 2.0,
            },
            device: DeviceRates {
                matmul_flops: 1979e12,
                half_flops: 989.4e12,
                memory_bytes_per_second: 3.35e12,
            },
            num_ranks: 4.0,
            matmul_efficiency: 0.56,
            attention_efficiency: 0.35,
            kv_efficiency: 0.70,
            single_weight_efficiency: 0.80,
            weight_efficiency: 0.63,
            head_efficiency: 0.5,
            element_efficiency: 0.80,
            all_reduce_bytes_per_second: 330e9,
            small_all_reduce_seconds: 8e-6,
            large_all_reduce_seconds: 20e-6,
            kernel_seconds: 80.0 * 12.0 * 1.8e-6 + 0.6e-3,
            eager_seconds: 80.0 * 15.0 * 3.0e-6,
            host_seconds: 0.7e-3,
        }
    }

    /// The same model on eight H100: matrix products over smaller shards reach 0.53, a small all-reduce takes 10 µs.
    #[must_use]
    pub fn llama3_70b_fp8_h100_tp8() -> Self {
        Self {
            name: "llama3-70b-fp8-h100-tp8",
            num_ranks: 8.0,
            matmul_efficiency: 0.53,
            small_all_reduce_seconds: 10e-6,
            ..Self::llama3_70b_fp8_h100_tp4()
        }
    }

    /// Returns how long a step takes; nothing for a step without tokens.
    #[must_use]
    pub fn step_time(&self, shape: &StepShape) -> Duration {
        let num_tokens = shape.num_tokens() as f64;
        if num_tokens == 0.0 {
            return Duration::ZERO;
        }
        let mut seconds = self.matmul_seconds(num_tokens)
            + self.head_seconds((shape.prefills.len() + shape.decodes.len()) as f64)
            + self.attention_seconds(shape)
            + self.all_reduce_seconds(num_tokens)
            + self.element_seconds(num_tokens)
            + self.host_seconds
            + self.kernel_seconds;
        if !shape.prefills.is_empty() {
            seconds += self.eager_seconds;
        }
        Duration::from_secs_f64(seconds)
    }

    /// Computing and streaming weights overlap: a smooth maximum of the two.
    fn matmul_seconds(&self, num_tokens: f64) -> f64 {
        let params = self.model.layer_params();
        let compute =
            2.0 * params * num_tokens / (self.num_ranks * self.device.matmul_flops * self.matmul_efficiency);
        let efficiency =
            if num_tokens == 1.0 { self.single_weight_efficiency } else { self.weight_efficiency };
        let stream = params * self.model.weight_bytes
            / (self.num_ranks * self.device.memory_bytes_per_second * efficiency);
        // Not `hypot`, whose last bit is the platform's.
        (compute * compute + stream * stream).sqrt()
    }

    fn head_seconds(&self, num_rows: f64) -> f64 {
        let params = self.model.vocab_size * self.model.hidden;
        let stream = params * self.model.head_weight_bytes
            / (self.num_ranks * self.device.memory_bytes_per_second * self.weight_efficiency);
        let compute =
            2.0 * params * num_rows / (self.num_ranks * self.device.half_flops * self.head_efficiency);
        stream.max(compute)
    }

    fn attention_seconds(&self, shape: &StepShape) -> f64 {
        let pairs: f64 = shape
            .prefills
            .iter()
            .map(|chunk| (f64::from(chunk.num_tokens), f64::from(chunk.context)))
            .map(|(new, context)| new * context + new * (new + 1.0) / 2.0)
            .sum();
        let flops = 4.0 * self.model.num_layers * self.model.hidden * pairs;
        let context: f64 = shape.decodes.iter().map(|&context| f64::from(context)).sum();
        flops / (self.num_ranks * self.device.half_flops * self.attention_efficiency)
            + self.model.kv_token_bytes() * context
                / (self.num_ranks * self.device.memory_bytes_per_second * self.kv_efficiency)
    }

    /// Two all-reduces a layer, each of a row of 16-bit activations a token.
    fn all_reduce_seconds(&self, num_tokens: f64) -> f64 {
        const LARGE: f64 = 1_048_576.0;
        let bytes = num_tokens * self.model.hidden * 2.0;
        let latency =
            if bytes < LARGE { self.small_all_reduce_seconds } else { self.large_all_reduce_seconds };
        let share = 2.0 * (self.num_ranks - 1.0) / self.num_ranks;
        2.0 * self.model.num_layers * (latency + share * bytes / self.all_reduce_bytes_per_second)
    }

    /// Bytes that norms, residuals, quantising, rotary embeddings and activations move for each token and layer.
    fn element_seconds(&self, num_tokens: f64) -> f64 {
        let model = &self.model;
        let projected = model.attention_params() / model.hidden - model.hidden;
        let bytes = 2.0 * (8.0 * model.hidden)
            + 2.0 * (3.0 * model.hidden)
            + 3.0 * (model.hidden + model.feed_forward) / self.num_ranks
            + 6.0 * projected / self.num_ranks
            + 6.0 * model.feed_forward / self.num_ranks;
        model.num_layers * num_tokens * bytes
            / (self.device.memory_bytes_per_second * self.element_efficiency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(num_tokens: u32, context: u32) -> Chunk {
        Chunk { num_tokens, context }
    }

    fn milliseconds(profile: &HardwareProfile, prefills: &[Chunk], decodes: &[u32]) -> f64 {
        let shape = StepShape { prefills: prefills.to_vec(), decodes: decodes.to_vec() };
        profile.step_time(&shape).as_secs_f64() * 1e3
    }

    fn assert_near(value: f64, expected: f64, tolerance: f64) {
        assert!((value / expected - 1.0).abs() <= tolerance, "{value}, not {expected}");
    }

    #[test]
    fn a_prefill_of_3000_tokens_and_a_decode_of_six() {
        let tp4 = HardwareProfile::llama3_70b_fp8_h100_tp4();
        assert_near(tp4.model.kv_token_bytes(), 327_680.0, 0.0);
        assert_near(milliseconds(&tp4, &[prefill(3000, 0)], &[]), 171.0, 0.02);
        assert_near(milliseconds(&tp4, &[], &[3000; 6]), 13.4, 0.03);
        // By part: matrix products 93, attention 8.5, all-reduces 39 ms.
        assert_near(tp4.matmul_seconds(3000.0) * 1e3, 93.0, 0.02);
        let shape = StepShape { prefills: vec![prefill(3000, 0)], decodes: vec![] };
        assert_near(tp4.attention_seconds(&shape) * 1e3, 8.5, 0.02);
        assert_near(tp4.all_reduce_seconds(3000.0) * 1e3, 39.0, 0.02);
    }

    /// What leaving the last tokens of a 3000-token prompt to a decoding engine with six residents costs a step there.
    #[test]
    fn the_price_of_a_prefill_among_decodes() {
        let tp4 = HardwareProfile::llama3_70b_fp8_h100_tp4();
        let alone = milliseconds(&tp4, &[], &[3000; 6]);
        let prices = [(16, 4.0), (64, 7.4), (300, 17.4), (600, 32.8), (1500, 80.8), (3000, 158.7)];
        for (left, expected) in prices {
            let together = milliseconds(&tp4, &[prefill(left, 3000 - left)], &[3000; 6]);
            assert_near(together - alone, expected, 0.01);
        }
    }

    #[test]
    fn eight_devices_are_faster_but_not_twice() {
        let (tp4, tp8) =
            (HardwareProfile::llama3_70b_fp8_h100_tp4(), HardwareProfile::llama3_70b_fp8_h100_tp8());
        assert_near(milliseconds(&tp8, &[prefill(3000, 0)], &[]), 125.0, 0.01);
        assert_near(milliseconds(&tp8, &[], &[3000; 6]), 9.25, 0.01);
        assert!(
            milliseconds(&tp8, &[prefill(3000, 0)], &[]) * 2.0 > milliseconds(&tp4, &[prefill(3000, 0)], &[])
        );
    }

    #[test]
    fn time_grows_with_work_and_nothing_takes_none() {
        let tp4 = HardwareProfile::llama3_70b_fp8_h100_tp4();
        assert_eq!(tp4.step_time(&StepShape::default()), Duration::ZERO);
        let mut last = 0.0;
        for num_tokens in [2, 16, 64, 256, 1024, 4096] {
            let time = milliseconds(&tp4, &[prefill(num_tokens, 100)], &[]);
            assert!(time > last);
            last = time;
        }
        assert!(milliseconds(&tp4, &[prefill(100, 9000)], &[]) > milliseconds(&tp4, &[prefill(100, 0)], &[]));
        assert!(milliseconds(&tp4, &[], &[9000]) > milliseconds(&tp4, &[], &[10]));
    }
}
