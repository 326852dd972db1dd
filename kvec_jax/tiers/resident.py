"""What of a cache is always on the device: first tokens, recent ones, and the index; and how a layer is cut into these.

A head's tokens, in order, are sinks, blocks of P, and the ring: at least ``recent`` tokens, less than a block more, and
the generated ones. A local layer has a ring only, which holds its window.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.tiers.index import cluster_order
from kvec_jax.tiers.layout import Layout
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident:
    """Always on the device, whatever the window sizes. The arrays that steps write to hold bits, see ``to_bits``.

    Attributes:
        sinks: [2, L, B, K, sinks, D], keys and values.
        sink_counts: int32 [L, B, K].
        ring: Bits [2, L, B, K, R, D], keys and values.
        ring_counts: int32 [L, B, K].
        index: [L, B, K, N, D], one key per block.
        counts: int32 [L, B, K], blocks of each head.
        next_position: int32 [B].
    """

    sinks: Array
    sink_counts: Array
    ring: Array
    ring_counts: Array
    index: Array
    counts: Array
    next_position: Array


class Parts(NamedTuple):
    """One layer's keys and values, cut.

    Attributes:
        sinks: [2, B, K, sinks, D].
        sink_counts: int32 [B, K].
        ring: [2, B, K, R, D].
        ring_counts: int32 [B, K].
        blocks: Bits [B, K, n, 2, P, D].
        index: [B, K, n, D].
        counts: int32 [B, K], blocks of each head.
        worth: float32 [B, K, n], which blocks to place high; -1 where there is none.
        packing: int32 [B, K, n], order in which blocks lie on disk: those with similar keys together.
    """

    sinks: Array
    sink_counts: Array
    ring: Array
    ring_counts: Array
    blocks: Array
    index: Array
    counts: Array
    worth: Array
    packing: Array


def bits_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What numbers of ``dtype`` are stored as."""
    return jnp.dtype(jnp.uint16) if jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def to_bits(x: Array) -> Array:
    """The numbers as they are stored: bfloat16 as uint16.

    XLA on CPU (of JAX 0.10) copies a whole buffer of bfloat16 to write a row of it.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """The numbers that ``to_bits`` stored."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


@functools.partial(jax.jit, static_argnames=("layout", "dtype"))
def empty_resident(layout: Layout, lengths: Array, dtype: jnp.dtype) -> Resident:
    """Nothing yet, of prompts with ``lengths`` int32 [B]."""
    shape = layout.layers, layout.rows, layout.heads
    nothing = jnp.zeros(shape, jnp.int32)
    return Resident(
        sinks=jnp.zeros((2, *shape, layout.sinks, layout.head_dim), dtype),
        sink_counts=nothing,
        ring=jnp.zeros((2, *shape, layout.ring, layout.head_dim), bits_dtype(dtype)),
        ring_counts=nothing,
        index=jnp.zeros((*shape, layout.blocks, layout.head_dim), dtype),
        counts=nothing,
        next_position=jnp.array(lengths),
    )


