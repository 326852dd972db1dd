"""Attention of a few queries over packed rows of keys and values and over a tail, on a Hopper GPU, through Mosaic GPU.

The rows of a key-value head are cut into shares as in ``ragged_attention_triton``. A program is one warpgroup: it goes
through its share in blocks of rows, which the copy engine brings into shared memory while the tensor cores work on the
block before (``emit_pipeline``), and keeps the weighted sum in registers. XLA merges the shares' partials. The copy
engine takes tiles of 8 rows: a block begins at a whole tile, at most 7 rows early, and the last one of an array is
moved back to lie inside it; what isn't the share's, or is there twice, is masked.

Bytes that must move: 2 D of each row once; for each query D in, and D + 2 out in float32, for each share. Operations
that must run: for each row and each of its head's M queries, 4 D in the two products and one exponential; the tensor
cores take 64 queries at a time, of which a decoding step has G.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.pallas.compat import needs_index, simulated_gpu
from kvec_jax.pallas.shares import limits_of, merge_shares, shares_of
from kvec_jax.pallas.spans import Span, nothing
from kvec_jax.typing import Array

# Queries, and rows, of a product; rows of a tile; blocks of rows that are in shared memory at a time.
_QUERIES, _ROWS, _TILE, _STAGES = 64, 64, 8, 2


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
    blocks = pl.cdiv(M, _QUERIES)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, blocks * _QUERIES - M), (0, 0)])
    shares = shares_of(pool[2].most + tail[2].most, _ROWS, B * K * blocks)
    limits, seen = limits_of(pool[2], tail[2], blocks * _QUERIES)
    statistic = jax.ShapeDtypeStruct((shares, B * K, blocks * _QUERIES), jnp.float32)
    run = plgpu.kernel(
        functools.partial(_kernel, heads=(B, K), scale=scale, local=seen is not None),
        out_type=[jax.ShapeDtypeStruct((*statistic.shape, D), jnp.float32), statistic, statistic],
        grid=(B * K, shares, blocks),
        grid_names=("head", "share", "block"),
        interpret=simulated_gpu() if interpret else None,
    )
    weighted, maxima, totals = run(
        jnp.reshape(layer, 1),
        limits.reshape(B * K, 4),
        jnp.zeros((2, 1, _QUERIES), jnp.int32) if seen is None else seen.reshape(2, B * K, -1),
        queries.reshape(B * K, -1, D),
        *map(_whole_tiles, pool[:2]),
        *(_whole_tiles(x.reshape(-1, *x.shape[3:])) for x in tail[:2]),
    )
    weighted, maxima, totals = (x[:, :, :M].reshape(shares, B, K, M, *x.shape[3:]) for x in (weighted, maxima, totals))
    return merge_shares(weighted, maxima, totals)


def _whole_tiles(rows: Array) -> Array:
    """``rows`` [.., R, D] with a block of them at least, and a multiple of a tile: a copy, if they aren't already."""
    missing = max(_ROWS, pl.cdiv(rows.shape[-2], _TILE) * _TILE) - rows.shape[-2]
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, missing), (0, 0)]) if missing else rows


def _kernel(
    layer,  # int32 [1]
    limits,  # int32 [B * K, 4]
    seen,  # int32 [2, B * K, queries]
    queries,  # [B * K, queries, D]
    pool_keys,  # [B, P, D]
    pool_values,
    tail_keys,  # [L * B * K, R, D]
    tail_values,
    weighted,  # float32 [shares, B * K, queries, D]
    maxima,  # float32 [shares, B * K, queries]
    totals,
    *,
    heads: tuple[int, int],
    scale: float,
    local: bool,
):
    B, K = heads
    head, share, block = (lax.axis_index(name) for name in ("head", "share", "block"))
    mine = pl.ds(block * _QUERIES, _QUERIES)
    pool_first, pool_last, tail_first, tail_last = (limits[head, i] for i in range(4))
    packed = jnp.maximum(pool_last - pool_first, 0)
    length = packed + jnp.maximum(tail_last - tail_first, 0)
    share_length = _up(_up(length, maxima.shape[0]), _ROWS) * _ROWS
    begin = share * share_length
    end = jnp.minimum(begin + share_length, length)
    parts = (
        (
            pool_keys,
            pool_values,
            lax.div(head, jnp.int32(K)),
            pool_first + begin,
            pool_first + jnp.minimum(end, packed),
        ),
        (
            tail_keys,
            tail_values,
            layer[0] * (B * K) + head,
            tail_first + jnp.maximum(begin - packed, 0),
            tail_first + end - packed,
        ),
    )

    def with_queries(query, barrier):
        plgpu.copy_gmem_to_smem(queries.at[head, mine], query, barrier)
        plgpu.barrier_wait(barrier)
        state = _nothing_yet(queries.shape[-1])
        for i, (keys, values, lead, first, last) in enumerate(parts):
            from_row = _column(seen.at[i, head, mine]) if local else None
            state = _attend_rows(state, query, keys.at[lead], values.at[lead], first, last, from_row, scale)
        return state

    state = pl.run_scoped(
        with_queries,
        plgpu.SMEM((_QUERIES, queries.shape[-1]), queries.dtype, transforms=_tiles(queries.dtype)),
        plgpu.Barrier(),
    )
    _write(state, *(x.at[share, head, mine] for x in (weighted, maxima, totals)))


