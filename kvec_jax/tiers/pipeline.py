"""A step of decoding over tiers, driven by the host: select, attend to what is there, fetch, attend to the rest.

The host only strings together compiled programs and waits for two things: the numbers of the missing blocks, and their
fetch. What is on the device is attended to meanwhile. With several micro-batches one's fetch overlaps the other's
computation as well. Transfers are issued from the host's main thread only; other threads read files and copy memory.
"""

import concurrent.futures
import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.models.transformer import Transformer
from kvec_jax.tiers import programs
from kvec_jax.tiers.layout import Layout
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.resident import Parts, bits_dtype, empty_resident
from kvec_jax.tiers.slots import empty_slots
from kvec_jax.tiers.store import BlockStore
from kvec_jax.tiers.threads import Threads, wait_for
from kvec_jax.typing import Array


class Workers:
    """Threads that fetch and store, and one that follows hints."""

    def __init__(self, store: BlockStore, parts: int, timeout: float, recorder: Recorder) -> None:
        self._store, self._timeout, self._recorder = store, timeout, recorder
        self._fetching, self._hinting = Threads(parts, "kvec-fetch"), Threads(1, "kvec-hint")
        self._hint: concurrent.futures.Future | None = None

    def fetch(self, layer: int, ids: np.ndarray, out: np.ndarray, row: int, part: int) -> concurrent.futures.Future:
        """Starts to fetch blocks into ``out``."""
        return self._fetching.submit(self._fetch, layer, ids, out, row, part)

    def hint(self, layer: int, ids: np.ndarray, row: int) -> None:
        """Follows a hint, unless an earlier one is still being followed."""
        if self._hint is None or self._hint.done():
            if self._hint is not None:
                self._hint.result()
            self._hint = self._hinting.submit(self._store.hint, layer, ids, row)

    def wait(self, fetch: concurrent.futures.Future, layer: int, part: int) -> None:
        """Waits for a fetch.

        Raises:
            StoreError: If it failed, or takes too long.
        """
        began = time.perf_counter()
        wait_for(fetch, self._timeout, f"fetching blocks of layer {layer}")
        self._recorder.add("stall", layer, part, began)

    def put(self, layer: int, blocks: np.ndarray, counts: np.ndarray, row: int, first: np.ndarray) -> None:
        """Stores blocks of generated tokens, as ``BlockStore.put`` does, and waits for it.

        Raises:
            StoreError: If it fails, or takes too long.
        """
        put = functools.partial(self._store.put, layer, blocks, counts, row=row, first=first)
        wait_for(self._fetching.submit(put), self._timeout, f"storing blocks of layer {layer}")

    def close(self) -> None:
        """Ends the threads; one that is stuck ends with the process."""
        self._fetching.close()
        self._hinting.close()

    def _fetch(self, layer: int, ids: np.ndarray, out: np.ndarray, row: int, part: int) -> None:
        began = time.perf_counter()
        self._store.fetch(layer, ids, out, row)
        self._recorder.add("fetch", layer, part, began)


