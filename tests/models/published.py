"""Families without golden files, in float64 numpy over the tensors of a Hugging Face folder.

Written from the published descriptions and apart from the library: rotations are complex numbers, attention is a loop
over query positions, and the RoPE scalings are worked out pair by pair.
"""

import math

import numpy as np


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turn(x, freqs, factor):
    """Multiplies dimension pairs (i, i + pairs) of ``x`` [T, heads, D] by ``factor * exp(1j * position * freq)``."""
    pairs = len(freqs)
    z = x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]
    z = z * factor * np.exp(1j * np.arange(len(x))[:, None, None] * np.asarray(freqs))
    return np.concatenate([z.real, z.imag, x[..., 2 * pairs :]], -1)


def attend(q, k, v, window):
    """[T, N, D] from q [T, N, D], k and v [T, K, D]."""
    out = np.zeros_like(q)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(q.shape[1]):
            head = n * k.shape[1] // q.shape[1]
            scores = k[first : t + 1, head] @ q[t, n] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[t, n] = weights / weights.sum() @ v[first : t + 1, head]
    return out


def forward(config: dict, tensors: dict, tokens, rotation, window=lambda layer: None) -> np.ndarray:
    """Logits [T, V].

    Args:
        config: ``config.json``.
        tensors: By their names on the hub.
        tokens: [T].
        rotation: ``rotation(layer)`` gives the frequencies and the attention factor, or ``None`` for no rotation.
        window: ``window(layer)`` gives the sliding window, or ``None``.
    """
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    N, eps = config["num_attention_heads"], config["rms_norm_eps"]
    K = config["num_key_value_heads"]
    D = config["hidden_size"] // N
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = {n.split(".", 3)[3]: a for n, a in w.items() if n.startswith(f"model.layers.{layer}.")}
        y = norm(x, p["input_layernorm.weight"], eps)
        if "self_attn.qkv_proj.weight" in p:
            fused = y @ p["self_attn.qkv_proj.weight"].T
            q, k, v = np.split(fused, [N * D, (N + K) * D], axis=-1)
        else:
            q, k, v = (y @ p[f"self_attn.{n}_proj.weight"].T + p.get(f"self_attn.{n}_proj.bias", 0) for n in "qkv")
        q, k, v = (a.reshape(len(tokens), -1, D) for a in (q, k, v))
        if (how := rotation(layer)) is not None:
            q, k = turn(q, *how), turn(k, *how)
        out = attend(q, k, v, window(layer)).reshape(len(tokens), -1)
        x = x + out @ p["self_attn.o_proj.weight"].T
        y = norm(x, p["post_attention_layernorm.weight"], eps)
        if "mlp.gate_up_proj.weight" in p:
            gate, up = np.split(y @ p["mlp.gate_up_proj.weight"].T, 2, axis=-1)
        else:
            gate, up = y @ p["mlp.gate_proj.weight"].T, y @ p["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp.down_proj.weight"].T
    x = norm(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def plain_frequencies(theta, rotated):
    return [theta ** (-2 * i / rotated) for i in range(rotated // 2)]


def yarn_frequencies(theta, dim, factor, original, fast=32.0, slow=1.0, truncate=True):
    """Pairs that turn more than ``fast`` times stay, those under ``slow`` are stretched, a ramp in between."""

    def border(turns):  # wavelength 2 pi theta^(2i/dim) = original / turns, solved for i
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = border(fast), border(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(dim - 1, high)
    out = []
    for i, plain in enumerate(plain_frequencies(theta, dim)):
        share = min(1.0, max(0.0, (i - low) / (high - low)))
        out.append(plain * (1 - share) + plain / factor * share)
    return out
