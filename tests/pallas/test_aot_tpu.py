"""Every TPU kernel, at the sizes of published models, goes through the compiler of every chip."""

import pytest

from kvec_jax.pallas.aot import compile_for
from tests.arg_specs import LENGTHS, ids
from tests.compiled import PROPERTY, REQUIRED
from tests.kernel_cases import cases, largest_cases, prompt_cases

every_chip = pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])


@pytest.mark.aot_tpu
@pytest.mark.parametrize("case", largest_cases() + prompt_cases(LENGTHS[-1:]), ids=ids)
@every_chip
def test_kernel_compiles(chip, case, record_property):
    check(chip, case, record_property)


@pytest.mark.slow
@pytest.mark.aot_tpu
@pytest.mark.parametrize("case", cases() + prompt_cases(), ids=ids)
@every_chip
def test_kernel_compiles_at_every_size(chip, case, record_property):
    check(chip, case, record_property)


def check(chip, case, record_property):
    if chip not in REQUIRED:
        pytest.importorskip("libtpu")
    compiled = compile_for(chip, case.using("pallas_tpu"), *case.arguments)
    assert "tpu_custom_call" in compiled.as_text()
    record_property(PROPERTY, chip)
