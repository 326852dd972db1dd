"""Where the chosen rows of each layer go while a prompt is read, so that only one layer's keys are ever whole."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.implementations import Implementations
from kvec_jax.pack_rows import pack_rows
from kvec_jax.select import indices_of
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The pool of a ``CompressedKV`` while it fills, layer by layer; fields as there.

    Attributes:
        keys, values: [B, P, D].
        positions: int32 [B, P].
        starts, counts: int32 [B, L, K].
        used: int32 [B], rows filled so far.
        segment_rows: Static. Rows of every segment, or 0 where segments are packed end to end.
        layer_rows: Static. Most rows that one layer may keep.
    """

    keys: Array
    values: Array
    positions: Array
    starts: Array
    counts: Array
    used: Array
    segment_rows: int = dataclasses.field(metadata={"static": True})
    layer_rows: int = dataclasses.field(metadata={"static": True})

    def add(
        self, layer: Array, keys: Array, values: Array, kept: Array | None, how: Implementations = Implementations()
    ) -> "Pool":
        """The pool with the ``kept`` entries of one more layer.

        Args:
            layer: int32 scalar, traced.
            keys: [B, K, T, D].
            values: [B, K, T, D].
            kept: bool [B, K, T]; ``None`` means the whole segment, T being ``segment_rows``.
            how: The rows are gathered.
        """
        return (self._add_equal if self.segment_rows else self._add_ragged)(layer, keys, values, kept, how)

    def _add_equal(self, layer, keys, values, kept, how):
        B, K, T, D = keys.shape
        S = self.segment_rows
        if kept is None:
            index = jnp.broadcast_to(jnp.arange(T), (B, K, T))
            counts = self.counts
        else:
            index = indices_of(kept, S)
            counts = _put(self.counts, jnp.sum(kept, axis=-1, dtype=jnp.int32)[:, None], 1, layer)
            keys, values = take_rows(keys, values, index + T * jnp.arange(K)[:, None], how)
        first = layer * K * S
        return dataclasses.replace(
            self,
            keys=_put(self.keys, keys.reshape(B, K * S, D), 1, first),
            values=_put(self.values, values.reshape(B, K * S, D), 1, first),
            positions=_put(self.positions, index.reshape(B, K * S), 1, first),
            counts=counts,
        )

    def _add_ragged(self, layer, keys, values, kept, how):
        B, K, T, D = keys.shape
        counts = jnp.sum(kept, axis=-1, dtype=jnp.int32)
        starts = self.used[:, None] + jnp.cumsum(counts, axis=-1) - counts
        index = indices_of(kept.reshape(B, K * T), self.layer_rows)
        row = jnp.arange(B)[:, None]
        place = jnp.where(index < K * T, self.used[:, None] + jnp.arange(self.layer_rows), self.keys.shape[1])

        keys, values = take_rows(keys, values, index, how)

        def scatter(pool, rows):
            return pool.at[row, place].set(rows, mode="drop")

        return dataclasses.replace(
            self,
            keys=scatter(self.keys, keys),
            values=scatter(self.values, values),
            positions=scatter(self.positions, index % T),
            starts=_put(self.starts, starts[:, None], 1, layer),
            counts=_put(self.counts, counts[:, None], 1, layer),
            used=self.used + jnp.sum(counts, axis=-1),
        )


def equal_pool(B: int, L: int, K: int, D: int, rows: int, dtype, counts: Array) -> Pool:
    """An empty pool with ``rows`` rows for every segment; ``counts`` [B] is what each has if all of them are kept."""
    segments = jnp.arange(L * K, dtype=jnp.int32).reshape(L, K)
    return _pool(
        B, L * K * rows, D, dtype,
        starts=jnp.broadcast_to(segments * rows, (B, L, K)),
        counts=jnp.broadcast_to(counts[:, None, None], (B, L, K)),
        segment_rows=rows,
        layer_rows=K * rows,
    )  # fmt: skip


def ragged_pool(B: int, L: int, K: int, D: int, rows: int, layer_rows: int, dtype) -> Pool:
    """An empty pool of ``rows`` rows in all, of which a layer may take ``layer_rows``, packed end to end."""
    zeros = jnp.zeros((B, L, K), jnp.int32)
    return _pool(B, rows, D, dtype, starts=zeros, counts=zeros, segment_rows=0, layer_rows=layer_rows)


def _pool(B: int, P: int, D: int, dtype, **fields) -> Pool:
    return Pool(
        keys=jnp.zeros((B, P, D), dtype),
        values=jnp.zeros((B, P, D), dtype),
        positions=jnp.zeros((B, P), jnp.int32),
        used=jnp.zeros((B,), jnp.int32),
        **fields,
    )


def take_rows(keys: Array, values: Array, index: Array, how: Implementations) -> tuple[Array, Array]:
    """Rows [B, S, D] of a layer's keys and values [B, K, T, D].

    ``index`` [B, ...], S numbers for each row of the batch, counts over all heads; a number too large gives some row.
    """
    B, _, _, D = keys.shape
    return pack_rows(
        keys.reshape(B, -1, D),
        values.reshape(B, -1, D),
        index.reshape(B, -1),
        implementation=how.pack_rows,
        interpret=bool(how.interpret),
    )


def _put(x: Array, part: Array, axis: int, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis)
