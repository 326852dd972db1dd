"""A whole generation over a slice of TPUs, compiled without them."""

import pytest

import kvec_jax as kv
from kvec_jax.pallas.aot import mesh_of
from kvec_jax.testing import tiny_config
from tests.compiled import PROPERTY, REQUIRED

# Llama's heads, in a model of two layers.
SMALL = tiny_config(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    "policy", [kv.SnapKV(256), pytest.param(kv.LaProx(256), marks=pytest.mark.slow)], ids=lambda policy: policy.name
)
def test_small_model_over_sixteen_chips(policy, record_property):
    check(SMALL, policy, 1024, record_property)


@pytest.mark.slow
@pytest.mark.aot_tpu
@pytest.mark.parametrize("policy", [kv.SnapKV(1024), kv.KVec(1024), kv.LaProx(1024)], ids=lambda policy: policy.name)
def test_llama_over_sixteen_chips(policy, record_property):
    from benchmarks.aot_memory import LLAMA_3_1_8B

    memory = check(LLAMA_3_1_8B, policy, 8192, record_property)
    assert memory.argument_size_in_bytes < 2.1e9  # an eighth of 16 GB


def check(config, policy, tokens, record_property):
    if "v5e" not in REQUIRED:
        pytest.importorskip("libtpu")
    from benchmarks.aot_mesh import compile_generation

    mesh = mesh_of("v5e", "4x4", (2, 8), ("data", "tensor"))
    compiled = compile_generation(mesh, config, policy, 4, tokens, new_tokens=16)
    text = compiled.as_text()
    assert "tpu_custom_call" in text and "all-gather" in text
    record_property(PROPERTY, "v5e")
    return compiled.memory_analysis()
