"""Exact selection: the k largest, ties to the lower index, whatever the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvec_jax.select import FIRST_KEY, LOWEST_KEY, indices_of, ordered_keys, top_k_mask
from tests.oracle.policies import top

SPECIAL = [-np.inf, -3.4e38, -1.0, -1e-30, -1e-45, 0.0, 1e-45, 1e-30, 1.0, 3.4e38, np.inf]


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_keys_have_the_order_of_the_scores(wrap):
    keys = np.asarray(wrap(ordered_keys)(jnp.array(SPECIAL, jnp.float32)))
    normal = [i for i, x in enumerate(SPECIAL) if x == 0 or abs(x) > 1e-38]  # XLA may flush subnormal numbers to zero
    assert (np.diff(keys[normal]) > 0).all()
    assert (np.diff(keys) >= 0).all()
    assert LOWEST_KEY < keys.min() and keys.max() < FIRST_KEY - 10**6


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_zeros_of_either_sign_are_equal_and_nan_comes_last(wrap):
    keys = np.asarray(wrap(ordered_keys)(jnp.array([0.0, -0.0, np.nan, -np.nan, -np.inf], jnp.float32)))
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] < keys[4]
    assert keys[2] > LOWEST_KEY


# Few different values: most draws have ties at the border.
SCORES = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0, float("inf")]), min_size=40, max_size=40)


select = jax.jit(lambda scores, k: top_k_mask(ordered_keys(scores), k))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCORES, st.integers(0, 45))
def test_the_k_best_with_ties_to_the_lower_index(scores, k):
    mask = select(np.array(scores, np.float32), k)
    np.testing.assert_array_equal(np.flatnonzero(mask), top(scores, k))


def test_every_row_has_its_own_k():
    scores = np.random.default_rng(0).normal(size=(3, 2, 500)).astype(np.float32)
    k = np.array([[0, 1], [17, 499], [500, 700]])
    mask = np.asarray(top_k_mask(ordered_keys(jnp.array(scores)), jnp.array(k)))
    for i in np.ndindex(3, 2):
        np.testing.assert_array_equal(np.flatnonzero(mask[i]), top(scores[i], k[i]))


def test_entries_that_must_never_be_kept_come_after_all_others():
    keys = jnp.where(jnp.arange(8) < 4, LOWEST_KEY, ordered_keys(jnp.array([9.0] * 4 + [-np.inf, np.nan, -1.0, 2.0])))
    assert np.flatnonzero(top_k_mask(keys, 4)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("capacity", [1, 3, 6, 9])
def test_indices_are_in_order_and_filled_with_the_size(capacity):
    rng = np.random.default_rng(capacity)
    mask = rng.random((2, 3, 6)) < 0.5
    mask[0, 0], mask[1, 1] = False, True
    got = np.asarray(indices_of(jnp.array(mask), capacity))
    assert got.dtype == np.int32 and got.shape == (2, 3, capacity)
    for i in np.ndindex(2, 3):
        want = np.flatnonzero(mask[i])[:capacity]
        np.testing.assert_array_equal(got[i], np.pad(want, (0, capacity - len(want)), constant_values=6))
