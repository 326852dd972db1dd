"""Which rows of a packed pool, or of a tail, the queries of each head see."""

from typing import NamedTuple

import jax.numpy as jnp

from kvec_jax.typing import Array


class Span(NamedTuple):
    """For each head the rows from ``first`` up to and without ``last``; there are none if last is not after first.

    Attributes:
        first, last: int32 [B, K].
        seen: int32 [B, K, M], the first row that each query sees, none of them before ``first``; ``None`` where every
            query sees all rows.
        most: Rows that a head can have at most.
    """

    first: Array
    last: Array
    seen: Array | None
    most: int


def nothing(queries: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Span]:
    """Keys and values of the given shape of which no query [B, K, M, D] sees any."""
    rows, nowhere = jnp.zeros(shape, queries.dtype), jnp.zeros(queries.shape[:2], jnp.int32)
    return rows, rows, Span(nowhere, nowhere, None, 0)
