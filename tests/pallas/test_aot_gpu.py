"""Every GPU kernel, at the sizes of published models, goes through the compiler for an H100."""

import dataclasses

import jax.numpy as jnp
import pytest

from kvec_jax.pallas.aot import compile_for
from kvec_jax.ragged_attention import ragged_attention
from tests.arg_specs import Segments, ids
from tests.compiled import PROPERTY, REQUIRED
from tests.kernel_cases import cases, largest_cases, on_gpus, ragged

# What a program that holds the kernel calls.
_TARGETS = {"pallas_gpu": "triton", "mosaic_gpu": "mosaic_gpu"}


@pytest.mark.aot_gpu
@pytest.mark.parametrize("case, kernel", on_gpus(largest_cases()), ids=ids)
def test_kernel_compiles(case, kernel, record_property):
    check(case, kernel, record_property)


@pytest.mark.slow
@pytest.mark.aot_gpu
@pytest.mark.parametrize("case, kernel", on_gpus(cases()), ids=ids)
def test_kernel_compiles_at_every_size(case, kernel, record_property):
    check(case, kernel, record_property)


@pytest.mark.aot_gpu
@pytest.mark.parametrize("kernel", _TARGETS)
def test_attention_of_a_local_layer_compiles(kernel, record_property):
    spec = Segments(name="local", G=4, D=256, counts=((512,),), Q=16, tail=128, dtype="bfloat16")
    case = ragged(spec)

    def attend(queries, cache, **how):
        oldest = jnp.zeros((spec.B, spec.G * spec.Q), jnp.int32)
        return ragged_attention(queries, cache, jnp.int32(0), oldest, scale=0.1, **how)

    check(dataclasses.replace(case, function=attend), kernel, record_property)


def check(case, kernel, record_property):
    if "h100" not in REQUIRED:
        pytest.importorskip("jax_plugins.xla_cuda13")
    compiled = compile_for("h100", case.using(kernel), *case.arguments)
    assert _TARGETS[kernel] in compiled.as_text()
    record_property(PROPERTY, "h100")
