"""A pool in which entries of different layers compete: the best so far, replaced as better ones come.

An entry outside the best n of the first layers has n better ones, so it can never come back: keeping only the best n
while the layers pass is exact, and needs the keys of one layer at a time.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvec_jax.implementations import Implementations
from kvec_jax.part import Part
from kvec_jax.pool import Pool, take_rows
from kvec_jax.select import LOWEST_KEY, indices_of
from kvec_jax.typing import Array

_EMPTY = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Competition:
    """Places that entries of all layers compete for, in no order.

    Attributes:
        keys, values: [B, P, D].
        order: int32 [B, P], which entry is better; ``LOWEST_KEY`` in empty places.
        identity: int32 [B, P], ``(layer * K + head) * T + position`` of each entry; breaks ties, and sorts at the end.
        length: Static. T.
    """

    keys: Array
    values: Array
    order: Array
    identity: Array
    length: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, B: int, places: int, D: int, T: int, dtype) -> "Competition":
        """No entries yet."""
        return cls(
            keys=jnp.zeros((B, places, D), dtype),
            values=jnp.zeros((B, places, D), dtype),
            order=jnp.full((B, places), LOWEST_KEY, jnp.int32),
            identity=jnp.full((B, places), _EMPTY, jnp.int32),
            length=T,
        )

    def candidates(self, layer: Array, order: Array) -> tuple[Array, Array]:
        """Order and identity int32 [B, P + K * T] of all places and then of a layer's entries, ``order`` [B, K, T]."""
        B, K, T = order.shape
        new = jnp.broadcast_to(layer * K * T + jnp.arange(K * T, dtype=jnp.int32), (B, K * T))
        return (
            jnp.concatenate([self.order, order.reshape(B, K * T)], axis=1),
            jnp.concatenate([self.identity, new], axis=1),
        )

    def rank(self, identity: Array, K: int, part: Part) -> Array:
        """Which of equal entries comes first: their ``identity``, with the heads of all devices counted."""
        if part.heads == 1:
            return identity
        layer = identity // (K * self.length)
        others = (layer * (part.heads - 1) + part.number) * (K * self.length)
        return jnp.where(identity == _EMPTY, _EMPTY, identity + others)

    def replace(
        self,
        alive: Array,
        order: Array,
        identity: Array,
        keys: Array,
        values: Array,
        how: Implementations = Implementations(),
    ) -> "Competition":
        """Puts the new entries that are ``alive`` into the places of old ones that are not.

        Args:
            alive: bool [B, P + K * T], no more than P of them.
            order: int32 [B, P + K * T], as ``candidates`` gave it.
            identity: int32 [B, P + K * T], likewise.
            keys: [B, K, T, D] of the layer.
            values: [B, K, T, D].
            how: The rows are gathered.
        """
        B, K, T, _ = keys.shape
        P = self.order.shape[1]
        old, new = alive[:, :P], alive[:, P:]
        most = min(P, K * T)
        source, target = indices_of(new, most), indices_of(~old, most)
        source_at = jnp.minimum(source, K * T - 1)
        target = jnp.where(source < K * T, target, P)  # dropped where there is nothing to write
        row = jnp.arange(B)[:, None]

        def write(places, entries):
            return places.at[row, target].set(entries, mode="drop")

        keys, values = take_rows(keys, values, source_at, how)
        return dataclasses.replace(
            self,
            keys=write(self.keys, keys),
            values=write(self.values, values),
            order=write(jnp.where(old, self.order, LOWEST_KEY), jnp.take_along_axis(order[:, P:], source_at, axis=1)),
            identity=write(
                jnp.where(old, self.identity, _EMPTY), jnp.take_along_axis(identity[:, P:], source_at, axis=1)
            ),
        )

    def drop(self, dead: Array) -> "Competition":
        """The pool without the entries marked in ``dead`` bool [B, P]."""
        return dataclasses.replace(
            self,
            order=jnp.where(dead, LOWEST_KEY, self.order),
            identity=jnp.where(dead, _EMPTY, self.identity),
        )

    def segments(self, L: int, K: int, rows: int | None = None) -> Pool:
        """The entries sorted by layer, head and position, in a pool of ``rows`` rows (all places by default)."""
        place = jnp.argsort(self.identity, axis=1)[:, :rows]
        identity = jnp.take_along_axis(self.identity, place, axis=1)
        borders = jnp.arange(L * K + 1, dtype=jnp.int32) * self.length
        at = jax.vmap(lambda row: jnp.searchsorted(row, borders))(identity).astype(jnp.int32)
        return Pool(
            keys=jnp.take_along_axis(self.keys, place[..., None], axis=1),
            values=jnp.take_along_axis(self.values, place[..., None], axis=1),
            positions=jnp.where(identity == _EMPTY, 0, identity % self.length),
            starts=at[:, :-1].reshape(-1, L, K),
            counts=jnp.diff(at, axis=1).reshape(-1, L, K),
            used=at[:, -1],
            segment_rows=0,
            layer_rows=0,
        )
