"""Fixtures and settings of all tests."""

import os

# Expected numbers are the CPU's; `make test-device` sets JAX_PLATFORMS itself. Before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The tests compile far more than they compute: XLA's CPU code generator takes a third of the time without LLVM's
# optimisations. What XLA itself does to a program stays the same.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax  # noqa: E402

# Several devices, for what is divided among them; a CPU can pretend to be as many as one likes.
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    jax.config.update("jax_num_cpu_devices", 8)

from tests.compiled import pytest_sessionfinish, pytest_terminal_summary  # noqa: E402, F401 - hooks


def pytest_runtest_teardown(item, nextitem):
    """Frees the compiled programs of a file that is done; those of all files together take gigabytes."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
