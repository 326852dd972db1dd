"""Attention over a prompt's spans: a summary each, or, for the few that matter most to this token, their rows.

The rows of an expanded span are never made from its factors: ``q (U V)^T = (q V^T) U^T``, and the same for values.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax import host
from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.sekv.head import route_scores
from kvec_jax.select import indices_of
from kvec_jax.typing import Array

if TYPE_CHECKING:
    from kvec_jax.sekv.memory import SpanMemory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """What one layer changes while it attends: as in ``SpanMemory``, without the layer axis."""

    slot_spans: Array
    slots: Array
    fetched: Array


def attend_spans(
    memory: "SpanMemory", queries: Array, layer: Array, real: Array, scale: float
) -> tuple[Partial, "SpanMemory"]:
    """Attention over the spans, as ``kvec_jax.forms.Beyond.attend``; token after token, so that any portions agree."""
    B, N, Q, D = queries.shape
    K = memory.keys.shape[2]
    grouped = queries.reshape(B, K, N // K, Q, D)

    def at_layer(x):
        return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)

    keys, values = at_layer(memory.keys), at_layer(memory.values)
    start = _Layer(slot_spans=at_layer(memory.slot_spans), slots=at_layer(memory.slots), fetched=memory.fetched)

    def step(state, inputs):
        queries, real = inputs
        logits = jnp.einsum("BKGD,BKSD->BKGS", queries, keys, preferred_element_type=jnp.float32) * scale
        scores = _scores(memory, queries, keys, logits, layer)
        state, reads = _expand(memory, state, scores, real, layer)
        return state, _attend(memory, queries, logits, values, state, reads, scale)

    if Q == 1:
        state, partial = step(start, (grouped[..., 0, :], real[:, 0]))
    else:
        state, partials = lax.scan(step, start, (jnp.moveaxis(grouped, 3, 0), real.T))
        partial = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(B, K, -1, *x.shape[4:]), partials)
    return partial, dataclasses.replace(
        memory,
        slot_spans=lax.dynamic_update_index_in_dim(memory.slot_spans, state.slot_spans, layer, 0),
        slots=lax.dynamic_update_index_in_dim(memory.slots, state.slots, layer, 0),
        fetched=state.fetched,
    )


def prior(counts: Array) -> Array:
    """Ln n of each span: how much more its summary counts than one row; float32."""
    return jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))


def choose(scores: Array, allowed: Array, places: int) -> tuple[Array, Array]:
    """The spans that a group of query heads expands: those with the highest score above 0 of any head.

    Args:
        scores: float32 [B, K, G, S].
        allowed: int32 [B], at most so many.
        places: No less than any of ``allowed``; static.

    Returns:
        int32 [B, K, places], spans by falling score (of equal ones the first), and bool [B, K, places], which count.
    """
    best, span = lax.top_k(jnp.max(scores, axis=2), places)
    return span, (best > 0) & (jnp.arange(places) < allowed[:, None, None])


def _scores(memory: "SpanMemory", queries: Array, keys: Array, logits: Array, layer: Array) -> Array:
    """How much each query head wants each span, float32 [B, K, G, S]: above 0 it does."""
    counts = memory.counts[:, None, None]
    if memory.route is None:
        # Similarity and prior alone: the share that a summary has of the attention of all. Every share is above 0.
        return jax.nn.softmax(logits + prior(counts), axis=-1, where=counts > 0)
    norms, route, threshold = (
        lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in (memory.norms, memory.route, memory.threshold)
    )
    scores = route_scores(queries, keys, norms, memory.counts, route, threshold)
    return jnp.where(counts > 0, scores, 0)


def _expand(memory: "SpanMemory", state: _Layer, scores: Array, real: Array, layer: Array) -> tuple[_Layer, Array]:
    """Brings the chosen spans into slots, and says which slots are read, bool [B, K, Z].

    A span that is in a slot already stays there. Others take the slots of spans that are not chosen now.
    """
    B, K, Z = state.slot_spans.shape
    if Z == 0:
        return state, jnp.zeros((B, K, 0), bool)
    places = min(Z, scores.shape[-1])
    span, chosen = choose(scores, memory.allowed, places)
    chosen &= real[:, None, None]
    there = (state.slot_spans[..., None, :] == span[..., None]) & chosen[..., None]  # [B, K, places, Z]
    missing = chosen & ~jnp.any(there, axis=-1)
    free = ~jnp.any(there, axis=-2)
    # The i-th missing span goes to the i-th free slot.
    turn = jnp.cumsum(missing, axis=-1)[..., None] == jnp.cumsum(free, axis=-1)[..., None, :]
    goes = turn & missing[..., None] & free[..., None, :]  # [B, K, places, Z]
    arrives = jnp.any(goes, axis=-2)
    slot_spans = jnp.where(arrives, jnp.sum(jnp.where(goes, span[..., None], 0), axis=-2), state.slot_spans)
    slots = _fetch(memory, state.slots, slot_spans, arrives, layer)
    fetched = state.fetched + jnp.sum(arrives, axis=(1, 2), dtype=jnp.int32)
    reads = jnp.any(there | goes, axis=-2)
    return _Layer(slot_spans=slot_spans, slots=slots, fetched=fetched), reads


def _fetch(memory: "SpanMemory", slots: Array, slot_spans: Array, arrives: Array, layer: Array) -> Array:
    """The slots with the rank rows of those that arrive: one slice for each, none for the others."""
    B, K, Z, R, X = slots.shape
    rank_rows = memory.factors.shape[0] // (memory.keys.shape[0] * B * K)
    listed = indices_of(arrives.reshape(-1), B * K * Z)
    spans = slot_spans.reshape(-1)

    def bring(i, slots):
        b, k, z = jnp.unravel_index(listed[i], (B, K, Z))
        first = ((layer * B + b) * K + k) * rank_rows + memory.offsets[b, spans[listed[i]]]
        rows = host.fetch(memory.factors, first, R).reshape(1, 1, 1, R, X)
        return lax.dynamic_update_slice(slots, rows, (b, k, z, 0, 0))

    return lax.fori_loop(0, jnp.sum(arrives), bring, slots)


def _attend(
    memory: "SpanMemory", queries: Array, logits: Array, values: Array, state: _Layer, reads: Array, scale: float
) -> Partial:
    """One softmax over the summaries of spans that are not read, and the rows of those that are: [B, K, G]."""
    B, K, Z = reads.shape
    S, D, J = values.shape[2], values.shape[3], memory.max_span
    read_span = jnp.where(reads, state.slot_spans, S)
    expanded = jnp.any(read_span[..., None] == jnp.arange(S), axis=-2)  # [B, K, S]
    summed = ~expanded & (memory.counts > 0)[:, None]
    coarse = jnp.where(summed[:, :, None], logits + prior(memory.counts)[:, None, None], LOWEST)

    of_slot = jnp.minimum(jnp.maximum(state.slot_spans, 0), S - 1).reshape(B, -1)
    ranks, counts = (jnp.take_along_axis(x, of_slot, axis=1).reshape(B, K, Z) for x in (memory.ranks, memory.counts))
    rows = jnp.where((jnp.arange(state.slots.shape[3]) < ranks[..., None])[..., None], state.slots, 0)
    left_keys, right_keys, left_values, right_values = jnp.split(rows, (J, J + D, 2 * J + D), axis=-1)
    wide = dict(preferred_element_type=jnp.float32)
    inner = jnp.einsum("BKGD,BKZRD->BKGZR", queries, right_keys, **wide).astype(queries.dtype)
    fine = jnp.einsum("BKGZR,BKZRJ->BKGZJ", inner, left_keys, **wide) * scale
    seen = reads[..., None] & (jnp.arange(J) < counts[..., None])
    fine = jnp.where(seen[:, :, None], fine, LOWEST)

    maximum = jnp.maximum(jnp.max(coarse, axis=-1), jnp.max(fine, axis=(-1, -2), initial=LOWEST))
    coarse = jnp.where(summed[:, :, None], jnp.exp(coarse - maximum[..., None]), 0)
    fine = jnp.where(seen[:, :, None], jnp.exp(fine - maximum[..., None, None]), 0)
    inner = jnp.einsum("BKGZJ,BKZRJ->BKGZR", fine.astype(values.dtype), left_values, **wide).astype(values.dtype)
    weighted = jnp.einsum("BKGS,BKSD->BKGD", coarse.astype(values.dtype), values, **wide)
    weighted += jnp.einsum("BKGZR,BKZRD->BKGD", inner, right_values, **wide)
    return Partial(weighted, maximum, jnp.sum(coarse, axis=-1) + jnp.sum(fine, axis=(-1, -2)))
