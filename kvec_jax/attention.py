"""Attention of a prompt over itself, and of new tokens over a compressed cache.

Both are blockwise: no T x T matrix exists, and blocks that no query sees are not touched.
"""

import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.online_softmax import Partial, attend_block, attend_blocks, finish, merge
from kvec_jax.segments import attend_segments
from kvec_jax.typing import Array

QUERY_BLOCK = 256
KEY_BLOCK = 512


def prompt_attention(
    queries: Array, keys: Array, values: Array, lengths: Array, *, scale: float, reach: Array | None = None
) -> Array:
    """Causal attention of a right-padded prompt over itself.

    Args:
        queries: [B, N, T, D].
        keys: [B, K, T, D].
        values: [B, K, T, D].
        lengths: int32 [B], real tokens of each row. What a padded query gives is of no meaning.
        scale: Factor on the logits.
        reach: int32 scalar, traced: how many tokens back a query sees, itself included; ``None`` means all.

    Returns:
        [B, N, T, D] in the queries' dtype.
    """
    B, N, T, D = queries.shape
    K = keys.shape[1]
    G = N // K
    query_block, key_block = min(QUERY_BLOCK, T), min(KEY_BLOCK, T)
    blocks = -(-T // query_block)
    # Rows of one key-value head's query group lie together, so that each block of keys is read once for all of them.
    queries = _pad_axis(queries.reshape(B, K, G, T, D), 3, blocks * query_block)
    longest = jnp.max(lengths)

    def attend(i):
        top = i * query_block
        mine = lax.dynamic_slice_in_dim(queries, top, query_block, axis=3).reshape(B, K, G * query_block, D)
        positions = jnp.tile(top + jnp.arange(query_block), G)

        def fetch(j):
            start = jnp.minimum(j * key_block, T - key_block)
            at = start + jnp.arange(key_block)
            mask = (at >= j * key_block) & (at <= positions[:, None])
            if reach is not None:
                mask &= at > positions[:, None] - reach
            return _rows(keys, start, key_block), _rows(values, start, key_block), mask

        bottom = jnp.minimum(top + query_block, longest)
        first = 0 if reach is None else jnp.maximum(top - reach + 1, 0) // key_block
        last = jnp.where(top < longest, -(-bottom // key_block), 0)
        out, _ = finish(attend_blocks(mine, fetch, first, last, scale))
        return out.astype(queries.dtype).reshape(B, K, G, query_block, D)

    out = lax.map(attend, jnp.arange(blocks))  # [blocks, B, K, G, query_block, D]
    return jnp.moveaxis(out, 0, 3).reshape(B, N, blocks * query_block, D)[:, :, :T]


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

    Returns:
        [B, N, Q, D] in the queries' dtype.
    """
    B, N, Q, D = queries.shape
    K = cache.num_kv_heads
    grouped = queries.reshape(B, K, (N // K) * Q, D)
    steps = jnp.tile(jnp.arange(Q), N // K)  # which of the new tokens a grouped query belongs to
    oldest = None if reach is None else cache.next_position[:, None] + steps - reach + 1  # [B, G * Q]
    partial = attend_segments(grouped, cache, layer, oldest, scale)
    if cache.tail_capacity:
        partial = merge(partial, _attend_tail(grouped, cache, layer, oldest, scale))
    if more is not None:
        partial = merge(partial, more)
    out, _ = finish(_attend_new(partial, grouped, keys, values, steps, reach, scale))
    return out.astype(queries.dtype).reshape(B, N, Q, D)


def _attend_tail(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """The partial over the tail; work follows the longest tail in use, not its capacity."""
    B, K, _, D = queries.shape
    R = cache.tail_capacity
    block = min(KEY_BLOCK, R)
    first_position = cache.next_position - cache.tail_length

    def slab(tail, start):
        return lax.dynamic_slice(tail, (layer, 0, 0, start, 0), (1, B, K, block, D))[0]

    def fetch(i):
        start = jnp.minimum(i * block, R - block)
        at = start + jnp.arange(block)
        mask = ((at >= i * block) & (at < cache.tail_length[:, None]))[:, None, None]
        if oldest is not None:
            mask &= (first_position[:, None, None] + at >= oldest[..., None])[:, None]
        return slab(cache.tail_keys, start), slab(cache.tail_values, start), mask

    return attend_blocks(queries, fetch, 0, -(-jnp.max(cache.tail_length) // block), scale)


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


def _pad_axis(x: Array, axis: int, size: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)
