"""Exact selection by every implementation: a stable sort is the oracle, ties by the thousand its hard case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.select import FIRST_KEY, LOWEST_KEY, ordered_keys, top_k_mask
from tests.pallas.implementations import every_implementation, every_way, using


def expected(keys, k, rank=None):
    """Rows' k largest; of equal ones the lowest ranks, by default the lowest indices."""
    keys = np.asarray(keys, np.int64)
    rank = np.broadcast_to(np.arange(keys.shape[-1]), keys.shape) if rank is None else np.asarray(rank)
    mask = np.zeros(keys.shape, bool)
    for i, count in zip(np.ndindex(*keys.shape[:-1]), np.broadcast_to(k, keys.shape[:-1]).flat):
        mask[i][np.lexsort((rank[i], -keys[i]))[:count]] = True
    return mask


def rows(kind: str, shape: tuple[int, ...]):
    """int32 keys."""
    rng = np.random.default_rng(0)
    return {
        "all different": rng.permutation(np.prod(shape)).reshape(shape) * 1000 - 5_000_000,
        "thousands of ties": rng.integers(-2, 2, shape),
        "all equal": np.full(shape, -7),
        "all masked": np.full(shape, LOWEST_KEY),
        "extremes": rng.choice([LOWEST_KEY, LOWEST_KEY + 1, -1, 0, 1, FIRST_KEY - 1, FIRST_KEY], shape),
    }[kind].astype(np.int32)


KINDS = ["all different", "thousands of ties", "all equal", "all masked", "extremes"]
# The same program for all keys and numbers: one compilation.
select = jax.jit(top_k_mask, static_argnames=("implementation", "interpret"))


@pytest.mark.parametrize("kind", KINDS)
@every_implementation
def test_the_largest(implementation, kind):
    keys = rows(kind, (2, 3, 1500))
    k = np.array([[0, 1, 2], [700, 1499, 1500]], np.int32)
    np.testing.assert_array_equal(select(keys, k, implementation=implementation, interpret=True), expected(keys, k))


@pytest.mark.parametrize("kind", KINDS)
@every_implementation
def test_the_largest_by_rank(implementation, kind):
    keys = rows(kind, (3, 1500))
    rank = np.stack([np.random.default_rng(i).permutation(1500) * 1_000_000 for i in range(3)]).astype(np.int32)
    for k in (np.array([1, 750, 2000], np.int32), np.array([0, 1499, 300], np.int32)):
        got = select(keys, k, rank, implementation=implementation, interpret=True)
        np.testing.assert_array_equal(got, expected(keys, k, rank))


@pytest.mark.parametrize("ranked", [False, True], ids=["by index", "by rank"])
@every_way
def test_a_row_that_no_block_divides(way, ranked):
    keys = rows("thousands of ties", (2, 37))
    rank = np.stack([np.arange(37)[::-1], np.random.default_rng(0).permutation(37)]).astype(np.int32)
    rank = rank if ranked else None
    with using(way) as how:
        got = np.asarray(top_k_mask(keys, 20, rank, **how))
    np.testing.assert_array_equal(got, expected(keys, 20, rank))


@every_implementation
def test_nan_comes_after_every_number(implementation):
    scores = jnp.array([np.nan, -np.inf, 1.0, np.nan, -1.0, np.inf] * 50)
    got = np.asarray(top_k_mask(ordered_keys(scores), 200, implementation=implementation, interpret=True))
    assert not got[np.isnan(scores)].any() and got[~np.isnan(scores)].all()


@pytest.mark.slow
@pytest.mark.parametrize("S", [8193, 131072, 200_000])
@every_implementation
def test_long_rows(implementation, S):
    for kind in KINDS[:2]:
        keys = rows(kind, (1, S))
        got = select(keys, np.array([S // 3]), implementation=implementation, interpret=True)
        np.testing.assert_array_equal(got, expected(keys, S // 3))


def test_what_a_kernel_cannot_do_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="select_top_k: .*expected rows of at most 3145728 keys, got 7000000"):
        jax.eval_shape(lambda x: top_k_mask(x, 1, implementation="pallas_tpu"), jnp.zeros(7_000_000, jnp.int32))
