"""One layer of the student, values and gradients, against the formulas in float64.

A decision has no slope of its own. What training follows is the slope of the same attention with every decision o
replaced by o + sigmoid(score / t) - sigmoid(score / t as it was): that function's finite differences are taken.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvec_jax.online_softmax import finish
from kvec_jax.sekv import student
from kvec_jax.sekv.head import HeadConfig, ZoomHead, values_of, with_values
from kvec_jax.sekv.lesson import Factors, Lesson
from kvec_jax.sekv.spans import Spans
from tests.sekv import reference

K, G, D, d, T, S, J, R, Q = 2, 2, 8, 4, 60, 5, 8, 3, 4
COUNTS, SLOTS, RANKS = ((8, 7, 5, 6, 8), (8, 3, 0, 0, 0)), (2, 1), ((3, 3, 2, 2, 3), (3, 1, 0, 0, 0))
SCALE, LAYER = 0.5, 1


@functools.cache
def lesson() -> Lesson:
    """Random rows of two prompts; the second has only two spans."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    def factors():
        singular = jnp.flip(jnp.sort(jnp.abs(normal(2, 2, K, S, R))), axis=-1)
        present = (jnp.array(COUNTS) > 0)[None, :, None, :, None]
        return Factors(
            mean=normal(2, 2, K, S, D) * present,
            left=normal(2, 2, K, S, J, R) * present[..., None],
            right=normal(2, 2, K, S, R, D) * present[..., None],
            singular=singular * present,
        )

    span_of = np.full((2, T), -1)
    for row, counts in enumerate(COUNTS):
        span_of[row, 10 : 10 + sum(counts)] = np.repeat(np.arange(S), counts)
    exact = jnp.asarray(span_of < 0)
    counts = jnp.array(COUNTS)
    spans = Spans(exact=exact, anchors=exact, span_of=jnp.asarray(span_of), counts=counts, members=counts[..., None])
    return Lesson(
        questions=jnp.zeros((2, Q), jnp.int32), teacher=normal(2, Q, 3),
        exact_keys=normal(2, 2, K, T, D), exact_values=normal(2, 2, K, T, D),
        keys=factors(), values=factors(), spans=spans, ranks=jnp.array(RANKS), slots=jnp.array(SLOTS), places=2,
    )  # fmt: skip


def blank() -> ZoomHead:
    return ZoomHead(
        HeadConfig(layers=2, heads=K * G, head_dim=D, route_dim=d, max_rank=R, hidden=6, typical_span=7),
        rngs=nnx.Rngs(3),
    )


QUERIES = np.random.default_rng(1).normal(size=(2, K * G, Q, D)).astype(np.float32)
OUT, LOG = (np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in ((2, QUERIES.shape), (3, (2, 4, Q))))


@jax.jit
def parts(values):
    """Outputs, logarithms of sums, and notes."""
    head = with_values(blank(), values)
    gates = tuple(student.span_gates(head, x, lesson().ranks) for x in (lesson().keys, lesson().values))
    partial, notes = student._look(lesson(), head, gates, jnp.asarray(QUERIES), LAYER, SCALE, 0.9, 10.0)
    out, log_sum = finish(partial)
    return out.reshape(OUT.shape), log_sum.reshape(LOG.shape), *notes


@jax.jit
@jax.grad
def gradient(values):
    out, log_sum, zoom, opened = parts(values)
    return jnp.sum(out * OUT) + jnp.sum(log_sum * LOG) + 3 * zoom + 5 * opened


def slowly(values, frozen):
    """The same parts from the formulas, one query at a time; ``frozen`` as ``reference.student`` wants it."""
    rows = (lesson().exact_keys, lesson().exact_values, lesson().keys, lesson().values)

    def prompt(b):
        mine = jax.tree.map(lambda x: np.asarray(x[LAYER, b], np.float64), rows)
        return reference.student(
            values, LAYER, QUERIES[b].astype(np.float64), *mine, np.asarray(lesson().spans.span_of[b]), RANKS[b],
            SLOTS[b], SCALE, frozen and frozen[b],
        )  # fmt: skip

    out, log_sum, zoom, opened, decided = zip(*map(prompt, range(2)), strict=True)
    return np.stack(out), np.stack(log_sum), np.mean(zoom), np.mean(opened), decided


def start(threshold):
    values = values_of(blank())
    return values | {"threshold": values["threshold"] + threshold}


@pytest.mark.parametrize("threshold", [-50.0, -0.5, 50.0], ids=["open", "some", "closed"])
def test_a_layer_and_its_gradients_are_what_the_formulas_say(threshold):
    values = start(threshold)
    exact = {name: np.asarray(value, np.float64) for name, value in values.items()}
    *want, decided = slowly(exact, None)
    for mine, its in zip(parts(values), want, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-4)
    if threshold == -0.5:  # some decisions go either way
        assert all(0 < np.mean(hard) < 1 for hard, _ in decided)
    slopes = gradient(values)
    rng = np.random.default_rng(4)
    for name, value in exact.items():
        direction = rng.normal(size=value.shape)
        sides = []
        for step in (1e-5, -1e-5):
            out, log_sum, zoom, opened, _ = slowly(exact | {name: value + step * direction}, decided)
            sides.append(np.sum(out * OUT) + np.sum(log_sum * LOG) + 3 * zoom + 5 * opened)
        want = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(np.sum(slopes[name] * direction), want, rtol=2e-3, atol=1e-3, err_msg=name)


def test_every_trained_number_of_a_layer_receives_a_gradient():
    slopes = gradient(start(-0.5))
    for name, value in slopes.items():
        value = value[LAYER] if name in ("route", "threshold") else value
        assert np.all(np.isfinite(value)) and np.mean(np.asarray(value) != 0) > 0.99, name
