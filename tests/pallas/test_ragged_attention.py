"""Attention over packed rows and the tail: every implementation against the formula, written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.online_softmax import LOWEST, finish
from kvec_jax.ragged_attention import ragged_attention
from tests import arg_specs
from tests.arg_specs import Segments
from tests.pallas.implementations import assert_close, every_implementation, using
from tests.test_attention import build

SCALE = 0.3
LAYER = 1  # of two; in the other one every head has three rows
# Every head size, whole tiles and others, reach within the tail and the pool: small enough for the simulator.
SIMULATED = (
    Segments(name="local", G=2, D=64, counts=((5, 0, 130), (0, 0, 0)), Q=2, tail=9),
    Segments(name="global", G=4, D=128, counts=((70, 1),), tail=16, dtype="bfloat16"),
    Segments(name="wide", G=8, D=256, counts=((40,), (0,)), tail=1),
    Segments(name="long", G=1, D=80, counts=((1100, 600, 1),), tail=130),
)


def inputs(spec, segment_rows=0, tail_lengths=None):
    """Queries [B, K, G * Q, D] and a cache with rubbish between the segments."""
    rng = np.random.default_rng(0)
    counts = np.stack([np.full((spec.B, spec.K), 3), np.array(spec.counts)], axis=1)
    lengths = tail_lengths or [spec.tail] + [spec.tail // 2] * (spec.B - 1)
    cache = build(rng, counts, spec.D, segment_rows, lengths, spec.tail, dtype=jnp.dtype(spec.dtype), last=2000)
    queries = rng.normal(size=(spec.B, spec.K, spec.G * spec.Q, spec.D))
    return jnp.asarray(queries, spec.dtype), cache


def reaches(spec, cache, reach):
    """The first position that each query sees, with ``reach`` tokens for the first of the new ones."""
    steps = np.tile(np.arange(spec.Q), spec.G)
    return cache.next_position[:, None] + steps - reach + 1


def expected(queries, cache, oldest=None):
    """Output [B, K, M, D] and log-sum-exp [B, K, M] in float64; zeros and ``LOWEST`` where nothing is seen."""
    queries, keys, values, tail_keys, tail_values = (
        np.asarray(x, np.float64) for x in (queries, cache.keys, cache.values, cache.tail_keys, cache.tail_values)
    )
    B, K, M, D = queries.shape
    out, logsumexp = np.zeros((B, K, M, D)), np.full((B, K, M), LOWEST)
    share = cache.pool_share
    for b, k, m in np.ndindex(B, K, M):
        start, count = (int(x[b // share, LAYER, k]) for x in (cache.starts, cache.counts))
        own, used = slice(start, start + count), int(cache.tail_length[b])
        tail_at = int(cache.next_position[b]) - used + np.arange(used)
        at = np.concatenate([cache.positions[b // share, own], tail_at])
        seen = at >= (-1 if oldest is None else int(oldest[b, m]))
        if seen.any():
            rows = [
                np.concatenate([pool[b // share, own], tail[LAYER, b, k, :used]])[seen]
                for pool, tail in ((keys, tail_keys), (values, tail_values))
            ]
            logits = rows[0] @ queries[b, k, m] * SCALE
            logsumexp[b, k, m] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            out[b, k, m] = np.exp(logits - logsumexp[b, k, m]) @ rows[1]
    return out, logsumexp


def check(spec, queries, cache, oldest=None, **how):
    run = jax.jit(lambda *a: ragged_attention(*a, scale=SCALE, **how))
    partial = run(queries, cache, jnp.int32(LAYER), oldest)
    assert all(x.dtype == jnp.float32 for x in partial)
    for got, want in zip(finish(partial), expected(queries, cache, oldest)):
        assert_close(np.where(np.abs(got) > 1e30, 0, got), np.where(np.abs(want) > 1e30, 0, want), spec.dtype)
        np.testing.assert_array_equal(np.abs(got) > 1e30, np.abs(want) > 1e30)


def slow_if(condition: bool, *values):
    return pytest.param(*values, marks=pytest.mark.slow if condition else ())


# The interpreted TPU kernel takes seconds to compile.
@pytest.mark.parametrize(
    "implementation, spec",
    [
        slow_if(implementation == "pallas_tpu" and spec.name not in ("g3", "g4"), implementation, spec)
        for implementation in ("xla", "pallas_tpu", "pallas_gpu")
        for spec in arg_specs.SEGMENTS
    ],
    ids=arg_specs.ids,
)
def test_segments_of_all_kinds(implementation, spec):
    check(spec, *inputs(spec), implementation=implementation, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("reach", [None, 700], ids=["global", "local"])
@pytest.mark.parametrize("spec", arg_specs.WIDE_SEGMENTS, ids=arg_specs.ids)
@every_implementation
def test_segments_of_all_sizes(implementation, spec, reach):
    queries, cache = inputs(spec)
    oldest = None if reach is None else reaches(spec, cache, reach)
    check(spec, queries, cache, oldest, implementation=implementation, interpret=True)


@every_implementation
def test_reach(implementation):
    """Within the pool, within the tail, and none at all: what a query doesn't see has no weight."""
    spec = Segments(name="local", G=2, D=16, counts=((40, 0, 200), (9, 30, 1)), Q=3, tail=20)
    queries, cache = inputs(spec)
    oldest = reaches(spec, cache, 900).at[:, ::3].add(890).at[:, 1].add(10**6)
    check(spec, queries, cache, oldest, implementation=implementation, interpret=True)


