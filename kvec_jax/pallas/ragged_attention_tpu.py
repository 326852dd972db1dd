"""Attention of a few queries over packed rows of keys and values and over a tail, on a TPU.

The packed rows and the tail rows of one key-value head count as one sequence, cut into blocks of S rows. The blocks of
all heads stand in one list, so that work follows the rows there are; a head without rows has no block. A step takes
``_TOGETHER`` blocks, whose chains of products, maxima and exponentials fill each other's gaps. Meanwhile the rows of
the next steps are on their way, from where they lie in HBM to one of ``_SLOTS`` buffers. Each block is read once for
all queries of its head, and added to the head's running maximum, sum and weighted sum, which stay in VMEM.

Bytes that must move: 2 D of each row once; for each query D in, and D + 2 out in float32. Operations that must run: for
each row and each of its head's M queries, 4 D in the two products and one exponential.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.pallas.ragged_rows_tpu import (
    BEGIN,
    END,
    LANES,
    SUBLANES,
    TAIL_BEGIN,
    TAIL_END,
    Blocks,
    Fetcher,
    make_rows,
    make_table,
    pad,
)
from kvec_jax.pallas.spans import Span, nothing
from kvec_jax.typing import Array

# Most bytes of a block's keys, and most rows. 128 KiB are four times what a v5e reads while a copy begins.
_BLOCK_BYTES, _BLOCK_ROWS = 1 << 17, 512
# Blocks in a step; steps whose rows are in VMEM or on their way there.
_TOGETHER, _SLOTS = 2, 4
# Most queries of a head, and of all heads, that a program takes.
_QUERIES, _ALL_QUERIES = 128, 1024


def attend(
    queries: Array,
    pool: tuple[Array, Array, Span] | None,
    tail: tuple[Array, Array, Span] | None,
    layer: Array,
    scale: float,
    interpret: bool,
) -> Partial:
    """See ``kvec_jax.ragged_attention``.

    Args:
        queries: [B, K, M, D].
        pool: Keys and values [B, P, D], and which of them each head sees; ``None`` if there are none.
        tail: Keys and values [L, B, K, R, D], and which of the layer's each head sees; ``None`` if there are none.
        layer: int32 scalar, whose tail it is.
        scale: Factor on the logits.
        interpret: Whether to interpret the kernel.

    Returns:
        The partial of shape [B, K, M].
    """
    B, K, M, D = queries.shape
    tile = LANES if D % LANES else SUBLANES
    pool = pool or nothing(queries, (B, tile, D))
    tail = tail or nothing(queries, (1, B, K, tile, D))
    heads, rows = _program(B * K, M)
    blocks = pl.cdiv(M, rows)
    queries = pad(queries.reshape(B * K, M, D), 1, blocks * rows)
    layer = jnp.minimum(layer, tail[0].shape[0] - 1)
    table, seen = make_table(pool[2], tail[2], tile)
    if seen is not None:
        seen = pad(seen, 1, blocks * rows)
    keys, values = (make_rows(*parts, layer, tile) for parts in zip(pool[:2], tail[:2]))
    if not interpret:  # or else XLA may move all of a small pool to VMEM first
        keys, values = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), (keys, values))
    S = _block_rows(pool[2].most + tail[2].most, D * queries.dtype.itemsize)

    def per_query(columns):
        return pl.BlockSpec((heads, rows, columns), lambda i, j, *_: (i, j, 0))

    in_hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), keys)
    # To the interpreter more slots and blocks would be more to compile, and nothing to gain.
    slots, together = (2, 1) if interpret else (_SLOTS, _TOGETHER)
    shape = (D, together * S) if tile == LANES else (together * S, D)
    buffers = [pltpu.VMEM(shape, queries.dtype)] * slots
    running = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    weighted, sums = pl.pallas_call(
        functools.partial(_kernel, S=S, tile=tile, scale=scale, by_tiles=interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * K // heads, blocks),
            in_specs=[per_query(D), None if seen is None else per_query(2), in_hbm, in_hbm],
            out_specs=[per_query(D), per_query(LANES)],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.SemaphoreType.DMA((slots,)),
                running,
                running,
                [pltpu.SMEM((heads,), jnp.int32)] * 3,
                pltpu.SMEM((slots * (together + 1) + 1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B * K, blocks * rows, D), jnp.float32),
            jax.ShapeDtypeStruct((B * K, blocks * rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # Scalar code that would take longer than the products; the simulator checks the bounds in the tests.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="ragged_attention",
    )(table, jnp.reshape(layer, 1), queries, seen, keys, values)
    weighted, sums = (x[:, :M].reshape(B, K, M, -1) for x in (weighted, sums))
    return Partial(weighted, sums[..., 0], sums[..., 1])


def _program(heads: int, M: int) -> tuple[int, int]:
    """Heads that a program takes, and queries of each."""
    rows = min(-(-M // SUBLANES) * SUBLANES, _QUERIES)
    most = max(_ALL_QUERIES // rows, 1)
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0), rows


def _block_rows(most: int, row_bytes: int) -> int:
    """Rows of a block: so many that the longest sequence makes blocks of about the same length."""
    blocks = pl.cdiv(most, min(_BLOCK_BYTES // row_bytes // LANES * LANES, _BLOCK_ROWS))
    return pl.cdiv(pl.cdiv(most, blocks), LANES) * LANES


def _kernel(
    table,  # int32 [FIELDS * B * K]
    layer,  # int32 [1]
    queries,  # [heads, rows, D]
    seen,  # int32 [heads, rows, 2], or None
    keys,  # Rows
    values,  # Rows
    weighted,  # float32 [heads, rows, D]
    sums,  # float32 [heads, rows, LANES]: the maximum, then the total in all other columns
    key_buffers,  # for each slot [together * S, D], or rows and columns exchanged
    value_buffers,
    arrived,
    maxima,  # float32 [heads, rows, LANES], all columns the same
    totals,
    lists,  # int32 [heads] each
    state,
    *,
    S: int,
    tile: int,
    scale: float,
    by_tiles: bool,
):
    slots, together = len(key_buffers), key_buffers[0].shape[int(tile == LANES)] // S
    blocks = Blocks(table, *lists, pl.program_id(0) * queries.shape[0], S, tile)
    used, total = blocks.fill()
    steps = pl.cdiv(total, together)
    buffers = list(zip(key_buffers, value_buffers))
    fetcher = Fetcher(blocks, used, total, layer[0], together, (keys, values), buffers, arrived, state, by_tiles)
    state[state.shape[0] - 1] = 0

    def prepare(slot):
        # What is never copied to is multiplied by zero, which must not make NaN of it.
        value_buffers[slot][...] = jnp.zeros_like(value_buffers[slot])
        if slot < slots - 1:
            fetcher.start(jnp.int32(slot), slot)

    def run(step, slot):
        fetcher.wait(slot)
        fetcher.start(step + slots - 1, (slot - 1) % slots)
        parts = [_attend_block(fetcher, step, slot, i, queries, seen, scale) for i in range(together)]
        for part in parts:
            _add(weighted, maxima, totals, *part)

    def use_slots(i, _):
        for slot in range(slots):
            step = i * slots + slot
            pl.when(step < steps)(functools.partial(run, step, slot))

    for slot in range(slots):
        pl.when(slot < steps)(functools.partial(prepare, slot))
    weighted[...] = jnp.zeros_like(weighted)
    maxima[...] = jnp.full_like(maxima, LOWEST)
    totals[...] = jnp.zeros_like(totals)
    lax.fori_loop(0, pl.cdiv(steps, slots), use_slots, None)
    lane = lax.broadcasted_iota(jnp.int32, sums.shape, 2)
    sums[...] = jnp.where(lane == 0, maxima[...], totals[...])


def _attend_block(fetcher: Fetcher, step, slot: int, i: int, queries, seen, scale: float) -> tuple[Array, Partial]:
    """A block's head, and the partial over its rows; maximum and total [rows, 1]."""
    field, S = fetcher.blocks.field, fetcher.blocks.S
    head, at, exists = fetcher.block(step, slot, i)
    rows = pl.ds(i * S, S)
    if fetcher.blocks.tile == LANES:
        keys, values = (buffer[:, rows] for buffer in fetcher.buffers[slot])  # [D, S]
        logits, weigh = _dot(queries[head], keys, 0), 1
    else:
        keys, values = (buffer[rows] for buffer in fetcher.buffers[slot])  # [S, D]
        logits, weigh = _dot(queries[head], keys, 1), 0
    logits *= scale
    place = at + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    begin, tail_begin = field(BEGIN, head), field(TAIL_BEGIN, head)
    if seen is not None:
        begin, tail_begin = seen[head][:, :1], seen[head][:, 1:]
    end, tail_end = (jnp.where(exists, field(name, head), 0) for name in (END, TAIL_END))
    mask = ((place >= begin) & (place < end)) | ((place >= tail_begin) & (place < tail_end))
    logits = jnp.where(mask, logits, -jnp.inf)
    maximum = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), LOWEST)
    weights = jnp.exp(logits - maximum)
    weighted = _dot(weights.astype(values.dtype), values, weigh)
    return head, Partial(weighted, maximum, jnp.sum(weights, axis=1, keepdims=True))


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Product over the last axis of ``a`` and the given one of ``b``, summed in float32."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _add(weighted, maxima, totals, head: Array, part: Partial) -> None:
    """Adds a block's partial to its head's."""
    old = maxima[head]
    new = jnp.maximum(old, part.maximum)
    keep, take = jnp.exp(old - new), jnp.exp(part.maximum - new)
    maxima[head] = new
    totals[head] = totals[head] * keep + part.total * take
    weighted[head] = weighted[head] * keep[:, :1] + part.weighted * take[:, :1]
