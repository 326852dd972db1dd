"""Quadratic forms v A v^T of values, with a few matrices for each head, on a TPU.

One program sees a block of S values of one head and the head's matrices. Values stand in lanes: A v^T [D, S] comes from
the matrix unit, is multiplied by v^T and added up over sublanes, so that the sums lie as they are written.

The matrix unit multiplies bfloat16. Values of that type meet each matrix in three parts of 8 bits, whose sum is its
float32: three products in place of the six that float32 takes.

For each of B rows and K heads, bytes that must move: T D of values, 4 X T of results, and X D D of matrices once.
Operations that must run: 2 X D D T (three times that where values are bfloat16, six times for float32).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvec_jax.typing import Array

_BLOCK = 512
# Bytes of matrices that a program holds.
_MATRIX_BYTES = 2 << 20


def refusal(values: Array, matrices: Array) -> str | None:
    """Why these arrays can't be had, or ``None``."""
    if values.dtype not in (jnp.float32, jnp.bfloat16) or matrices.dtype != jnp.float32:
        return (
            f"expected float32 or bfloat16 values and float32 matrices, got {values.dtype} values and "
            f"{matrices.dtype} matrices"
        )
    if values.shape[-1] > 256:
        return f"expected heads of at most 256, got {values.shape[-1]}"
    return None


def quadratic_forms(values: Array, matrices: Array, interpret: bool) -> Array:
    """See ``kvec_jax.value_norms.quadratic_forms``."""
    B, K, T, D = values.shape
    X = matrices.shape[1]
    parts = split(matrices) if values.dtype == jnp.bfloat16 else matrices[:, :, None]
    most = max(_MATRIX_BYTES // (parts.shape[2] * parts.dtype.itemsize * D * D), 1)
    some = max(x for x in range(1, X + 1) if X % x == 0 and x <= most)  # matrices of a program
    S = min(_BLOCK, T)
    out = pl.pallas_call(
        functools.partial(_kernel, some=some),
        grid=(K, X // some, B, pl.cdiv(T, S)),
        in_specs=[
            pl.BlockSpec((1, 1, S, D), lambda k, x, b, t: (b, k, t, 0)),
            pl.BlockSpec((1, some, *parts.shape[2:]), lambda k, x, b, t: (k, x, 0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, 1, some, S), lambda k, x, b, t: (b, k, x, 0, t)),
        out_shape=jax.ShapeDtypeStruct((B, K, X // some, some, T), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "parallel")),
        interpret=interpret,
        name="value_norms",
    )(values, parts)
    return out.reshape(B, K, X, T)


def _kernel(values, parts, out, *, some):
    """Refs: [1, 1, S, D]; [1, some, parts, D, D]; [1, 1, 1, some, S]."""
    block = values[0, 0]
    columns = block.astype(jnp.float32).T  # [D, S]
    exact = lax.Precision.HIGHEST if block.dtype == jnp.float32 else None

    def form(x, _):
        through = sum(
            lax.dot_general(
                parts[0, x, i],
                block,
                (((1,), (1,)), ((), ())),
                precision=exact,
                preferred_element_type=jnp.float32,
            )
            for i in range(parts.shape[2])
        )
        out[0, 0, 0, pl.ds(x, 1)] = jnp.sum(through * columns, axis=0, keepdims=True)

    lax.fori_loop(0, some, form, None)


def split(x: Array) -> Array:
    """Three bfloat16 parts [K, X, 3, D, D] that add up to the float32 ``x`` [K, X, D, D], the largest first."""
    parts = []
    for _ in range(3):
        # Not left to a rounding that the compiler may take to be none.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts, axis=2)
