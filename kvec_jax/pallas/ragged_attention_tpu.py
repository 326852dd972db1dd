"""Attention of a few queries over packed rows of keys and values and over a tail, on a TPU.

The packed rows and the tail rows of one key-value head count as one sequence, cut into blocks of S rows. The blocks of
all heads stand in one list, so that work follows the rows there are; a head without rows has no block. A step takes
``_TOGETHER`` blocks, whose chains of products, maxima and exponentials fill each other's gaps. Meanwhile the rows of
the next steps are on their way, from where they lie in HBM to one of ``_SLOTS`` buffers. Each block is read once for
all queries of its head, and added to the head's running maximum, sum and weighted sum, which stay in VMEM.

In HBM, XLA lays keys out in tiles of 8 rows and 128 columns; with heads of other sizes, which would waste columns, the
other way round: of 8 columns and 128 rows. Copies are of whole tiles, and the rows of others that come along, up to 7
before and 7 behind, or 127, are masked. A pool with gaps between its segments would make the copies no shorter, and
itself longer.

Bytes that must move: 2 D of each row once; for each query D in, and D + 2 out in float32. Operations that must run: for
each row and each of its head's M queries, 4 D in the two products and one exponential.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.pallas.spans import Span, nothing
from kvec_jax.typing import Array

_SUBLANES, _LANES = 8, 128
# Most bytes of a block's keys, and most rows. 128 KiB are four times what a v5e reads while a copy begins.
_BLOCK_BYTES, _BLOCK_ROWS = 1 << 17, 512
# Blocks in a step; steps whose rows are in VMEM or on their way there.
_TOGETHER, _SLOTS = 2, 4
# Most queries of a head, and of all heads, that a program takes.
_QUERIES, _ALL_QUERIES = 128, 1024


class Rows(NamedTuple):
    """Keys, or values, in HBM; with rows and columns exchanged where tiles are of 128 rows.

    Attributes:
        pool: [B, P, D].
        pool_end: [B, tile, D], the pool's last rows where no whole tile holds them; ``None`` otherwise.
        tail: [L, B, K, R, D].
        tail_end: [B, K, tile, D] of the layer that is attended, likewise.
    """

    pool: Array
    pool_end: Array | None
    tail: Array
    tail_end: Array | None


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
    tile = _LANES if D % _LANES else _SUBLANES
    pool = pool or nothing(queries, (B, tile, D))
    tail = tail or nothing(queries, (1, B, K, tile, D))
    heads, rows = _program(B * K, M)
    blocks = pl.cdiv(M, rows)
    queries = _pad(queries.reshape(B * K, M, D), 1, blocks * rows)
    layer = jnp.minimum(layer, tail[0].shape[0] - 1)
    table, seen = _table(pool[2], tail[2], tile)
    if seen is not None:
        seen = _pad(seen, 1, blocks * rows)
    keys, values = (_rows(*parts, layer, tile) for parts in zip(pool[:2], tail[:2]))
    if not interpret:  # or else XLA may move all of a small pool to VMEM first
        keys, values = jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), (keys, values))
    S = _block_rows(pool[2].most + tail[2].most, D * queries.dtype.itemsize)

    def per_query(columns):
        return pl.BlockSpec((heads, rows, columns), lambda i, j, *_: (i, j, 0))

    in_hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), keys)
    # To the interpreter more slots and blocks would be more to compile, and nothing to gain.
    slots, together = (2, 1) if interpret else (_SLOTS, _TOGETHER)
    shape = (D, together * S) if tile == _LANES else (together * S, D)
    buffers = [pltpu.VMEM(shape, queries.dtype)] * slots
    running = pltpu.VMEM((heads, rows, _LANES), jnp.float32)
    weighted, sums = pl.pallas_call(
        functools.partial(_kernel, S=S, tile=tile, scale=scale, by_tiles=interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * K // heads, blocks),
            in_specs=[per_query(D), None if seen is None else per_query(2), in_hbm, in_hbm],
            out_specs=[per_query(D), per_query(_LANES)],
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
            jax.ShapeDtypeStruct((B * K, blocks * rows, _LANES), jnp.float32),
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
    rows = min(-(-M // _SUBLANES) * _SUBLANES, _QUERIES)
    most = max(_ALL_QUERIES // rows, 1)
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0), rows


def _block_rows(most: int, row_bytes: int) -> int:
    """Rows of a block: so many that the longest sequence makes blocks of about the same length."""
    blocks = pl.cdiv(most, min(_BLOCK_BYTES // row_bytes // _LANES * _LANES, _BLOCK_ROWS))
    return pl.cdiv(pl.cdiv(most, blocks), _LANES) * _LANES


def _rows(pool: Array, tail: Array, layer: Array, tile: int) -> Rows:
    """The rows, and copies of the last ones where no whole tile holds them."""
    P, R = pool.shape[1], tail.shape[3]
    pool_end = tail_end = None
    if P % tile:
        pool_end = _pad(pool[:, P // tile * tile :], 1, tile)
    if R % tile:
        end = lax.dynamic_index_in_dim(tail[..., R // tile * tile :, :], layer, keepdims=False)
        tail_end = _pad(end, 2, tile)
    rows = Rows(pool, pool_end, tail, tail_end)
    if tile == _LANES:
        rows = jax.tree.map(lambda x: x.swapaxes(-1, -2), rows)  # as they lie in HBM already
    return rows


def _pad(x: Array, axis: int, size: int) -> Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)


# What the kernel knows of each head, in scalar memory. The sequence of a head: whole tiles of the pool, from the one
# that holds its first row to the one that holds its last, then whole tiles of the tail.
_FIELDS = 10
(
    _ROW,  # of the batch
    _HEAD,  # among the key-value heads
    _POOL_ROW,  # row of the pool where the sequence begins
    _BEGIN,  # places in the sequence, of the first row that counts ...
    _END,  # ... and one past the last
    _TAIL_BEGIN,  # likewise, of the tail
    _TAIL_END,
    _PACKED,  # length of the pool's part
    _TAIL_ROW,  # row of the tail where its part begins
    _LENGTH,  # of the whole sequence
) = range(_FIELDS)


def _table(pool: Span, tail: Span, tile: int) -> tuple[Array, Array | None]:
    """The fields of all heads [_FIELDS * B * K], and the places that each query sees from [B * K, M, 2], both int32."""
    pool_row, begin, end = _to_tiles(pool, tile)
    packed = _whole(end, tile)
    tail_row, tail_begin, tail_end = _to_tiles(tail, tile)
    row, head = jnp.indices(packed.shape)
    tail_begin, tail_end = packed + tail_begin, packed + tail_end
    length = _whole(tail_end, tile)
    fields = [row, head, pool_row, begin, end, tail_begin, tail_end, packed, tail_row, length]
    table = jnp.concatenate([x.reshape(-1) for x in fields])
    if pool.seen is None and tail.seen is None:
        return table, None
    seen = _seen(pool, pool_row), _seen(tail, tail_row) + packed[..., None]
    return table, jnp.stack(jnp.broadcast_arrays(*seen), axis=-1).reshape(table.size // _FIELDS, -1, 2)


def _to_tiles(span: Span, tile: int) -> tuple[Array, Array, Array]:
    """The row that begins the first tile of a span, and the span's ends counted from there; zeros if it is empty."""
    some = span.last > span.first
    row = jnp.where(some, span.first & -tile, 0)
    return row, *(jnp.where(some, x - row, 0) for x in (span.first, span.last))


