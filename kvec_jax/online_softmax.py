"""Softmax over keys that arrive block by block: partial results, how they grow and how they merge.

Attention over any set of keys is summed up by a running maximum of the logits, the sum of their exponentials and the
matching weighted sum of values (https://arxiv.org/abs/2205.14135). Two such partials over disjoint keys merge into the
partial of the union, which is what lets packed rows, the tail and other tiers be attended separately.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvec_jax.typing import Array

# Finite, so that a maximum over nothing can be subtracted from -inf without making a NaN.
LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


class Partial(NamedTuple):
    """Attention of some queries over some keys, not yet divided by the sum.

    Attributes:
        weighted: float32 [..., D], sum of exp(logit - maximum) * value.
        maximum: float32 [...], largest logit, or ``LOWEST`` where there was no key.
        total: float32 [...], sum of exp(logit - maximum); 0 where there was no key.
    """

    weighted: Array
    maximum: Array
    total: Array


def empty(shape: tuple[int, ...], head_dim: int) -> Partial:
    """The partial of no keys at all, for queries of the given shape."""
    return Partial(jnp.zeros((*shape, head_dim)), jnp.full(shape, LOWEST), jnp.zeros(shape))


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the union of two disjoint sets of keys."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    weighted = a.weighted * scale_a[..., None] + b.weighted * scale_b[..., None]
    return Partial(weighted, maximum, a.total * scale_a + b.total * scale_b)


def finish(partial: Partial) -> tuple[Array, Array]:
    """Output float32 [..., D] and log-sum-exp float32 [...]; zeros and ``LOWEST`` where there was no key."""
    nothing = partial.total == 0
    total = jnp.where(nothing, 1.0, partial.total)
    return partial.weighted / total[..., None], partial.maximum + jnp.log(total)


def attend_block(queries: Array, keys: Array, values: Array, mask: Array | None, scale: float) -> Partial:
    """The partial over one block of keys.

    Args:
        queries: [..., M, D].
        keys: [..., S, D].
        values: [..., S, D].
        mask: bool, broadcastable to [..., M, S]: which keys a query sees. ``None`` means all of them.
        scale: Factor on the logits.

    Returns:
        The partial of shape [..., M]; products in the operands' dtype, sums in float32.
    """
    logits = jnp.einsum("...MD,...SD->...MS", queries, keys, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    maximum = jnp.maximum(jnp.max(logits, axis=-1), LOWEST)
    weights = jnp.exp(logits - maximum[..., None])
    weighted = jnp.einsum(
        "...MS,...SD->...MD", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return Partial(weighted, maximum, jnp.sum(weights, axis=-1))


def attend_blocks(
    queries: Array,
    fetch: Callable[[Array], tuple[Array, Array, Array | None]],
    first: Array | int,
    last: Array | int,
    scale: float,
    start: Partial | None = None,
) -> Partial:
    """The partial over the blocks ``first`` to ``last - 1``; the bounds may be traced, and no other block is touched.

    Args:
        queries: [..., M, D].
        fetch: Gives keys [..., S, D], values [..., S, D] and mask (see ``attend_block``) of block ``i``.
        first: First block.
        last: One past the last block.
        scale: Factor on the logits.
        start: What to add to; nothing by default.

    Returns:
        The partial of shape [..., M].
    """
    if start is None:
        start = empty(queries.shape[:-1], queries.shape[-1])

    def step(i, partial):
        return merge(partial, attend_block(queries, *fetch(i), scale))

    return lax.fori_loop(first, last, step, start)
