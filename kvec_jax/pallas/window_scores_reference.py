"""Attention of a prompt's last queries over its keys, reduced key by key, in plain ``jnp``: what kernels must equal.

Arguments and results as in ``window_scores_tpu``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.online_softmax import LOWEST
from kvec_jax.typing import Array

# Keys that are looked at, at a time.
_BLOCK = 1024


def statistics(
    queries: Array,
    positions: Array,
    keys: Array,
    logsumexp: Array,
    reduce: Callable,
    rivals: Callable | None,
    scale: float,
    interpret: bool = False,
):
    """See ``kvec_jax.scores.window_scores``."""
    T = keys.shape[2]
    block, blocks, logits = _blocks(queries, positions, keys, scale)
    looks = positions[..., None] >= 0

    def at(i):
        values, visible = logits(i)
        weights = jnp.where(visible, jnp.exp(values - logsumexp[..., None]), 0.0)  # [B, K, G, W, S]
        found = jax.vmap(jax.vmap(reduce, (0, None)))(weights, looks)
        peak = None if rivals is None else jnp.sum(jnp.max(jax.vmap(jax.vmap(rivals))(weights), axis=1), axis=1)
        return found, peak

    parts = lax.map(at, jnp.arange(blocks))  # [blocks, ..., block]
    return jax.tree.map(lambda x: _join(x)[..., :T], parts)


def logsumexp(queries: Array, positions: Array, keys: Array, scale: float, interpret: bool = False) -> Array:
    """Log-sum-exp of the logits of every query, float32 [B, K, G, W]; ``LOWEST`` for those that look at nothing."""
    _, blocks, logits = _blocks(queries, positions, keys, scale)

    def add(i, state):
        maximum, total = state
        values = jnp.where(*reversed(logits(i)), -jnp.inf)
        larger = jnp.maximum(maximum, jnp.max(values, axis=-1))
        added = jnp.sum(jnp.exp(values - larger[..., None]), axis=-1)
        return larger, total * jnp.exp(maximum - larger) + added

    shape = queries.shape[:-1]
    maximum, total = lax.fori_loop(0, blocks, add, (jnp.full(shape, LOWEST), jnp.zeros(shape)))
    return maximum + jnp.log(jnp.where(total == 0, 1.0, total))


def _blocks(queries: Array, positions: Array, keys: Array, scale: float):
    T = keys.shape[2]
    block = min(_BLOCK, T)
    blocks = -(-T // block)
    keys = jnp.pad(keys, [(0, 0), (0, 0), (0, blocks * block - T), (0, 0)])

    def logits(i):
        """Logits [B, K, G, W, block] of a block, and which of them count."""
        part = lax.dynamic_slice_in_dim(keys, i * block, block, axis=2)
        values = jnp.einsum("BKGWD,BKSD->BKGWS", queries, part, preferred_element_type=jnp.float32) * scale
        visible = i * block + jnp.arange(block) <= positions[..., None]  # [B, W, S]
        return values, visible[:, None, None]

    return block, blocks, logits


def _join(parts: Array) -> Array:
    """[blocks, ..., S] to [..., blocks * S]."""
    parts = jnp.moveaxis(parts, 0, -2)
    return parts.reshape(*parts.shape[:-2], -1)
