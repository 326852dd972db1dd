"""Blocks of any size in Triton kernels, where arrays must be powers of two in size."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from kvec_jax.typing import Array


def load_rows(ref, lead: tuple, at: Array, columns: Array) -> Array:
    """Rows ``ref[*lead, at, columns]`` [S, C], zeros in columns that the array doesn't have.

    A row beyond the last gives the last, to be masked by the caller.

    Args:
        ref: [..., T, D].
        lead: Scalars, one for each axis but the last two.
        at: int32 [S].
        columns: int32 [C].
    """
    T, D = ref.shape[-2:]
    index = (*lead, jnp.minimum(at, T - 1)[:, None], columns[None])
    if D & (D - 1) == 0:  # whole rows were asked for, or parts of equal size
        return plt.load(ref.at[index])
    mask = jnp.broadcast_to(columns[None] < D, (at.size, columns.size))
    return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def store_last(ref, lead: tuple, at: Array, value: Array) -> None:
    """``ref[*lead, ..., at] = value`` [..., S]; what lies beyond the last place is left out.

    Args:
        ref: [..., T].
        lead: Scalars, for the first axes.
        at: int32 [S].
        value: [..., S], whole in its other axes.
    """
    inner = value.shape[:-1]
    axes = [
        jnp.arange(size).reshape([-1 if axis == i else 1 for i in range(value.ndim)]) for axis, size in enumerate(inner)
    ]
    at = at.reshape([1] * len(inner) + [-1])
    mask = jnp.broadcast_to(at < ref.shape[-1], value.shape)
    plt.store(ref.at[(*lead, *axes, at)], value, mask=mask)
