"""Attention of a prompt over itself: JAX's kernels behind our dispatch, against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax import UnsupportedError
from kvec_jax.prompt_attention import attend_prompt
from tests import arg_specs
from tests.pallas.implementations import assert_close, every_implementation

SCALE = 0.25


def inputs(spec):
    return spec.normal(0, "B", "N", "T", "D"), spec.normal(1, "B", "K", "T", "D"), spec.normal(2, "B", "K", "T", "D")


def expected(spec, queries, keys, values, reach):
    q, k, v = (np.asarray(x, np.float64) for x in (queries, keys, values))
    k, v = (x.repeat(spec.G, axis=1) for x in (k, v))
    age = np.arange(spec.T)[:, None] - np.arange(spec.T)
    logits = np.where((age >= 0) & (age < reach), q @ k.swapaxes(2, 3) * SCALE, -np.inf)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - largest)
    return weights @ v / weights.sum(-1, keepdims=True), (largest + np.log(weights.sum(-1, keepdims=True)))[..., 0]


@pytest.mark.parametrize("spec", arg_specs.PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_attention(implementation, spec):
    check(spec, [None], implementation)


@pytest.mark.parametrize("spec", [arg_specs.PROMPTS[0], arg_specs.PROMPTS[3]], ids=arg_specs.ids)
@every_implementation
def test_attention_that_may_be_local(implementation, spec):
    check(spec, [20, 1000], implementation)


@pytest.mark.slow
@pytest.mark.parametrize("spec", arg_specs.WIDE_PROMPTS, ids=arg_specs.ids)
@every_implementation
def test_attention_of_all_shapes(implementation, spec):
    check(spec, [20, 10_000], implementation)


def check(spec, reaches, implementation):
    arrays = inputs(spec)
    lengths = jnp.array(spec.lengths)

    @jax.jit
    def run(reach):
        how = dict(window=20, implementation=implementation, interpret=True)
        return attend_prompt(*arrays, lengths, scale=SCALE, reach=reach, **how)

    for reach in reaches:
        out, logsumexp = run(None if reach is None else jnp.int32(reach))
        wanted, wanted_sums = expected(spec, *arrays, reach or spec.T)
        assert out.dtype == arrays[0].dtype
        for row, length in enumerate(spec.lengths):
            assert_close(out[row, :, :length], wanted[row, :, :length], spec.dtype)
            if logsumexp is not None:
                assert_close(logsumexp[row, :, :length], wanted_sums[row, :, :length], spec.dtype)


def test_plain_attention_gives_its_log_sum_exp():
    spec = arg_specs.PROMPTS[0]
    assert attend_prompt(*inputs(spec), jnp.array(spec.lengths), scale=SCALE)[1].shape == (spec.B, spec.N, spec.T)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_window_that_is_only_known_later_is_refused(implementation):
    spec = arg_specs.PROMPTS[0]
    with pytest.raises(UnsupportedError, match="prompt_attention: .*how far back local layers see must be known"):
        arrays = *inputs(spec), jnp.array(spec.lengths)
        attend_prompt(*arrays, scale=SCALE, reach=jnp.int32(3), implementation=implementation, interpret=True)


def test_what_cudnn_cannot_do_is_refused_with_the_reason():
    spec = arg_specs.PROMPTS[0]
    with pytest.raises(UnsupportedError, match="cuDNN takes float16 or bfloat16 queries"):
        attend_prompt(*inputs(spec), jnp.array(spec.lengths), scale=SCALE, implementation="pallas_gpu")
