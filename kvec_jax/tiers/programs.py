"""The compiled pieces of a step and of reading a prompt; the host strings them together.

Each takes the layer as a traced number, so one program serves all layers. Only those that need the pool are given it:
what selects never waits for what fetches.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.cache import CompressedKV
from kvec_jax.decoding import choose_tokens, is_end
from kvec_jax.models.transformer import Block, Rotation, Transformer
from kvec_jax.online_softmax import Partial, attend_block, attend_blocks, finish, merge
from kvec_jax.prefill import layer_reach
from kvec_jax.prompt_attention import attend_prompt
from kvec_jax.tiers import resident as residents
from kvec_jax.tiers import slots as tables
from kvec_jax.tiers.index import block_scores, choose_blocks
from kvec_jax.tiers.layout import Layout
from kvec_jax.tiers.resident import Parts, Resident, from_bits
from kvec_jax.tiers.slots import Found, Slots
from kvec_jax.typing import Array

# Queries at the end of the prompt whose choice says which blocks are placed high.
_WINDOW = 32
_RING_BLOCK = 128
# Of a layer's MLP on a CPU.
_PARTS = 8


@jax.jit
def embed(model: Transformer, tokens: Array) -> Array:
    """Hidden states [B, T, M] of ``tokens`` int32 [B, T]."""
    return model.embed(tokens)


@functools.partial(jax.jit, static_argnames="layout")
def read_layer(
    model: Transformer, hidden: Array, lengths: Array, layer: Array, is_local: Array, layout: Layout
) -> tuple[Array, Parts]:
    """One layer of the prompt: the next hidden states [B, T, M], and the layer's keys and values, cut."""
    config, block = model.config, layer_of(model, layer)
    B, T, _ = hidden.shape
    rotation = Rotation(config, jnp.broadcast_to(jnp.arange(T), (B, T)))
    queries, keys, values = block.project(hidden)
    queries, keys = (rotation(x, is_local, layer) for x in (queries, keys))
    reach = layer_reach(config, is_local, T)
    attended, _ = attend_prompt(
        queries, keys, values, lengths, scale=config.scale, reach=reach, window=config.sliding_window
    )
    counts = jnp.broadcast_to(lengths[:, None], (B, layout.heads))
    last = jnp.maximum(lengths[:, None] - _WINDOW + jnp.arange(_WINDOW), 0)
    looks = jnp.take_along_axis(queries, last[:, None, :, None], axis=2)
    looks = looks.reshape(B, layout.heads, -1, layout.head_dim)
    parts = residents.cut(keys, values, counts, is_local, layout)
    worth = block_scores(looks, parts.index, parts.counts, config.scale)
    return block.finish(hidden, attended), parts._replace(worth=worth)


@functools.partial(jax.jit, static_argnames=("rows", "layout"))
def cut_layer(cache: CompressedKV, layer: Array, is_local: Array, rows: int, layout: Layout) -> Parts:
    """One layer of a compressed cache, cut; no head of it has more than ``rows`` rows."""
    counts = cache.counts[:, layer]
    at = cache.starts[:, layer][..., None] + jnp.arange(rows)
    B, K, _ = at.shape
    at = jnp.minimum(at, cache.keys.shape[1] - 1).reshape(B, K * rows, 1)
    keys, values = (jnp.take_along_axis(x, at, axis=1).reshape(B, K, rows, -1) for x in (cache.keys, cache.values))
    return residents.cut(keys, values, counts, is_local, layout)


@functools.partial(jax.jit, donate_argnames=("resident", "slots", "pool"), static_argnames="size")
def place_layer(
    resident: Resident, slots: Slots, pool: Array, parts: Parts, first: Array, layer: Array, size: int
) -> tuple[Resident, Slots, Array]:
    """Puts one layer of the ``size`` rows from ``first`` on where it belongs on the device."""
    heads = {"sinks": 1, "ring": 1}
    mine = Parts(
        *(
            lax.dynamic_slice_in_dim(x, first, size, heads.get(name, 0))
            for name, x in zip(Parts._fields, parts, strict=True)
        )
    )
    slots, pool = tables.fill_layer(slots, pool, layer, mine.blocks, mine.worth)
    return residents.place(resident, mine, layer), slots, pool


