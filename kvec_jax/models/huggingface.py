"""Hugging Face's ``config.json``, and the names of the tensors beside it, for every family that is known here.

A configuration that asks for something that isn't done here is refused: a model never runs wrong. To add a family,
add it to ``FAMILIES``; what it needs that no other has goes into ``ModelConfig`` and ``Block``.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.hf_rope import rope_from_hf
from kvec_jax.models.weights import Part, Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What every model of a family has in common, and the values that its files may leave out.

    Attributes:
        qkv_bias, qk_norm: As in ``ModelConfig`` (``attention_bias``, ``qk_norm``).
        gemma: Gemma's norms, embedding scale and local layers.
        partial_rotary: Whether a part of each head may be rotated.
        theta: Base of RoPE.
        defaults: What a missing key in ``config.json`` means.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    partial_rotary: bool = False
    theta: float = 10_000.0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA3_DEFAULTS = dict(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)

FAMILIES = {
    "gemma3": Family(gemma=True, qk_norm=True, theta=1e6, defaults=_GEMMA3_DEFAULTS),
    "gemma3_text": Family(gemma=True, qk_norm=True, theta=1e6, defaults=_GEMMA3_DEFAULTS),
    "llama": Family(),
    "mistral": Family(defaults=dict(sliding_window=4096)),
    "phi3": Family(
        partial_rotary=True,
        defaults=dict(original_max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None),
    ),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, defaults=dict(head_dim=128)),
    "smollm3": Family(theta=2e6, defaults=dict(tie_word_embeddings=True)),
}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Settings that change the computation in a way that isn't done here, unless they are absent, null, false or zero.
_REFUSED = (
    "add_cross_attention",
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "is_encoder_decoder",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "use_bidirectional_attention",
    "use_mrope",
)


def config_from_hf(
    config_json: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    max_context: int | None = None,
) -> ModelConfig:
    """The configuration in ``config.json``, as transformers 5 or older versions write it.

    Args:
        config_json: Its content; of a Gemma 3 with vision, the text part is taken.
        generation_config: Content of ``generation_config.json``, whose end tokens come first.
        max_context: Shortens the context.

    Raises:
        UnsupportedError: When the family, or something it asks for, isn't done here; names the key and the value.
        LoadError: When a key is missing or its value makes no sense.

    Example:
        >>> config_from_hf({"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        ...                 "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": "silu",
        ...                 "max_position_embeddings": 512}).head_dim
        16
    """
    model_type = config_json.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedError(f"unknown architecture model_type = {model_type!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    settings = dict(config_json)
    if "text_config" in settings:
        text = settings.pop("text_config")
        shared = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
        outer = {key: settings[key] for key in shared if key in settings}
        settings = {**outer, **text, "model_type": "gemma3_text"}
    settings = {**family.defaults, **settings}
    _refuse(settings)
    try:
        config = _config(settings, family, generation_config or {}, max_context)
    except KeyError as error:
        raise LoadError(f"the configuration lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"the configuration is wrong: {error}") from error
    return config if max_context is None else config.with_context(max_context)


def hf_rules(config: ModelConfig) -> Rules:
    """Which tensor of the safetensors files is which parameter."""
    gemma = config.post_norms
    one_plus = _one_plus if gemma else None
    D, F = config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
    norms = {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_attention_norm" if gemma else "mlp_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
    }
    if not gemma:
        del norms["pre_feedforward_layernorm"], norms["post_feedforward_layernorm"]
    layer = {f"{name}.weight": (Part(parameter, prepare=one_plus),) for name, parameter in norms.items()}
    for name in ("q", "k", "v"):
        layer[f"self_attn.{name}_proj.bias"] = (Part(f"{name}_bias"),)
    if config.model_type == "phi3":
        layer["self_attn.qkv_proj.weight"] = _split(("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        layer["mlp.gate_up_proj.weight"] = _split(("gate_proj", F), ("up_proj", F))
    else:
        layer |= {f"self_attn.{name}_proj.weight": (Part(f"{name}_proj"),) for name in ("q", "k", "v")}
        layer |= {f"mlp.{name}_proj.weight": (Part(f"{name}_proj"),) for name in ("gate", "up")}
    layer["self_attn.o_proj.weight"] = (Part("o_proj"),)
    layer["mlp.down_proj.weight"] = (Part("down_proj"),)
    table: dict[str, tuple[Part, ...]] = {
        "embed_tokens.weight": (Part("embedding"),),
        "norm.weight": (Part("final_norm", prepare=one_plus),),
        "lm_head.weight": (Part("lm_head"),),
    }
    for name, parts in layer.items():
        stacked = tuple(dataclasses.replace(part, parameter=f"layers.{part.parameter}") for part in parts)
        table[f"layers.{{layer}}.{name}"] = stacked
    ignored = [r".*rotary_emb\.inv_freq"]
    if config.tie_word_embeddings:
        ignored.append(r"lm_head\.weight")  # some files hold the embedding twice
    if gemma:
        ignored.append(r"(vision_tower|multi_modal_projector)\..*")
    prefix = r"model\.language_model\.|language_model\.model\.|language_model\.|model\."
    return Rules(table, ignored=tuple(ignored), prefix=prefix)


def _config(settings, family: Family, generation, max_context: int | None) -> ModelConfig:
    width, heads, layers = (settings[k] for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = settings.get("head_dim") or _divide(width, heads)
    longest = settings["max_position_embeddings"]
    context = longest if max_context is None else min(max_context, longest)
    act = settings["hidden_activation" if family.gemma else "hidden_act"]
    if act not in _ACTIVATIONS:
        raise UnsupportedError(f"hidden_act = {act!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    no_rope = _no_rope_layers(settings, layers)
    window, local = _local_layers(settings, layers, longest, no_rope)
    rope = rope_from_hf(settings, theta=family.theta, context=context, partial=family.partial_rotary)
    if rope.kind == "yarn":
        # Qwen's instructions for long texts add the scaling and leave the context as it was.
        longest = max(longest, int(rope.factor * rope.original_max_position))
    return ModelConfig(
        model_type=settings["model_type"],
        vocab_size=settings["vocab_size"],
        hidden_size=width,
        intermediate_size=settings["intermediate_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        hidden_act=_ACTIVATIONS[act],
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        attention_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        embedding_scale=math.sqrt(width) if family.gemma else 1.0,
        attention_scale=float(settings["query_pre_attn_scalar"]) ** -0.5 if family.gemma else None,
        rope=rope,
        local_rope=_local_rope(settings, context) if family.gemma else None,
        sliding_window=window,
        local_layers=local,
        no_rope_layers=no_rope,
        eos_token_ids=_end_tokens(settings, generation),
        bos_token_id=settings.get("bos_token_id"),
    )


def _refuse(settings) -> None:
    for key in _REFUSED:
        # Qwen2 always has the biases that we know of; the key is not read for it.
        if settings.get(key) and not (key == "attention_bias" and settings["model_type"] == "qwen2"):
            raise UnsupportedError(f"{key} = {settings[key]!r} is not supported")


def _divide(width: int, heads: int) -> int:
    if width % heads:
        raise LoadError(f"hidden_size ({width}) is not a multiple of num_attention_heads ({heads})")
    return width // heads


def _no_rope_layers(settings, layers: int) -> tuple[int, ...]:
    """SmolLM3: ``no_rope_layers`` has a 0, against its name, where a layer does not rotate."""
    if settings["model_type"] != "smollm3":
        return ()
    rotates = settings.get("no_rope_layers")
    if rotates is None:
        interval = settings.get("no_rope_layer_interval", 4)
        rotates = [(i + 1) % interval for i in range(layers)]
    if len(rotates) != layers:
        raise LoadError(f"no_rope_layers: expected {layers} entries, got {len(rotates)}")
    return tuple(i for i, rotated in enumerate(rotates) if not rotated)


def _local_layers(settings, layers: int, longest: int, no_rope) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers that have it; none where it is not shorter than the context."""
    window, model_type = settings.get("sliding_window"), settings["model_type"]
    optional = model_type in ("qwen2", "qwen3", "smollm3")
    if model_type == "llama" or not window or (optional and not settings.get("use_sliding_window")):
        return None, ()
    if model_type in ("mistral", "phi3"):
        local = range(layers)
    elif (types := settings.get("layer_types")) is not None:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown or len(types) != layers:
            raise UnsupportedError(f"layer_types = {types!r} is not supported for {layers} layers")
        local = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    elif model_type == "smollm3":
        local = no_rope
    elif model_type in ("qwen2", "qwen3"):
        local = range(settings.get("max_window_layers", 28), layers)
    else:
        pattern = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
        local = [i for i in range(layers) if (i + 1) % pattern]
    local = tuple(local) if window < longest else ()
    return (window, local) if local else (None, ())


def _local_rope(settings, context: int):
    """Gemma 3's local layers have a base of their own and no scaling."""
    own = settings.get("rope_parameters") or {}
    if "sliding_attention" in own:
        return rope_from_hf(settings, theta=1e4, layer_type="sliding_attention", context=context)
    base = settings.get("rope_local_base_freq") or 1e4
    return rope_from_hf({"rope_theta": base}, theta=1e4, context=context)


def _end_tokens(settings, generation) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    found = settings.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _split(*sizes: tuple[str, int]) -> tuple[Part, ...]:
    """Parts of a fused tensor, from top to bottom."""
    parts, start = [], 0
    for parameter, rows in sizes:
        parts.append(Part(parameter, rows=(start, start + rows)))
        start += rows
    return tuple(parts)


def _one_plus(weight: np.ndarray) -> np.ndarray:
    """Gemma multiplies by ``1 + weight``; in float32, where the sum is exact enough."""
    return weight.astype(np.float32) + 1.0


__all__ = ["FAMILIES", "Family", "config_from_hf", "hf_rules"]
