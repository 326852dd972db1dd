"""What a zoom-in head is trained for (paper, section 3.4); every term is an average, so that weights mean something."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvec_jax.models.transformer import Transformer
from kvec_jax.sekv.head import ZoomHead
from kvec_jax.sekv.lesson import Factors, Lesson
from kvec_jax.sekv.student import answer, mean_over_spans, span_gates
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of the losses; the paper's, but for their scales.

    Attributes:
        zoom: Of the decisions' cross-entropy.
        wanted: How much more a span that is to be opened counts in it than one that is not. The paper's 10 makes the
            head want nearly every span; where slots are few the order of the spans is what counts, and 1 keeps it.
        recon: Of the energy that gates take from the factors.
        budget: Of the share of spans that are opened, at the end; it grows over the first half of the training.
        gates: Of open gates, inside the budget.
    """

    zoom: float = 1.0
    wanted: float = 10.0
    recon: float = 0.5
    budget: float = 0.1
    gates: float = 0.1


class Losses(NamedTuple):
    """float32 scalars: ``total`` is minimised, ``kl`` is what the others serve.

    Attributes:
        total: The weighted sum.
        kl: Mean over queries of KL(full attention || SeKV), in nats.
        zoom: See ``kvec_jax.sekv.student.Notes``.
        recon: Share of the factors' energy that the gates take.
        budget: Share of spans wanted open, and a little of the gates' mean.
    """

    total: Array
    kl: Array
    zoom: Array
    recon: Array
    budget: Array


def divergence(teacher: Array, student: Array) -> Array:
    """Mean KL divergence of the distributions that logits [..., V] stand for, in nats."""
    known, guessed = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.mean(jnp.sum(jnp.exp(known) * (known - guessed), axis=-1))


def losses(model: Transformer, head: ZoomHead, lesson: Lesson, ramp: Array, weights: Weights) -> Losses:
    """All losses of a head on one lesson.

    Args:
        model: Frozen.
        head: What is trained.
        lesson: Of ``make_lesson``.
        ramp: How much of the budget's weight counts by now, 0 to 1.
        weights: Of the terms.
    """
    logits, notes = answer(model, head, lesson, positive_weight=weights.wanted)
    kl = divergence(lesson.teacher, logits)
    recon = (_lost(head, lesson.keys, lesson) + _lost(head, lesson.values, lesson)) / 2
    opened = (_opened(head, lesson.keys, lesson) + _opened(head, lesson.values, lesson)) / 2
    budget = notes.opened + weights.gates * opened
    total = kl + weights.zoom * notes.zoom + weights.recon * recon + ramp * weights.budget * budget
    return Losses(total, kl, notes.zoom, recon, budget)


def _lost(head: ZoomHead, factors: Factors, lesson: Lesson) -> Array:
    gates = span_gates(head, factors, lesson.ranks)
    energy = jnp.where(gates > 0, factors.singular**2, 0)
    lost = jnp.sum((1 - gates) ** 2 * energy, axis=-1) / jnp.maximum(jnp.sum(energy, axis=-1), 1e-12)
    return _over_spans(lost, lesson)


def _opened(head: ZoomHead, factors: Factors, lesson: Lesson) -> Array:
    gates = span_gates(head, factors, lesson.ranks)
    return _over_spans(jnp.sum(gates, axis=-1) / jnp.maximum(lesson.ranks, 1)[:, None], lesson)


def _over_spans(x: Array, lesson: Lesson) -> Array:
    """Mean of ``x`` [L, B, K, S] over the spans there are, each window counting the same."""
    return mean_over_spans(x, (lesson.spans.counts > 0)[:, None])
