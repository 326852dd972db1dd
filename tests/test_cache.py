"""The packed cache: what it holds, how much that takes, and that nothing changes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.testing import tiny_model
from tests.test_attention import build

UNEVEN = dataclasses.replace(kv.KNorm(20), scope="layer")  # heads keep different numbers of entries


@pytest.fixture
def cache():
    counts = np.array([[[3, 0], [5, 1]], [[0, 0], [2, 7]]])
    return build(np.random.default_rng(0), counts, 16, 0, [2, 0], 4, spare=0)


def test_kept_positions_are_sorted_integers_by_layer_and_head(cache):
    for row in range(2):
        kept = cache.kept_positions(row)
        assert [[len(h) for h in layer] for layer in kept] == cache.counts[row].tolist()
        at = 0
        for heads in kept:
            for positions in heads:
                assert positions.dtype == np.int32
                assert (np.diff(positions) > 0).all()
                np.testing.assert_array_equal(positions, cache.positions[row, at : at + len(positions)])
                at += len(positions)


@pytest.mark.parametrize("row", [-1, 2])
def test_there_is_no_such_row(cache, row):
    with pytest.raises(IndexError, match=f"expected 0 to 1, got {row}"):
        cache.kept_positions(row)


def test_nbytes_is_what_the_buffers_hold(cache):
    P, D, R, L, K, B = 9, 16, 4, 2, 2, 2
    pool, tail = 2 * B * P * D * 4, 2 * L * B * K * R * D * 4
    assert cache.pool_nbytes == pool
    assert cache.nbytes == pool + tail + 4 * (B * P + 2 * B * L * K + 2 * B)
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, cache)
    assert half.pool_nbytes == pool // 2


def test_it_is_a_pytree_that_nothing_mutates(cache):
    leaves, tree = jax.tree.flatten(cache)
    again = jax.tree.unflatten(tree, leaves)
    assert again.segment_rows == cache.segment_rows
    assert jax.jit(lambda c: c.counts.sum())(cache) == 18
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.keys = cache.values


@pytest.mark.parametrize("tokens, capacity", [(0, 4), (2, 4), (3, 5), (10, 12)])
def test_reserve_makes_room_after_the_longest_tail(cache, tokens, capacity):
    more = cache.reserve(tokens)
    assert more.tail_capacity == capacity
    assert cache.tail_capacity == 4
    np.testing.assert_array_equal(more.tail_keys[:, :, :, :4], cache.tail_keys)
    np.testing.assert_array_equal(more.tail_values[:, :, :, :4], cache.tail_values)
    np.testing.assert_array_equal(more.tail_length, cache.tail_length)


def test_sizes(cache):
    assert (cache.num_kv_heads, cache.tail_capacity) == (2, 4)


def test_take_rows_gives_each_row_a_pool_of_its_own():
    model = tiny_model()
    tokens, lengths = jnp.arange(90).reshape(2, 45) % 256, jnp.array([45, 30])
    logits, cache = kv.prefill(model, tokens, lengths, UNEVEN, reserve=4)
    index = jnp.array([1, 0, 1])
    taken = cache.take_rows(index)
    for row, source in enumerate(index.tolist()):
        before, after = cache.kept_positions(source), taken.kept_positions(row)
        assert [[x.tolist() for x in layer] for layer in before] == [[x.tolist() for x in layer] for layer in after]
    token = jnp.argmax(logits, axis=-1)[:, None]
    expected, _ = kv.extend(model, cache, token, jnp.array([1, 1]))
    got, _ = kv.extend(model, taken, token[index], jnp.array([1, 1, 1]))
    np.testing.assert_allclose(got, expected[index], rtol=1e-5, atol=1e-5)
