"""The implementations that every behaviour suite goes through; kernels are interpreted."""

import contextlib

import numpy as np
import pytest

from kvec_jax.pallas.compat import simulated_tpu
from tests.arg_specs import TOLERANCE

every_implementation = pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "pallas_gpu"])
# The TPU kernel as well in the simulator that finds races and accesses out of bounds: few and small shapes.
every_way = pytest.mark.parametrize("way", ["xla", "pallas_tpu", "pallas_gpu", "simulated_tpu"])


@contextlib.contextmanager
def using(way: str):
    """Arguments of an operation that is to run in the given ``way``, within the context."""
    with simulated_tpu() if way == "simulated_tpu" else contextlib.nullcontext():
        yield dict(implementation="pallas_tpu" if way == "simulated_tpu" else way, interpret=True)


def assert_close(got, expected, dtype: str = "float32") -> None:
    """Equal but for rounding in ``dtype``, relative to the largest number."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    largest = max(np.abs(expected[np.isfinite(expected)]).max(initial=0), 1e-30)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)
