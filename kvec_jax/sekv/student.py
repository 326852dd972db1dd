"""SeKV's attention in a form that can be differentiated: both branches of every decision, for the trained head."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.extend import run_extend
from kvec_jax.implementations import Implementations
from kvec_jax.models.transformer import Transformer
from kvec_jax.online_softmax import LOWEST, Partial
from kvec_jax.pool import ragged_pool
from kvec_jax.prefill import as_cache
from kvec_jax.sekv.head import ZoomHead, route_norms, route_scores
from kvec_jax.sekv.lesson import Factors, Lesson
from kvec_jax.sekv.zoom import choose, prior
from kvec_jax.typing import Array

# Width of the sigmoid whose slope stands for that of a decision.
_TEMPERATURE = 0.5


class Notes(NamedTuple):
    """Sums over the layers, of means over queries, heads and spans.

    Attributes:
        zoom: Cross-entropy of the decisions with what full attention looks at.
        opened: Share of the spans that are read in detail; its gradient is that of the scores.
    """

    zoom: Array
    opened: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Student:
    """A ``kvec_jax.forms.Beyond`` that takes notes; ``look(queries, layer, scale)`` gives partial and notes."""

    notes: Notes
    look: Callable = dataclasses.field(metadata={"static": True})
    device_nbytes = host_nbytes = 0

    def attend(self, queries: Array, layer: Array, real: Array, scale: float) -> tuple[Partial, "_Student"]:
        partial, notes = jax.checkpoint(self.look, static_argnums=2)(queries, layer, scale)
        return partial, dataclasses.replace(self, notes=jax.tree.map(jnp.add, self.notes, notes))


def answer(
    model: Transformer, head: ZoomHead | None, lesson: Lesson, *, coverage: float = 0.9, positive_weight: float = 10.0
) -> tuple[Array, Notes]:
    """Runs the model over a lesson's last tokens on top of SeKV's memory of its prompt, all of them at once.

    The same step as for any cache (``run_extend``); only attention over the prompt differs, in that it can be
    differentiated with respect to the head.

    Args:
        model: Frozen.
        head: What is trained; ``None`` for the untrained mode.
        lesson: Of ``make_lesson``, with at most 512 last tokens.
        coverage: Share of a query's attention to spans that the spans to be opened must hold.
        positive_weight: How much more a span that is to be opened counts in ``Notes.zoom``.

    Returns:
        Logits float32 [B, Q, V], and notes averaged over the layers.
    """
    config = model.config
    L, B = lesson.exact_keys.shape[:2]
    # Gates depend on nothing that changes with the query: made once.
    gates = None if head is None else tuple(span_gates(head, x, lesson.ranks) for x in (lesson.keys, lesson.values))

    def look(queries, layer, scale):
        return _look(lesson, head, gates, queries, layer, scale, coverage, positive_weight)

    nothing = ragged_pool(B, L, config.num_key_value_heads, config.head_dim, 0, 0, model.dtype)
    cache = as_cache(nothing, config, jnp.full(B, lesson.length, jnp.int32), 0)
    student = _Student(notes=Notes(jnp.float32(0), jnp.float32(0)), look=look)
    lengths = jnp.full(B, lesson.questions.shape[1], jnp.int32)
    cache = dataclasses.replace(cache, beyond=student)
    how = Implementations(ragged_attention="xla")  # kernels have no gradient
    logits, cache = run_extend(model, cache, lesson.questions, lengths, True, how)
    return logits, jax.tree.map(lambda total: total / L, cache.beyond.notes)


def span_gates(head: ZoomHead, factors: Factors, ranks: Array) -> Array:
    """Gates of the singular values of all spans, float32 [L, B, K, S, R]."""
    return head.gates(factors.singular, factors.mean, ranks[:, None])


def _look(lesson, head, gates, queries, layer, scale, coverage, positive_weight) -> tuple[Partial, Notes]:
    B, N, Q, D = queries.shape
    K = lesson.exact_keys.shape[2]
    queries = queries.reshape(B, K, N // K, Q, D)
    at = lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)  # noqa: E731
    lesson_keys, lesson_values = at(lesson.exact_keys), at(lesson.exact_values)
    keys, values = (jax.tree.map(at, x) for x in (lesson.keys, lesson.values))
    counts = lesson.spans.counts
    used = (counts > 0)[:, None, None, None]

    def products(rows):  # [B, K, rows, D] to float32 [B, K, G, Q, rows]
        return jnp.einsum("BKGQD,BKTD->BKGQT", queries, rows, preferred_element_type=jnp.float32) * scale

    true = products(lesson_keys)
    coarse = jnp.where(used, products(keys.mean) + prior(counts)[:, None, None, None], LOWEST)
    key_gates, value_gates = (None, None) if gates is None else map(at, gates)
    fine_keys, fine_values = _rows(keys, lesson.ranks, key_gates), _rows(values, lesson.ranks, value_gates)
    S, J = fine_keys.shape[2:4]
    seen = used[..., None] & (jnp.arange(J) < counts[:, None, None, None, :, None])
    fine = products(fine_keys.reshape(B, K, S * J, D)).reshape(*coarse.shape, J)
    fine = jnp.where(seen, fine, LOWEST)

    scores = _scores(head, queries, keys.mean, coarse, used, counts, at)
    open_now, wish = _decide(scores, lesson, head is not None)
    exact_seen = lesson.spans.exact[:, None, None, None]
    exact = jnp.where(exact_seen, true, LOWEST)
    maximum = lax.stop_gradient(
        jnp.maximum(jnp.maximum(jnp.max(exact, -1), jnp.max(coarse, -1)), jnp.max(fine, axis=(-1, -2)))
    )
    exact = jnp.where(exact_seen, jnp.exp(exact - maximum[..., None]), 0)
    coarse = jnp.where(used, jnp.exp(coarse - maximum[..., None]), 0) * (1 - open_now)
    fine = jnp.where(seen, jnp.exp(fine - maximum[..., None, None]), 0) * open_now[..., None]
    dtype = queries.dtype
    weighted = jnp.einsum("BKGQT,BKTD->BKGQD", exact.astype(dtype), lesson_values).astype(jnp.float32)
    weighted += jnp.einsum("BKGQS,BKSD->BKGQD", coarse.astype(dtype), values.mean)
    weighted += jnp.einsum("BKGQSJ,BKSJD->BKGQD", fine.astype(dtype), fine_values)
    total = jnp.sum(exact, -1) + jnp.sum(coarse, -1) + jnp.sum(fine, axis=(-1, -2))
    flat = jax.tree.map(lambda x: x.reshape(B, K, -1, *x.shape[4:]), Partial(weighted, maximum, total))
    return flat, _notes(lesson, scores, wish, true, used, coverage, positive_weight)


def _rows(factors: Factors, ranks: Array, gates: Array | None) -> Array:
    """The rows that a span's gated factors stand for, [B, K, S, max_span, D]."""
    R = factors.right.shape[-2]
    gates = (jnp.arange(R) < ranks[..., None])[:, None] if gates is None else gates
    return jnp.einsum("BKSJR,BKSRD->BKSJD", factors.left, (factors.right * gates[..., None]).astype(factors.left.dtype))


