"""What the last queries say about the keys: every implementation against the formula, written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.scores import window_scores
from tests import arg_specs
from tests.pallas.implementations import assert_close, every_implementation, every_way, using

SCALE = 0.2


def reduce_with(spec):
    """All kinds of statistics at once: over heads, over queries, of pairs of heads, by which queries look."""

    def reduce(weights, looks):
        grouped = jnp.sum(weights, axis=0) / spec.G
        recent = jnp.arange(weights.shape[1])[:, None] >= weights.shape[1] - 2
        return {
            "mean": jnp.sum(grouped, axis=0),
            "norm": jnp.sqrt(jnp.sum(jnp.square(weights), axis=1)),
            "recent": jnp.sum(jnp.where(recent, grouped, 0), axis=0),
            "pairs": jnp.sum(weights[:, None] * weights[None], axis=2),
            "spread": jnp.sum(jnp.where(looks, jnp.square(weights - 0.1), 0), axis=1),
        }

    return reduce


def rivals(weights):
    return jnp.max(weights, axis=0)


def inputs(spec):
    queries, keys = spec.normal(0, "B", "N", "W", "D"), spec.normal(1, "B", "K", "T", "D")
    positions = np.array(spec.lengths)[:, None] - spec.W + np.arange(spec.W)
    padding = np.arange(spec.T) >= np.array(spec.lengths)[:, None]
    return queries, jnp.asarray(positions, jnp.int32), jnp.where(padding[:, None, :, None], jnp.nan, keys)


def expected(spec, queries, positions, keys):
    """Weights [B, K, G, W, T], and the statistics of them."""
    B, K, G, W, T = spec.B, spec.K, spec.G, spec.W, spec.T
    q = np.asarray(queries, np.float64).reshape(B, K, G, W, -1)
    k = np.nan_to_num(np.asarray(keys, np.float64))
    weights = np.zeros((B, K, G, W, T))
    logsumexp = np.full((B, K, G, W), -np.inf)
    for b in range(B):
        for w, position in enumerate(np.asarray(positions)[b]):
            if position >= 0:
                logits = np.einsum("kgd,ktd->kgt", q[b, :, :, w], k[b, :, : position + 1]) * SCALE
                logsumexp[b, :, :, w] = np.log(np.exp(logits).sum(-1))
                weights[b, :, :, w, : position + 1] = np.exp(logits - logsumexp[b, :, :, w, None])
    looks = (np.asarray(positions) >= 0)[:, None, None, :, None]
    statistics = {
        "mean": weights.mean(2).sum(2),
        "norm": np.sqrt((weights**2).sum(3)),
        "recent": weights.mean(2)[:, :, -2:].sum(2),
        "pairs": np.einsum("bkgwt,bkhwt->bkght", weights, weights),
        "spread": np.where(looks, (weights - 0.1) ** 2, 0).sum(3),
    }
    return statistics, weights.max(axis=(1, 2)).sum(1), logsumexp.reshape(B, -1, W)


def check(spec, **how):
    queries, positions, keys = inputs(spec)
    statistics, peak, logsumexp = expected(spec, queries, positions, keys)

    @jax.jit
    def run(known):
        return window_scores(
            queries, positions, keys, reduce_with(spec), scale=SCALE, rivals=rivals, logsumexp=known, **how
        )

    for known in (None, jnp.asarray(logsumexp, jnp.float32)):
        found, highest = run(known)
        for name, value in statistics.items():
            assert_close(found[name], value, spec.dtype)
        assert_close(highest, peak, spec.dtype)


@pytest.mark.parametrize("spec", arg_specs.PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_statistics(implementation, spec):
    check(spec, implementation=implementation, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", arg_specs.WIDE_PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_statistics_of_all_shapes(implementation, spec):
    check(spec, implementation=implementation, interpret=True)


@pytest.mark.parametrize("spec", arg_specs.PROMPTS[:2], ids=arg_specs.ids)
def test_no_race(spec):
    queries, positions, keys = inputs(spec)
    statistics, peak, logsumexp = expected(spec, queries, positions, keys)
    for known in (None, jnp.asarray(logsumexp, jnp.float32)):
        with using("simulated_tpu") as how:
            found, _ = window_scores(
                queries, positions, keys, reduce_with(spec), scale=SCALE, rivals=rivals, logsumexp=known, **how
            )
        assert_close(found["mean"], statistics["mean"])


@every_way
def test_queries_that_look_at_nothing_give_zeros(way):
    x = jnp.ones((1, 2, 8, 64))
    with using(way) as how:
        mean = window_scores(
            x,
            jnp.full((1, 8), -1),
            x,
            lambda weights, looks: weights.sum((0, 1)),
            scale=1.0,
            logsumexp=x[..., 0],
            **how,
        )
    assert not np.any(mean)


@every_implementation
def test_under_jit_with_one_result_and_no_rivals(implementation):
    spec = arg_specs.PROMPTS[0]

    @jax.jit
    def run(*arrays):
        return window_scores(
            *arrays,
            lambda weights, looks: weights.sum((0, 1)),
            scale=SCALE,
            implementation=implementation,
            interpret=True,
        )

    arrays = inputs(spec)
    assert_close(run(*arrays), expected(spec, *arrays)[0]["mean"] * spec.G)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_derivatives_are_those_of_the_reference(implementation):
    spec = arg_specs.PROMPTS[0]
    queries, positions, keys = inputs(spec)
    keys = jnp.nan_to_num(keys)

    def loss(queries, keys, **how):
        def norm(weights, looks):
            return jnp.sum(jnp.square(weights), axis=1)

        return jnp.sum(window_scores(queries, positions, keys, norm, scale=SCALE, **how))

    got = jax.grad(loss, (0, 1))(queries, keys, implementation=implementation, interpret=True)
    for x, y in zip(got, jax.grad(loss, (0, 1))(queries, keys, implementation="xla")):
        assert_close(x, y)


def test_what_a_kernel_cannot_do_is_refused_with_the_reason():
    positions, keys = jnp.zeros((1, 200), jnp.int32), jnp.ones((1, 1, 9, 64))
    queries = jnp.ones((1, 5, 200, 64))
    for implementation in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(UnsupportedError, match="window_scores: .*of one type, got bfloat16 and float32"):
            arrays = queries.astype(jnp.bfloat16), positions, keys
            window_scores(*arrays, None, scale=1.0, implementation=implementation)
    with pytest.raises(UnsupportedError, match="at most 512 queries for each key-value head, got 2048"):
        window_scores(queries, positions, keys, None, scale=1.0, implementation="pallas_gpu")
