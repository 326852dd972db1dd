"""What a user's ``implementation`` means."""

import jax
import jax.numpy as jnp
import pytest

from kvec_jax import Implementations, UnsupportedError
from kvec_jax.implementations import OPERATIONS, resolve
from kvec_jax.pallas import dispatch
from kvec_jax.pallas.dispatch import choose


def test_a_name_sets_every_operation():
    chosen = resolve("pallas_gpu")
    assert {getattr(chosen, name) for name in OPERATIONS} == {"pallas_gpu"}
    assert chosen == resolve(Implementations(**dict.fromkeys(OPERATIONS, "pallas_gpu")))
    assert hash(chosen) == hash(resolve("pallas_gpu"))


def test_on_a_cpu_kernels_are_interpreted_and_none_is_taken_unasked():
    assert resolve(None) == Implementations(**dict.fromkeys(OPERATIONS, "xla"), interpret=True)
    assert resolve(Implementations(pack_rows="pallas_tpu", interpret=False)).interpret is False


def test_where_the_arrays_are_decides(monkeypatch):
    monkeypatch.setattr("kvec_jax.implementations.default_platform", lambda: "tpu")
    assert resolve(None) == Implementations(interpret=False)
    assert resolve(None, {"weights": jnp.ones(3)}).select_top_k == "xla"
    assert jax.eval_shape(lambda x: resolve(None, x).interpret + x, 0).shape == ()  # tracers say nothing


def test_a_kernel_of_another_platform_is_refused_unless_interpreted(monkeypatch):
    monkeypatch.setattr("kvec_jax.implementations.default_platform", lambda: "gpu")
    with pytest.raises(UnsupportedError, match="select_top_k: 'pallas_tpu' is no kernel for this platform, gpu"):
        resolve(Implementations(select_top_k="pallas_tpu"))
    assert resolve(Implementations(select_top_k="pallas_tpu", interpret=True)).select_top_k == "pallas_tpu"


@pytest.mark.parametrize("make", [resolve, lambda name: Implementations(pack_rows=name)])
def test_unknown_names(make):
    with pytest.raises(
        ValueError, match=r"expected 'xla' or 'pallas_tpu' or 'pallas_gpu' or 'mosaic_gpu' or None, got 'cuda'"
    ):
        make("cuda")
    with pytest.raises(ValueError, match="interpret: expected None, True or False, got 'yes'"):
        Implementations(interpret="yes")


@pytest.mark.parametrize("platform, chosen", [("cpu", "xla"), ("tpu", "pallas_tpu"), ("gpu", "xla")])
def test_none_takes_the_platforms_kernel_where_it_can(monkeypatch, platform, chosen):
    monkeypatch.setattr(dispatch, "default_platform", lambda: platform)
    assert choose("op", None, pallas_tpu=None, pallas_gpu="too large") == chosen


def test_a_name_never_falls_back():
    assert choose("op", "xla", pallas_tpu="no") == "xla"
    with pytest.raises(UnsupportedError, match="op: implementation='pallas_gpu' can't do this case: too large"):
        choose("op", "pallas_gpu", pallas_tpu=None, pallas_gpu="too large")
    with pytest.raises(UnsupportedError, match="there is no such kernel"):
        choose("op", "pallas_gpu", pallas_tpu=None)
