"""Semantic spans: a text is cut where the model itself is surprised."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.models.transformer import Transformer
from kvec_jax.sekv.plan import Limits
from kvec_jax.select import LOWEST_KEY, indices_of, ordered_keys, top_k_mask
from kvec_jax.typing import Array

# Positions whose logits exist at one time.
_CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """A partition of each prompt's positions into exact ones and spans.

    Attributes:
        exact: bool [B, T], positions that stay exact: sinks, anchors and the recent window.
        anchors: bool [B, T], those of them that were chosen for their surprisal.
        span_of: int32 [B, T], number of the span of each other position; -1 for exact ones and padding.
        counts: int32 [B, S], positions of each span, 0 for unused ones.
        members: int32 [B, S, max_span], positions of each span, in order; T beyond its count.
    """

    exact: Array
    anchors: Array
    span_of: Array
    counts: Array
    members: Array


def surprisals(model: Transformer, hidden: Array, tokens: Array) -> Array:
    """How little the model expected each token of a prompt: -ln p(token | those before), in nats.

    The logits of a few positions exist at a time, never those of all.

    Args:
        model: The decoder.
        hidden: [B, T, M], of the last layer.
        tokens: int32 [B, T].

    Returns:
        float32 [B, T]; 0 for the first token, of which nothing is known.
    """
    B, T = tokens.shape
    chunk = min(_CHUNK, T)
    targets = jnp.roll(tokens, -1, axis=1)

    def surprise(start):
        start = jnp.minimum(start, T - chunk)
        logits = model.unembed(lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1))
        target = lax.dynamic_slice_in_dim(targets, start, chunk, axis=1)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    starts = jnp.arange(0, T, chunk)
    parts = lax.map(surprise, starts)  # [chunks, B, chunk]
    at = (jnp.minimum(starts, T - chunk)[:, None] + jnp.arange(chunk)).reshape(-1)
    flat = jnp.moveaxis(parts, 1, 0).reshape(B, -1)
    following = jnp.zeros((B, T + 1), jnp.float32).at[:, at + 1].set(flat)
    return following[:, :T]


def threshold(surprisal: Array, lengths: Array, alpha: float) -> Array:
    """Mean + alpha * standard deviation of each row's surprisals, float32 [B]; the first token doesn't count."""
    at = jnp.arange(surprisal.shape[1])
    known = (at > 0) & (at < lengths[:, None])
    count = jnp.maximum(lengths - 1, 1)
    mean = jnp.sum(surprisal, axis=1, where=known) / count
    deviation = jnp.sum((surprisal - mean[:, None]) ** 2, axis=1, where=known) / count
    return mean + alpha * jnp.sqrt(deviation)


def segment(surprisal: Array, lengths: Array, limits: Limits, alpha: float = 1.0) -> Spans:
    """Cuts prompts into spans at the tokens above mean + alpha * std (paper, section 3.1).

    A token above the threshold begins a span of its own or, if it is among the most surprising, stays exact as an
    anchor and ends the span before it. A span shorter than ``min_span`` goes on over the boundary instead: it is merged
    with its neighbour, as few spans as the device's bytes have summaries for. One of ``max_span`` tokens ends anyway.

    Args:
        surprisal: float32 [B, T], of ``surprisals``.
        lengths: int32 [B].
        limits: Of ``make_limits``.
        alpha: How far above the mean.

    Returns:
        The spans; exact positions and spans partition the positions below ``lengths``.
    """
    T = surprisal.shape[1]
    at = jnp.arange(T)
    real = at < lengths[:, None]
    kept = real & ((at < limits.sinks[:, None]) | (at >= (lengths - limits.window)[:, None]))
    peak = real & (surprisal > threshold(surprisal, lengths, alpha)[:, None])
    order = jnp.where(peak & ~kept, ordered_keys(surprisal), LOWEST_KEY)
    anchors = top_k_mask(order, limits.anchors) & peak & ~kept
    exact = kept | anchors
    span_of = _number(~exact & real, peak, limits)
    counts = jnp.sum(span_of[:, None] == jnp.arange(limits.max_spans)[:, None], axis=-1, dtype=jnp.int32)
    return Spans(
        exact=exact, anchors=anchors, span_of=span_of, counts=counts, members=_members(span_of, counts, limits)
    )


def _number(compressed: Array, peak: Array, limits: Limits) -> Array:
    """The span of every compressed position [B, T], -1 elsewhere, in one pass from left to right."""

    def step(carry, inputs):
        span, count, boundary = carry
        compressed, peak = inputs
        boundary |= peak  # a new run begins at a peak, or after exact tokens
        ends = compressed & (((count >= limits.min_span) & boundary) | (count >= limits.max_span))
        span, count = span + ends, jnp.where(ends, 0, count)
        carry = span, count + compressed, ~compressed
        return carry, jnp.where(compressed, span, -1)

    B = compressed.shape[0]
    start = jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, bool)
    return lax.scan(step, start, (compressed.T, peak.T))[1].T


def _members(span_of: Array, counts: Array, limits: Limits) -> Array:
    T = span_of.shape[1]
    listed = indices_of(span_of >= 0, T)  # spans follow each other in it
    place = (jnp.cumsum(counts, axis=1) - counts)[..., None] + jnp.arange(limits.max_span)  # [B, S, max_span]
    found = jnp.take_along_axis(listed, jnp.minimum(place, T - 1).reshape(place.shape[0], -1), axis=1)
    return jnp.where(jnp.arange(limits.max_span) < counts[..., None], found.reshape(place.shape), T)