def cut(keys: Array, values: Array, counts: Array, is_local: Array, layout: Layout) -> Parts:
    """Cuts a layer into sinks, blocks and ring.

    Args:
        keys: [B, K, T, D], a head's tokens in order.
        values: [B, K, T, D].
        counts: int32 [B, K], tokens of each head.
        is_local: bool scalar, traced.
        layout: Of the run.

    Returns:
        The parts; of the blocks, those that come later are worth more.
    """
    P, T = layout.block_tokens, keys.shape[2]
    both = jnp.stack([keys, values])
    most = max((T - layout.sinks - layout.recent) // P, 1)
    sink_counts = jnp.where(is_local, 0, jnp.minimum(counts, layout.sinks))
    blocks = jnp.where(is_local, 0, jnp.maximum(counts - layout.sinks - layout.recent, 0) // P)
    ring_counts = jnp.where(is_local, jnp.minimum(counts, layout.window), counts - sink_counts - blocks * P)
    middle = layout.sinks + jnp.arange(most * P)
    middle = jnp.broadcast_to(middle, (*counts.shape, most * P))
    if layout.clustered:
        order = cluster_order(_rows(keys, middle), blocks * P, P)
        middle = layout.sinks + order
    rows = _rows(both, middle).reshape(2, *counts.shape, most, P, -1)
    index = jnp.mean(rows[0], axis=-2, dtype=jnp.float32).astype(keys.dtype)
    ring = (counts - ring_counts)[..., None] + jnp.arange(layout.ring)
    return Parts(
        sinks=_rows(both, jnp.broadcast_to(jnp.arange(layout.sinks), (*counts.shape, layout.sinks))),
        sink_counts=sink_counts,
        ring=_rows(both, ring),
        ring_counts=ring_counts,
        blocks=to_bits(jnp.moveaxis(rows, 0, 3)),
        index=index,
        counts=blocks,
        worth=jnp.where(jnp.arange(most) < blocks[..., None], jnp.arange(most, dtype=jnp.float32), -1.0),
        packing=cluster_order(index, blocks, layout.per_extent),
    )


def place(resident: Resident, parts: Parts, layer: Array) -> Resident:
    """``resident`` with one more layer."""
    n = parts.index.shape[2]
    return dataclasses.replace(
        resident,
        sinks=resident.sinks.at[:, layer].set(parts.sinks),
        sink_counts=resident.sink_counts.at[layer].set(parts.sink_counts),
        ring=resident.ring.at[:, layer].set(to_bits(parts.ring)),
        ring_counts=resident.ring_counts.at[layer].set(parts.ring_counts),
        index=resident.index.at[layer, :, :, :n].set(parts.index),
        counts=resident.counts.at[layer].set(parts.counts),
    )


def append(resident: Resident, keys: Array, values: Array, alive: Array, layer: Array) -> Resident:
    """``resident`` with the newest token of one layer, keys and values [B, K, D], in its ring where ``alive`` [B]."""
    B, K, _ = keys.shape
    rows, heads = jnp.arange(B)[:, None], jnp.arange(K)
    counts = resident.ring_counts[layer]
    layers = jnp.broadcast_to(layer, (B, K))
    return dataclasses.replace(
        resident,
        ring=resident.ring.at[:, layers, rows, heads, counts].set(to_bits(jnp.stack([keys, values])), mode="drop"),
        ring_counts=resident.ring_counts.at[layer].add(alive[:, None].astype(jnp.int32)),
    )


def cut_ring(
    resident: Resident, layer: Array, is_local: Array, layout: Layout, most: int
) -> tuple[Resident, Array, Array]:
    """Moves a layer's older ring tokens into blocks; a local layer drops those outside its window.

    Args:
        resident: With generated tokens in the ring.
        layer: int32 scalar, traced.
        is_local: bool scalar, traced.
        layout: Of the run.
        most: Most blocks that a head gets; static.

    Returns:
        ``resident`` with a shorter ring and a longer index; the blocks, bits [B, K, most, 2, P, D]; how many
        each head has, int32 [B, K].
    """
    P = layout.block_tokens
    counts, blocks = resident.ring_counts[layer], resident.counts[layer]
    fresh = jnp.where(is_local, 0, jnp.maximum(counts - layout.recent, 0) // P)
    gone = jnp.where(is_local, jnp.maximum(counts - layout.window, 0), fresh * P)
    ring = resident.ring[:, layer]
    rows = ring[:, :, :, : most * P].reshape(2, *counts.shape, most, P, -1)
    index = jnp.mean(from_bits(rows[0]), axis=-2, dtype=jnp.float32).astype(resident.index.dtype)
    into = jnp.where(jnp.arange(most) < fresh[..., None], blocks[..., None] + jnp.arange(most), layout.blocks)
    b, k = jnp.arange(counts.shape[0])[:, None, None], jnp.arange(counts.shape[1])[:, None]
    shifted = _rows(ring, gone[..., None] + jnp.arange(layout.ring))
    resident = dataclasses.replace(
        resident,
        ring=resident.ring.at[:, layer].set(shifted),
        ring_counts=resident.ring_counts.at[layer].set(counts - gone),
        index=resident.index.at[layer].set(resident.index[layer].at[b, k, into].set(index, mode="drop")),
        counts=resident.counts.at[layer].set(blocks + fresh),
    )
    return resident, jnp.moveaxis(rows, 0, 3), fresh


def _rows(x: Array, index: Array) -> Array:
    """``x`` [..., B, K, T, D] at ``index`` int32 [B, K, n] (the last where it is beyond T): [..., B, K, n, D]."""
    return jnp.take_along_axis(x, _like(x, jnp.minimum(index, x.shape[-2] - 1)), axis=-2)


def _like(x: Array, index: Array) -> Array:
    return index.reshape((1,) * (x.ndim - 4) + index.shape + (1,))
