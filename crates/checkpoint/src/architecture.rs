//! The numbers that define a model, from whichever file they came.

use microserving_protocol::TokenId;

/// A supported family. They differ only in details of attention, so one walk serves them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, TinyLlama.
    Llama,
    /// Mistral 7B and its kin without a sliding window: Llama by another name.
    Mistral,
    /// Adds a bias to q, k and v.
    Qwen2,
    /// Normalises each head of q and k.
    Qwen3,
}

impl Architecture {
    /// Returns the family of a Hugging Face `model_type`, which GGUF's `general.architecture` shares.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "llama" => Some(Self::Llama),
            "mistral" => Some(Self::Mistral),
            "qwen2" => Some(Self::Qwen2),
            "qwen3" => Some(Self::Qwen3),
            _ => None,
        }
    }

    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Says whether q, k and v have a bias.
    #[must_use]
    pub const fn has_qkv_bias(self) -> bool {
        matches!(self, Self::Qwen2)
    }

    /// Says whether the heads of q and k are normalised.
    #[must_use]
    pub const fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3)
    }
}

/// How the rotary frequencies differ from `theta^(-2i/d)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// They do not.
    None,
    /// All divided by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: slow rotations are divided by `factor`, fast ones kept, those between blended.
    Llama3 {
        /// Divides the slow rotations.
        factor: f64,
        /// Rotations slower than `original_context / low_freq_factor` tokens a turn are slow.
        low_freq_factor: f64,
        /// Rotations faster than `original_context / high_freq_factor` tokens a turn are fast.
        high_freq_factor: f64,
        /// The context the model was first trained for.
        original_context: f64,
    },
    /// A divisor for each frequency, as GGUF files carry it ready-made.
    Divisors(Vec<f32>),
}

/// The shape and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the gated layer.
    pub intermediate: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of the embedding: logits per position.
    pub vocab_size: usize,
    /// The longest sequence that the model was made for, in tokens.
    pub max_context: u32,
    /// Added to the mean square where rows are normalised.
    pub rms_eps: f32,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they differ from the base's powers.
    pub rope_scaling: RopeScaling,
    /// The embedding serves as output matrix.
    pub tied: bool,
    /// The tokens that end a sequence, as far as the files say.
    pub eos_tokens: Vec<TokenId>,
}

impl ModelConfig {
    /// Returns the width of all query heads together.
    #[must_use]
    pub const fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Returns the width of all key (or value) heads together.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Checks what every executor relies on.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        let sizes = [
            ("number of layers", self.num_layers),
            ("hidden size", self.hidden),
            ("intermediate size", self.intermediate),
            ("number of heads", self.num_heads),
            ("number of KV heads", self.num_kv_heads),
            ("head dimension", self.head_dim),
            ("vocabulary size", self.vocab_size),
            ("context length", self.max_context as usize),
        ];
        for (what, size) in sizes {
            // 2^24 is far above any real model and keeps every product of two sizes inside usize.
            if size == 0 || size > 1 << 24 {
                return Err(format!("the {what} is {size}, outside 1..=2^24"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(format!(
                "{} heads cannot share {} KV heads evenly",
                self.num_heads, self.num_kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("the head dimension {} is odd, so it cannot be rotated", self.head_dim));
        }
        if !(self.rms_eps.is_finite() && self.rms_eps >= 0.0) {
            return Err(format!("the epsilon of the norms is {}", self.rms_eps));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(format!("the base of the rotary embedding is {}", self.rope_theta));
        }
        if let RopeScaling::Divisors(divisors) = &self.rope_scaling
            && divisors.len() != self.head_dim / 2
        {
            return Err(format!(
                "there are {} rotary divisors for a head dimension of {}",
                divisors.len(),
                self.head_dim
            ));
        }
        Ok(())
    }

    /// Returns the angle per position of each pair of a head: `head_dim / 2` values.
    #[must_use]
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        (0..self.head_dim / 2)
            .map(|i| {
                let base = self.rope_theta.powf(-((2 * i) as f64) / self.head_dim as f64);
                match &self.rope_scaling {
                    RopeScaling::None => base,
                    RopeScaling::Linear { factor } => base / factor,
                    RopeScaling::Divisors(divisors) => base / f64::from(divisors[i]),
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                        let wavelength = 2.0 * std::f64::consts::PI / base;
                        let turns = original_context / wavelength;
                        if turns > *high_freq_factor {
                            base
                        } else if turns < *low_freq_factor {
                            base / factor
                        } else {
                            let blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                            (1.0 - blend) * base / factor + blend * base
                        }
                    }
                }
            })
            .collect()
    }
}
