"""Attention over prompts and over packed rows and the tail, against plain softmax attention in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import attention, prompt_attention, segments
from kvec_jax.attention import cache_attention
from kvec_jax.cache import CompressedKV
from kvec_jax.prompt_attention import attend_prompt
from tests.oracle.forward import attend

SHAPES = [(2, 1, 16), (2, 3, 64), (1, 4, 16), (1, 8, 64)]  # K, G, D
SCALE = 0.3


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks, the last ones partial, at sizes that are quick."""
    monkeypatch.setattr(attention, "KEY_BLOCK", 24)
    monkeypatch.setattr(prompt_attention, "QUERY_BLOCK", 16)
    monkeypatch.setattr(prompt_attention, "KEY_BLOCK", 24)
    monkeypatch.setattr(segments, "EQUAL_BLOCK", 8)
    monkeypatch.setattr(segments, "RAGGED_BLOCK", 8)
    monkeypatch.setattr(segments, "RAGGED_BATCH", 3)


@pytest.mark.parametrize("reaches", [[None], [1, 9, 1000]], ids=["global", "local"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompt(small_blocks, shape, reaches):
    (K, G, D), T, lengths = shape, 75, [75, 41, 3]
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 3, K * G, T, D), normal(rng, 3, K, T, D), normal(rng, 3, K, T, D)
    run = jax.jit(lambda *a, reach: attend_prompt(*a, scale=SCALE, reach=reach)[0])
    for reach in reaches:
        got = run(q, k, v, jnp.array(lengths), reach=reach)
        back = np.arange(T)[:, None] - np.arange(T)
        allowed = np.broadcast_to((back >= 0) & (back < (reach or T)), (K, T, T))
        for row, length in enumerate(lengths):
            want, _ = attend(*(x[row].astype(np.float64) for x in (q, k, v)), SCALE, allowed)
            np.testing.assert_allclose(got[row, :, :length], want[:, :length], atol=2e-5)


def test_prompt_of_one_block_and_in_default_blocks_are_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 1, 4, 700, 16), normal(rng, 1, 2, 700, 16), normal(rng, 1, 2, 700, 16)
    blocks = attend_prompt(q, k, v, jnp.array([700]), scale=SCALE)[0]
    monkeypatch.setattr(prompt_attention, "QUERY_BLOCK", 1024)
    monkeypatch.setattr(prompt_attention, "KEY_BLOCK", 1024)
    np.testing.assert_allclose(blocks, attend_prompt(q, k, v, jnp.array([700]), scale=SCALE)[0], atol=1e-5)


def build(rng, counts, D, segment_rows, tail_length, tail_capacity, dtype=np.float32, spare=5, rows=None, last=200):
    """A cache with random rows from ``last`` positions, ``counts`` [B, L, K], and rubbish where nothing may be read."""
    B, L, K = counts.shape
    starts = np.zeros_like(counts)
    for b in range(B):
        at = 0
        for i in np.ndindex(L, K):
            starts[(b, *i)] = at
            at += segment_rows or counts[(b, *i)]
    P = L * K * segment_rows if segment_rows else rows or int(counts.sum(axis=(1, 2)).max()) + spare
    keys, values = normal(rng, B, P, D) * 50, np.full((B, P, D), 1e4, np.float32)
    positions = np.full((B, P), 7, np.int32)
    for i in np.ndindex(B, L, K):
        n, own = counts[i], slice(starts[i], starts[i] + counts[i])
        keys[i[0], own], values[i[0], own] = normal(rng, n, D), normal(rng, n, D)
        positions[i[0], own] = np.sort(rng.choice(last, n, replace=False))
    tail_shape = (L, B, K, tail_capacity, D)
    fields = dict(
        keys=keys.astype(dtype),
        values=values.astype(dtype),
        positions=positions,
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        tail_keys=normal(rng, *tail_shape).astype(dtype),
        tail_values=normal(rng, *tail_shape).astype(dtype),
        tail_length=np.array(tail_length, np.int32),
        next_position=np.array(tail_length, np.int32) + last,
        segment_rows=segment_rows,
    )
    return CompressedKV(**{n: x if n == "segment_rows" else jnp.asarray(x) for n, x in fields.items()})


def new_tokens(rng, B, K, G, Q, D, dtype=jnp.float32):
    """Queries, keys and values of Q new tokens."""
    return tuple(jnp.asarray(normal(rng, B, heads, Q, D)).astype(dtype) for heads in (K * G, K, K))


def attend_cache(new, cache, layer, reach=None):
    return cache_attention(*new, cache, layer, scale=SCALE, reach=reach)


