"""Attention of a few queries over packed rows of keys and values and over a tail, on a GPU, through Triton.

Of one key-value head the packed rows and the rows of the tail count as one sequence. It is cut into so many shares of
equal length that all multiprocessors have work; a program goes through its share block by block, as long as there are
rows, for all queries of the head. XLA merges the shares' partials. Sizes are powers of two, as Triton wants them:
queries by padding, head sizes by masked loads, since keys and values are not to be copied.

Bytes that must move: 2 D of each row once; for each query D in, and D + 2 out in float32, for each share. Operations
that must run: for each row and each of its head's M queries, 4 D in the two products and one exponential.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.pallas.shares import limits_of, merge_shares, shares_of
from kvec_jax.pallas.spans import Span, nothing
from kvec_jax.typing import Array

# Rows and columns that the tensor cores take; queries that a program takes.
_LEAST, _QUERIES = 16, 64
# Numbers in a block of keys. Products of float32 run on the plain cores, fully unrolled: multiplications in one.
_BLOCK, _EXACT_PRODUCTS = 8192, 1 << 17


def attend(
    queries: Array,
    pool: tuple[Array, Array, Span] | None,
    tail: tuple[Array, Array, Span] | None,
    layer: Array,
    scale: float,
    interpret: bool,
) -> Partial:
    """See ``ragged_attention_tpu.attend``."""
    B, K, M, D = queries.shape
    pool = pool or nothing(queries, (B, 1, D))
    tail = tail or nothing(queries, (1, B, K, 1, D))
    layer = jnp.minimum(layer, tail[0].shape[0] - 1)
    rows = min(max(pl.next_power_of_2(M), _LEAST), _QUERIES)
    columns = max(pl.next_power_of_2(D), _LEAST)
    blocks = pl.cdiv(M, rows)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, blocks * rows - M), (0, columns - D)])
    S = _BLOCK // columns
    if queries.dtype == jnp.float32:
        S = min(S, _EXACT_PRODUCTS // (rows * columns))
    shares = shares_of(pool[2].most + tail[2].most, S, B * K * blocks)
    statistics = jax.ShapeDtypeStruct((shares, B, K, M), jnp.float32)
    weighted, maxima, totals = pl.pallas_call(
        functools.partial(_kernel, S=S, rows=rows, scale=scale),
        grid=(B * K, shares, blocks),
        out_shape=[jax.ShapeDtypeStruct((shares, B, K, M, D), jnp.float32), statistics, statistics],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="ragged_attention",
    )(jnp.reshape(layer, 1), *limits_of(pool[2], tail[2], blocks * rows), queries, *pool[:2], *tail[:2])
    return merge_shares(weighted, maxima, totals)


def _kernel(
    layer,  # int32 [1]
    limits,  # int32 [B, K, 4]
    seen,  # int32 [2, B, K, rows * blocks], or None
    queries,  # [B, K, rows * blocks, columns]
    pool_keys,  # [B, P, D]
    pool_values,
    tail_keys,  # [L, B, K, R, D]
    tail_values,
    weighted,  # float32 [shares, B, K, M, D]
    maxima,  # float32 [shares, B, K, M]
    totals,
    *,
    S: int,
    rows: int,
    scale: float,
):
    K, columns = queries.shape[1], queries.shape[-1]
    head, share = pl.program_id(0), pl.program_id(1)
    b, k = head // K, head % K
    mine = pl.program_id(2) * rows + jnp.arange(rows)
    pool_first, pool_last, tail_first, tail_last = (limits[b, k, i] for i in range(4))
    packed = jnp.maximum(pool_last - pool_first, 0)
    length = packed + jnp.maximum(tail_last - tail_first, 0)
    share_length = pl.cdiv(pl.cdiv(length, pl.num_programs(1)), S) * S
    begin = share * share_length
    end = jnp.minimum(begin + share_length, length)
    query = plt.load(queries.at[b, k, mine[:, None], jnp.arange(columns)[None]])
    state = Partial(
        jnp.zeros((rows, columns), jnp.float32), jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    )
    parts = (
        (pool_keys, pool_values, (b,), pool_first + begin, pool_first + jnp.minimum(end, packed)),
        (
            tail_keys,
            tail_values,
            (layer[0], b, k),
            tail_first + jnp.maximum(begin - packed, 0),
            tail_first + end - packed,
        ),
    )
    for i, part in enumerate(parts):
        from_row = None if seen is None else plt.load(seen.at[i, b, k, mine])
        state = _attend_rows(state, query, *part, from_row, S, scale)
    place = (share, b, k)
    real = mine < maxima.shape[-1]
    plt.store(maxima.at[(*place, mine)], state.maximum, mask=real)
    plt.store(totals.at[(*place, mine)], state.total, mask=real)
    column = jnp.arange(columns)[None]
    inside = real[:, None] & (column < weighted.shape[-1])
    plt.store(weighted.at[(*place, mine[:, None], column)], state.weighted, mask=inside)


def _attend_rows(state: Partial, query, keys, values, lead, first, last, seen, S: int, scale: float) -> Partial:
    """Adds the rows from ``first`` up to ``last`` of ``keys[lead]`` and ``values[lead]`` [.., D] to the state."""
    exact = "highest" if query.dtype == jnp.float32 else None
    column = jnp.arange(query.shape[1])[None]

    def step(i, state):
        at = first + i * S + jnp.arange(S)
        there = (at < last)[:, None] & (column < keys.shape[-1])

        def load(ref):
            return plt.load(ref.at[(*lead, at[:, None], column)], mask=there, other=jnp.zeros((), ref.dtype))

        logits = plt.dot(query, load(keys), trans_b=True, precision=exact) * scale
        visible = at[None] < last
        if seen is not None:
            visible &= at[None] >= seen[:, None]
        logits = jnp.where(visible, logits, -jnp.inf)
        maximum = jnp.maximum(state.maximum, jnp.max(logits, axis=1))
        keep = jnp.exp(state.maximum - maximum)
        weights = jnp.exp(logits - maximum[:, None])
        added = plt.dot(weights.astype(query.dtype), load(values), precision=exact)
        total = state.total * keep + jnp.sum(weights, axis=1)
        return Partial(state.weighted * keep[:, None] + added, maximum, total)

    return lax.fori_loop(0, jnp.maximum(last - first + S - 1, 0) // S, step, state)