@functools.partial(jax.jit, donate_argnames="resident", static_argnames="layout")
def select(
    model: Transformer, resident: Resident, hidden: Array, alive: Array, layer: Array, is_local: Array, layout: Layout
):
    """The newest token enters a layer, and chooses its blocks.

    Returns:
        ``resident`` with the token; queries [B, K, G, D]; scores [B, K, N]; chosen [B, K, top]; hints [B, K, hints].
    """
    config = model.config
    rotation = Rotation(config, resident.next_position[:, None])
    queries, keys, values = layer_of(model, layer).project(hidden)
    queries, keys = (rotation(x, is_local, layer) for x in (queries, keys))
    resident = residents.append(resident, keys[:, :, 0], values[:, :, 0], alive, layer)
    queries = queries.reshape(hidden.shape[0], layout.heads, -1, layout.head_dim)
    counts = resident.counts[layer]
    scores = block_scores(queries, resident.index[layer], counts, config.scale)
    return resident, queries, scores, *choose_blocks(scores, counts, alive, layout)


@functools.partial(jax.jit, donate_argnames="slots", static_argnames=("size", "lookahead"))
def look_up(slots: Slots, scores: Array, chosen: Array, layer: Array, step: Array, size: int, lookahead: bool):
    """See ``slots.look_up``."""
    return tables.look_up(slots, scores, chosen, layer, step, size, lookahead)


