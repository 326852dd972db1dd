"""The packed cache: what it holds, how much that takes, and that nothing changes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_attention import build


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
