"""Reading prompts onto tiers: each layer's blocks leave for the host while the next layer is computed."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.cache import CompressedKV
from kvec_jax.models.transformer import Transformer
from kvec_jax.policies.prepared import prepare
from kvec_jax.prefill import run_prefill
from kvec_jax.tiers import programs
from kvec_jax.tiers.layout import Layout
from kvec_jax.tiers.resident import Parts
from kvec_jax.tiers.store import BlockStore
from kvec_jax.tiers.threads import Threads, wait_for
from kvec_jax.typing import Array

# Layers whose blocks are on the device at once: one being computed, one leaving.
_IN_FLIGHT = 2


class PromptLayers:
    """The layers of prompts, read one by one as they are asked for; iterating gives the parts of each.

    Attributes:
        hidden: [B, T, M], states after the newest layer.
    """

    def __init__(self, model: Transformer, tokens: Array, lengths: Array, layout: Layout) -> None:
        self._model, self._lengths, self._layout = model, lengths, layout
        self.hidden = programs.embed(model, tokens)

    def __iter__(self) -> Iterator[Parts]:
        for layer in range(self._layout.layers):
            is_local = jnp.bool_(layer in self._model.config.local_layers)
            self.hidden, parts = programs.read_layer(
                self._model, self.hidden, self._lengths, jnp.int32(layer), is_local, self._layout
            )
            yield parts


def compress(model: Transformer, tokens: Array, lengths: Array, policy) -> tuple[Array, CompressedKV]:
    """Logits float32 [B, V] and what ``policy`` keeps."""
    return _compress(model, prepare(policy, model), tokens, lengths, policy)


def cut_layers(cache: CompressedKV, config, rows: int, layout: Layout) -> Iterator[Parts]:
    """The parts of each layer of a compressed cache, of which no head has more than ``rows`` rows."""
    for layer in range(layout.layers):
        yield programs.cut_layer(cache, jnp.int32(layer), jnp.bool_(layer in config.local_layers), rows, layout)


class Writer:
    """Stores layers in the background; what goes wrong is raised by the next call.

    Args:
        store: Where blocks go.
        layers: How many layers have blocks.
        timeout: Seconds that a layer may take.
        progress: Called with the number of stored layers.
    """

    def __init__(self, store: BlockStore, layers: int, timeout: float, progress: Callable[[int], None]) -> None:
        self._store, self._timeout, self._progress = store, timeout, progress
        self._room = store.frames // max(layers, 1)
        self._thread = Threads(1, "kvec-write")
        self._pending: list[concurrent.futures.Future] = []
        self._done = 0

    def put(self, layer: int, parts: Parts, windows: np.ndarray) -> None:
        """Stores a layer's blocks; in memory the most important of those that are not on the device.

        Waits for an earlier layer where too many are under way.
        """
        leaving = parts.blocks, parts.counts, parts.packing, parts.worth
        for x in leaving:
            x.copy_to_host_async()
        self._pending.append(self._thread.submit(self._put, layer, leaving, windows))
        while len(self._pending) >= _IN_FLIGHT:
            self._wait()

    def finish(self) -> None:
        """Waits for all layers."""
        while self._pending:
            self._wait()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.close()

    def _wait(self) -> None:
        wait_for(self._pending.pop(0), self._timeout, "storing a layer")
        self._done += 1
        self._progress(self._done)

    def _put(self, layer: int, leaving, windows: np.ndarray) -> None:
        blocks, counts, packing, worth = (np.asarray(x) for x in leaving)
        # Those on the device come after all the others.
        rank = np.argsort(np.argsort(-worth, axis=-1, kind="stable"), axis=-1, kind="stable")
        importance = np.where(rank < windows[:, None], worth - 1e6, worth)
        self._store.put(layer, blocks, counts, order=packing, importance=importance, room=self._room)


@functools.partial(jax.jit, static_argnames="policy")
def _compress(model, prepared, tokens, lengths, policy):
    return run_prefill(model, prepared, tokens, lengths, policy, 0)
