"""Shares of a head's rows, to which programs of a GPU attend side by side, and what they find put together."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvec_jax.online_softmax import Partial
from kvec_jax.pallas.spans import Span
from kvec_jax.typing import Array

# Programs that keep a large GPU busy: two for each multiprocessor of an H100. Most shares of a head.
_PROGRAMS, _SHARES = 264, 32


def shares_of(rows: int, block: int, programs: int) -> int:
    """How many shares, where a head has at most ``rows``, and there are ``programs`` for each share."""
    return max(min(pl.cdiv(rows, block), _PROGRAMS // programs, _SHARES), 1)


def limits_of(pool: Span, tail: Span, queries: int) -> tuple[Array, Array | None]:
    """First and last rows of pool and tail, int32 [B, K, 4], and the first that each query sees [2, B, K, queries].

    The second is ``None`` where all queries see all rows.
    """
    limits = jnp.stack([pool.first, pool.last, tail.first, tail.last], axis=-1)
    if pool.seen is None and tail.seen is None:
        return limits, None
    seen = (span.first[..., None] if span.seen is None else span.seen for span in (pool, tail))
    seen = jnp.stack(jnp.broadcast_arrays(*seen))
    return limits, jnp.pad(seen, [(0, 0)] * 3 + [(0, queries - seen.shape[-1])])


def merge_shares(weighted: Array, maxima: Array, totals: Array) -> Partial:
    """The partial over all shares, which are the first axis of the three."""
    maximum = jnp.max(maxima, axis=0)
    scales = jnp.exp(maxima - maximum)
    return Partial(jnp.sum(weighted * scales[..., None], axis=0), maximum, jnp.sum(totals * scales, axis=0))
