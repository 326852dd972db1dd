"""RoPE settings in Hugging Face's ``config.json``, old style (``rope_theta``, ``rope_scaling``) and new.

Frequencies and attention factors are those that transformers computes from the same settings.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.rope import Rope

_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"},
}


def rope_from_hf(
    settings: Mapping[str, Any],
    *,
    theta: float,
    layer_type: str = "full_attention",
    context: int,
    partial: bool = False,
) -> Rope:
    """The rotation of the layers of one type.

    Args:
        settings: ``config.json``.
        theta: Base where the settings are silent.
        layer_type: Which entry counts where ``rope_parameters`` has one for each type of layer.
        context: The context in use, which decides between LongRoPE's two sets of frequencies.
        partial: Whether the family can rotate a part of each head.

    Raises:
        UnsupportedError: For a kind or a setting that isn't known here.
        LoadError: When a setting is missing or has the wrong type.
    """
    values = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise LoadError(f"rope_parameters: expected an object, got {values!r}")
    if layer_type in values:
        values = values[layer_type]
    kind = values.get("rope_type", values.get("type", "default"))
    if settings.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its names in older files
    if kind not in _KEYS:
        raise UnsupportedError(f"rope_type = {kind!r} is not supported; known: {', '.join(_KEYS)}")
    if unknown := sorted(key for key in values if key not in _KEYS[kind] | _COMMON and values[key] is not None):
        raise UnsupportedError(f"the {kind} RoPE setting {unknown[0]} = {values[unknown[0]]!r} is not supported")
    fraction = values.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    if fraction != 1 and not partial:
        raise UnsupportedError(f"partial_rotary_factor = {fraction!r} is not supported for this family")
    base = values.get("rope_theta") or settings.get("rope_theta") or theta
    try:
        scaling = _SCALINGS[kind](values, settings, context) if kind in _SCALINGS else {}
        return Rope(theta=float(base), kind=kind, fraction=fraction, **scaling)
    except KeyError as error:
        raise LoadError(f"the {kind} RoPE settings lack {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise LoadError(f"the {kind} RoPE settings are wrong: {error}") from error


def _linear(values, settings, context) -> dict:
    return dict(factor=float(values["factor"]))


def _llama3(values, settings, context) -> dict:
    return dict(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position=int(values["original_max_position_embeddings"]),
    )


def _yarn(values, settings, context) -> dict:
    longest = settings["max_position_embeddings"]
    original = values.get("original_max_position_embeddings") or longest
    factor = float(values.get("factor") or longest / original)
    attention = values.get("attention_factor")
    if attention is None:
        mscale, over = values.get("mscale"), values.get("mscale_all_dim")
        attention = _mscale(factor, mscale) / _mscale(factor, over) if mscale and over else _mscale(factor, 1.0)
    return dict(
        factor=factor,
        original_max_position=int(original),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=float(attention),
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(values, settings, context) -> dict:
    longest = settings["max_position_embeddings"]
    stated = settings.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = stated or longest
    factor = longest / stated if stated else float(values.get("factor") or 1.0)
    attention = values.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    pairs = values["long_factor"] if context > original else values["short_factor"]
    return dict(pair_factors=tuple(float(x) for x in pairs), attention_factor=float(attention))


_SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


__all__ = ["rope_from_hf"]