def expected(new, cache, layer, row, reach=None):
    """Attention of one row's new tokens in float64, over lists of the rows that they may see."""
    (queries, keys, values), cache = jax.tree.map(lambda x: np.asarray(x, np.float64), (new, cache))
    N, Q, D = queries.shape[1:]
    K = cache.counts.shape[2]
    out = np.zeros((N, Q, D))
    used, position = int(cache.tail_length[row]), int(cache.next_position[row])
    for n in range(N):
        h = n // (N // K)
        own = slice(int(cache.starts[row, layer, h]), int(cache.starts[row, layer, h] + cache.counts[row, layer, h]))
        for q in range(Q):
            at = np.concatenate([cache.positions[row, own], position - used + np.arange(used + q + 1)])
            tail, newer = (layer, row, h, slice(used)), (row, h, slice(q + 1))
            k = np.concatenate([cache.keys[row, own], cache.tail_keys[tail], keys[newer]])
            v = np.concatenate([cache.values[row, own], cache.tail_values[tail], values[newer]])
            seen = (at > position + q - (reach or 10**6))[None, None]
            out[n, q] = attend(queries[row, n : n + 1, q : q + 1], k[None], v[None], SCALE, seen)[0][0, 0]
    return out


def counts_of(kind, L, K, rng):
    counts = rng.integers(0, 40, size=(3, L, K))
    if kind == "some empty":
        counts[0, :, 0] = 0
        counts[1] = 0
    elif kind == "one long":
        counts[:] = 1
        counts[0, 0, 0] = 190
    return counts


@pytest.mark.parametrize("layout", ["ragged", "equal"])
@pytest.mark.parametrize("shape, reach", list(zip(SHAPES, [None, 25, 25, None])), ids=str)
def test_packed_rows_and_tail(small_blocks, shape, reach, layout):
    (K, G, D), L, Q = shape, 2, 30  # more new tokens than a block has
    rng = np.random.default_rng(2)
    run = jax.jit(attend_cache)
    for kind in ("random", "some empty", "one long"):
        counts = counts_of(kind, L, K, rng)
        cache = build(rng, counts, D, 190 if layout == "equal" else 0, [0, 4, 31], 40, rows=400)
        new = new_tokens(rng, 3, K, G, Q, D)
        for layer in range(L):
            got = run(new, cache, layer, reach)
            for row in range(3):
                np.testing.assert_allclose(got[row], expected(new, cache, layer, row, reach), atol=2e-5)


@pytest.mark.parametrize("segment_rows", [0, 300])
def test_block_sizes_as_they_are(segment_rows):
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 180, size=(2, 1, 2))
    cache = build(rng, counts, 16, segment_rows, [3, 9], 16)
    new = new_tokens(rng, 2, 2, 3, 2, 16)
    got = jax.jit(attend_cache)(new, cache, 0)
    for row in range(2):
        np.testing.assert_allclose(got[row], expected(new, cache, 0, row), atol=2e-5)


def test_a_pool_with_no_rows_at_all():
    rng = np.random.default_rng(4)
    cache = build(rng, np.zeros((1, 1, 2), int), 16, 0, [2], 8, spare=0)
    assert cache.keys.shape[1] == 0
    new = new_tokens(rng, 1, 2, 2, 1, 16)
    got = jax.jit(attend_cache)(new, cache, 0)
    np.testing.assert_allclose(got[0], expected(new, cache, 0, 0), atol=2e-5)


@pytest.mark.parametrize("segment_rows", [0, 64])
def test_rows_beyond_a_segment_may_hold_anything(segment_rows):
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 60, size=(2, 2, 2))
    cache = build(rng, counts, 16, segment_rows, [1, 5], 9)
    own = np.zeros(cache.positions.shape, bool)
    for b, i, h in np.ndindex(counts.shape):
        own[b, int(cache.starts[b, i, h]) :][: counts[b, i, h]] = True
    rubbish = jnp.where(jnp.asarray(own)[..., None], cache.keys, 3e4)
    other = dataclasses.replace(cache, keys=rubbish, values=jnp.where(own[..., None], cache.values, -7e3))
    new = new_tokens(rng, 2, 2, 2, 2, 16)
    run = jax.jit(attend_cache)
    np.testing.assert_array_equal(run(new, cache, 1), run(new, other, 1))


@pytest.mark.parametrize("segment_rows", [0, 64])
def test_bfloat16_keeps_its_type_and_is_close(segment_rows):
    rng = np.random.default_rng(6)
    cache = build(rng, rng.integers(0, 60, size=(1, 1, 2)), 16, segment_rows, [5], 16, dtype=jnp.bfloat16)
    new = new_tokens(rng, 1, 2, 2, 2, 16, jnp.bfloat16)
    got = jax.jit(attend_cache)(new, cache, 0)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0].astype(jnp.float32), expected(new, cache, 0, 0), atol=0.03)


def test_a_padded_prompt_forms_no_matrix_of_all_pairs():
    B, N, K, T, D = 1, 4, 2, 4096, 16
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, N, T, D), (B, K, T, D), (B, K, T, D))]
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    compiled = jax.jit(lambda *a: attend_prompt(*a, scale=SCALE)).lower(*shapes, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T
