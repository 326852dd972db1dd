"""Kept rows in 8 and 4 bits: what is stored, and what attention makes of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.online_softmax import finish
from kvec_jax.segments import attend_segments
from tests.prompts import as_lists, batch, model_of

B, L, K, D = 2, 2, 2, 8
COUNTS = {
    "equal": np.array([[[70, 70], [70, 70]], [[9, 9], [1, 1]]]),
    "ragged": np.array([[[70, 0], [3, 130]], [[0, 0], [1, 64]]]),
}


@functools.cache
def cache_of(kind: str) -> kv.CompressedKV:
    """Made up keys whose channels differ in size and offset, as those of real models do, and values."""
    counts = COUNTS[kind]
    flat = counts.reshape(B, -1)
    rows = int(counts.max()) if kind == "equal" else 0
    starts = np.tile(np.arange(L * K) * rows, (B, 1)) if rows else np.cumsum(flat, axis=1) - flat
    P = L * K * rows if rows else int(flat.sum(axis=1).max()) + 5
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(B, P, D)) * np.geomspace(0.1, 10, D) + rng.normal(size=D) * 5
    tail = jnp.zeros((L, B, K, 0, D))
    return kv.CompressedKV(
        keys=jnp.asarray(keys, jnp.float32),
        values=jnp.asarray(rng.normal(size=(B, P, D)), jnp.float32),
        positions=jnp.zeros((B, P), jnp.int32),
        starts=jnp.asarray(starts.reshape(counts.shape), jnp.int32),
        counts=jnp.asarray(counts, jnp.int32),
        tail_keys=tail,
        tail_values=tail,
        tail_length=jnp.zeros(B, jnp.int32),
        next_position=jnp.full(B, 200, jnp.int32),
        segment_rows=rows,
    )


def rounded(x, axis, bits, stored):
    """Each number as the nearest of 2**bits levels between the extremes along ``axis``."""
    if not x.size:
        return x
    low, high = np.min(x, axis, keepdims=True), np.max(x, axis, keepdims=True)
    step = ((high - low) / np.float32(2**bits - 1)).astype(stored).astype(np.float32)
    low = low.astype(stored).astype(np.float32)
    return low + step * np.clip(np.round((x - low) / np.where(step == 0, 1, step)), 0, 2**bits - 1)


def put_back(cache, bits):
    """The cache with each segment's rows as the formula rounds them, in place of its own."""
    keys, values = np.array(cache.keys), np.array(cache.values)
    for place in np.ndindex(cache.counts.shape):
        start, count = int(cache.starts[place]), int(cache.counts[place])
        rows = place[0], slice(start, start + count)
        keys[rows], values[rows] = rounded(keys[rows], 0, bits, np.float32), rounded(values[rows], 1, bits, np.float16)
    return dataclasses.replace(cache, keys=jnp.asarray(keys), values=jnp.asarray(values))


@jax.jit
def attend(queries, cache, layer):
    return finish(attend_segments(queries, cache, layer, None, 0.05))


def attended(cache, layer):
    queries = jnp.asarray(np.random.default_rng(1).normal(size=(cache.tail_length.shape[0], K, 3, D)), jnp.float32)
    return attend(queries, cache, jnp.int32(layer))


@pytest.mark.parametrize("dtype, bits", [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("kind", COUNTS)
def test_attention_sees_the_nearest_levels(kind, dtype, bits):
    cache = cache_of(kind)
    small, want = kv.quantise(cache, dtype), put_back(cache, bits)
    for layer in range(L):
        for got, expected in zip(attended(small, layer), attended(want, layer), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4)


def test_fewer_bits_are_further_from_the_truth():
    cache = cache_of("equal")
    exact, *rough = (attended(each, 0)[0] for each in (cache, kv.quantise(cache, "int8"), kv.quantise(cache, "int4")))
    errors = [float(jnp.abs(out - exact).max()) for out in rough]
    assert 0 < errors[0] < errors[1] / 4 and errors[1] < 0.5


@pytest.mark.parametrize("kind", COUNTS)
def test_bytes_are_those_of_the_buffers(kind):
    cache = cache_of(kind)
    P = cache.keys.shape[1]
    for dtype, share in (("int8", 1), ("int4", 2)):
        small = kv.quantise(cache, dtype)
        codes, scales = 2 * B * P * D // share, 2 * 4 * B * L * K * D + 2 * 2 * B * P
        assert small.pool_nbytes == codes + scales
        assert cache.nbytes - small.nbytes == cache.pool_nbytes - small.pool_nbytes
        assert dtype in repr(small) and f"head_dim={D}" in repr(small)


def test_rows_that_share_a_pool():
    small = kv.quantise(cache_of("ragged"), "int8")
    twice = dataclasses.replace(
        small, tail_length=jnp.zeros(2 * B, jnp.int32), next_position=jnp.full(2 * B, 200, jnp.int32)
    )
    copied = (
        jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), small.scales),
        *(jnp.repeat(getattr(small, name), 2, axis=0) for name in ("keys", "values", "positions", "starts", "counts")),
    )
    names = ("scales", "keys", "values", "positions", "starts", "counts")
    apart = dataclasses.replace(twice, **dict(zip(names, copied, strict=True)))
    for got, expected in zip(attended(twice, 1), attended(apart, 1), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_prompts_are_read_into_fewer_bits():
    model, _ = model_of()
    arguments = model, *batch((37, 60), 64), dataclasses.replace(kv.KNorm(24), scope="layer")
    _, whole = kv.prefill(*arguments, reserve=4)
    _, small = kv.prefill(*arguments, reserve=4, cache_dtype="int8")
    again = kv.quantise(whole, "int8")
    np.testing.assert_array_equal(small.keys, again.keys)
    assert as_lists(small.kept_positions(1)) == as_lists(whole.kept_positions(1))
    new = jnp.array([[7, 8], [9, 10]])
    logits, after = kv.extend(model, small, new)
    exact, _ = kv.extend(model, whole, new)
    assert 0 < float(jnp.abs(logits - exact).max()) < 0.1 and after.tail_length.tolist() == [2, 2]


def test_bad_calls():
    cache = cache_of("equal")
    with pytest.raises(ValueError, match="cache_dtype: expected 'int8' or 'int4', got 'int2'"):
        kv.quantise(cache, "int2")
    with pytest.raises(ValueError, match="not quantised yet"):
        kv.quantise(kv.quantise(cache, "int8"), "int4")