def _seen(span: Span, row: Array) -> Array:
    return (span.first[..., None] if span.seen is None else span.seen) - row[..., None]


class _Blocks(NamedTuple):
    """The list of a program's blocks, by the heads that have some; refs in scalar memory.

    Attributes:
        table: See ``_table``.
        heads, first, last: Head number i of the list, its first block, and one past its last.
        base: Number of the program's first head among all heads.
        S, tile: Rows of a block, and of a tile.
    """

    table: jax.Array
    heads: jax.Array
    first: jax.Array
    last: jax.Array
    base: Array
    S: int
    tile: int

    def field(self, name: int, head: Array) -> Array:
        """A field of one of the program's heads."""
        return self.table[name * (self.table.shape[0] // _FIELDS) + self.base + head]

    def fill(self) -> tuple[Array, Array]:
        """Makes the list; gives how many heads and how many blocks are in it."""

        def add(head, carry):
            used, blocks = carry
            end = blocks + pl.cdiv(self.field(_LENGTH, head), self.S)
            self.heads[used] = head
            self.first[used] = blocks
            self.last[used] = end
            return used + jnp.minimum(end - blocks, 1), end

        return lax.fori_loop(0, self.heads.shape[0], add, (jnp.int32(0), jnp.int32(0)))


class _Fetcher(NamedTuple):
    """What brings the rows of a step into the buffers of a slot.

    Attributes:
        blocks: The list.
        used, total: Heads and blocks in it.
        layer: int32 scalar, whose tail it is.
        together: Blocks in a step.
        sources: Keys and values in HBM.
        buffers: For each slot a pair of them in VMEM, [together * S, D].
        arrived: For each slot a semaphore.
        state: int32 scalars: for each slot which heads of the list its blocks belong to, and the rows on their way;
            then the head of the next block to fetch.
        by_tiles: Whether to copy tile by tile, for the interpreter, which knows no copy of a traced length.
    """

    blocks: _Blocks
    used: Array
    total: Array
    layer: Array
    together: int
    sources: tuple[Rows, Rows]
    buffers: list[tuple[jax.Array, jax.Array]]
    arrived: jax.Array
    state: jax.Array
    by_tiles: bool

    def start(self, step: Array, slot: int) -> None:
        """Starts the copies of a step's blocks; of none where the list has come to its end."""
        at_head = self.state.shape[0] - 1
        head = self.state[at_head]
        rows = jnp.int32(0)
        for i in range(self.together):
            block = step * self.together + i
            self.state[self._place(slot, i)] = head
            rows += self._start_block(block, head, slot, i * self.blocks.S)
            head += (block + 1 >= self.blocks.last[head]).astype(jnp.int32)
            head = jnp.minimum(head, self.used - 1)
        self.state[self._place(slot, self.together)] = rows
        self.state[at_head] = head

    def wait(self, slot: int) -> None:
        """Waits until all rows of a slot are there."""
        rows = self.state[self._place(slot, self.together)]
        for buffer in self.buffers[slot]:
            self._each(rows, lambda at, n, x=buffer: self._copy(x, at, x, at, n, self.arrived.at[slot]).wait())

    def block(self, step: Array, slot: int, i: int) -> tuple[Array, Array, Array]:
        """Of the i-th block in a slot: its head, the place where it begins in the head's sequence, and if it exists."""
        index = self.state[self._place(slot, i)]
        block = step * self.together + i
        return self.blocks.heads[index], (block - self.blocks.first[index]) * self.blocks.S, block < self.total

    def _start_block(self, block, index, slot, place) -> Array:
        field, S = self.blocks.field, self.blocks.S
        head = self.blocks.heads[index]
        at = (block - self.blocks.first[index]) * S
        end = jnp.where(block < self.total, field(_LENGTH, head), 0)
        packed, row, kv_head = (field(name, head) for name in (_PACKED, _ROW, _HEAD))
        pool_rows = jnp.clip(jnp.minimum(packed, end) - at, 0, S)
        rows = jnp.clip(end - at, 0, S)
        for source, buffer in zip(self.sources, self.buffers[slot]):
            to = (buffer, self.arrived.at[slot])
            self._start_part(
                source.pool.at[row], source.pool_end, (row,), field(_POOL_ROW, head) + at, pool_rows, place, *to
            )
            tail_row = field(_TAIL_ROW, head) + jnp.maximum(at - packed, 0)
            part = source.tail.at[self.layer, row, kv_head]
            self._start_part(part, source.tail_end, (row, kv_head), tail_row, rows - pool_rows, place + pool_rows, *to)
        return rows

    def _start_part(self, part, end, lead, row, rows, place, buffer, arrived) -> None:
        """Starts copying rows of ``part`` [.., D] from ``row`` on; the last ones may stand apart, in ``end``."""
        tile = self.blocks.tile
        whole = part.shape[self._axis] // tile * tile
        if end is None:
            inside = rows
        else:
            inside = jnp.minimum(row + rows, whole) - row

            @pl.when((rows > 0) & (row + rows > whole))
            def _():
                self._copy(end.at[lead], 0, buffer, place + whole - row, tile, arrived).start()

        if whole:

            @pl.when(inside > 0)
            def _():
                self._each(inside, lambda at, n: self._copy(part, row + at, buffer, place + at, n, arrived).start())

    def _each(self, rows: Array, do) -> None:
        tile = self.blocks.tile
        if self.by_tiles:
            lax.fori_loop(0, lax.div(rows, tile), lambda i, _: do(i * tile, tile), None)
        else:
            do(0, rows)

    def _copy(self, source, row, buffer, place, rows, arrived):
        """The copy of rows of ``source`` to ``buffer``; all numbers are multiples of the tile."""
        tile = self.blocks.tile
        row, place, rows = (x if isinstance(x, int) else pl.multiple_of(x, tile) for x in (row, place, rows))
        everything = (slice(None),) * self._axis
        source, buffer = source.at[(*everything, pl.ds(row, rows))], buffer.at[(*everything, pl.ds(place, rows))]
        return pltpu.make_async_copy(source, buffer, arrived)

    @property
    def _axis(self) -> int:
        """Where rows are: the second axis where tiles are of 128 of them."""
        return int(self.blocks.tile == _LANES)

    def _place(self, slot: int, i: int) -> int:
        return slot * (self.together + 1) + i


def _whole(rows: Array, tile: int) -> Array:
    """Rows, rounded up to whole tiles."""
    return (rows + tile - 1) & -tile


def _kernel(
    table,  # int32 [_FIELDS * B * K]
    layer,  # int32 [1]
    queries,  # [heads, rows, D]
    seen,  # int32 [heads, rows, 2], or None
    keys,  # Rows
    values,  # Rows
    weighted,  # float32 [heads, rows, D]
    sums,  # float32 [heads, rows, _LANES]: the maximum, then the total in all other columns
    key_buffers,  # for each slot [together * S, D], or rows and columns exchanged
    value_buffers,
    arrived,
    maxima,  # float32 [heads, rows, _LANES], all columns the same
    totals,
    lists,  # int32 [heads] each
    state,
    *,
    S: int,
    tile: int,
    scale: float,
    by_tiles: bool,
):
    slots, together = len(key_buffers), key_buffers[0].shape[int(tile == _LANES)] // S
    blocks = _Blocks(table, *lists, pl.program_id(0) * queries.shape[0], S, tile)
    used, total = blocks.fill()
    steps = pl.cdiv(total, together)
    buffers = list(zip(key_buffers, value_buffers))
    fetcher = _Fetcher(blocks, used, total, layer[0], together, (keys, values), buffers, arrived, state, by_tiles)
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


def _attend_block(fetcher: _Fetcher, step, slot: int, i: int, queries, seen, scale: float) -> tuple[Array, Partial]:
    """A block's head, and the partial over its rows; maximum and total [rows, 1]."""
    field, S = fetcher.blocks.field, fetcher.blocks.S
    head, at, exists = fetcher.block(step, slot, i)
    rows = pl.ds(i * S, S)
    if fetcher.blocks.tile == _LANES:
        keys, values = (buffer[:, rows] for buffer in fetcher.buffers[slot])  # [D, S]
        logits, weigh = _dot(queries[head], keys, 0), 1
    else:
        keys, values = (buffer[rows] for buffer in fetcher.buffers[slot])  # [S, D]
        logits, weigh = _dot(queries[head], keys, 1), 0
    logits *= scale
    place = at + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    begin, tail_begin = field(_BEGIN, head), field(_TAIL_BEGIN, head)
    if seen is not None:
        begin, tail_begin = seen[head][:, :1], seen[head][:, 1:]
    end, tail_end = (jnp.where(exists, field(name, head), 0) for name in (_END, _TAIL_END))
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
