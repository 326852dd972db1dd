"""Whole generations through the kernels: the same entries kept and the same tokens as with plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration
from kvec_jax.testing import tiny_model

LENGTHS = np.array([150, 61])
CALIBRATION = Calibration(model="tiny", heads=((0, 5), (3,), (7, 1), (2, 4)), layer_weights=(1.0, 2.0, 0.5, 1.5))
POLICIES = {
    "snapkv": kv.SnapKV(24, window=8),
    "kvec": kv.KVec(24, window=6, extended_window=8, unfocused_heads=1),
    "laprox": kv.LaProx(24, window=8),
    "compresskv": kv.CompressKV(24, calibration=CALIBRATION, low=12),
    "adakv": kv.AdaKV(40),
}


@pytest.fixture(scope="module")
def prompts():
    return jax.random.randint(jax.random.key(0), (2, 150), 0, 256, jnp.int32)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_kernels_keep_and_say_what_xla_does(policy, implementation, prompts):
    model = tiny_model()

    def run(implementation):
        logits, cache = kv.prefill(model, prompts, LENGTHS, policy, reserve=20, implementation=implementation)
        kept = [cache.kept_positions(row) for row in range(2)]
        logits, cache = kv.extend(model, cache, prompts[:, :4], implementation=implementation)
        tokens, _ = kv.decode(model, cache, logits, max_new_tokens=16, eos_token_ids=(), implementation=implementation)
        return kept, logits, tokens

    kept, logits, tokens = run(implementation)
    plain_kept, plain_logits, plain_tokens = run("xla")
    jax.tree.map(np.testing.assert_array_equal, kept, plain_kept)
    np.testing.assert_allclose(logits, plain_logits, atol=1e-4)
    np.testing.assert_array_equal(tokens, plain_tokens)


def test_generate_takes_an_implementation_for_each_operation(prompts):
    how = kv.Implementations(select_top_k="pallas_tpu", window_scores="pallas_gpu", prompt_attention="xla")
    arguments = tiny_model(), prompts, LENGTHS, kv.SnapKV(24, window=8)
    got = kv.generate(*arguments, max_new_tokens=6, implementation=how)
    np.testing.assert_array_equal(got, kv.generate(*arguments, max_new_tokens=6))


def test_a_name_that_is_none_and_a_case_that_no_kernel_does(prompts):
    model, policy = tiny_model(), kv.SnapKV(24, window=8)
    with pytest.raises(ValueError, match="implementation: expected 'xla' or 'pallas_tpu'"):
        kv.prefill(model, prompts, LENGTHS, policy, implementation="tpu")
    half = tiny_model(dtype=jnp.float16)
    with pytest.raises(kv.UnsupportedError, match="can't do this case: expected float32 or bfloat16"):
        kv.prefill(half, prompts, LENGTHS, policy, implementation="pallas_tpu")
