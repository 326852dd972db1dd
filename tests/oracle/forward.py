"""A decoder-only Transformer over one unpadded prompt, in float64, with plain T x T attention.

Written from the descriptions of Llama (https://arxiv.org/abs/2302.13971), Qwen2 and Qwen3
(https://arxiv.org/abs/2505.09388) and Gemma 3 (https://arxiv.org/abs/2503.19786).
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np


@dataclasses.dataclass
class Trace:
    """What a pass over T tokens shows; lists run over layers.

    ``logits`` [T, V]; ``queries`` and ``raw_queries`` (before RoPE, after any norm) [N, T, D]; ``keys`` (rotated),
    ``raw_keys`` and ``values`` [K, T, D]; ``attention`` [N, T, T]; ``output`` [N, D, M], the layer's W_O by head.
    """

    logits: np.ndarray
    queries: list
    raw_queries: list
    keys: list
    raw_keys: list
    values: list
    attention: list
    output: list


def weights(model) -> dict:
    """The parameters of a ``Transformer`` as float64 numpy, by name; layers' parameters keep their leading axis L."""
    names = [n for n in vars(model.layers) if hasattr(getattr(model.layers, n), "get_value")]
    tree = {n: getattr(model.layers, n) for n in names}
    tree |= {n: getattr(model, n) for n in ("embedding", "final_norm", "lm_head") if hasattr(model, n)}
    return {n: np.asarray(p.get_value()).astype(np.float64) for n, p in tree.items()}


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; rows with no finite entry give zeros."""
    top = np.max(x, axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1.0, total)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def frequencies(rope, head_dim: int) -> np.ndarray:
    """Rotation per position of each pair; ``llama3`` as the Llama 3.1 model card describes its scaling."""
    out = []
    for i in range(0, head_dim, 2):
        f = 1.0 / rope.theta ** (i / head_dim)
        if rope.kind == "linear":
            f /= rope.factor
        elif rope.kind == "llama3":
            turns = rope.original_max_position * f / (2 * math.pi)
            if turns < rope.low_freq_factor:
                f /= rope.factor
            elif turns <= rope.high_freq_factor:
                s = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                f = (1 - s) * f / rope.factor + s * f
        out.append(f)
    return np.array(out)


def rotate(x: np.ndarray, positions: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """Rotates the pairs (x_i, x_{i + D/2}) of ``x`` [heads, T, D] by position times frequency."""
    half = x.shape[-1] // 2
    phase = positions[:, None] * freqs[None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(phase) - b * np.sin(phase), b * np.cos(phase) + a * np.sin(phase)], -1)


def visible(config, layer: int, total: int, kept=None, prompt: int | None = None) -> np.ndarray:
    """Who may attend to whom, bool [K, total, total]: causal, the layer's window, and ``kept`` for later tokens.

    ``kept[layer][head]`` are the prompt positions that tokens from ``prompt`` on may still see.
    """
    rows, columns = np.arange(total)[:, None], np.arange(total)[None]
    allowed = columns <= rows
    if layer in config.local_layers:
        allowed = allowed & (rows - columns < config.sliding_window)
    allowed = np.repeat(allowed[None], config.num_key_value_heads, axis=0)
    if kept is not None:
        for head in range(config.num_key_value_heads):
            gone = np.ones(total, bool)
            gone[np.asarray(kept[layer][head], int)] = False
            gone[prompt:] = False
            allowed[head, prompt:, gone] = False
    return allowed


def attend(q, k, v, scale: float, allowed):
    """Softmax attention; query head n reads key-value head n // G. Returns output [N, T, D], weights [N, T, T]."""
    groups = q.shape[0] // k.shape[0]
    out, weights = np.zeros_like(q), np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    for n in range(q.shape[0]):
        h = n // groups
        weights[n] = softmax(np.where(allowed[h], q[n] @ k[h].T * scale, -np.inf))
        out[n] = weights[n] @ v[h]
    return out, weights


