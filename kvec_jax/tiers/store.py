"""The host side of the cache: blocks in memory, up to a limit, and all of them on disk.

A block is P tokens of one key-value head, keys and values together. It is named by (layer, row, head, block), written
once and never changed, so what a fetch gives depends on nothing but the name. A store belongs to one run, is mutable,
and is never seen by a ``jit``.
"""

import dataclasses
import threading
from typing import Literal

import numpy as np

from kvec_jax.errors import StoreError
from kvec_jax.tiers.disk import LEAST_EXTENT, PAGE, ExtentFile, aligned

Backend = Literal["ram", "mmap", "direct"]
# So that copies under way take little memory.
_EXTENTS_AT_ONCE, _BLOCKS_AT_ONCE = 16, 256


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """How many blocks there can be, and what one is.

    Attributes:
        layers: L.
        rows: B.
        heads: K.
        blocks: Most blocks of one head.
        block_tokens: Tokens of a block.
        head_dim: D.
        dtype: Of the stored numbers.
        stored_layers: How many of the layers store anything.
    """

    layers: int
    rows: int
    heads: int
    blocks: int
    block_tokens: int
    head_dim: int
    dtype: np.dtype
    stored_layers: int

    @property
    def block(self) -> tuple[int, int, int]:
        """Shape of a block: keys and values, tokens, numbers."""
        return 2, self.block_tokens, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(np.prod(self.block)) * np.dtype(self.dtype).itemsize

    @property
    def per_extent(self) -> int:
        """Blocks that lie together on disk."""
        return -(-LEAST_EXTENT // self.block_bytes)

    @property
    def most(self) -> int:
        """Most blocks that are stored."""
        return self.stored_layers * self.rows * self.heads * self.blocks

    def names(self, layer: int, row: int, ids: np.ndarray) -> np.ndarray:
        """One number for each of ``ids`` [b, K, M] of the rows from ``row`` on."""
        rows, heads, _ = ids.shape
        segment = (layer * self.rows + row + np.arange(rows)[:, None]) * self.heads + np.arange(heads)
        return segment[..., None] * self.blocks + ids

    def describe(self, name: int) -> str:
        """The block of that number, in words."""
        segment, block = divmod(int(name), self.blocks)
        segment, head = divmod(segment, self.heads)
        layer, row = divmod(segment, self.rows)
        return f"layer {layer}, row {row}, head {head}, block {block}"


@dataclasses.dataclass
class StoreCounts:
    """What a store did.

    Attributes:
        memory_blocks: Fetched from memory.
        disk_blocks: Fetched from disk.
        disk_bytes_read: Whole extents.
        disk_bytes_written: Whole extents.
        hinted_blocks: Brought into memory before anyone asked.
        failed_hints: Hints that could not be followed.
    """

    memory_blocks: int = 0
    disk_blocks: int = 0
    disk_bytes_read: int = 0
    disk_bytes_written: int = 0
    hinted_blocks: int = 0
    failed_hints: int = 0


class BlockStore:
    """Blocks in memory, and on disk where there is one.

    With a disk everything is written to it at once; memory then holds the most important blocks, and later those that
    were fetched last.

    Args:
        shape: Of the blocks.
        host_bytes: Most bytes of blocks in memory; ``None`` means all.
        folder: Where the disk's file lies; ``None`` means no disk.
        disk_bytes: Most bytes on disk; ``None`` means as many as there is room for.
        backend: ``"ram"`` without a disk; how to read it with one.
        threads: That read the disk at the same time.
        timeout: Seconds that a fetch may take.

    Raises:
        StoreError: If there is no disk and memory can't hold everything, or the folder can't be written in.
    """

    def __init__(
        self,
        shape: StoreShape,
        *,
        host_bytes: int | None = None,
        folder: str | None = None,
        disk_bytes: int | None = None,
        backend: Backend = "ram",
        threads: int = 4,
        timeout: float = 60.0,
    ) -> None:
        self.shape = shape
        self.counts = StoreCounts()
        room = shape.most if host_bytes is None else min(host_bytes // shape.block_bytes, shape.most)
        if backend == "ram" and room < shape.most:
            raise StoreError(
                f"host_bytes: the cache takes {shape.most * shape.block_bytes:,} bytes and there is no disk, "
                f"got {host_bytes:,}"
            )
        self.per_extent = shape.per_extent
        extent_bytes = -(-self.per_extent * shape.block_bytes // PAGE) * PAGE
        self._disk = None
        if backend != "ram":
            self._disk = ExtentFile(folder, extent_bytes, backend, threads, disk_bytes, timeout)
        self._lock = threading.Lock()
        names = shape.layers * shape.rows * shape.heads * shape.blocks
        self._arena = np.empty((room, *shape.block), shape.dtype)
        self._frame_of = np.full(names, -1, np.int32)  # where in the arena a block is
        self._name_of = np.full(room, -1, np.int64)
        self._used = np.zeros(room, np.int64)  # when a frame was fetched last
        self._clock = 0
        self._place_of = np.full(names, -1, np.int64) if self._disk else None  # extent and place in it

    @property
    def reads(self) -> str:
        """How the disk is read: ``"none"``, ``"mmap"``, ``"direct"``, or ``"buffered"`` where O_DIRECT was refused."""
        if self._disk is None:
            return "none"
        if self._disk.direct:
            return "direct"
        return "mmap" if self._disk.backend == "mmap" else "buffered"

    @property
    def frames(self) -> int:
        """Blocks that fit in memory."""
        return len(self._arena)

    def memory_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return int(np.count_nonzero(self._name_of >= 0)) * self.shape.block_bytes

    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return 0 if self._disk is None else self._disk.nbytes

    def put(
        self,
        layer: int,
        blocks: np.ndarray,
        counts: np.ndarray,
        *,
        row: int = 0,
        first: np.ndarray | None = None,
        order: np.ndarray | None = None,
        importance: np.ndarray | None = None,
        room: int = 0,
    ) -> None:
        """Stores blocks of one layer.

        Args:
            layer: Which.
            blocks: [b, K, n, 2, P, D].
            counts: int [b, K]: how many of the n there are, from the first on.
            row: The first of the b rows.
            first: int [b, K]: number that the first block of each head gets; 0 by default.
            order: int [b, K, n]: order in which they lie on disk, those of ``counts`` first; as they are by default.
            importance: float [b, K, n]: which go into memory first where there is a disk; without it none does.
            room: How many of them may go into memory where there is a disk.

        Raises:
            StoreError: If the disk or a limit is reached.
        """
        b, K, n = blocks.shape[:3]
        ids = np.arange(n) + (np.zeros((b, K, 1), int) if first is None else first[..., None])
        names = self.shape.names(layer, row, ids)
        there = np.arange(n) < counts[..., None]
        if self._disk is not None:
            for segment in np.ndindex(b, K):
                if counts[segment]:
                    packing = np.arange(n) if order is None else order[segment]
                    self._write(names[segment], blocks[segment], packing[: counts[segment]])
        if self._disk is None:
            chosen = there.reshape(-1).nonzero()[0]
        elif importance is not None:
            worth = np.where(there, importance, -np.inf).reshape(-1)
            chosen = np.argsort(-worth, kind="stable")[: min(room, int(there.sum()))]
        else:
            return
        names, blocks = names.reshape(-1), blocks.reshape(-1, *self.shape.block)
        for start in range(0, len(chosen), _BLOCKS_AT_ONCE):
            some = chosen[start : start + _BLOCKS_AT_ONCE]
            with self._lock:
                self._keep(names[some], blocks[some])

    def fetch(self, layer: int, ids: np.ndarray, out: np.ndarray, row: int = 0) -> None:
        """Gets blocks, from memory or disk.

        Args:
            layer: Which.
            ids: int [b, K, M]; ``shape.blocks`` asks for nothing.
            out: [b, K, M, 2, P, D], written: the blocks, and zeros where nothing is asked for.
            row: The first of the b rows.

        Raises:
            StoreError: If the disk fails, or a block was never stored.
        """
        asked = (ids < self.shape.blocks).reshape(-1)
        names = self.shape.names(layer, row, ids).reshape(-1)
        flat = out.reshape(-1, *self.shape.block)
        flat[~asked] = 0
        with self._lock:
            self._clock += 1
            frames = np.where(asked, self._frame_of[np.where(asked, names, 0)], -1)
            here = (frames >= 0).nonzero()[0]
            flat[here] = self._arena[frames[here]]
            self._used[frames[here]] = self._clock
            self.counts.memory_blocks += len(here)
        missing = (asked & (frames < 0)).nonzero()[0]
        if len(missing):
            flat[missing] = self._read(names[missing])
            with self._lock:
                self.counts.disk_blocks += len(missing)

    def hint(self, layer: int, ids: np.ndarray, row: int = 0) -> None:
        """Brings blocks, int [b, K, M] as in ``fetch``, from disk into memory; no later fetch gives anything else.

        If the disk fails, that is counted and no more: a fetch that needs the blocks reads again and says what is
        wrong.
        """
        if self._disk is None:
            return
        names = self.shape.names(layer, row, ids)[ids < self.shape.blocks]
        with self._lock:
            names = names[self._frame_of[names] < 0]
        if not len(names):
            return
        try:
            self._read(names)
        except StoreError:
            with self._lock:
                self.counts.failed_hints += 1
        else:
            with self._lock:
                self.counts.hinted_blocks += len(names)

    def close(self) -> None:
        """Gives memory and disk back."""
        if self._disk is not None:
            self._disk.close()
        self._arena = self._arena[:0]

    def _write(self, names: np.ndarray, blocks: np.ndarray, order: np.ndarray) -> None:
        """Packs a segment's blocks into extents of their own, some at a time, as copies of them are made."""
        some = _EXTENTS_AT_ONCE * self.per_extent
        for start in range(0, len(order), some):
            self._write_some(names, blocks, order[start : start + some])

    def _write_some(self, names: np.ndarray, blocks: np.ndarray, order: np.ndarray) -> None:
        count = len(order)
        needed = -(-count // self.per_extent)
        data = aligned(needed * self._disk.extent_bytes).reshape(needed, -1)
        packed = data[:, : self.per_extent * self.shape.block_bytes].reshape(needed, self.per_extent, -1)
        raw = np.ascontiguousarray(blocks[order]).view(np.uint8).reshape(count, -1)
        for extent in range(needed):
            part = raw[extent * self.per_extent : (extent + 1) * self.per_extent]
            packed[extent, : len(part)] = part
        first = self._disk.append(data)
        with self._lock:
            self._place_of[names[order]] = first * self.per_extent + np.arange(count)
            self.counts.disk_bytes_written += data.nbytes

    def _read(self, names: np.ndarray) -> np.ndarray:
        """Blocks from disk, which are then kept in memory too."""
        places = self._place_of[names]
        if places.min() < 0:
            raise StoreError(f"no such block was stored: {self.shape.describe(names[places.argmin()])}")
        blocks = np.empty((len(names), *self.shape.block), self.shape.dtype)
        raw = blocks.view(np.uint8).reshape(len(names), -1)
        extents, which = np.unique(places // self.per_extent, return_inverse=True)

        def use(i: int, extent: np.ndarray) -> None:
            wanted = (which == i).nonzero()[0]
            packed = extent[: self.per_extent * self.shape.block_bytes].reshape(self.per_extent, -1)
            raw[wanted] = packed[places[wanted] % self.per_extent]

        try:
            self._disk.visit(extents, use)
        except StoreError as error:
            raise StoreError(f"{error}; needed for {self.shape.describe(names[0])}") from error
        with self._lock:
            self.counts.disk_bytes_read += len(extents) * self._disk.extent_bytes
            self._keep(names, blocks)
        return blocks

    def _keep(self, names: np.ndarray, blocks: np.ndarray) -> None:
        """Puts blocks into memory in place of those fetched longest ago; as many as fit. The lock is held."""
        names, index = np.unique(names, return_index=True)
        new = self._frame_of[names] < 0
        names, index = names[new][: len(self._arena)], index[new][: len(self._arena)]
        if not len(names):
            return
        age = np.where(self._name_of < 0, -1, self._used)
        frames = np.argpartition(age, len(names) - 1)[: len(names)]
        old = self._name_of[frames]
        self._frame_of[old[old >= 0]] = -1
        self._arena[frames] = blocks[index]
        self._name_of[frames], self._frame_of[names], self._used[frames] = names, frames, self._clock
