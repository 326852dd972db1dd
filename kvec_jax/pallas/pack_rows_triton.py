"""Rows of keys and values in the order of an index, on a GPU, through Triton.

One program copies a block of rows: it loads their indices, then the rows at them, of keys and of values alike.

For each of B rows of the batch, with S rows chosen of two arrays: bytes that must move, 2 S D in and as many out, and 4
S of index. No operations.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvec_jax.pallas.triton_blocks import load_rows
from kvec_jax.typing import Array

_BLOCK = 64


def refusal(keys: Array, values: Array, index: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    return None if index.size and keys.shape[1] else "expected rows to choose from and to choose, got none"


def pack_rows(keys: Array, values: Array, index: Array, interpret: bool) -> tuple[Array, Array]:
    """See ``kvec_jax.pack_rows.pack_rows``; every index is one of a row."""
    B, S = index.shape
    out_shape = tuple(jax.ShapeDtypeStruct((B, S, x.shape[-1]), x.dtype) for x in (keys, values))
    return pl.pallas_call(
        functools.partial(_kernel, columns=pl.next_power_of_2(keys.shape[-1])),
        grid=(B, pl.cdiv(S, _BLOCK)),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="pack_rows",
    )(keys, values, index)


def _kernel(keys, values, index, packed_keys, packed_values, *, columns):
    """Refs: [B, T, D] twice; [B, S]; [B, S, D] twice."""
    row = pl.program_id(0)
    place = pl.program_id(1) * _BLOCK + jnp.arange(_BLOCK)
    S, D = packed_keys.shape[1:]
    at = plt.load(index.at[row, jnp.minimum(place, S - 1)])
    column = jnp.arange(columns)
    inside = jnp.broadcast_to((place[:, None] < S) & (column[None] < D), (_BLOCK, columns))
    for rows, packed in ((keys, packed_keys), (values, packed_values)):
        plt.store(packed.at[row, place[:, None], column[None]], load_rows(rows, (row,), at, column), mask=inside)
