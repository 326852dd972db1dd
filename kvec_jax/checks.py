"""Checks of what users pass to the steps; each raises at the call, with what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvec_jax.cache import CompressedKV
from kvec_jax.errors import UnsupportedError
from kvec_jax.forms import Driven, Form
from kvec_jax.models.config import ModelConfig
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.base import Policy
from kvec_jax.typing import Array


def check_model(model) -> None:
    """Raises unless ``model`` is a ``Transformer``."""
    if not isinstance(model, Transformer):
        raise TypeError(f"model: expected a Transformer, such as lm.model of a loaded lm, got {type(model).__name__}")


def check_cache(cache) -> None:
    """Raises unless ``cache`` is a ``CompressedKV``."""
    if not isinstance(cache, CompressedKV):
        raise TypeError(f"cache: expected a CompressedKV, which prefill gives, got {type(cache).__name__}")


def check_policy(policy, mesh: Mesh | None = None) -> None:
    """Raises unless ``policy`` is a ``Policy``, or one with a form of its own where there is no ``mesh``."""
    if isinstance(policy, Driven):
        raise UnsupportedError(
            f"policy: {policy.name!r} works with LanguageModel.generate only, which drives its steps from the host; "
            "expected a Policy such as kvec_jax.SnapKV(256)"
        )
    if not isinstance(policy, Policy | Form):
        raise TypeError(f"policy: expected a Policy such as kvec_jax.SnapKV(256), got {policy!r}")
    check_choosing(policy, mesh)


def check_choosing(policy, mesh: Mesh | None) -> None:
    """Raises for policies that can't work on a ``mesh``."""
    if mesh is not None and not isinstance(policy, Policy):
        raise UnsupportedError(f"policy: only policies that choose rows work on a mesh, and {policy.name!r} doesn't")


def check_same_mesh(model: Transformer, cache: CompressedKV) -> None:
    """Raises unless ``cache`` lies where ``model`` does."""
    if model.mesh != cache.mesh:
        raise ValueError(f"cache: expected one on the model's mesh, {model.mesh}, got one on {cache.mesh}")


def check_tokens(config: ModelConfig, tokens, lengths) -> tuple[Array, Array]:
    """Checks a right-padded batch [B, T] and its lengths [B]; returns both as int32 arrays."""
    tokens = check_token_array(tokens)
    B, T = tokens.shape
    lengths = check_lengths(lengths, B, 1, T)
    check_token_ids(config, tokens)
    return tokens, lengths


def check_token_array(tokens) -> Array:
    """Checks that ``tokens`` are integers [rows, columns], at least one of each."""
    tokens = _as_array("tokens", tokens)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens: expected integers of shape [B, T], got {tokens.dtype} {list(tokens.shape)}")
    if 0 in tokens.shape:
        raise ValueError(f"tokens: expected at least one row and one token, got shape {list(tokens.shape)}")
    return jnp.asarray(tokens, jnp.int32)


def check_token_ids(config: ModelConfig, tokens: Array) -> None:
    """Raises unless all tokens are in the vocabulary."""
    _check_range("tokens", tokens, 0, config.vocab_size - 1)


def check_lengths(lengths, batch: int, low: int, high: int) -> Array:
    """Checks integers [batch] from ``low`` to ``high``."""
    lengths = _as_array("lengths", lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths: expected {batch} integers, got {lengths.dtype} {list(lengths.shape)}")
    _check_range("lengths", lengths, low, high)
    return jnp.asarray(lengths, jnp.int32)


def _as_array(name: str, values) -> Array | np.ndarray:
    if isinstance(values, jax.Array):
        return values
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise ValueError(f"{name}: expected integers, got {values!r}") from error


def _check_range(name: str, values: Array, low: int, high: int) -> None:
    if isinstance(values, jax.core.Tracer):  # under jit only shapes can be checked
        return
    values = np.asarray(values)
    if values.min() < low or values.max() > high:
        raise ValueError(f"{name}: expected {low} to {high}, got {values.min()} to {values.max()}")
