"""Gathering the rows that were chosen from a layer's keys and values."""

import functools

import jax.numpy as jnp

from kvec_jax.pallas.dispatch import choose, differentiable
from kvec_jax.typing import Array, Implementation


def pack_rows(
    keys: Array,
    values: Array,
    index: Array,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Rows of keys and values, in the order of an index.

    Args:
        keys: [B, T, D].
        values: [B, T, D].
        index: int32 [B, S]; an index of T or more gives some row, to be ignored.
        implementation: See ``kvec_jax.Implementations``.
        interpret: Whether a kernel is interpreted.

    Returns:
        Keys and values [B, S, D].

    Raises:
        UnsupportedError: If the implementation that was asked for can't do this.

    Example:
        >>> rows = jnp.arange(8.0).reshape(1, 4, 2)
        >>> pack_rows(rows, -rows, jnp.array([[3, 0]]))[1].tolist()
        [[[-6.0, -7.0], [-0.0, -1.0]]]
    """
    from kvec_jax.pallas import pack_rows_tpu, pack_rows_triton  # not before kernels may be needed

    index = jnp.clip(index, 0, keys.shape[1] - 1)
    refusals = dict(
        pallas_tpu=pack_rows_tpu.refusal(keys, values, index), pallas_gpu=pack_rows_triton.refusal(keys, values, index)
    )
    chosen = choose("pack_rows", implementation, **refusals)
    if chosen == "xla":
        return _pack_rows(keys, values, index)
    kernels = pack_rows_tpu if chosen == "pallas_tpu" else pack_rows_triton
    kernel = functools.partial(kernels.pack_rows, interpret=interpret)
    return differentiable(kernel, _pack_rows)(keys, values, index)


def _pack_rows(keys: Array, values: Array, index: Array) -> tuple[Array, Array]:
    keys, values = (jnp.take_along_axis(x, index[..., None], axis=1) for x in (keys, values))
    return keys, values
