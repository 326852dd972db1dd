"""How the rows that attention sees come into VMEM, on a TPU: the list of their blocks, and the copies.

In HBM, XLA lays keys out in tiles of 8 rows and 128 columns; with heads of other sizes, which would waste columns, the
other way round: of 8 columns and 128 rows. Copies are of whole tiles, and the rows of others that come along, up to 7
before and 7 behind, or 127, are masked. A pool with gaps between its segments would make the copies no shorter, and
itself longer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.pallas.spans import Span
from kvec_jax.typing import Array

SUBLANES, LANES = 8, 128


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


def make_rows(pool: Array, tail: Array, layer: Array, tile: int) -> Rows:
    """The rows, and copies of the last ones where no whole tile holds them."""
    P, R = pool.shape[1], tail.shape[3]
    pool_end = tail_end = None
    if P % tile:
        pool_end = pad(pool[:, P // tile * tile :], 1, tile)
    if R % tile:
        end = lax.dynamic_index_in_dim(tail[..., R // tile * tile :, :], layer, keepdims=False)
        tail_end = pad(end, 2, tile)
    rows = Rows(pool, pool_end, tail, tail_end)
    if tile == LANES:
        rows = jax.tree.map(lambda x: x.swapaxes(-1, -2), rows)  # as they lie in HBM already
    return rows


def pad(x: Array, axis: int, size: int) -> Array:
    """``x`` with zeros at the end of an axis, up to a size."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)


# What the kernel knows of each head, in scalar memory. The sequence of a head: whole tiles of the pool, from the one
# that holds its first row to the one that holds its last, then whole tiles of the tail.
FIELDS = 10
(
    ROW,  # of the batch
    HEAD,  # among the key-value heads
    POOL_ROW,  # row of the pool where the sequence begins
    BEGIN,  # places in the sequence, of the first row that counts ...
    END,  # ... and one past the last
    TAIL_BEGIN,  # likewise, of the tail
    TAIL_END,
    PACKED,  # length of the pool's part
    TAIL_ROW,  # row of the tail where its part begins
    LENGTH,  # of the whole sequence
) = range(FIELDS)


def make_table(pool: Span, tail: Span, tile: int) -> tuple[Array, Array | None]:
    """The fields of all heads [FIELDS * B * K], and the places that each query sees from [B * K, M, 2], both int32."""
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
    return table, jnp.stack(jnp.broadcast_arrays(*seen), axis=-1).reshape(table.size // FIELDS, -1, 2)


def _to_tiles(span: Span, tile: int) -> tuple[Array, Array, Array]:
    """The row that begins the first tile of a span, and the span's ends counted from there; zeros if it is empty."""
    some = span.last > span.first
    row = jnp.where(some, span.first & -tile, 0)
    return row, *(jnp.where(some, x - row, 0) for x in (span.first, span.last))


def _seen(span: Span, row: Array) -> Array:
    return (span.first[..., None] if span.seen is None else span.seen) - row[..., None]


def _whole(rows: Array, tile: int) -> Array:
    """Rows, rounded up to whole tiles."""
    return (rows + tile - 1) & -tile


class Blocks(NamedTuple):
    """The list of a program's blocks, by the heads that have some; refs in scalar memory.

    Attributes:
        table: See ``make_table``.
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
        return self.table[name * (self.table.shape[0] // FIELDS) + self.base + head]

    def fill(self) -> tuple[Array, Array]:
        """Makes the list; gives how many heads and how many blocks are in it."""

        def add(head, carry):
            used, blocks = carry
            end = blocks + pl.cdiv(self.field(LENGTH, head), self.S)
            self.heads[used] = head
            self.first[used] = blocks
            self.last[used] = end
            return used + jnp.minimum(end - blocks, 1), end

        return lax.fori_loop(0, self.heads.shape[0], add, (jnp.int32(0), jnp.int32(0)))


class Fetcher(NamedTuple):
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

    blocks: Blocks
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
        end = jnp.where(block < self.total, field(LENGTH, head), 0)
        packed, row, kv_head = (field(name, head) for name in (PACKED, ROW, HEAD))
        pool_rows = jnp.clip(jnp.minimum(packed, end) - at, 0, S)
        rows = jnp.clip(end - at, 0, S)
        for source, buffer in zip(self.sources, self.buffers[slot]):
            to = (buffer, self.arrived.at[slot])
            self._start_part(
                source.pool.at[row], source.pool_end, (row,), field(POOL_ROW, head) + at, pool_rows, place, *to
            )
            tail_row = field(TAIL_ROW, head) + jnp.maximum(at - packed, 0)
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
        return int(self.blocks.tile == LANES)

    def _place(self, slot: int, i: int) -> int:
        return slot * (self.together + 1) + i
