"""GGUF files of the Llama, Qwen2, Qwen3 and Gemma 3 architectures, as llama.cpp writes them.

They differ from the same models in Hugging Face's format: the rows of Llama's query and key matrices are interleaved,
Gemma's norms already contain their 1, and some of Gemma's settings aren't in the metadata.
"""

import functools
import math

import numpy as np

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.gguf_file import GgufFile
from kvec_jax.models.rope import Rope
from kvec_jax.models.weights import Part, Rules

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")

# Tokens that end a turn or a text, by name; only one of them is in the metadata as eos_token_id.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
_CONTROL = 3


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata.

    Raises:
        UnsupportedError: When the architecture, or something it asks for, isn't done here.
        LoadError: When the metadata lacks something or contradicts itself.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: unknown architecture {architecture!r}; known in GGUF: {', '.join(ARCHITECTURES)}"
        )
    try:
        return _config(file, architecture)
    except KeyError as error:
        raise LoadError(f"{file.path}: the metadata lacks {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise LoadError(f"{file.path}: {error}") from error


def gguf_rules(config: ModelConfig) -> Rules:
    """Which tensor of a GGUF file is which parameter."""
    unpermute_q = unpermute_k = None
    if config.model_type == "llama":
        unpermute_q = functools.partial(_halves_first, heads=config.num_attention_heads)
        unpermute_k = functools.partial(_halves_first, heads=config.num_key_value_heads)
    layer = {
        "attn_norm.weight": Part("input_norm"),
        "attn_q.weight": Part("q_proj", prepare=unpermute_q),
        "attn_k.weight": Part("k_proj", prepare=unpermute_k),
        "attn_v.weight": Part("v_proj"),
        "attn_q.bias": Part("q_bias"),
        "attn_k.bias": Part("k_bias"),
        "attn_v.bias": Part("v_bias"),
        "attn_q_norm.weight": Part("q_norm"),
        "attn_k_norm.weight": Part("k_norm"),
        "attn_output.weight": Part("o_proj"),
        "post_attention_norm.weight": Part("post_attention_norm"),
        "ffn_norm.weight": Part("mlp_norm"),
        "ffn_gate.weight": Part("gate_proj"),
        "ffn_up.weight": Part("up_proj"),
        "ffn_down.weight": Part("down_proj"),
        "post_ffw_norm.weight": Part("post_mlp_norm"),
    }
    table = {"token_embd.weight": (Part("embedding"),), "output_norm.weight": (Part("final_norm"),)}
    table |= {"output.weight": (Part("lm_head"),)}
    for name, part in layer.items():
        table["blk.{layer}." + name] = (Part("layers." + part.parameter, prepare=part.prepare),)
    return Rules(table, ignored=(r"rope_freqs\.weight",))


def _config(file: GgufFile, architecture: str) -> ModelConfig:
    metadata = file.metadata

    def get(key, default=None):
        return metadata.get(f"{architecture}.{key}", default)

    def need(key):
        return metadata[f"{architecture}.{key}"]

    _refuse(file, get)
    heads, width = need("attention.head_count"), need("embedding_length")
    head_dim = get("attention.key_length") or get("rope.dimension_count") or width // heads
    gemma = architecture == "gemma3"
    layers = need("block_count")
    rope = _rope(file, get, head_dim, 1_000_000.0 if gemma else 10_000.0)
    window = get("attention.sliding_window") if gemma else None
    return ModelConfig(
        model_type="gemma3_text" if gemma else architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=width,
        intermediate_size=need("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=need("context_length"),
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        hidden_act="gelu_tanh" if gemma else "silu",
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=gemma or architecture == "qwen3",
        post_norms=gemma,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        # Only Gemma 3 27B divides by something else than the head size, and the metadata doesn't say so.
        attention_scale=(width // heads) ** -0.5 if gemma and layers == 62 else None,
        rope=rope,
        local_rope=Rope(theta=get("rope.freq_base_swa", 10_000.0)) if gemma else None,
        sliding_window=window,
        local_layers=_local_layers(get, layers) if window else (),
        eos_token_ids=end_token_ids(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _refuse(file: GgufFile, get) -> None:
    """Raises for settings that change the computation in a way that isn't done here."""
    for key in ("expert_count", "attn_logit_softcapping", "final_logit_softcapping", "attention.scale"):
        if get(key):
            raise UnsupportedError(f"{file.path}: {key} = {get(key)!r} is not supported")
    if get("attention.value_length", get("attention.key_length")) != get("attention.key_length"):
        raise UnsupportedError(f"{file.path}: attention.value_length differs from attention.key_length")
    if get("attention.causal") is False:
        raise UnsupportedError(f"{file.path}: attention.causal = False is not supported")
    if not isinstance(get("attention.head_count_kv", 1), int) or not isinstance(get("attention.head_count", 1), int):
        raise UnsupportedError(f"{file.path}: layers with different numbers of heads are not supported")


def _local_layers(get, layers: int) -> tuple[int, ...]:
    """Gemma 3: every sixth layer sees everything, the others a window."""
    pattern = get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        return tuple(i for i, local in enumerate(pattern[:layers]) if local)
    return tuple(i for i in range(layers) if (i + 1) % pattern)


def _rope(file: GgufFile, get, head_dim: int, theta: float) -> Rope:
    theta = get("rope.freq_base", theta)
    fraction = get("rope.dimension_count", head_dim) / head_dim
    if (divisors := file.tensors.get("rope_freqs.weight")) is not None:
        # Llama 3's scaling, worked out by the converter: a divisor for each pair.
        factors = tuple(divisors.read(0, divisors.shape[0]).tolist())
        return Rope(theta=theta, kind="longrope", pair_factors=factors, fraction=fraction)
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0, 1):
        return Rope(theta=theta, fraction=fraction)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor, fraction=fraction)
    if kind == "yarn":
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=get("rope.scaling.original_context_length"),
            beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=0.1 * math.log(factor) + 1.0,
            fraction=fraction,
        )
    raise UnsupportedError(f"{file.path}: rope.scaling.type = {kind!r} is not supported")


def end_token_ids(metadata: dict) -> tuple[int, ...]:
    """The tokens that end a generation: those that the metadata names, then control tokens known to end a turn."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    known = [i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind == _CONTROL and text in _END_TOKENS]
    return tuple(dict.fromkeys(i for i in named + known if i is not None))


def _halves_first(rows: np.ndarray, *, heads: int) -> np.ndarray:
    """Rows [heads * D, in] with interleaved RoPE pairs, put in the order that the rotate-half form wants."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


__all__ = ["ARCHITECTURES", "config_from_gguf", "end_token_ids", "gguf_rules"]
