"""The check of kernels on a GPU, where there is none."""

import dataclasses

import jax
import pytest

from benchmarks import gpu_check
from tests.arg_specs import ids
from tests.kernel_cases import small_cases

FEW = [case for case in small_cases() if case.size in ("mean-g1", "g1", "head-g1", "200-of-g1", "g1-q1")]


def test_without_a_gpu_it_refuses_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit, match="^benchmarks.gpu_check needs a GPU; JAX finds only cpu$"):
        gpu_check.main()


@pytest.mark.parametrize("case", FEW, ids=ids)
def test_a_kernel_that_is_right_passes(case, monkeypatch):
    monkeypatch.setattr(gpu_check, "RUNS", 1)
    outcome = gpu_check.run(case, interpret=True)
    assert outcome.passed, outcome.error or outcome.difference
    assert outcome.milliseconds > 0 and outcome.xla > 0


@pytest.mark.parametrize("fault", ["value", "error"])
def test_a_kernel_that_is_wrong_fails(fault, monkeypatch):
    def wrong(*arguments, implementation, interpret):
        result = FEW[0].function(*arguments, implementation="xla")
        if implementation == "xla":
            return result
        if fault == "error":
            raise ValueError("refused")
        return jax.tree.map(lambda x: x * 1.01, result)

    monkeypatch.setattr(gpu_check, "RUNS", 1)
    outcome = gpu_check.run(dataclasses.replace(FEW[0], function=wrong))
    assert not outcome.passed
    assert outcome.error == ("ValueError: refused" if fault == "error" else "")
