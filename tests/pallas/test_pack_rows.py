"""Gathering of rows by every implementation, against numpy's indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.pack_rows import pack_rows
from tests import arg_specs
from tests.pallas.implementations import every_implementation, every_way, using

run = jax.jit(pack_rows, static_argnames=("implementation", "interpret"))


def check(spec, S, pack=run, **how):
    keys, values = (spec.normal(seed, "B", "T", "D").at[0, 0, 0].set(jnp.nan) for seed in (0, 1))
    index = np.random.default_rng(0).integers(0, spec.T, (spec.B, S)).astype(np.int32)
    got = pack(keys, values, index, **how)
    for packed, rows in zip(got, (keys, values), strict=True):
        assert packed.dtype == rows.dtype
        rows = np.take_along_axis(np.asarray(rows, np.float32), index[..., None], axis=1)
        np.testing.assert_array_equal(np.asarray(packed, np.float32), rows)


@pytest.mark.parametrize("spec", [spec for spec in arg_specs.PROMPTS if spec.G in (1, 3, 7)], ids=arg_specs.ids)
@every_implementation
def test_rows(implementation, spec):
    check(spec, 200, implementation=implementation, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("S", [1, 128, 1000])
@pytest.mark.parametrize("spec", arg_specs.WIDE_PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_rows_of_all_shapes(implementation, spec, S):
    check(spec, S, implementation=implementation, interpret=True)


@every_way
def test_one_row(way):
    # Of bfloat16 the kernel fetches words; copies of memory that is looked at as such are beyond JAX's simulator.
    with using(way) as how:
        check(arg_specs.PROMPTS[0], 1, pack_rows, **how)


@every_implementation
def test_an_index_that_is_too_large_gives_some_row(implementation):
    rows = jnp.ones((1, 3, 64))
    keys, _ = run(rows, rows, jnp.array([[0, 3, 99]]), implementation=implementation, interpret=True)
    np.testing.assert_array_equal(keys, np.ones((1, 3, 64)))


def test_what_a_kernel_cannot_do_is_refused_with_the_reason():
    rows = jnp.ones((1, 3, 64), jnp.float16)
    with pytest.raises(UnsupportedError, match="pack_rows: .*one type, got float16 and float16"):
        pack_rows(rows, rows, jnp.zeros((1, 1), jnp.int32), implementation="pallas_tpu")
