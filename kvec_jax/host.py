"""Memory of the host, under ``jit``: where arrays lie that the device needs only pieces of.

JAX calls the place a memory kind (``pinned_host``); an array there has another type than one on the device, so that
nothing moves unsaid. On CPU both are the same memory, and arrays stay where they are unless a caller insists.
"""

import jax
from jax import lax

from kvec_jax.typing import Array


def apart() -> bool:
    """Whether the default backend's device has a memory of its own, apart from the host's."""
    return jax.default_backend() != "cpu"


def to_host(x: Array) -> Array:
    """``x`` in the memory of the host."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """``x`` in the memory of the device; nothing happens to an array that is there."""
    return jax.device_put(x, jax.memory.Space.Device)


def fetch(x: Array, start: Array | int, count: int) -> Array:
    """Rows of ``x``, wherever it lies, in the memory of the device.

    XLA copies it from host memory without bringing the whole array, which on TPU must be cut along one axis alone.

    Args:
        x: Any array.
        start: First row, int32 scalar, may be traced; clamped so that the piece lies inside.
        count: Rows of the piece; static.

    Example:
        >>> import jax.numpy as jnp
        >>> jax.jit(lambda x: fetch(to_host(x), 1, 1))(jnp.arange(6.0).reshape(3, 2)).tolist()
        [[2.0, 3.0]]
    """
    return to_device(lax.dynamic_slice_in_dim(x, start, count, axis=0))


def is_on_host(x: Array) -> bool:
    """Whether ``x`` lies in the memory of the host by its type, on CPU as elsewhere."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def beside(x: Array, other: Array) -> Array:
    """``x`` in the memory in which ``other`` lies."""
    return to_host(x) if is_on_host(other) else x
