"""Kept rows in 8 or 4 bits: keys by channel, values by token, as both vary least that way (https://arxiv.org/abs/2402.02750).

A number x is stored as the integer nearest to (x - zero) / scale. Keys share zero and scale over the rows of a segment,
channel by channel; each row of values has its own. Attention restores the rows of a block when it comes to them; the
tail, which grows token by token, stays as it is.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_choice
from kvec_jax.errors import UnsupportedError
from kvec_jax.spread import on_mesh
from kvec_jax.typing import Array

CACHE_DTYPES = ("int8", "int4")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScales:
    """How to restore a pool's rows.

    Attributes:
        key_scale, key_zero: float32 [B, L, K, D].
        value_scale, value_zero: float16 [B, P].
        bits: Static. 8, or 4: then a byte holds channels d and d + D / 2, the first in its lower half.
    """

    key_scale: Array
    key_zero: Array
    value_scale: Array
    value_zero: Array
    bits: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def of_layer(self, layer: Array) -> tuple[Array, Array]:
        """Scale and zero of a layer's keys, each [B, K, D]."""
        scale, zero = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in (self.key_scale, self.key_zero))
        return scale, zero

    def keys(self, codes: Array, scale: Array, zero: Array, dtype) -> Array:
        """Keys [..., S, D] from their codes; ``scale`` and ``zero`` [..., D] are those of their segment."""
        return _restore(codes, scale[..., None, :], zero[..., None, :], self.bits, dtype)

    def values(self, codes: Array, scale: Array, zero: Array, dtype) -> Array:
        """Values [..., S, D] from their codes; ``scale`` and ``zero`` [..., S] are those of the rows."""
        return _restore(codes, scale[..., None], zero[..., None], self.bits, dtype)


def quantise(cache, dtype: str):
    """The cache with its kept rows stored in fewer bits; what comes after the prompt is not.

    Args:
        cache: A ``CompressedKV`` of any policy that chooses rows.
        dtype: ``"int8"`` or ``"int4"``.

    Returns:
        The ``CompressedKV``, for ``extend`` and ``decode`` like any other.

    Raises:
        ValueError: For another dtype, or a cache that is quantised already.
        UnsupportedError: For a cache of a form of its own.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> _, cache = kv.prefill(tiny_model(), jnp.arange(60)[None], jnp.array([60]), kv.SnapKV(32, window=8))
        >>> small = kv.quantise(cache, "int4")
        >>> small.keys.shape, small.nbytes < cache.nbytes / 2
        ((1, 256, 8), True)
    """
    from kvec_jax.checks import check_cache  # which needs this module

    check_cache(cache)
    check_choice("cache_dtype", dtype, CACHE_DTYPES)
    if cache.scales is not None:
        raise ValueError(f"cache_dtype: expected a cache that is not quantised yet, got {cache!r}")
    if cache.beyond is not None:
        raise UnsupportedError(f"cache_dtype: a cache with {type(cache.beyond).__name__} can't be quantised")
    return _quantise(cache, int(dtype.removeprefix("int")))


@functools.partial(jax.jit, static_argnames="bits")
@on_mesh
def _quantise(cache, bits: int):
    keys, values = (x.astype(jnp.float32) for x in (cache.keys, cache.values))
    low, high, segment = jax.vmap(_segment_range)(keys, cache.starts, cache.counts)
    key_scale, key_zero = _scale(low, high, bits)  # [B, L * K, D]
    value_scale, value_zero = (
        x.astype(jnp.float16) for x in _scale(jnp.min(values, axis=-1), jnp.max(values, axis=-1), bits)
    )
    row_scale, row_zero = (jnp.take_along_axis(x, segment[..., None], axis=1) for x in (key_scale, key_zero))
    shape = (*cache.counts.shape, keys.shape[-1])
    return dataclasses.replace(
        cache,
        keys=_codes(keys, row_scale, row_zero, bits),
        values=_codes(values, value_scale[..., None], value_zero[..., None], bits),
        scales=RowScales(
            key_scale=key_scale.reshape(shape),
            key_zero=key_zero.reshape(shape),
            value_scale=value_scale,
            value_zero=value_zero,
            bits=bits,
        ),
    )


def _segment_range(keys: Array, starts: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Smallest and largest key of each segment [L * K, D], and the segment of each row int32 [P]."""
    starts, counts = starts.reshape(-1), counts.reshape(-1)
    row = jnp.arange(keys.shape[0])
    # Of segments that start at the same row all but the last are empty.
    segment = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    used = (row < (starts + counts)[segment])[:, None]
    ranged = functools.partial(jnp.where, (counts == 0)[:, None], 0.0)
    sort = dict(segment_ids=segment, num_segments=starts.shape[0], indices_are_sorted=True)
    low = jax.ops.segment_min(jnp.where(used, keys, jnp.inf), **sort)
    high = jax.ops.segment_max(jnp.where(used, keys, -jnp.inf), **sort)
    return ranged(low), ranged(high), segment


def _scale(low: Array, high: Array, bits: int) -> tuple[Array, Array]:
    return (high - low) / (2**bits - 1), low


def _codes(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    scale, zero = scale.astype(jnp.float32), zero.astype(jnp.float32)
    steps = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    codes = jnp.clip(jnp.round(steps), 0, 2**bits - 1).astype(jnp.uint8)
    if bits == 8:
        return codes
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << 4)


def _restore(codes: Array, scale: Array, zero: Array, bits: int, dtype) -> Array:
    if bits == 4:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    return (codes.astype(jnp.float32) * scale.astype(jnp.float32) + zero.astype(jnp.float32)).astype(dtype)
