"""Whole generations through the kernels: the same entries kept and the same tokens as with plain XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration
from kvec_jax.testing import tiny_model

LENGTHS = np.array([90, 41])
POLICIES = {
    "snapkv": kv.SnapKV(24, window=8),
    "kvec": kv.KVec(24, window=6, extended_window=8, unfocused_heads=1),
    "laprox": kv.LaProx(24, window=8),
    "compresskv": kv.CompressKV(
        24, calibration=Calibration(model="tiny", heads=((0, 5), (3,)), layer_weights=(0.7, 0.3)), low=12
    ),
    "adakv": kv.AdaKV(40),
}
# Goes through all kernels of a platform. Interpreted ones take long to compile: the others are slow.
QUICK = [("pallas_tpu", "laprox")]
CASES = [
    pytest.param(kernels, name, marks=() if (kernels, name) in QUICK else pytest.mark.slow)
    for kernels in ("pallas_tpu", "pallas_gpu")
    for name in POLICIES
]


@functools.cache
def inputs(dtype=jnp.float32):
    """A model of two layers, and prompts [2, 90]."""
    model = tiny_model(dtype=dtype, num_hidden_layers=2)
    return model, jax.random.randint(jax.random.key(0), (2, 90), 0, 256, jnp.int32)


@functools.cache
def run(name: str, implementation: str):
    """What is kept of the prompts, the logits, and what comes next."""
    model, prompts = inputs()
    logits, cache = kv.prefill(model, prompts, LENGTHS, POLICIES[name], reserve=20, implementation=implementation)
    kept = [cache.kept_positions(row) for row in range(2)]
    how = dict(max_new_tokens=16, eos_token_ids=(), implementation=implementation)
    return kept, logits, kv.decode(model, cache, logits, **how)[0]


@pytest.mark.parametrize("implementation, name", CASES)
def test_kernels_keep_and_say_what_xla_does(implementation, name):
    kept, logits, tokens = run(name, implementation)
    plain_kept, plain_logits, plain_tokens = run(name, "xla")
    jax.tree.map(np.testing.assert_array_equal, kept, plain_kept)
    np.testing.assert_allclose(logits, plain_logits, atol=1e-4)
    np.testing.assert_array_equal(tokens, plain_tokens)


@pytest.mark.slow
def test_each_operation_takes_an_implementation_of_its_own():
    model, prompts = inputs()
    how = kv.Implementations(select_top_k="pallas_tpu", window_scores="pallas_gpu", ragged_attention="xla")
    tokens = kv.generate(model, prompts, LENGTHS, POLICIES["snapkv"], max_new_tokens=16, implementation=how)
    np.testing.assert_array_equal(tokens, run("snapkv", "xla")[2])


def test_names_that_are_none_and_cases_that_no_kernel_does():
    model, prompts = inputs()
    with pytest.raises(ValueError, match="implementation: expected 'xla' or 'pallas_tpu'"):
        kv.prefill(model, prompts, LENGTHS, POLICIES["snapkv"], implementation="tpu")
    half, _ = inputs(jnp.float16)
    with pytest.raises(kv.UnsupportedError, match="can't do this case: expected float32 or bfloat16"):
        kv.prefill(half, prompts, LENGTHS, POLICIES["snapkv"], implementation="pallas_tpu")
