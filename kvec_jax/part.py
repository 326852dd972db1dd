"""What passes between devices that share a model: the only collective operations there are.

Over a mesh every device runs the same program on its own heads and its own rows of the batch. Matrices are divided by
their columns, so that no sum over the model's width, its heads or its MLP is ever cut in pieces: activations are
gathered before they are multiplied, and every number is the sum that one device would have computed.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvec_jax.typing import Array

# Names of a mesh's axes: rows of the batch are divided over the first, heads over the second.
DATA, TENSOR = "data", "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a computation that one device has; every method is the identity where that is all of it.

    Attributes:
        heads: Devices that the heads are divided over.
        rows: Devices that the rows of the batch are divided over.
    """

    heads: int = 1
    rows: int = 1

    @property
    def number(self) -> Array | int:
        """Which of the devices that the heads are divided over this one is."""
        return lax.axis_index(TENSOR) if self.heads > 1 else 0

    def gather(self, x: Array, axis: int) -> Array:
        """All devices' ``x``, one after the other along ``axis``."""
        return lax.all_gather(x, TENSOR, axis=axis % x.ndim, tiled=True) if self.heads > 1 else x

    def own(self, x: Array, axis: int) -> Array:
        """This device's share of ``x``, which all have whole, along ``axis``."""
        if self.heads == 1:
            return x
        size = x.shape[axis] // self.heads
        return lax.dynamic_slice_in_dim(x, self.number * size, size, axis)

    def sum(self, x: Array) -> Array:
        """The sum of all devices' ``x``."""
        return lax.psum(x, TENSOR) if self.heads > 1 else x

    def max(self, x: Array) -> Array:
        """The largest of all devices' ``x``, number by number."""
        return lax.pmax(x, TENSOR) if self.heads > 1 else x

    def before(self, x: Array) -> Array | int:
        """The sum of ``x`` over the devices before this one."""
        if self.heads == 1:
            return 0
        each = lax.all_gather(x, TENSOR)
        earlier = jnp.arange(self.heads).reshape(-1, *[1] * x.ndim) < self.number
        return jnp.sum(jnp.where(earlier, each, 0), axis=0, dtype=x.dtype)

    def rows_of(self, matrix: Array) -> Array:
        """Some rows [..., in / heads, out] of a matrix of which each device has some columns [..., in, out / heads]."""
        if self.heads == 1:
            return matrix
        axis = matrix.ndim - 2
        return lax.all_to_all(matrix, TENSOR, split_axis=axis, concat_axis=axis + 1, tiled=True)

    def look_up(self, table: Array, index: Array) -> Array:
        """Rows ``index`` of a table of which each device has some."""
        if self.heads == 1:
            return table[index]
        at = index - self.number * table.shape[0]
        mine = (at >= 0) & (at < table.shape[0])
        rows = table[jnp.clip(at, 0, table.shape[0] - 1)]
        return self.sum(jnp.where(mine[..., None], rows, jnp.zeros((), table.dtype)))

    def any_row(self, marks: Array) -> Array:
        """Whether one of the ``marks`` bool [B] is set, in any row of the whole batch: the same on every device."""
        found = jnp.any(marks)
        return lax.pmax(found.astype(jnp.int32), DATA) > 0 if self.rows > 1 else found


WHOLE = Part()