def _attend_rows(state, query, keys, values, first, last, seen, scale: float):
    """Adds the rows from ``first`` up to ``last`` of ``keys`` and ``values`` [R, D] to the state."""
    shape = (_QUERIES, _ROWS)
    early = lax.div(first, jnp.int32(_TILE))

    def begin(step):
        # Multiplied last: the compiler must see that it is a multiple of a tile.
        return jnp.minimum(early + step * (_ROWS // _TILE), (keys.shape[0] - _ROWS) // _TILE) * _TILE

    def attend(indices, keys, values, state):
        weighted, maximum, total = state
        (step,) = indices
        logits = _products(query, keys) * scale
        at = begin(step) + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        visible = (at >= jnp.maximum(first, early * _TILE + step * _ROWS)) & (at < last)
        if seen is not None:
            visible &= at >= lax.broadcast_in_dim(seen, shape, [0])
        logits = jnp.where(visible, logits, -jnp.inf)
        highest = jnp.maximum(maximum, jnp.max(logits, axis=1))
        keep = jnp.exp(maximum - highest)
        weights = jnp.exp(logits - lax.broadcast_in_dim(highest, shape, [0]))
        total = total * keep + jnp.sum(weights, axis=1)
        weighted *= lax.broadcast_in_dim(keep, weighted.shape, [0])
        return _add_sums(weighted, weights.astype(query.dtype), values), highest, total

    def block(step):
        return begin(step), 0

    spec = plgpu.BlockSpec((pl.Element(_ROWS), keys.shape[1]), block, transforms=_tiles(query.dtype))
    steps = _up(jnp.where(last > first, last - early * _TILE, 0), _ROWS)
    pipeline = plgpu.emit_pipeline(
        attend, grid=(steps,), in_specs=[spec, spec], max_concurrent_steps=_STAGES, init_carry=state
    )
    return pipeline(keys, values)


def _products(query, keys):
    """Float32 ``query @ keys.T`` of two matrices in shared memory."""

    def multiply(products):
        plgpu.wgmma(products, query, keys.transpose((1, 0)))
        return products[...]

    return pl.run_scoped(multiply, plgpu.ACC((query.shape[0], keys.shape[0]), jnp.float32))


def _add_sums(weighted, weights, values):
    """Adds ``weights @ values`` to ``weighted``; ``values`` lie in shared memory."""

    def multiply(sums):
        plgpu.wgmma(sums, weights, values)

    return pl.run_state(multiply)(plgpu.ACC.init(weighted))


def _write(state, weighted, maxima, totals) -> None:
    def through_shared_memory(sums, highest, total):
        for buffer, x in zip((sums, highest, total), state, strict=True):
            buffer[...] = x
        plgpu.commit_smem()
        for buffer, target in zip((sums, highest, total), (weighted, maxima, totals), strict=True):
            plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    column = plgpu.SMEM((_QUERIES,), jnp.float32)
    sums = plgpu.SMEM(state[0].shape, jnp.float32, transforms=_tiles(jnp.float32))
    pl.run_scoped(through_shared_memory, sums, column, column)


def _nothing_yet(D: int):
    """Weighted sum, maximum and total of no rows, as the products want them laid out."""
    columns = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((_QUERIES, D), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((_QUERIES,), LOWEST, jnp.float32), columns),
        plgpu.layout_cast(jnp.zeros((_QUERIES,), jnp.float32), columns),
    )


def _column(numbers):
    """One number for each query, from global memory."""
    index = ((),) if needs_index(plgpu.load) else ()
    return plgpu.load(numbers, *index, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _tiles(dtype):
    """How the tensor cores want a matrix in shared memory: rows of 128 bytes, by eights."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _up(x, y: int):
    """The quotient, rounded up."""
    return lax.div(x + (y - 1), jnp.int32(y))
