#!/usr/bin/env python3
"""Computes the logits of seeded random tiny models in numpy, float64, with nothing but the papers' formulas.

Usage: python3 tiny_models.py > tiny_models.json      (needs numpy)

The weights are not stored: both this script and the tests make them from the tensors' names (see `weights`).
"""
import json

import numpy as np

BASE = dict(hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=256, eos_token_id=2)

MODELS = {
    "llama_tied": dict(model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, vocab_size=90, tie_word_embeddings=True),
    "llama3_scaled_untied": dict(model_type="llama", hidden_size=48, intermediate_size=100, num_hidden_layers=2,
                                 num_attention_heads=4, num_key_value_heads=1, vocab_size=77, tie_word_embeddings=False,
                                 rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                   high_freq_factor=4.0, original_max_position_embeddings=64)),
    "llama_linear": dict(model_type="llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, vocab_size=64, tie_word_embeddings=True,
                         rope_scaling=dict(type="linear", factor=4.0)),
    "mistral": dict(model_type="mistral", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=2, vocab_size=70, tie_word_embeddings=False,
                    sliding_window=None),
    "qwen2": dict(model_type="qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                  num_attention_heads=8, num_key_value_heads=4, vocab_size=80, tie_word_embeddings=True,
                  rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=32),
    "qwen3": dict(model_type="qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=85, tie_word_embeddings=True,
                  rms_norm_eps=1e-6),
}


def shapes(c):
    """Names and shapes of all tensors."""
    d, ff, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    heads = c["num_attention_heads"]
    kv, hd = c.get("num_key_value_heads", heads), c.get("head_dim", d // heads)
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, d)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        out[p + "input_layernorm.weight"] = (d,)
        out[p + "post_attention_layernorm.weight"] = (d,)
        for name, n in (("q", heads * hd), ("k", kv * hd), ("v", kv * hd)):
            out[p + f"self_attn.{name}_proj.weight"] = (n, d)
            if c["model_type"] == "qwen2":
                out[p + f"self_attn.{name}_proj.bias"] = (n,)
            if c["model_type"] == "qwen3" and name != "v":
                out[p + f"self_attn.{name}_norm.weight"] = (hd,)
        out[p + "self_attn.o_proj.weight"] = (d, heads * hd)
        out[p + "mlp.gate_proj.weight"] = (ff, d)
        out[p + "mlp.up_proj.weight"] = (ff, d)
        out[p + "mlp.down_proj.weight"] = (d, ff)
    return out


def weights(name, shape):
    """Uniform numbers from SplitMix64, seeded by the FNV-1a hash of the name: exact in f32 on every machine."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    uniform = (z >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0
    if "norm" in name:
        return (1.0 + uniform / 4).astype(np.float32).astype(np.float64).reshape(shape)
    return (uniform / (1 if "embed" in name else 4)).astype(np.float32).astype(np.float64).reshape(shape)


def frequencies(c, hd):
    """Angle per position of each rotated pair."""
    inv = c["rope_theta"] ** (-np.arange(0, hd, 2) / hd)
    s = c.get("rope_scaling")
    if not s:
        return inv
    if s.get("type") == "linear":
        return inv / s["factor"]
    turns = s["original_max_position_embeddings"] * inv / (2 * np.pi)
    blend = np.clip((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
    return (1 - blend) * inv / s["factor"] + blend * inv


def logits(c, tokens):
    """Logits after every token."""
    w = {name: weights(name, shape) for name, shape in shapes(c).items()}
    heads = c["num_attention_heads"]
    kv, hd = c.get("num_key_value_heads", heads), c.get("head_dim", c["hidden_size"] // heads)
    n = len(tokens)
    angle = np.arange(n)[:, None] * frequencies(c, hd)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, g):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * g

    def rotate(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"])
        part = {}
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            y = h @ w[p + f"self_attn.{name}_proj.weight"].T + w.get(p + f"self_attn.{name}_proj.bias", 0)
            y = y.reshape(n, count, hd)
            if p + f"self_attn.{name}_norm.weight" in w:
                y = norm(y, w[p + f"self_attn.{name}_norm.weight"])
            part[name] = y if name == "v" else rotate(y)
        out = np.empty((n, heads, hd))
        for head in range(heads):
            k, v = part["k"][:, head * kv // heads], part["v"][:, head * kv // heads]
            score = part["q"][:, head] @ k.T / np.sqrt(hd)
            score[np.triu_indices(n, 1)] = -np.inf
            e = np.exp(score - score.max(-1, keepdims=True))
            out[:, head] = e / e.sum(-1, keepdims=True) @ v
        x = x + out.reshape(n, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    x = norm(x, w["model.norm.weight"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def main():
    out = {}
    for name, extra in MODELS.items():
        config = {**BASE, **extra}
        tokens = [(i * 37 + 11) % config["vocab_size"] for i in range(70)]
        every = logits(config, tokens)
        out[name] = dict(config=config, tokens=tokens,
                         logits={str(i): [round(float(x), 5) for x in every[i]] for i in (0, 31, 32, 69)})
    print(json.dumps(out, separators=(",", ":")).replace('},"', '},\n"'))


if __name__ == "__main__":
    main()