def _scores(head, queries, mean_keys, coarse, used, counts, at) -> Array:
    """As ``kvec_jax.sekv.zoom`` scores spans, for all queries: float32 [B, K, G, Q, S]."""
    if head is None:
        return jax.nn.softmax(coarse, axis=-1, where=used)
    route, threshold = at(head.route[...]), at(head.threshold[...])
    norms = route_norms(route, mean_keys)
    per_query = jax.vmap(route_scores, in_axes=(3, None, None, None, None, None), out_axes=3)
    return jnp.where(used, per_query(queries, mean_keys, norms, counts, route, threshold), 0)


def _decide(scores: Array, lesson: Lesson, trained: bool) -> tuple[Array, Array]:
    """Whether each query reads each span: 0 or 1, with the slope of a sigmoid on both sides; and the sigmoid itself."""
    S = scores.shape[-1]
    places = min(lesson.places, S)
    spans, chosen = jax.vmap(choose, in_axes=(3, None, None), out_axes=2)(scores, lesson.slots, places)
    hard = jnp.any((spans[..., None] == jnp.arange(S)) & chosen[..., None], axis=-2)  # [B, K, Q, S]
    hard = jnp.broadcast_to(hard[:, :, None], scores.shape).astype(jnp.float32)
    soft = jax.nn.sigmoid(scores / _TEMPERATURE) if trained else jnp.zeros_like(scores)
    return hard + (soft - lax.stop_gradient(soft)), soft


def _notes(lesson, scores, wish, true, used, coverage, positive_weight) -> Notes:
    mass = lax.stop_gradient(_span_mass(lesson, true))
    ordered = -jnp.sort(-mass, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    least = jnp.min(jnp.where(before < coverage, ordered, jnp.inf), axis=-1, keepdims=True)
    wanted = mass >= least  # the fewest spans that hold the share
    loss = jnp.where(wanted, -positive_weight * jax.nn.log_sigmoid(scores), -jax.nn.log_sigmoid(-scores))
    return Notes(zoom=mean_over_spans(loss, used), opened=mean_over_spans(wish, used))


def _span_mass(lesson: Lesson, true: Array) -> Array:
    """Share of each span in the attention that full attention gives to all spans, [B, K, G, Q, S]."""
    weights = jax.nn.softmax(true, axis=-1, where=(lesson.spans.span_of >= 0)[:, None, None, None])
    member = lesson.spans.span_of[..., None] == jnp.arange(lesson.spans.counts.shape[1])  # [B, T, S]
    return jnp.einsum("BKGQT,BTS->BKGQS", weights, member.astype(jnp.float32))


def mean_over_spans(x: Array, used: Array) -> Array:
    """Mean of the means of ``x`` [..., S] over the spans that are ``used``, a mask that can be broadcast to it."""
    return jnp.mean(jnp.sum(x, axis=-1, where=used) / jnp.maximum(jnp.sum(used, axis=-1), 1))