@pytest.mark.parametrize("tail", [slow_if(True, 0), 7])
@every_implementation
def test_equal_segments(implementation, tail):
    spec = Segments(name="equal", G=2, D=16, counts=((21, 0), (3, 24)), tail=tail)
    check(spec, *inputs(spec, segment_rows=24), implementation=implementation, interpret=True)


@pytest.mark.parametrize("implementation", ["xla", slow_if(True, "pallas_tpu"), "pallas_gpu"])
def test_rows_of_a_batch_that_share_a_pool(implementation):
    spec = Segments(name="shared", G=2, D=16, counts=((21, 0),) * 2, Q=2, tail=8)
    queries, cache = inputs(spec, tail_lengths=[8, 3])
    shared = dataclasses.replace(
        cache, **{name: getattr(cache, name)[:1] for name in ("keys", "values", "positions", "starts", "counts")}
    )
    check(spec, queries, shared, reaches(spec, cache, 1500), implementation=implementation, interpret=True)


@every_implementation
def test_nothing_to_attend(implementation):
    spec = Segments(name="empty", G=2, D=16, counts=((0, 0),), tail=0)
    queries, cache = inputs(spec)
    cache = dataclasses.replace(cache, keys=cache.keys[:, :0], values=cache.values[:, :0], counts=cache.counts * 0)
    check(spec, queries, cache, implementation=implementation, interpret=True)


@pytest.mark.parametrize("spec", [slow_if(spec.name != "local", spec) for spec in SIMULATED], ids=arg_specs.ids)
def test_no_races_and_nothing_out_of_bounds(spec):
    queries, cache = inputs(spec)
    oldest = reaches(spec, cache, 1000) if spec.name == "local" else None
    with using("simulated_tpu") as how:
        # Not interpreted: the simulator copies any number of rows at once, as the chip does.
        check(spec, queries, cache, oldest, **how | {"interpret": False})


@pytest.mark.parametrize(
    "spec, reach",
    [
        (Segments(name="step", G=4, D=64, counts=((70, 0, 1), (0, 130, 5)), tail=9, dtype="bfloat16"), None),
        slow_if(True, Segments(name="turn", G=3, D=128, counts=((300, 1),), Q=30, tail=130, dtype="bfloat16"), None),
        slow_if(True, Segments(name="local", G=2, D=256, counts=((90, 0),), Q=3, tail=70, dtype="bfloat16"), 1500),
    ],
    ids=arg_specs.ids,
)
def test_through_mosaic_gpu(spec, reach, monkeypatch):
    """In JAX's simulator of a GPU, where races are errors; its matrix products are plain ones, for it has no others."""
    from kvec_jax.pallas import ragged_attention_mosaic as mosaic

    if not hasattr(mosaic.plgpu, "InterpretGPUParams"):
        pytest.skip("this version of JAX has no simulator of a GPU for users")

    def products(query, keys):
        return jnp.dot(query[...], keys[...].T, preferred_element_type=jnp.float32)

    def add_sums(weighted, weights, values):
        return weighted + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

    monkeypatch.setattr(mosaic, "_products", products)
    monkeypatch.setattr(mosaic, "_add_sums", add_sums)
    queries, cache = inputs(spec)
    oldest = None if reach is None else reaches(spec, cache, reach)
    check(spec, queries, cache, oldest, implementation="mosaic_gpu", interpret=True)


def test_mosaic_gpu_refuses_what_its_matrix_instruction_cannot_take():
    spec = Segments(name="f32", G=1, D=64, counts=((3,),))
    with pytest.raises(UnsupportedError, match="expected bfloat16 and a head size of 64, 128 or 256, got float32 and"):
        check(spec, *inputs(spec), implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu", "mosaic_gpu"])
def test_other_types_are_refused(kernel):
    spec = Segments(name="half", G=1, D=16, counts=((3,),), dtype="float16")
    queries, cache = inputs(spec)
    with pytest.raises(UnsupportedError, match="ragged_attention: .*float16 and float16"):
        check(spec, queries, cache, implementation=kernel, interpret=True)
