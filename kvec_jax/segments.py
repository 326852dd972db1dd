"""Attention of a few queries over the packed rows of one layer, or its tail; work follows the rows really there."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.online_softmax import LOWEST, Partial, attend_block, attend_blocks, empty
from kvec_jax.typing import Array

# Rows of a block of equal segments, or of the tail; one block is copied out at a time.
EQUAL_BLOCK = 512
# Ragged segments are cut into blocks of this many rows, and so many blocks are attended as one batched product.
RAGGED_BLOCK = 64
RAGGED_BATCH = 32


def attend_segments(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """The partial of every head's queries over its own segment of a layer.

    Args:
        queries: [B, K, M, D]; M counts the queries of a key-value head's group, for all new tokens.
        cache: Whose pool is attended. Rows of the batch may share a pool, see ``CompressedKV``.
        layer: int32 scalar, traced.
        oldest: int32 [B, M], first position that each query sees; ``None`` means all.
        scale: Factor on the logits.

    Returns:
        The partial of shape [B, K, M].
    """
    if cache.keys.shape[1] == 0:
        return empty(queries.shape[:-1], queries.shape[-1])
    if cache.pool_share > 1:
        return _attend_shared(queries, cache, layer, oldest, scale)
    if cache.segment_rows:
        return _attend_equal(queries, cache, layer, oldest, scale)
    return _attend_ragged(queries, cache, layer, oldest, scale)


def attend_tail(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """The partial over a layer's tail, see ``attend_segments``; work follows the longest in use, not the capacity."""
    B, K, _, D = queries.shape
    R = cache.tail_capacity
    block = min(EQUAL_BLOCK, R)
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


def _attend_shared(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """Rows of the batch that share a pool stand side by side, as more queries of one row: the pool is read once."""
    share = cache.pool_share
    oldest = None if oldest is None else oldest.reshape(-1, share * oldest.shape[1])
    owner = dataclasses.replace(cache, tail_length=cache.tail_length[::share])
    return apart(attend_segments(side_by_side(queries, share), owner, layer, oldest, scale), share)


def side_by_side(queries: Array, share: int) -> Array:
    """Queries [B, K, M, D] of rows of the batch that share a pool, as more of one row: [B / share, K, share * M, D]."""
    B, K, M, D = queries.shape
    return queries.reshape(B // share, share, K, M, D).swapaxes(1, 2).reshape(B // share, K, share * M, D)


def apart(partial: Partial, share: int) -> Partial:
    """The partial of queries that stood side by side, for each row of the batch again."""

    def split(x):
        rows, K, M = x.shape[:3]
        x = x.reshape(rows, K, share, M // share, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(rows * share, K, M // share, *x.shape[4:])

    return jax.tree.map(split, partial)


def _attend_equal(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """Every segment has ``segment_rows`` rows: plain batched products, up to the longest segment in use."""
    B, K = queries.shape[:2]
    S, scales = cache.segment_rows, cache.scales
    block = min(EQUAL_BLOCK, S)
    counts = lax.dynamic_index_in_dim(cache.counts, layer, 1, keepdims=False)  # [B, K]

    def slab(pool, start, *trailing):
        pool = pool.reshape(B, -1, K, S, *trailing)
        offsets = (0, layer, 0, start) + (0,) * len(trailing)
        return lax.dynamic_slice(pool, offsets, (B, 1, K, block, *trailing))[:, 0]

    def rows(start):
        keys, values = (slab(x, start, x.shape[-1]) for x in (cache.keys, cache.values))
        if scales is None:
            return keys, values
        by_row = (slab(x, start) for x in (scales.value_scale, scales.value_zero))
        return scales.keys(keys, *scales.of_layer(layer), queries.dtype), scales.values(values, *by_row, queries.dtype)

    def fetch(i):
        start = jnp.minimum(i * block, S - block)
        at = start + jnp.arange(block)
        mask = ((at >= i * block) & (at < counts[..., None]))[:, :, None]
        if oldest is not None:
            mask &= slab(cache.positions, start)[:, :, None] >= oldest[:, None, :, None]
        return *rows(start), mask

    return attend_blocks(queries, fetch, 0, -(-jnp.max(counts) // block), scale)


def _attend_ragged(queries: Array, cache: CompressedKV, layer: Array, oldest: Array | None, scale: float) -> Partial:
    """Split flash-decoding: blocks of all segments stand in one list, and are attended a batch at a time.

    A loop per segment would take as long as the longest; the list has as many blocks as there are rows to read.
    """
    B, K, M, D = queries.shape
    P, scales = cache.keys.shape[1], cache.scales
    pool_keys, pool_values = (x.reshape(B * P, x.shape[-1]) for x in (cache.keys, cache.values))
    counts, starts = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in (cache.counts, cache.starts))
    starts = (starts + P * jnp.arange(B)[:, None]).reshape(-1)
    counts = counts.reshape(-1)
    blocks = -(-counts // RAGGED_BLOCK)
    ends = jnp.cumsum(blocks)
    flat_queries = queries.reshape(B * K, M, D)

    def fetch(rows, segment):
        keys, values = pool_keys[rows], pool_values[rows]
        if scales is None:
            return keys, values
        by_segment = (x.reshape(B * K, D)[segment] for x in scales.of_layer(layer))
        by_row = (x.reshape(-1)[rows] for x in (scales.value_scale, scales.value_zero))
        return scales.keys(keys, *by_segment, queries.dtype), scales.values(values, *by_row, queries.dtype)

    def attend(i, partial):
        number = i * RAGGED_BATCH + jnp.arange(RAGGED_BATCH)
        segment = jnp.minimum(jnp.searchsorted(ends, number, side="right"), B * K - 1)
        offset = (number - (ends - blocks)[segment])[:, None] * RAGGED_BLOCK + jnp.arange(RAGGED_BLOCK)
        rows = jnp.minimum(starts[segment][:, None] + offset, B * P - 1)
        mask = ((number < ends[-1])[:, None] & (offset < counts[segment][:, None]))[:, None]
        if oldest is not None:
            mask &= cache.positions.reshape(-1)[rows][:, None] >= oldest[segment // K][..., None]
        part = attend_block(flat_queries[segment], *fetch(rows, segment), mask, scale)
        return _merge_into(partial, part, segment)

    start = empty((B * K, M), D)
    partial = lax.fori_loop(0, -(-ends[-1] // RAGGED_BATCH), attend, start)
    return jax.tree.map(lambda x: x.reshape(B, K, *x.shape[1:]), partial)


def _merge_into(partial: Partial, parts: Partial, segment: Array) -> Partial:
    """Adds blocks' partials [blocks, M] to those of the segments [segments, M] that they belong to."""
    maximum = jnp.maximum(partial.maximum, jnp.full_like(partial.maximum, LOWEST).at[segment].max(parts.maximum))
    old = jnp.exp(partial.maximum - maximum)
    new = jnp.exp(parts.maximum - maximum[segment])
    weighted = (partial.weighted * old[..., None]).at[segment].add(parts.weighted * new[..., None])
    return Partial(weighted, maximum, (partial.total * old).at[segment].add(parts.total * new))
