"""Attention of new tokens over one layer of a compressed cache, and over one another."""

import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.online_softmax import Partial, attend_block, attend_blocks, finish, merge
from kvec_jax.ragged_attention import ragged_attention
from kvec_jax.typing import Array, Implementation

KEY_BLOCK = 512


def cache_attention(
    queries: Array,
    keys: Array,
    values: Array,
    cache: CompressedKV,
    layer: Array,
    *,
    scale: float,
    reach: Array | None = None,
    more: Partial | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Array:
    """Attention of new tokens over one layer of a compressed cache (its packed rows and its tail) and over one another.

    The cache is only read. That the new tokens are not in its tail yet keeps the tail out of the loop over the layers:
    they are added once, for all layers.

    Args:
        queries: [B, N, Q, D], the first at each row's ``cache.next_position``.
        keys: [B, K, Q, D] of the new tokens.
        values: [B, K, Q, D].
        cache: Whose rows are attended.
        layer: int32 scalar, traced.
        scale: Factor on the logits.
        reach: int32 scalar, traced: how many tokens back a query sees, itself included; ``None`` means all.
        more: The partial [B, K, G * Q] over what lies beyond pool and tail, if anything does.
        implementation: Of ``ragged_attention``, see ``kvec_jax.Implementations``.
        interpret: Whether its kernel is interpreted.

    Returns:
        [B, N, Q, D] in the queries' dtype.
    """
    B, N, Q, D = queries.shape
    K = cache.num_kv_heads
    grouped = queries.reshape(B, K, (N // K) * Q, D)
    steps = jnp.tile(jnp.arange(Q), N // K)  # which of the new tokens a grouped query belongs to
    oldest = None if reach is None else cache.next_position[:, None] + steps - reach + 1  # [B, G * Q]
    partial = ragged_attention(
        grouped, cache, layer, oldest, scale=scale, implementation=implementation, interpret=interpret
    )
    if more is not None:
        partial = merge(partial, more)
    out, _ = finish(_attend_new(partial, grouped, keys, values, steps, reach, scale))
    return out.astype(queries.dtype).reshape(B, N, Q, D)


def _attend_new(
    partial: Partial, queries: Array, keys: Array, values: Array, steps: Array, reach: Array | None, scale: float
) -> Partial:
    """Adds the new tokens themselves, each of which sees those up to itself."""
    Q = keys.shape[2]
    block = min(KEY_BLOCK, Q)

    def fetch(i):
        start = jnp.minimum(i * block, Q - block)
        at = start + jnp.arange(block)
        mask = (at >= i * block) & (at <= steps[:, None])
        if reach is not None:
            mask &= at > steps[:, None] - reach
        return _rows(keys, start, block), _rows(values, start, block), mask

    if Q == block:  # no loop for the one token of a decoding step
        return merge(partial, attend_block(queries, *fetch(0), scale))
    return attend_blocks(queries, fetch, 0, -(-Q // block), scale, partial)


def _rows(x: Array, start: Array, count: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, count, axis=2)
