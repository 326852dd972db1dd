"""Norms of v W by every implementation, against the product itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.value_norms import quadratic_forms, value_norms
from tests import arg_specs
from tests.pallas.implementations import assert_close, every_implementation, every_way, using

WIDTH = 48
run = jax.jit(value_norms, static_argnames=("implementation", "interpret"))


def inputs(spec):
    """Values, with NaN in padding, and projections [K, G, D, width] with their Gram matrices."""
    values = spec.normal(0, "B", "K", "T", "D")
    padding = np.arange(spec.T) >= np.array(spec.lengths)[:, None]
    projections = np.asarray(spec.normal(1, "K", "G", "D", WIDTH, dtype="float32"), np.float64)
    grams = np.einsum("kgdm,kgem->kgde", projections, projections)
    return jnp.where(padding[:, None, :, None], jnp.nan, values), jnp.asarray(grams, jnp.float32), projections


def check(spec, **how):
    values, grams, projections = inputs(spec)
    got = run(values, grams, **how)
    outputs = np.einsum("bktd,kgdm->bkgtm", np.asarray(values, np.float64), projections)
    for row, length in enumerate(spec.lengths):
        # The values are exact in either type, and so are the sums, whatever the type.
        assert_close(got[row, :, :, :length], np.linalg.norm(outputs[row, :, :, :length], axis=-1))


@pytest.mark.parametrize("spec", arg_specs.PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_norms(implementation, spec):
    check(spec, implementation=implementation, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", arg_specs.WIDE_PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_norms_of_all_shapes(implementation, spec):
    check(spec, implementation=implementation, interpret=True)


@every_way
def test_any_quadratic_form(way):
    values = np.random.default_rng(0).normal(size=(1, 1, 5, 64)).astype(np.float32)
    matrices = np.random.default_rng(1).normal(size=(1, 3, 64, 64)).astype(np.float32)
    with using(way) as how:
        got = np.asarray(quadratic_forms(jnp.asarray(values), jnp.asarray(matrices), **how))
    assert_close(got[0, 0], np.einsum("td,xde,te->xt", values[0, 0], matrices[0], values[0, 0]))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_what_a_kernel_cannot_do_is_refused_with_the_reason(implementation):
    with pytest.raises(UnsupportedError, match="value_norms: .*heads of at most 256, got 512"):
        value_norms(jnp.ones((1, 1, 3, 512)), jnp.ones((1, 1, 512, 512)), implementation=implementation)
    with pytest.raises(UnsupportedError, match="value_norms: .*got float16 values and float32 matrices"):
        value_norms(jnp.ones((1, 1, 3, 8), jnp.float16), jnp.ones((1, 1, 8, 8)), implementation=implementation)
