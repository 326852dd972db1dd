"""Fixtures and settings of all tests."""

import os

# Expected numbers are the CPU's; `make test-device` sets JAX_PLATFORMS itself. Before anything imports jax.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
