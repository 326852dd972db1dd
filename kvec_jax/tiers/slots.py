"""Which blocks are on the device: tables of slots, and what each step does to them.

All (layer, head) windows lie end to end in one pool of blocks. The tables say which block a slot holds and where a
block is; the two are inverses of each other after every step.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvec_jax.tiers.layout import Layout
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Tables of the pool.

    Attributes:
        slot_block: int32 [L, B, K, S], block that a slot holds, or N.
        block_slot: int32 [L, B, K, N], slot that a block is in, or S.
        used: int32 [L, B, K, S], step in which a slot's block was chosen last; -1 where there is none.
        sizes: int32 [L, K], slots of each head; at most S.
        first: int32 [L, K], where in the pool they begin.
    """

    slot_block: Array
    block_slot: Array
    used: Array
    sizes: Array
    first: Array


class Found(NamedTuple):
    """What a step's chosen blocks of one layer turned out to be.

    Attributes:
        places: int32 [B, K, top], where in the pool each chosen block is or will be; the pool's size for none.
        hit: bool [B, K, top], whether it is there already.
        missing: int32 [B, K, top], the blocks that are not, first; then N.
        into: int32 [B, K, top], where in the pool they go; then the pool's size.
    """

    places: Array
    hit: Array
    missing: Array
    into: Array


def empty_slots(layout: Layout, windows: np.ndarray) -> Slots:
    """Tables in which every slot is free; ``windows`` int [L, K] are the slots of each head."""
    ends = np.cumsum(windows.reshape(-1)).reshape(windows.shape)
    most = max(int(windows.max()), layout.top)
    return _empty_slots(windows.astype(np.int32), (ends - windows).astype(np.int32), layout, most)


@functools.partial(jax.jit, static_argnames=("layout", "most"))
def _empty_slots(sizes: Array, first: Array, layout: Layout, most: int) -> Slots:
    shape = layout.layers, layout.rows, layout.heads
    return Slots(
        slot_block=jnp.full((*shape, most), layout.blocks, jnp.int32),
        block_slot=jnp.full((*shape, layout.blocks), most, jnp.int32),
        used=jnp.full((*shape, most), -1, jnp.int32),
        sizes=jnp.array(sizes),  # a copy: all of it will be donated
        first=jnp.array(first),
    )


def look_up(slots: Slots, scores: Array, chosen: Array, layer: Array, step: Array, size: int, lookahead: bool):
    """Finds a layer's chosen blocks, and gives those that are missing the slots of the least worthy.

    Args:
        slots: Tables.
        scores: float32 [B, K, N] of this step.
        chosen: int32 [B, K, top], rising, then N.
        layer: int32 scalar, traced.
        step: int32 scalar, traced.
        size: Blocks of the pool.
        lookahead: Whether a block is worth its score of this step, rather than when it was chosen last.

    Returns:
        The tables after the missing blocks have come, and ``Found``. Free slots go first; of equal ones the first.
    """
    slot_block, block_slot, used = (x[layer] for x in (slots.slot_block, slots.block_slot, slots.used))
    S, N, top = slot_block.shape[-1], block_slot.shape[-1], chosen.shape[-1]
    where = _take(block_slot, chosen, S)
    hit = where < S
    missing = ~hit & (chosen < N)
    worth = _take(scores, slot_block, -jnp.inf) if lookahead else used.astype(jnp.float32)
    stays = _mark(where, S) | (jnp.arange(S) >= slots.sizes[layer][:, None])
    _, victims = lax.top_k(-jnp.where(stays, jnp.inf, worth), top)
    victims = victims.astype(jnp.int32)
    order = jnp.argsort(~missing, axis=-1, stable=True)
    count = jnp.sum(missing, axis=-1, keepdims=True)
    among = jnp.arange(top) < count
    new = jnp.where(among, jnp.take_along_axis(chosen, order, axis=-1), N)
    into = jnp.where(among, victims, S)
    where = jnp.where(missing, jnp.take_along_axis(victims, jnp.cumsum(missing, axis=-1) - 1, axis=-1), where)
    block_slot = _put(block_slot, _take(slot_block, into, N), S)
    block_slot = _put(block_slot, new, into)
    slot_block = _put(slot_block, into, new)
    used = _put(used, where, step)
    first = slots.first[layer][:, None]
    slots = dataclasses.replace(
        slots,
        slot_block=slots.slot_block.at[layer].set(slot_block),
        block_slot=slots.block_slot.at[layer].set(block_slot),
        used=slots.used.at[layer].set(used),
    )
    return slots, Found(_in_pool(where, first, S, size), hit, new, _in_pool(into, first, S, size))


def fill_layer(slots: Slots, pool: Array, layer: Array, blocks: Array, worth: Array) -> tuple[Slots, Array]:
    """Puts a layer's most important blocks on the device.

    Args:
        slots: Tables in which the layer's slots are free.
        pool: [B, size, 2, P, D].
        layer: int32 scalar, traced.
        blocks: [B, K, n, 2, P, D].
        worth: float32 [B, K, n]; negative where there is no block.

    Returns:
        Tables and pool.
    """
    S, N = slots.slot_block.shape[-1], slots.block_slot.shape[-1]
    most = min(S, blocks.shape[2])
    values, best = lax.top_k(worth, most)
    rank = jnp.arange(most)
    fits = (values >= 0) & (rank < slots.sizes[layer][:, None])
    block = jnp.where(fits, best, N).astype(jnp.int32)
    into = jnp.where(fits, rank, S)
    slots = dataclasses.replace(
        slots,
        slot_block=slots.slot_block.at[layer, ..., :most].set(block),
        block_slot=slots.block_slot.at[layer].set(_put(slots.block_slot[layer], block, into)),
        used=slots.used.at[layer, ..., :most].set(jnp.where(fits, 0, -1)),
    )
    rows = jnp.take_along_axis(blocks, best[..., None, None, None], axis=2)
    return slots, write_blocks(pool, rows, _in_pool(into, slots.first[layer][:, None], S, pool.shape[1]))


def write_blocks(pool: Array, blocks: Array, into: Array) -> Array:
    """The pool [B, size, 2, P, D] with ``blocks`` [B, K, M, 2, P, D] at ``into`` int32 [B, K, M]; ``size``: nowhere."""
    rows = jnp.arange(pool.shape[0])[:, None, None]
    return pool.at[rows, into].set(blocks, mode="drop")


def read_blocks(pool: Array, places: Array) -> Array:
    """The blocks [B, K, M, 2, P, D] at ``places`` int32 [B, K, M]; anything where there is none."""
    rows = jnp.arange(pool.shape[0])[:, None, None]
    return pool.at[rows, places].get(mode="clip")


def _take(table: Array, index: Array, default) -> Array:
    """``table[..., index]``, and ``default`` for an index beyond it."""
    size = table.shape[-1]
    found = jnp.take_along_axis(table, jnp.minimum(index, size - 1), axis=-1)
    return jnp.where(index < size, found, default)


def _put(table: Array, index: Array, values: Array) -> Array:
    """``table`` [B, K, X] with ``values`` at ``index`` [B, K, Y]; an index beyond it is dropped."""
    B, K, _ = table.shape
    rows, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[:, None]
    return table.at[rows, heads, index].set(values, mode="drop")


def _mark(index: Array, size: int) -> Array:
    return _put(jnp.zeros((*index.shape[:2], size), bool), index, True)


def _in_pool(slot: Array, first: Array, none: int, size: int) -> Array:
    return jnp.where(slot < none, first + slot, size).astype(jnp.int32)
