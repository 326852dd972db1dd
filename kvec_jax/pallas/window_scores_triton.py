"""Attention of a prompt's last queries over its keys, reduced key by key, on a GPU, through Triton.

One program sees a block of S keys and goes through the K heads one after the other, so that the largest weight over the
heads needs no second pass. Per head: one product [G W, D] x [D, S] on the tensor cores, weights by the log-sum-exp that
is known already, and whatever ``reduce`` makes of them, in registers. Sizes are padded to powers of two: heads behind,
queries in front, both with weights of zero; head sizes by masked loads, since the keys are not to be copied.

For each of B rows, bytes that must move: K T D of keys once, and what ``reduce`` gives, [.., T] in float32. Operations
that must run: 2 N W T D in the product. ``logsumexp`` reads the keys once more where nobody knows it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvec_jax.online_softmax import LOWEST
from kvec_jax.pallas.triton_blocks import load_rows, store_last
from kvec_jax.typing import Array

# Weights that one program holds at a time: queries of a head times keys.
_WEIGHTS = 8192
# Shared memory for the queries of one head.
_QUERY_BYTES = 1 << 17
# Products of float32 run on the plain cores, fully unrolled: how many multiplications one may have.
_EXACT_PRODUCTS = 1 << 17
_LEAST = 16  # rows and columns that the tensor cores take
_CHUNK = 1024  # keys of one program that looks for the log-sum-exp


def refusal(queries: Array, keys: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"expected float queries and keys of one type, got {queries.dtype} and {keys.dtype}"
    G, W, D = queries.shape[2:]
    rows = pl.next_power_of_2(G) * pl.next_power_of_2(W)
    if D > 256:
        return f"expected heads of at most 256, got {D}"
    most = min(2 * _WEIGHTS // _LEAST, _QUERY_BYTES // (pl.next_power_of_2(D) * keys.dtype.itemsize))
    if rows > most:
        return f"expected at most {most} queries for each key-value head, got {rows} (powers of two)"
    return None


def statistics(
    queries: Array,
    positions: Array,
    keys: Array,
    logsumexp: Array,
    reduce: Callable,
    rivals: Callable | None,
    scale: float,
    interpret: bool,
):
    """See ``window_scores_tpu.statistics``."""
    G = queries.shape[2]
    T = keys.shape[2]
    queries, positions, logsumexp = _pad_queries(queries, positions, logsumexp)
    B, K, heads, W, D = queries.shape
    S = _block(heads * W, D, keys.dtype)
    looks = jax.ShapeDtypeStruct((W, 1), bool)
    shapes, tree = jax.tree.flatten(jax.eval_shape(reduce, _weights(heads, W, S), looks))
    wanted = jax.tree.leaves(jax.eval_shape(reduce, _weights(G, W, T), looks))
    out_shape = [jax.ShapeDtypeStruct((B, K, *x.shape[:-1], T), x.dtype) for x in shapes]
    if rivals is not None:
        out_shape.append(jax.ShapeDtypeStruct((B, T), jnp.float32))
    outputs = pl.pallas_call(
        functools.partial(_statistics_kernel, reduce=reduce, rivals=rivals, scale=scale, S=S),
        grid=(B, pl.cdiv(T, S)),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=8 if heads * W * S >= _WEIGHTS else 4, num_stages=2),
        interpret=interpret,
        name="window_statistics",
    )(positions, queries, keys, logsumexp)
    peak = None if rivals is None else outputs[-1]
    found = [x[(slice(None), slice(None), *(slice(size) for size in y.shape[:-1]))] for x, y in zip(outputs, wanted)]
    return jax.tree.unflatten(tree, found), peak


def _statistics_kernel(positions, queries, keys, logsumexp, *outputs, reduce, rivals, scale, S):
    """Refs: [B, W]; [B, K, G, W, D]; [B, K, T, D]; [B, K, G, W]; one for each statistic [B, K, ..., T]."""
    G, W = queries.shape[2:4]
    K = keys.shape[1]
    b = pl.program_id(0)
    at = pl.program_id(1) * S + jnp.arange(S)
    position = positions[b][:, None]
    looks = position >= 0
    visible = (at[None] <= position)[None]

    def step(k, peak):
        logits = _logits(queries, keys, b, k, at, scale)
        weights = jnp.where(visible, jnp.exp(logits - logsumexp[b, k][..., None]), 0.0)
        for ref, value in zip(outputs, jax.tree.leaves(reduce(weights, looks))):
            store_last(ref, (b, k), at, value)
        return peak if rivals is None else jnp.maximum(peak, rivals(weights))

    peak = lax.fori_loop(0, K, step, jnp.zeros((W, S) if rivals is not None else (), jnp.float32))
    if rivals is not None:
        store_last(outputs[-1], (b,), at, jnp.sum(peak, axis=0))


def logsumexp(queries: Array, positions: Array, keys: Array, scale: float, interpret: bool) -> Array:
    """Log-sum-exp of the logits of every query, float32 [B, K, G, W]; arguments as for ``statistics``.

    Each program leaves maximum and sum over some of the keys; XLA merges the few there are.
    """
    G, W = queries.shape[2:4]
    T = keys.shape[2]
    queries, positions, _ = _pad_queries(queries, positions, None)
    B, K, heads, padded, D = queries.shape
    S = _block(heads * padded, D, keys.dtype)
    chunks = pl.cdiv(T, _CHUNK)
    part = jax.ShapeDtypeStruct((B, K, chunks, heads, padded), jnp.float32)
    maxima, totals = pl.pallas_call(
        functools.partial(_logsumexp_kernel, scale=scale, S=S),
        grid=(B, K, chunks),
        out_shape=[part, part],
        compiler_params=plt.CompilerParams(num_warps=8 if heads * padded * S >= _WEIGHTS else 4, num_stages=2),
        interpret=interpret,
        name="window_logsumexp",
    )(positions, queries, keys)
    maximum = jnp.max(maxima, axis=2)
    total = jnp.sum(totals * jnp.exp(maxima - maximum[:, :, None]), axis=2)
    return (maximum + jnp.log(jnp.where(total == 0, 1.0, total)))[:, :, :G, padded - W :]


def _logsumexp_kernel(positions, queries, keys, maxima, totals, *, scale, S):
    """Refs as above; [B, K, chunks, G, W] twice."""
    G, W = queries.shape[2:4]
    b, k, chunk = (pl.program_id(i) for i in range(3))
    position = positions[b][:, None]
    first = chunk * _CHUNK
    last = jnp.minimum(first + _CHUNK, jnp.max(positions[b]) + 1)

    def step(i, state):
        maximum, total = state
        at = first + i * S + jnp.arange(S)
        visible = ((at[None] <= position) & (at[None] < last))[None]
        logits = jnp.where(visible, _logits(queries, keys, b, k, at, scale), -jnp.inf)
        larger = jnp.maximum(maximum, jnp.max(logits, axis=2))
        added = jnp.sum(jnp.exp(logits - larger[..., None]), axis=2)
        return larger, total * jnp.exp(maximum - larger) + added

    start = jnp.full((G, W), LOWEST, jnp.float32), jnp.zeros((G, W), jnp.float32)
    blocks = jnp.maximum(last - first + S - 1, 0) // S
    maxima[b, k, chunk], totals[b, k, chunk] = lax.fori_loop(0, blocks, step, start)


def _logits(queries, keys, b, k, at: Array, scale: float) -> Array:
    """Logits [G, W, S] of head ``k`` over the keys ``at`` [S]; those beyond the last are of no meaning."""
    G, W, D = queries.shape[2:]
    block = load_rows(keys, (b, k), at, jnp.arange(D))
    exact = "highest" if keys.dtype == jnp.float32 else None
    logits = plt.dot(queries[b, k].reshape(G * W, D), block, trans_b=True, precision=exact)
    return logits.reshape(G, W, -1) * scale


def _pad_queries(queries: Array, positions: Array, logsumexp: Array | None):
    """Powers of two: queries that look at nothing in front, heads and coordinates of zero behind."""
    G, W, D = queries.shape[2:]
    heads, size = pl.next_power_of_2(G), max(pl.next_power_of_2(D), _LEAST)
    window = max(pl.next_power_of_2(W), _LEAST // heads)
    behind, front = (0, heads - G), (window - W, 0)
    queries = jnp.pad(queries, [(0, 0), (0, 0), behind, front, (0, size - D)])
    positions = jnp.pad(positions, [(0, 0), front], constant_values=-1)
    if logsumexp is not None:  # a head's logits are zeros, and its weights too, by a large number
        logsumexp = jnp.pad(logsumexp, [(0, 0), (0, 0), (0, 0), front])
        logsumexp = jnp.pad(logsumexp, [(0, 0), (0, 0), behind, (0, 0)], constant_values=-LOWEST)
    return queries, positions, logsumexp


def _block(rows: int, D: int, dtype) -> int:
    """S: keys of a block."""
    most = _WEIGHTS // rows
    if dtype == jnp.float32:
        most = min(most, _EXACT_PRODUCTS // (rows * D))
    return max(_LEAST, min(128, most))


def _weights(G: int, W: int, S: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((G, W, S), jnp.float32)
