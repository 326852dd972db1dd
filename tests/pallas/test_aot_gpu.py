"""Every GPU kernel, at the sizes of published models, goes through the compiler for an H100."""

import pytest

from kvec_jax.pallas.aot import compile_for
from tests.arg_specs import ids
from tests.compiled import PROPERTY, REQUIRED
from tests.kernel_cases import cases, largest_cases


@pytest.mark.aot_gpu
@pytest.mark.parametrize("case", largest_cases(), ids=ids)
def test_kernel_compiles(case, record_property):
    check(case, record_property)


@pytest.mark.slow
@pytest.mark.aot_gpu
@pytest.mark.parametrize("case", cases(), ids=ids)
def test_kernel_compiles_at_every_size(case, record_property):
    check(case, record_property)


def check(case, record_property):
    if "h100" not in REQUIRED:
        pytest.importorskip("jax_plugins.xla_cuda13")
    compiled = compile_for("h100", case.using("pallas_gpu"), *case.arguments)
    assert "triton" in compiled.as_text()
    record_property(PROPERTY, "h100")
