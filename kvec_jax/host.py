"""Memory of the host, under ``jit``: where arrays lie that the device needs only pieces of.

JAX calls the place a memory kind (``pinned_host``); an array there has another type than one on the device, so that
nothing moves unsaid. On CPU both are the same memory, and arrays stay where they are unless a caller insists.
"""

import jax
import jax.numpy as jnp
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


def fetch(x: Array, start: tuple, shape: tuple[int, ...]) -> Array:
    """A piece of ``x``, wherever it lies, in the memory of the device.

    A contiguous slice is what XLA can copy from host memory without bringing the whole array.

    Args:
        x: Any array.
        start: First index along each axis, int32 scalars, may be traced; clamped so that the piece lies inside.
        shape: Of the piece.

    Example:
        >>> jax.jit(lambda x: fetch(to_host(x), (1, 0), (1, 2)))(jnp.arange(6.0).reshape(3, 2)).tolist()
        [[2.0, 3.0]]
    """
    return to_device(lax.dynamic_slice(x, start, shape))


def is_on_host(x: Array) -> bool:
    """Whether ``x`` lies in the memory of the host by its type, on CPU as elsewhere."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def take(x: Array, index: Array, axis: int) -> Array:
    """Entries of ``x`` along an axis, in the memory in which ``x`` lies; on the way they pass through the device's."""
    taken = jnp.take(to_device(x), index, axis=axis)
    return to_host(taken) if is_on_host(x) else taken
