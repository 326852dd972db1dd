"""Attention of a few queries over what one layer of a compressed cache holds: its packed rows and its tail."""

import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.online_softmax import Partial, empty, merge
from kvec_jax.pallas.dispatch import choose
from kvec_jax.pallas.spans import Span
from kvec_jax.segments import apart, attend_segments, attend_tail, side_by_side
from kvec_jax.typing import Array, Implementation


def ragged_attention(
    queries: Array,
    cache: CompressedKV,
    layer: Array,
    oldest: Array | None = None,
    *,
    scale: float,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Partial:
    """The partial of every head's queries over its own segment of a layer and over the layer's tail.

    Each row is read once for all queries of its head, and no rows but those kept are; the cache is only read.

    Args:
        queries: [B, K, M, D]; M counts the queries of a key-value head's group, for all new tokens.
        cache: What is attended. Rows of the batch may share a pool, see ``CompressedKV``.
        layer: int32 scalar, traced.
        oldest: int32 [B, M], first position that each query sees; ``None`` means all.
        scale: Factor on the logits.
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted.

    Returns:
        The partial of shape [B, K, M]: products in the queries' type, sums in float32.

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> model = tiny_model()
        >>> _, cache = kv.prefill(model, jnp.arange(60)[None], jnp.array([60]), kv.StreamingLLM(16))
        >>> queries = jnp.ones((1, cache.num_kv_heads, 3, model.config.head_dim))
        >>> ragged_attention(queries, cache, jnp.int32(0), scale=0.1).total.shape
        (1, 2, 3)
    """
    name = choose("ragged_attention", implementation, **_refusals(queries, cache.keys))
    if name == "xla":
        partial = attend_segments(queries, cache, layer, oldest, scale)
        if cache.tail_capacity:
            partial = merge(partial, attend_tail(queries, cache, layer, oldest, scale))
        return partial

    def attend(queries, pool, tail):
        if pool is None and tail is None:
            return empty(queries.shape[:-1], queries.shape[-1])
        return _kernel(name).attend(queries, pool, tail, layer, scale, interpret)

    tail = (cache.tail_keys, cache.tail_values, _tail_span(cache, oldest)) if cache.tail_capacity else None
    share = cache.pool_share
    if share == 1:
        return attend(queries, _pool(cache, layer, oldest), tail)
    together = None if oldest is None else oldest.reshape(-1, share * oldest.shape[1])
    pooled = apart(attend(side_by_side(queries, share), _pool(cache, layer, together), None), share)
    return pooled if tail is None else merge(pooled, attend(queries, None, tail))


def _refusals(queries: Array, keys: Array) -> dict[str, str | None]:
    """For each kernel why it can't do this case; ``None`` if it can."""
    reason = None
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.float32, jnp.bfloat16):
        reason = f"expected float32 or bfloat16 queries and keys of one type, got {queries.dtype} and {keys.dtype}"
    of_mosaic = reason
    if reason is None and (keys.dtype != jnp.bfloat16 or keys.shape[-1] not in (64, 128, 256)):
        of_mosaic = f"expected bfloat16 and a head size of 64, 128 or 256, got {keys.dtype} and {keys.shape[-1]}"
    return dict(pallas_tpu=reason, pallas_gpu=reason, mosaic_gpu=of_mosaic)


def _kernel(name: str):
    """The module of a kernel."""
    if name == "pallas_tpu":
        from kvec_jax.pallas import ragged_attention_tpu as kernel
    elif name == "mosaic_gpu":
        from kvec_jax.pallas import ragged_attention_mosaic as kernel
    else:
        from kvec_jax.pallas import ragged_attention_triton as kernel
    return kernel


def _pool(cache: CompressedKV, layer: Array, oldest: Array | None) -> tuple[Array, Array, Span] | None:
    if cache.keys.shape[1] == 0:
        return None
    return cache.keys, cache.values, _pool_span(cache, layer, oldest)


def _pool_span(cache: CompressedKV, layer: Array, oldest: Array | None) -> Span:
    """The pool rows of a layer's segments. They lie in position order, so that a query's reach is a first row."""
    starts, counts = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in (cache.starts, cache.counts))
    most = cache.segment_rows or cache.keys.shape[1]
    if oldest is None:
        return Span(starts, starts + counts, None, most)
    seen = starts[..., None] + _rows_before(cache.positions, starts, counts, oldest, most)
    return Span(jnp.min(seen, axis=-1), starts + counts, seen, most)


def _tail_span(cache: CompressedKV, oldest: Array | None) -> Span:
    B, K = cache.tail_length.shape[0], cache.num_kv_heads
    last = jnp.broadcast_to(cache.tail_length[:, None], (B, K))
    if oldest is None:
        return Span(jnp.zeros((B, K), jnp.int32), last, None, cache.tail_capacity)
    first_position = cache.next_position - cache.tail_length
    seen = jnp.maximum(oldest - first_position[:, None], 0)
    seen = jnp.broadcast_to(seen[:, None], (B, K, oldest.shape[1]))
    return Span(jnp.min(seen, axis=-1), last, seen, cache.tail_capacity)


def _rows_before(positions: Array, starts: Array, counts: Array, oldest: Array, most: int) -> Array:
    """How many rows of each segment [B, K] come from positions before ``oldest`` [B, M]: int32 [B, K, M].

    Each step of the search looks at 64 rows at once, and leaves a 64th of the rows: a few gathers, not a loop.
    """
    before = jnp.zeros((*starts.shape, oldest.shape[1]), jnp.int32)
    row = jnp.arange(starts.shape[0])[:, None, None, None]
    while most:  # the answer is from ``before`` to ``before + most``
        stride = -(-most // 64)
        probe = before[..., None] + stride * jnp.arange(1, 65) - 1
        inside = probe < counts[..., None, None]
        at = jnp.where(inside, starts[..., None, None] + probe, 0)
        earlier = inside & (positions[row, at] < oldest[:, None, :, None])
        before += stride * jnp.sum(earlier, axis=-1, dtype=jnp.int32)
        most = stride - 1
    return before
