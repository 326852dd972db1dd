"""Quadratic forms v A v^T of values, with a few matrices for each head, on a GPU, through Triton.

One program sees a block of S values of one head and goes through the head's matrices, a few columns at a time: the
product [S, D] x [D, E] on the tensor cores, times the values' own columns, added up. Values of bfloat16 meet each
matrix in three parts of 8 bits whose sum is its float32; float32 runs on the plain cores.

For each of B rows and K heads, bytes that must move: T D of values, 4 X T of results, and X D D of matrices once.
Operations that must run: 2 X D D T (three times that where values are bfloat16).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvec_jax.pallas.triton_blocks import load_rows, store_last
from kvec_jax.pallas.value_norms_tpu import split
from kvec_jax.typing import Array

_LEAST = 16  # rows and columns that the tensor cores take
_MATRIX = 8192  # numbers of a matrix that a program multiplies by at a time; more would not fit in shared memory


def quadratic_forms(values: Array, matrices: Array, interpret: bool) -> Array:
    """See ``kvec_jax.value_norms.quadratic_forms``; what is refused is what the TPU's kernel refuses."""
    B, K, T, D = values.shape
    X = matrices.shape[1]
    size = max(pl.next_power_of_2(D), _LEAST)
    matrices = jnp.pad(matrices, [(0, 0), (0, 0), (0, size - D), (0, size - D)])
    narrow = values.dtype == jnp.bfloat16
    parts = split(matrices) if narrow else matrices[:, :, None]
    S, columns = (64, min(size, _MATRIX // size)) if narrow else (_LEAST, _LEAST)
    return pl.pallas_call(
        functools.partial(_kernel, S=S, columns=columns),
        grid=(B, K, pl.cdiv(T, S)),
        out_shape=jax.ShapeDtypeStruct((B, K, X, T), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="value_norms",
    )(values, parts)


def _kernel(values, parts, out, *, S, columns):
    """Refs: [B, K, T, D]; [K, X, parts, D, D]; [B, K, X, T]."""
    X, count, D = parts.shape[1:4]
    b, k = pl.program_id(0), pl.program_id(1)
    at = pl.program_id(2) * S + jnp.arange(S)
    block = load_rows(values, (b, k), at, jnp.arange(D))
    exact = "highest" if block.dtype == jnp.float32 else None

    def form(x, _):
        def add(i, total):
            some = i * columns + jnp.arange(columns)
            through = jnp.zeros((S, columns), jnp.float32)
            for part in range(count):
                matrix = parts[k, x, part, :, pl.ds(i * columns, columns)]
                through += plt.dot(block, matrix, precision=exact)
            mine = load_rows(values, (b, k), at, some).astype(jnp.float32)
            return total + jnp.sum(through * mine, axis=1)

        store_last(out, (b, k, x), at, lax.fori_loop(0, D // columns, add, jnp.zeros((S,), jnp.float32)))

    lax.fori_loop(0, X, form, None)
