"""What the last queries of a prompt say about its keys, reduced key by key."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.online_softmax import LOWEST
from kvec_jax.typing import Array

KEY_BLOCK = 1024


def window_scores(
    queries: Array,
    positions: Array,
    keys: Array,
    reduce: Callable[[Array], Any],
    *,
    scale: float,
) -> Any:
    """Causal softmax attention of a few queries over all keys, reduced to statistics of each key.

    The weights [N, W, T] never exist at once: the keys are read twice, block by block, first for the softmax's
    denominators, then for the statistics.

    Args:
        queries: [B, N, W, D], after RoPE.
        positions: int32 [B, W] of the queries; the rows of those below 0 are zeros.
        keys: [B, K, T, D], key t at position t. No query is at or after a row's padding, so padding gets no weight.
        reduce: From weights float32 [B, K, G, W, S] of a block of S keys to any pytree of arrays [..., S]; it treats
            the keys one by one.
        scale: Factor on the logits.

    Returns:
        The pytree that ``reduce`` gives, with T in place of S.

    Example:
        >>> x = jnp.ones((1, 1, 3, 2))
        >>> window_scores(x, jnp.array([[0, 1, 2]]), x, lambda weights: weights[0, 0, 0, -1], scale=1.0).tolist()
        [0.3333333432674408, 0.3333333432674408, 0.3333333432674408]
    """
    B, N, W, D = queries.shape
    K, T = keys.shape[1:3]
    block = min(KEY_BLOCK, T)
    blocks = -(-T // block)
    keys = jnp.pad(keys, [(0, 0), (0, 0), (0, blocks * block - T), (0, 0)])
    queries = queries.reshape(B, K, N // K, W, D)

    def logits(i):
        part = lax.dynamic_slice_in_dim(keys, i * block, block, axis=2)
        values = jnp.einsum("BKGWD,BKSD->BKGWS", queries, part, preferred_element_type=jnp.float32) * scale
        visible = i * block + jnp.arange(block) <= positions[..., None]  # [B, W, S]
        return jnp.where(visible[:, None, None], values, -jnp.inf)

    start = jnp.full((B, K, N // K, W), LOWEST), jnp.zeros((B, K, N // K, W))
    maximum, total = lax.fori_loop(0, blocks, lambda i, state: _add_block(state, logits(i)), start)
    total = jnp.where(total == 0, 1.0, total)

    def statistics(i):
        return reduce(jnp.exp(logits(i) - maximum[..., None]) / total[..., None])

    parts = lax.map(statistics, jnp.arange(blocks))  # [blocks, ..., block]
    return jax.tree.map(lambda x: _join(x)[..., :T], parts)


def _add_block(state: tuple[Array, Array], logits: Array) -> tuple[Array, Array]:
    """Running maximum and sum of exponentials after one more block."""
    maximum, total = state
    larger = jnp.maximum(maximum, jnp.max(logits, axis=-1))
    added = jnp.sum(jnp.exp(logits - larger[..., None]), axis=-1)
    return larger, total * jnp.exp(maximum - larger) + added


def _join(parts: Array) -> Array:
    """[blocks, ..., S] to [..., blocks * S]."""
    parts = jnp.moveaxis(parts, 0, -2)
    return parts.reshape(*parts.shape[:-2], -1)


def pool_scores(scores: Array, lengths: Array, kernel: int, pooling: str) -> Array:
    """Spreads each score over its neighbours, within the first ``lengths`` entries of a row.

    Args:
        scores: float32 [B, K, T].
        lengths: int32 [B]: what lies at and after it neither gives nor gets.
        kernel: Odd number of neighbours, the entry itself included.
        pooling: ``"max"``, or ``"avg"``: the sum of the neighbours divided by ``kernel``, at the borders too.

    Returns:
        float32 [B, K, T].
    """
    inside = jnp.arange(scores.shape[-1]) < lengths[:, None, None]
    outside, combine = (0.0, jnp.add) if pooling == "avg" else (-jnp.inf, jnp.maximum)
    half = kernel // 2
    T = scores.shape[-1]
    padded = jnp.pad(jnp.where(inside, scores, outside), [(0, 0), (0, 0), (half, half)], constant_values=outside)
    pooled = padded[..., :T]
    for shift in range(1, kernel):
        pooled = combine(pooled, padded[..., shift : shift + T])
    return pooled / kernel if pooling == "avg" else pooled
