"""Choosing the next token: filters against sorted numpy, draws against the distribution they should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from tests.oracle.forward import softmax

LOGITS = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 2


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top-k, top-p and min-p, in that order, by sorting; for logits without ties."""
    out = []
    for row in logits.astype(np.float64) / temperature:
        order = np.argsort(-row, kind="stable")
        kept = list(order[: top_k or len(row)])
        p = np.zeros(len(row))
        p[kept] = softmax(row[kept])
        mass, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += p[token]
            if mass >= top_p:
                break
        nucleus = [t for t in nucleus if p[t] >= min_p * p.max()]
        p[[t for t in range(len(row)) if t not in nucleus]] = 0
        out.append(p / p.sum())
    return np.array(out)


SETTINGS = [
    {},
    dict(temperature=0.3),
    dict(temperature=7.0),
    dict(top_k=1),
    dict(top_k=5),
    dict(top_k=500),
    dict(top_p=0.05),
    dict(top_p=0.6),
    dict(top_p=0.99),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(temperature=1.7, top_k=12, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters(settings):
    filtered = jax.jit(lambda s, x: s.filter(x))(kv.Sample(**settings), LOGITS)
    np.testing.assert_allclose(softmax(np.asarray(filtered, np.float64)), reference(LOGITS, **settings), atol=1e-6)


@pytest.mark.parametrize("settings", [{}, dict(temperature=1.7, top_k=12, top_p=0.8, min_p=0.1)], ids=str)
def test_draws_have_the_distribution(settings):
    draws = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[0]), (draws, 50))
    tokens = jax.jit(kv.Sample(**settings).__call__)(logits, jax.random.split(jax.random.key(1), draws))
    assert tokens.dtype == jnp.int32
    want = reference(LOGITS[:1], **settings)[0]
    got = np.bincount(tokens, minlength=50) / draws
    assert (got[want == 0] == 0).all()
    error = np.sqrt(want * (1 - want) / draws)
    assert (np.abs(got - want) <= 5 * error).all()


def test_of_equal_logits_top_k_keeps_those_with_the_lower_id():
    filtered = kv.Sample(top_k=2).filter(jnp.array([[1.0, 3.0, 1.0, 1.0]]))
    assert jnp.isfinite(filtered).tolist() == [[True, True, False, False]]


def test_greedy_takes_the_most_likely_and_of_equal_ones_the_lowest():
    logits = jnp.array([[0.0, 4.0, 4.0], [-1.0, -3.0, -2.0]])
    tokens = kv.Greedy()(logits, None)
    assert tokens.tolist() == [1, 0] and tokens.dtype == jnp.int32


def test_a_row_draws_the_same_whatever_stands_beside_it():
    keys = jax.random.split(jax.random.key(3), 4)
    draw = jax.jit(kv.Sample().__call__)
    together = draw(LOGITS, keys)
    for row in range(4):
        alone = draw(LOGITS[row : row + 1], keys[row : row + 1])
        assert int(alone[0]) == int(together[row])


def test_extreme_logits():
    logits = jnp.array([[3e38, -3e38, 0.0], [-jnp.inf, 1.0, -jnp.inf]])
    keys = jax.random.split(jax.random.key(0), 2)
    draw = jax.jit(lambda sampler: sampler(logits, keys))
    for settings in ({}, dict(top_p=0.9), dict(top_k=2), dict(min_p=0.5)):
        assert draw(kv.Sample(**settings)).tolist() == [0, 1]


def test_numbers_do_not_compile_again():
    traced = []

    @jax.jit
    def draw(sampler, logits, keys):
        traced.append(sampler)
        return sampler(logits, keys)

    keys = jax.random.split(jax.random.key(0), 4)
    for settings in SETTINGS[1:3] + SETTINGS[4:6]:
        draw(kv.Sample(**settings), LOGITS, keys)
    assert len(traced) == 1


def penalised(logits, written, penalty):
    """Token by token, as CTRL's section 4.1 has it with Hugging Face's form for logits below 0."""
    logits = logits.astype(np.float64)
    for row, tokens in enumerate(written):
        for token in set(tokens):
            logits[row, token] *= penalty if logits[row, token] < 0 else 1 / penalty
    return logits


@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_repetition_penalty(window):
    penalise = jax.jit(lambda sampler, written, count: sampler.penalise(LOGITS, written, count))
    tokens = np.random.default_rng(1).integers(50, size=(4, 6))
    for count in (1, 3, 6):
        written = np.where(np.arange(6) < count, tokens, tokens[:, count - 1 : count])
        lately = tokens[:, max(count - (window or count), 0) : count]
        for penalty in (1.0, 1.3, 0.5):
            got = penalise(kv.Greedy(repetition_penalty=penalty, repetition_window=window), written, count)
            np.testing.assert_allclose(got, penalised(LOGITS, lately, penalty), rtol=1e-6)


def test_without_a_penalty_the_logits_stay():
    assert kv.Sample().penalise(LOGITS, np.zeros((4, 6), np.int32), 1) is LOGITS


def test_a_window_of_no_penalty():
    with pytest.raises(ValueError, match="repetition_window: needs a repetition_penalty, such as 1.1"):
        kv.Greedy(repetition_window=256)


@pytest.mark.parametrize(
    "field, value",
    [("temperature", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_k", 1.5)]
    + [("top_p", 0), ("top_p", 1.01), ("min_p", -0.1), ("min_p", 2)]
    + [("temperature", "hot"), ("top_k", None), ("top_p", "x")]
    + [("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("repetition_penalty", "high")]
    + [("repetition_window", 0), ("repetition_window", 2.5)],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises((TypeError, ValueError), match=f"{field}: expected .*, got {value!r}"):
        kv.Sample(**{field: value})
