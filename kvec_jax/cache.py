"""The packed key-value cache: every head keeps its own number of rows; the memory of the others is given back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvec_jax.forms import Beyond
from kvec_jax.part import TENSOR
from kvec_jax.placement import place_cache, size_of, whole
from kvec_jax.quantised import RowScales
from kvec_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedKV:
    """What is left of a prompt's keys and values, and the tokens that came after; immutable, a pytree.

    The *pool* holds the kept rows of all layers and heads. The rows of one (layer, key-value head), a *segment*, lie
    together in position order; segments differ in length, and may be empty. The *tail* holds the tokens added after
    compression, the same number for every layer and head. An uncompressed cache is the same with every row kept.

    Rows of a batch may share a pool, as questions about one text do: then the pool's arrays have fewer rows than the
    tail's, and each stands for as many neighbouring rows of the batch.

    Attributes:
        keys: [B, P, D], the pool's keys, after RoPE at their own positions (see ``shift``).
        values: [B, P, D].
        positions: int32 [B, P], where in the prompt each row came from.
        starts: int32 [B, L, K], first pool row of each segment.
        counts: int32 [B, L, K], rows of each segment.
        tail_keys: [L, B, K, R, D].
        tail_values: [L, B, K, R, D].
        tail_length: int32 [B], tail rows in use.
        next_position: int32 [B], position of the token that comes next.
        shift: int32 [B], by how many positions RoPE is behind, where the kept rows of each head were turned to the
            positions 0, 1, 2, ... (``rerotate``); ``None`` where keys are as they were.
        scales: How to restore ``keys`` and ``values`` where they are stored in 8 or 4 bits (see ``quantise``); ``None``
            where they are stored as they are.
        recent: [L, B, N, W, D], queries of the newest tokens, where the policy is going to choose again; else ``None``.
        beyond: What else attention sees of the prompt, in a form of its own (``kvec_jax.forms.Beyond``); ``None`` for
            policies that choose rows.
        segment_rows: Static. Rows set aside for every segment where all have the same (then segment s of the pool
            starts at row ``s * segment_rows``); 0 where the segments are packed end to end.
        mesh: Static. The devices that share the cache, see ``kvec_jax.shard``; ``None`` for a cache on one. Each has a
            pool of its own, with the rows of its heads: the pools lie one after the other along P, and ``starts`` count
            from the beginning of a head's own.
    """

    keys: Array
    values: Array
    positions: Array
    starts: Array
    counts: Array
    tail_keys: Array
    tail_values: Array
    tail_length: Array
    next_position: Array
    shift: Array | None = None
    scales: RowScales | None = None
    recent: Array | None = None
    beyond: Beyond | None = None
    segment_rows: int = dataclasses.field(default=0, metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        B, (_, L, K) = self.tail_length.shape[0], self.counts.shape
        rows, size = self.keys.shape[1], self.tail_keys.shape[4]
        dtype = f"int{self.scales.bits}" if self.scales else self.keys.dtype
        return (
            f"CompressedKV(batch={B}, layers={L}, kv_heads={K}, head_dim={size}, pool_rows={rows}, "
            f"tail_capacity={self.tail_capacity}, dtype={dtype})"
        )

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.counts.shape[-1]

    @property
    def pool_share(self) -> int:
        """How many rows of the batch share one row of the pool; mostly 1."""
        return self.tail_length.shape[0] // self.counts.shape[0]

    @property
    def first_rows(self) -> np.ndarray:
        """Where the pool begins in which each head's ``starts`` count, int64 [K]; zeros for a cache on one device."""
        devices = 1 if self.mesh is None else size_of(self.mesh, TENSOR)
        return np.arange(self.num_kv_heads) * devices // self.num_kv_heads * (self.keys.shape[1] // devices)

    @property
    def rope_position(self) -> Array:
        """Position by which RoPE turns the token that comes next, int32 [B]."""
        return self.next_position if self.shift is None else self.next_position - self.shift

    @property
    def tail_capacity(self) -> int:
        """R: tokens that the tail has room for."""
        return self.tail_keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes that all buffers of the cache hold, indices included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the kept keys and values on the device, with their scales, without tail and indices."""
        scales = self.scales.nbytes if self.scales else 0
        return self.keys.nbytes + self.values.nbytes + scales + (self.beyond.device_nbytes if self.beyond else 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes that ``beyond`` holds in the memory of the host; part of ``nbytes``."""
        return self.beyond.host_nbytes if self.beyond else 0

    def kept_positions(self, row: int) -> list[list[np.ndarray]]:
        """Prompt positions that one row of the batch keeps.

        Args:
            row: Index into the batch.

        Returns:
            ``kept[layer][head]``: sorted int32 array.

        Raises:
            IndexError: If there is no such row.
        """
        B = self.tail_length.shape[0]
        if not 0 <= row < B:
            raise IndexError(f"row: expected 0 to {B - 1}, got {row}")
        owner = row // self.pool_share
        positions, starts, counts = (whole(x)[owner] for x in (self.positions, self.starts, self.counts))
        starts = starts + self.first_rows
        return [
            [positions[start : start + count] for start, count in zip(*heads)]
            for heads in zip(starts.tolist(), counts.tolist())
        ]

    def take_rows(self, index: Array) -> "CompressedKV":
        """A copy with the rows ``index`` int32 [rows] of the batch, in that order; a row may be taken more than once.

        Each gets a row of the pool of its own.
        """
        own = (self.keys, self.values, self.positions, self.starts, self.counts)
        keys, values, positions, starts, counts = (x[index // self.pool_share] for x in own)
        taken = dataclasses.replace(
            self,
            keys=keys,
            values=values,
            positions=positions,
            starts=starts,
            counts=counts,
            tail_keys=self.tail_keys[:, index],
            tail_values=self.tail_values[:, index],
            tail_length=self.tail_length[index],
            next_position=self.next_position[index],
            shift=None if self.shift is None else self.shift[index],
            scales=jax.tree.map(lambda x: x[index // self.pool_share], self.scales),
            recent=None if self.recent is None else self.recent[:, index],
            beyond=self.beyond and self.beyond.take_rows(index),
        )
        return place_cache(taken)

    def reserve(self, tokens: int) -> "CompressedKV":
        """The same cache with room for ``tokens`` more after those already in its tail (a copy of the tail)."""
        missing = int(jnp.max(self.tail_length)) + tokens - self.tail_capacity
        if missing <= 0:
            return self
        padding = [(0, 0)] * 3 + [(0, missing), (0, 0)]
        tails = dict(tail_keys=jnp.pad(self.tail_keys, padding), tail_values=jnp.pad(self.tail_values, padding))
        return place_cache(dataclasses.replace(self, **tails))


def coverage(cache: CompressedKV) -> np.ndarray:
    """Share of each prompt's positions that at least one head of one layer keeps (K-VEC, section 3).

    Args:
        cache: Of any policy.

    Returns:
        float64 [B], in [0, 1].

    Example:
        >>> import kvec_jax as kv
        >>> from kvec_jax.testing import tiny_model
        >>> _, cache = kv.prefill(tiny_model(), jnp.arange(60)[None], jnp.array([60]), kv.StreamingLLM(15))
        >>> coverage(cache).tolist()
        [0.25]
    """
    lengths = whole(cache.next_position - cache.tail_length)
    kept = (np.unique(np.concatenate(sum(cache.kept_positions(row), []))) for row in range(len(lengths)))
    return np.array([len(positions) / length for positions, length in zip(kept, lengths)])