@functools.partial(jax.jit, static_argnames=("scale", "layout"))
def attend_resident(
    resident: Resident, queries: Array, layer: Array, is_local: Array, scale: float, layout: Layout
) -> Partial:
    """Attention over sinks and ring."""
    ring, counts = resident.ring[:, layer], resident.ring_counts[layer]
    size = min(_RING_BLOCK, layout.ring)
    oldest = jnp.where(is_local, counts - layout.window, 0)[..., None]

    def fetch(i):
        start = jnp.minimum(i * size, layout.ring - size)
        at = start + jnp.arange(size)
        mask = (at >= i * size) & (at < counts[..., None]) & (at >= oldest)
        keys, values = from_bits(lax.dynamic_slice_in_dim(ring, start, size, axis=3))
        return keys, values, mask[:, :, None]

    partial = attend_blocks(queries, fetch, 0, -(-jnp.max(counts) // size), scale)
    if not layout.sinks:
        return partial
    keys, values = resident.sinks[:, layer]
    there = jnp.arange(layout.sinks) < resident.sink_counts[layer][..., None]
    return merge(attend_block(queries, keys, values, there[:, :, None], scale), partial)


@functools.partial(jax.jit, static_argnames="scale")
def attend_held(partial: Partial, pool: Array, queries: Array, found: Found, scale: float) -> Partial:
    """``partial`` and attention over the chosen blocks that were on the device already."""
    return _attend(partial, tables.read_blocks(pool, found.places), found.hit, queries, scale)


@functools.partial(jax.jit, static_argnames=("scale", "layout"))
def attend_fetched(
    partial: Partial, blocks: Array, ids: Array, queries: Array, scale: float, layout: Layout
) -> Partial:
    """``partial`` and attention over ``blocks`` [B, K, M, 2, P, D], the first M of ``ids``; N stands for none."""
    return _attend(partial, blocks, ids[..., : blocks.shape[2]] < layout.blocks, queries, scale)


@functools.partial(jax.jit, donate_argnames="pool")
def write(pool: Array, blocks: Array, into: Array) -> Array:
    """The pool with ``blocks`` [B, K, M, 2, P, D] at the first M places of ``into``."""
    return tables.write_blocks(pool, blocks, into[..., : blocks.shape[2]])


gather = jax.jit(tables.read_blocks)


@jax.jit
def finish_layer(model: Transformer, hidden: Array, partial: Partial, layer: Array) -> Array:
    """The hidden states [B, 1, M] after a layer whose attention is ``partial``."""
    attended, _ = finish(partial)
    B, K, G, D = attended.shape
    attended = attended.astype(hidden.dtype).reshape(B, K * G, 1, D)
    block = layer_of(model, layer)

    def whole(x):
        return block.feed_forward(x, block.gate_proj[...], block.up_proj[...], block.down_proj[...])

    def by_parts(x):
        return _feed_forward_by_parts(model.layers, layer, x)

    return block.finish(hidden, attended, lambda x: lax.platform_dependent(x, cpu=by_parts, default=whole))


@functools.partial(jax.jit, donate_argnames="resident")
def end_step(resident: Resident, alive: Array, hidden: Array) -> tuple[Resident, Array]:
    """After a step of the rows that are ``alive`` bool [B]; and their ``hidden`` states [B, 1, M] as [B, M]."""
    position = resident.next_position + alive.astype(jnp.int32)
    return dataclasses.replace(resident, next_position=position), hidden[:, 0]


@functools.partial(jax.jit, donate_argnames="resident", static_argnames=("layout", "most"))
def cut_ring(resident: Resident, layer: Array, is_local: Array, layout: Layout, most: int):
    """See ``resident.cut_ring``."""
    return residents.cut_ring(resident, layer, is_local, layout, most)


@jax.jit
def last_logits(model: Transformer, hidden: Array, lengths: Array) -> Array:
    """Logits float32 [B, V] of the last token of prompts with ``hidden`` states [B, T, M]."""
    return model.unembed(jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0])


@jax.jit
def unembed(model: Transformer, hidden: Array) -> Array:
    """Logits float32 [B, V] after ``hidden`` [B, M]."""
    return model.unembed(hidden)


@functools.partial(jax.jit, static_argnames="ends")
def begin(logits: Array, sampler, key: Array, positions: Array, ends) -> tuple[Array, Array]:
    """The first tokens int32 [B], and which rows they end."""
    first = choose_tokens(sampler, key, logits, positions)
    return first, is_end(first, ends)


@functools.partial(jax.jit, static_argnames="ends")
def next_tokens(
    model: Transformer,
    hidden: Array,
    sampler,
    keys: Array,
    positions: Array,
    written: Array,
    count: Array,
    done: Array,
    ends,
) -> tuple[Array, Array]:
    """Tokens int32 [B] after ``hidden`` [B, M], at ``positions`` [B], and which rows are done; those that were stay.

    ``written`` int32 [B, S] holds the ``count`` tokens so far, and each row's newest in all other places.
    """
    logits = sampler.penalise(model.unembed(hidden), written, count)
    chosen = choose_tokens(sampler, keys, logits, positions)
    tokens = jnp.where(done, written[:, -1], chosen)
    return tokens, done | is_end(tokens, ends)


def layer_of(model: Transformer, layer: Array):
    """The parameters of one layer."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), model.layers)


def _feed_forward_by_parts(layers: Block, layer: Array, x: Array) -> Array:
    """The MLP of one of the stacked layers.

    XLA on CPU copies a layer's matrices out of the stack before it multiplies; parts of them stay in the caches.
    """
    gates, ups, downs = layers.gate_proj[...], layers.up_proj[...], layers.down_proj[...]
    _, M, F = gates.shape
    parts = math.gcd(F, _PARTS)
    size = F // parts

    def add(i, total):
        gate, up = (lax.dynamic_slice(stack, (layer, 0, i * size), (1, M, size))[0] for stack in (gates, ups))
        down = lax.dynamic_slice(downs, (layer, i * size, 0), (1, size, M))[0]
        return total + layers.feed_forward(x, gate, up, down).astype(jnp.float32)

    return lax.fori_loop(0, parts, add, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _attend(partial: Partial, blocks: Array, there: Array, queries: Array, scale: float) -> Partial:
    B, K, M, _, P, D = blocks.shape
    keys, values = (from_bits(blocks[:, :, :, i]).reshape(B, K, M * P, D) for i in (0, 1))
    mask = jnp.repeat(there, P, axis=-1)[:, :, None]
    return merge(partial, attend_block(queries, keys, values, mask, scale))