def activation(name: str, x: np.ndarray) -> np.ndarray:
    """SiLU, or the tanh form of GELU."""
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def forward(config, w: dict, tokens, kept=None, prompt: int | None = None, allow=None) -> Trace:
    """Runs ``tokens`` [T]; with ``kept`` and ``prompt``, tokens from ``prompt`` on see only what a cache kept.

    ``allow(layer, queries, keys, allowed)`` may restrict who sees whom further.
    """
    tokens = np.asarray(tokens)
    positions, eps, D = np.arange(len(tokens)), config.rms_norm_eps, config.head_dim
    hidden = w["embedding"][tokens] * config.embedding_scale
    trace = Trace(None, [], [], [], [], [], [], [])

    def heads(x):
        return x.reshape(len(tokens), -1, D).transpose(1, 0, 2)

    for layer in range(config.num_hidden_layers):
        p = {n: a[layer] for n, a in w.items() if n not in ("embedding", "final_norm", "lm_head")}
        x = rms_norm(hidden, p["input_norm"], eps)
        q, k, v = (heads(x @ p[f"{n}_proj"] + p.get(f"{n}_bias", 0.0)) for n in "qkv")
        if config.qk_norm:
            q, k = rms_norm(q, p["q_norm"], eps), rms_norm(k, p["k_norm"], eps)
        local = layer in config.local_layers and config.local_rope is not None
        freqs = frequencies(config.local_rope if local else config.rope, D)
        turned_q, turned_k = rotate(q, positions, freqs), rotate(k, positions, freqs)
        allowed = visible(config, layer, len(tokens), kept, prompt)
        if allow is not None:
            allowed = allow(layer, turned_q, turned_k, allowed)
        out, attention = attend(turned_q, turned_k, v, config.scale, allowed)
        out = out.transpose(1, 0, 2).reshape(len(tokens), -1) @ p["o_proj"]
        if config.post_norms:
            out = rms_norm(out, p["post_attention_norm"], eps)
        hidden = hidden + out
        x = rms_norm(hidden, p["mlp_norm"], eps)
        out = (activation(config.hidden_act, x @ p["gate_proj"]) * (x @ p["up_proj"])) @ p["down_proj"]
        if config.post_norms:
            out = rms_norm(out, p["post_mlp_norm"], eps)
        hidden = hidden + out
        trace.queries.append(turned_q), trace.raw_queries.append(q)
        trace.keys.append(turned_k), trace.raw_keys.append(k), trace.values.append(v)
        trace.attention.append(attention)
        trace.output.append(p["o_proj"].reshape(config.num_attention_heads, D, -1))
    head = w["embedding"] if config.tie_word_embeddings else w["lm_head"]
    trace.logits = rms_norm(hidden, w["final_norm"], eps) @ head.T
    return trace


def hugging_face(folder) -> tuple[SimpleNamespace, dict]:
    """Configuration and weights of a Llama, Mistral, Qwen2 or Qwen3 checkpoint, read without the library."""
    from safetensors.numpy import load_file

    folder = Path(folder)
    c = json.loads((folder / "config.json").read_text())
    r = c.get("rope_parameters") or {"rope_theta": c["rope_theta"], "rope_type": "default"}
    rope = SimpleNamespace(
        theta=r["rope_theta"],
        kind=r["rope_type"],
        factor=r.get("factor", 1.0),
        low_freq_factor=r.get("low_freq_factor", 1.0),
        high_freq_factor=r.get("high_freq_factor", 4.0),
        original_max_position=r.get("original_max_position_embeddings", 8192),
    )
    config = SimpleNamespace(**c)
    config.rope, config.local_rope, config.local_layers, config.sliding_window = rope, None, (), None
    config.head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    config.scale, config.embedding_scale = config.head_dim**-0.5, 1.0
    config.qk_norm, config.post_norms = c["model_type"] == "qwen3", False
    return config, _rename(load_file(folder / "model.safetensors"), c)


def _rename(tensors: dict, config: dict) -> dict:
    """Checkpoint tensors under the names of ``weights``; matrices turned to [in, out]."""
    tensors = {n.removeprefix("model."): t.astype(np.float64) for n, t in tensors.items()}
    w = {"embedding": tensors["embed_tokens.weight"], "final_norm": tensors["norm.weight"]}
    w["lm_head"] = tensors.get("lm_head.weight", w["embedding"])
    names = {"input_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
    names |= {f"{n}_proj": f"self_attn.{n}_proj.weight" for n in "qkvo"}
    names |= {f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"}
    names |= {f"{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"}
    names |= {f"{n}_proj": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    for ours, theirs in names.items():
        if f"layers.0.{theirs}" in tensors:
            stack = [tensors[f"layers.{i}.{theirs}"] for i in range(config["num_hidden_layers"])]
            w[ours] = np.stack([t.T if ours.endswith("_proj") else t for t in stack])
    return w
