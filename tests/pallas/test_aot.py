"""Compiling for chips that aren't here."""

import sys

import jax
import jax.numpy as jnp
import pytest

from kvec_jax.pallas import aot
from kvec_jax.pallas.aot import CHIPS, compile_for

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def test_unknown_chip():
    with pytest.raises(ValueError, match="chip: expected 'v5e', 'v5p', 'v6e' or 'h100', got 'v99'"):
        compile_for("v99", jnp.sin, X)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    aot.device_of.cache_clear()
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ImportError, match=r"libtpu: pip install 'kvec-jax\[tpu\]'"):
        compile_for("v5e", jnp.sin, X)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    def none(**topology):
        raise NotImplementedError("topology not implemented for cuda")

    aot.device_of.cache_clear()
    monkeypatch.setattr(aot.topologies, "get_topology_desc", none)
    with pytest.raises(ImportError, match=r"pip install 'kvec-jax\[cuda\]'"):
        compile_for("h100", jnp.sin, X)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.platform == "tpu"])
def test_memory_of_a_program_for_a_tpu(chip):
    pytest.importorskip("libtpu")
    _check_memory(chip)


@pytest.mark.aot_gpu
def test_memory_of_a_program_for_a_gpu():
    pytest.importorskip("jax_plugins.xla_cuda13")
    _check_memory("h100")


def _check_memory(chip):
    memory = compile_for(chip, lambda x: x + 1, X, donate_argnums=(0,)).memory_analysis()
    assert memory.argument_size_in_bytes == memory.alias_size_in_bytes == 64 * 128 * 4
    assert memory.temp_size_in_bytes == 0