class MicroBatch:
    """Some rows of the batch: their state on the device, and the order in which a step goes through the layers.

    Args:
        model: The decoder.
        policy: What the user said.
        layout: With the rows of the micro-batch.
        windows: int [L, K], slots on the device.
        lengths: int32 [B], of the prompts.
        row: The first row in the batch.
        part: Number of the micro-batch.
        recorder: Told of everything.
    """

    def __init__(
        self,
        model: Transformer,
        policy: Tiered,
        layout: Layout,
        windows: np.ndarray,
        lengths: Array,
        row: int,
        part: int,
        recorder: Recorder,
    ) -> None:
        self.row, self.part, self.layout = row, part, layout
        self._model, self._policy, self._recorder = model, policy, recorder
        self._scale = model.config.scale
        self._lookahead = policy.eviction == "lookahead"
        self._local = set(model.config.local_layers)
        numbers = range(layout.layers)
        self._layers = [(layer, jnp.int32(layer), jnp.bool_(layer in self._local)) for layer in numbers]
        self._size = max(int(windows.sum()), 1)
        self.resident = empty_resident(layout, lengths, model.dtype)
        self.slots = empty_slots(layout, windows)
        bits = bits_dtype(model.dtype)
        self.pool = jnp.zeros((layout.rows, self._size, *layout.block_shape), bits)
        # Blocks per head of a fetch, at most: few, since each is compiled.
        self._sizes = sorted({-(-layout.top // 16), -(-layout.top // 4), layout.top})
        # Room for the largest fetch. A fetch writes into it only when the device has copied the one before.
        shape = layout.rows, layout.heads, layout.top, *layout.block_shape
        self._staging = np.empty(shape, bits).reshape(-1, *layout.block_shape)
        self._placed: Array | None = None

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes of the pool, and of everything else on the device."""
        rest = sum(x.nbytes for x in jax.tree.leaves((self.resident, self.slots)))
        return self.pool.nbytes, rest

    def place(self, parts: Parts, layer: int) -> None:
        """Takes in its rows of one layer of the prompt."""
        self.resident, self.slots, self.pool = programs.place_layer(
            self.resident, self.slots, self.pool, parts, jnp.int32(self.row), jnp.int32(layer), self.layout.rows
        )

    def run(
        self, hidden: Array, alive: Array, step: int, workers: Workers, rehearsal: bool = False
    ) -> Iterator[Array | None]:
        """One step through all layers, from ``hidden`` [B, 1, M]; as a ``rehearsal`` with fetches of all sizes.

        Gives ``None`` where others can go on meanwhile, and at last the hidden states [B, M] after the last layer.
        """
        step_number = jnp.int32(step)
        for layer, at, is_local in self._layers:
            began = time.perf_counter()
            self.resident, queries, scores, chosen, hints = programs.select(
                self._model, self.resident, hidden, alive, at, is_local, self.layout
            )
            if layer in self._local:
                partial = programs.attend_resident(self.resident, queries, at, is_local, self._scale, self.layout)
            else:
                self.slots, found = programs.look_up(
                    self.slots, scores, chosen, at, step_number, self._size, self._lookahead
                )
                found.missing.copy_to_host_async()
                chosen.copy_to_host_async()
                self._recorder.watch("select", layer, self.part, began, found.missing)
                least = self._sizes[layer % len(self._sizes)] if rehearsal else 0
                inputs = layer, at, is_local, queries, found, chosen, hints, scores
                partial = yield from self._attend(*inputs, workers, least)
            began = time.perf_counter()
            hidden = programs.finish_layer(self._model, hidden, partial, at)
            self._recorder.watch("finish", layer, self.part, began, hidden)
        self.resident, hidden = programs.end_step(self.resident, alive, hidden)
        yield hidden

    def flush(self, workers: Workers) -> None:
        """Turns the older generated tokens into blocks and stores them."""
        most = self.layout.ring // self.layout.block_tokens
        for layer, at, is_local in self._layers:
            first = np.asarray(self.resident.counts[layer])
            self.resident, blocks, counts = programs.cut_ring(self.resident, at, is_local, self.layout, most)
            counts = np.asarray(counts)
            if counts.any():
                workers.put(layer, np.asarray(blocks), counts, self.row, first)

    def _attend(self, layer, at, is_local, queries, found, chosen, hints, scores, workers, least):
        """Attention over everything that a layer chose; a generator that gives way while others can go on."""
        overlap = self._policy.overlap and not self._policy.deterministic
        partial = self._attend_held(layer, at, is_local, queries, found) if overlap else None
        yield None
        began = time.perf_counter()
        missing, picked = np.asarray(found.missing), np.asarray(chosen)
        self._recorder.add("wait for select", layer, self.part, began)
        count = max(self._count(missing, picked), least)
        if self._recorder.trace is not None:
            self._recorder.trace.append((layer, self.row, picked, np.asarray(scores)))
        fetch = self._start_fetch(layer, missing, count, workers) if count else None
        if self.layout.hints:
            workers.hint(layer, np.asarray(hints), self.row)
        yield None
        blocks = None
        if fetch is not None:
            out, fetch = fetch
            workers.wait(fetch, layer, self.part)
            blocks = self._placed = jnp.array(out)
        if self._policy.deterministic:
            return self._attend_in_order(layer, at, is_local, queries, found, chosen, blocks)
        if not overlap:
            partial = self._attend_held(layer, at, is_local, queries, found)
        if blocks is not None:
            began = time.perf_counter()
            partial = programs.attend_fetched(partial, blocks, found.missing, queries, self._scale, self.layout)
            self.pool = programs.write(self.pool, blocks, found.into)
            self._recorder.watch("miss", layer, self.part, began, partial.total)
        return partial

    def _attend_held(self, layer, at, is_local, queries, found):
        began = time.perf_counter()
        partial = programs.attend_resident(self.resident, queries, at, is_local, self._scale, self.layout)
        partial = programs.attend_held(partial, self.pool, queries, found, self._scale)
        self._recorder.watch("hit", layer, self.part, began, partial.total)
        return partial

    def _attend_in_order(self, layer, at, is_local, queries, found, chosen, blocks):
        """Everything at once, in the order of the blocks, by programs that know nothing of window sizes."""
        began = time.perf_counter()
        if blocks is not None:
            self.pool = programs.write(self.pool, blocks, found.into)
        gathered = programs.gather(self.pool, found.places)
        partial = programs.attend_resident(self.resident, queries, at, is_local, self._scale, self.layout)
        partial = programs.attend_fetched(partial, gathered, chosen, queries, self._scale, self.layout)
        self._recorder.watch("hit", layer, self.part, began, partial.total)
        return partial

    def _count(self, missing: np.ndarray, chosen: np.ndarray) -> int:
        """Takes note of hits and misses; gives the most misses of any head."""
        per_head = np.sum(missing < self.layout.blocks, axis=-1)
        recorder = self._recorder
        recorder.missed += int(per_head.sum())
        recorder.chosen += int(np.sum(chosen < self.layout.blocks))
        recorder.fetches += bool(per_head.any())
        return int(per_head.max())

    def _start_fetch(self, layer: int, missing: np.ndarray, count: int, workers: Workers):
        """The smallest size that holds ``count`` blocks per head."""
        size = next(size for size in self._sizes if size >= count)
        if self._placed is not None:
            self._placed.block_until_ready()
        B, K = self.layout.rows, self.layout.heads
        out = self._staging[: B * K * size].reshape(B, K, size, *self.layout.block_shape)
        return out, workers.fetch(layer, missing[..., :size], out, self.row, self.part)
