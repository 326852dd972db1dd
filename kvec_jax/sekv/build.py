"""Makes SeKV's memory: summaries, factors and exact rows, from the keys and values of a whole prompt."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax import host
from kvec_jax.pool import Pool
from kvec_jax.sekv.factors import factorize
from kvec_jax.sekv.head import ZoomHead, route_norms
from kvec_jax.sekv.memory import SpanMemory
from kvec_jax.sekv.plan import Limits
from kvec_jax.sekv.spans import Spans
from kvec_jax.select import indices_of
from kvec_jax.typing import Array


def summarize(rows: Array, weights: Array) -> Array:
    """Weighted means of the rows of spans (paper, eq. 4).

    Args:
        rows: [B, K, S, max_span, D].
        weights: float32 [B, S, max_span], as ``span_weights`` gives them.

    Returns:
        float32 [B, K, S, D].
    """
    return jnp.einsum("BKSJD,BSJ->BKSD", rows.astype(jnp.float32), weights)


def span_weights(surprisal: Array, spans: Spans) -> Array:
    """Share of each token in its span's surprisal, float32 [B, S, max_span]; even where nothing surprised."""
    B, S, J = spans.members.shape
    real = jnp.arange(J) < spans.counts[..., None]
    at = jnp.minimum(spans.members, surprisal.shape[1] - 1).reshape(B, -1)
    weights = jnp.where(real, jnp.take_along_axis(surprisal, at, axis=1).reshape(B, S, J), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    even = real / jnp.maximum(spans.counts, 1)[..., None]
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), even)


def gather_spans(rows: Array, spans: Spans) -> Array:
    """The rows [B, K, T, D] of every span, [B, K, S, max_span, D], zeros beyond a span's count."""
    B, K, T, D = rows.shape
    S, J = spans.members.shape[1:]
    at = jnp.minimum(spans.members, T - 1).reshape(B, 1, -1, 1)
    found = jnp.take_along_axis(rows, at, axis=2).reshape(B, K, S, J, D)
    return jnp.where((jnp.arange(J) < spans.counts[..., None])[:, None, ..., None], found, 0)


def exact_pool(keys: Array, values: Array, spans: Spans, limits: Limits) -> Pool:
    """The exact rows of ``keys`` and ``values`` [L, B, K, T, D], the same positions for every layer and head."""
    L, B, K, T, D = keys.shape
    S = limits.max_exact
    positions, counts = indices_of(spans.exact, S), jnp.sum(spans.exact, axis=1, dtype=jnp.int32)
    at = jnp.minimum(positions, T - 1)  # T where there are fewer

    def pool(rows):
        chosen = jnp.take_along_axis(rows, at[None, :, None, :, None], axis=3)
        return jnp.moveaxis(chosen, 0, 1).reshape(B, L * K * S, D)

    starts = jnp.arange(L * K, dtype=jnp.int32).reshape(L, K) * S
    return Pool(
        keys=pool(keys),
        values=pool(values),
        positions=jnp.tile(positions, (1, L * K)),
        starts=jnp.broadcast_to(starts, (B, L, K)),
        counts=jnp.broadcast_to(counts[:, None, None], (B, L, K)),
        used=jnp.full((B,), L * K * S, jnp.int32),
        segment_rows=S,
        layer_rows=K * S,
    )


def summaries_and_factors(
    keys: Array, values: Array, spans: Spans, weights: Array, rank: int
) -> tuple[Array, Array, Array, Array]:
    """Of every span of one layer's ``keys`` and ``values`` [B, K, T, D], the values as further heads.

    One decomposition for both: on CPU each waits for threads of the pool that it runs in, and with two cores, two
    of them would wait for one another.

    Returns:
        The means float32 [B, 2 K, S, D], and what ``factorize`` gives: left [B, 2 K, S, max_span, R], right
        [B, 2 K, S, R, D], singular values [B, 2 K, S, R].
    """
    rows = gather_spans(jnp.concatenate([keys, values], axis=1), spans)
    return summarize(rows, weights), *factorize(rows, rank)


def build_memory(
    keys: Array, values: Array, surprisal: Array, spans: Spans, limits: Limits, head: ZoomHead | None, apart: bool
) -> SpanMemory:
    """Makes the memory of a prompt's spans, one layer at a time.

    Args:
        keys: [L, B, K, T, D], after RoPE.
        values: [L, B, K, T, D].
        surprisal: float32 [B, T].
        spans: Of ``segment``.
        limits: The same as for ``segment``.
        head: Trained; ``None`` for routing by similarity.
        apart: Whether the factors go to the host's memory.
    """
    L, B, K, T, D = keys.shape
    J, Z = limits.max_span, limits.max_slots
    dtype = keys.dtype
    weights = span_weights(surprisal, spans)
    largest = int(limits.rank(J, D, np))
    ranks = limits.rank(spans.counts, D)
    offsets = jnp.cumsum(ranks, axis=1) - ranks

    def build(inputs):
        keys, values, route = inputs
        means, left, right, singular = summaries_and_factors(keys, values, spans, weights, largest)
        if head is not None:
            right = right * head.gates(singular, means, ranks[:, None])[..., None]
        parts = jnp.concatenate([jnp.swapaxes(left, -1, -2), right], axis=-1).astype(dtype)
        packed = _pack(jnp.concatenate(jnp.split(parts, 2, axis=1), axis=-1), ranks, limits.rank_rows(T, D))
        mean_keys, mean_values = jnp.split(means.astype(dtype), 2, axis=1)
        return mean_keys, mean_values, packed, None if head is None else route_norms(route, mean_keys)

    routes = None if head is None else head.route[...]
    mean_keys, mean_values, factors, norms = lax.map(build, (keys, values, routes))
    factors = factors.reshape(-1, factors.shape[-1])
    return SpanMemory(
        keys=mean_keys,
        values=mean_values,
        counts=spans.counts,
        ranks=ranks,
        offsets=offsets,
        factors=host.to_host(factors) if apart else factors,
        slot_spans=jnp.full((L, B, K, Z), -1, jnp.int32),
        slots=jnp.zeros((L, B, K, Z, largest, 2 * (J + D)), dtype),
        allowed=limits.slots,
        fetched=jnp.zeros(B, jnp.int32),
        route=routes,
        threshold=None if head is None else head.threshold[...],
        norms=norms,
        max_span=J,
    )


def _pack(rank_rows: Array, ranks: Array, capacity: int) -> Array:
    """The rank rows [B, K, S, R, X] below each span's rank [B, S], end to end: [B, K, capacity, X]."""
    B, K, S, R, X = rank_rows.shape
    ends = jnp.cumsum(ranks, axis=1)
    number = jnp.arange(capacity)
    span = jnp.minimum(jax.vmap(lambda row: jnp.searchsorted(row, number, side="right"))(ends), S - 1)
    rank = number - jnp.take_along_axis(ends - ranks, span, axis=1)
    place = (span * R + jnp.minimum(rank, R - 1))[:, None, :, None]
    packed = jnp.take_along_axis(rank_rows.reshape(B, K, S * R, X), place, axis=2)
    return jnp.where((number < ends[:, -1:])[:, None, :, None], packed, 0)
