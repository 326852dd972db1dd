"""The index: one key for each block, which says from afar how much the block matters to a query."""

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.tiers.layout import Layout
from kvec_jax.typing import Array

_SEGMENT = 8192
_ITERATIONS = 10


def block_scores(queries: Array, index: Array, counts: Array, scale: float) -> Array:
    """How much each block matters: softmax over the blocks of query times mean key, summed over a head's queries.

    Args:
        queries: [B, K, G, D].
        index: [B, K, N, D].
        counts: int32 [B, K], blocks of each head.
        scale: Factor on the logits.

    Returns:
        float32 [B, K, N]; -1 where there is no block.
    """
    logits = jnp.einsum("BKGD,BKND->BKGN", queries, index, preferred_element_type=jnp.float32) * scale
    there = (jnp.arange(index.shape[2]) < counts[..., None])[:, :, None]
    logits = jnp.where(there, logits, -jnp.inf)
    maximum = jnp.max(logits, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(logits - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = weights / jnp.where(total == 0, 1.0, total)
    return jnp.where(there[:, :, 0], jnp.sum(share, axis=2), -1.0)


def choose_blocks(scores: Array, counts: Array, alive: Array, layout: Layout) -> tuple[Array, Array]:
    """The best blocks of each head; of equal ones those that come first.

    Args:
        scores: float32 [B, K, N].
        counts: int32 [B, K], blocks of each head.
        alive: bool [B], rows that still go on; the others choose nothing.
        layout: Of the run.

    Returns:
        int32 [B, K, top]: numbers of the chosen blocks in rising order, then N; and int32 [B, K, hints]: the next best.
    """
    N, top = layout.blocks, layout.top
    if isinstance(layout.budget, float):
        share = jnp.floor(counts.astype(jnp.float32) * layout.budget + 1e-4).astype(jnp.int32)
        wanted = jnp.minimum(jnp.maximum(share, 1), counts)
    else:
        wanted = jnp.minimum(counts, top)
    wanted = jnp.where(alive[:, None], wanted, 0)[..., None]
    _, best = lax.top_k(scores, top + layout.hints)
    best = best.astype(jnp.int32)
    rank = jnp.arange(top + layout.hints)
    chosen = jnp.where(rank < wanted, best, N)[..., :top]
    further = jnp.where((rank >= wanted) & (rank < jnp.minimum(wanted + layout.hints, counts[..., None])), best, N)
    hints = jnp.sort(jnp.where(alive[:, None, None], further, N))[..., : layout.hints]
    return jnp.sort(chosen), hints


def cluster_order(keys: Array, counts: Array, per: int) -> Array:
    """An order in which similar keys lie together.

    K-means as the systems before KVDrive do it: within segments of 8,192 keys, less their mean, seeded evenly; ten
    rounds of assignment to the centroid of largest inner product, of unit length, and a last one of any length. A
    segment has as many clusters as its own keys ask for, however long the others of the batch are.

    Args:
        keys: [B, K, T, D].
        counts: int32 [B, K], keys of each head.
        per: Keys per cluster, on average; at least one cluster in each segment.

    Returns:
        int32 [B, K, T]: indices of the keys, cluster by cluster, neighbours in order; those that don't count last.
    """
    B, K, T, D = keys.shape
    length = min(_SEGMENT, T)
    segments = -(-T // length)
    padded = jnp.pad(keys.astype(jnp.float32), [(0, 0), (0, 0), (0, segments * length - T), (0, 0)])
    there = jnp.arange(segments * length) < counts[..., None]
    parts = padded.reshape(-1, length, D), there.reshape(-1, length)
    cluster = lax.map(lambda part: _clusters(*part, per), parts).reshape(B, K, -1)
    cluster = cluster + jnp.arange(segments * length) // length * length
    cluster = jnp.where(there, cluster, segments * length)[..., :T]
    return jnp.argsort(cluster, axis=-1, stable=True).astype(jnp.int32)


def _clusters(keys: Array, there: Array, per: int) -> Array:
    """The cluster int32 [S] of each of ``keys`` [S, D]; those that are not ``there`` have no say."""
    most = max(len(keys) // per, 1)
    weight = there.astype(jnp.float32)
    total = jnp.sum(there)
    count = jnp.maximum(total // per, 1)
    mean = jnp.einsum("S,SD->D", weight, keys) / jnp.maximum(total, 1)
    keys = (keys - mean) * weight[:, None]
    numbers = jnp.arange(most)

    def assign(centroids):
        return jnp.argmax(jnp.where(numbers < count, keys @ centroids.T, -jnp.inf), axis=-1)

    def refine(_, centroids):
        mine = assign(centroids / jnp.maximum(jnp.linalg.norm(centroids, axis=-1, keepdims=True), 1e-20))
        sums = jax.ops.segment_sum(keys, mine, most)
        sizes = jax.ops.segment_sum(weight, mine, most)[:, None]
        return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1.0), centroids)

    seeds = jnp.minimum(numbers * total // count, len(keys) - 1)
    return assign(lax.fori_loop(0, _ITERATIONS, refine, keys[seeds])).astype(jnp.int32)
