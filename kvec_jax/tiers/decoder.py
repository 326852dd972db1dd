"""A run over tiers from prompts to tokens: what it needs is made, used step by step, and given back."""

import dataclasses
import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.models.transformer import Transformer
from kvec_jax.running import round_up
from kvec_jax.sampling import Sampler
from kvec_jax.tiers import programs
from kvec_jax.tiers.allocator import give_back
from kvec_jax.tiers.layout import make_layout, store_shape
from kvec_jax.tiers.pipeline import MicroBatch, Workers
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.prefill import PromptLayers, Writer, compress, cut_layers
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.resident import Parts, bits_dtype
from kvec_jax.tiers.store import BlockStore
from kvec_jax.tiers.windows import make_windows
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class HostState:
    """A generation under way, on the host; as ``kvec_jax.decoding.DecodeState``, with the cache elsewhere.

    Attributes:
        tokens: int32 [B, capacity].
        count: How many columns of ``tokens`` were generated.
        done: bool [B], rows that have met an end token.
    """

    tokens: np.ndarray
    count: int
    done: np.ndarray


class TieredDecoder:
    """The cache of a batch over device, host memory and disk, and the steps that use it. Close it, or use ``with``.

    Args:
        model: The decoder.
        policy: How the cache is spread.
        lengths: int32 [B], of the prompts.
        prompt_rows: Most tokens of the prompt that a head keeps.
        max_new_tokens: Most tokens to generate.
        recorder: Told of everything; one of its own by default.

    Raises:
        ValueError, StoreError: If a tier is too small, or the disk's folder can't be written in.
    """

    def __init__(
        self,
        model: Transformer,
        policy: Tiered,
        lengths: Array,
        prompt_rows: int,
        max_new_tokens: int,
        recorder: Recorder | None = None,
    ) -> None:
        config, B = model.config, lengths.shape[0]
        self._model, self._policy, self._lengths = model, policy, lengths
        self.recorder = recorder or Recorder()
        bits = bits_dtype(model.dtype)
        self.layout = make_layout(config, policy, B, prompt_rows, max_new_tokens, bits)
        self.windows = make_windows(config, policy, self.layout, B, bits.itemsize)
        self.store = BlockStore(
            store_shape(config, self.layout, B, bits),
            host_bytes=policy.host_bytes,
            folder=policy.disk,
            disk_bytes=policy.disk_bytes,
            backend=policy.reads,
            threads=policy.threads,
            timeout=policy.timeout,
        )
        parts = policy.micro_batches or _micro_batches(model, B)
        self._workers = Workers(self.store, parts, policy.timeout, self.recorder)
        self.micro_batches = [
            self._micro_batch(rows, part) for part, rows in enumerate(np.array_split(np.arange(B), min(parts, B)))
        ]
        self._room = self.layout.ring - max(policy.recent + policy.block_tokens - 1, self.layout.window)
        self._since_flush = 0

    def __enter__(self) -> "TieredDecoder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Gives memory and disk back."""
        self.recorder.settle()
        self._workers.close()
        self.store.close()

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes of the blocks on the device, and of everything else there."""
        pools, rests = zip(*(micro_batch.device_bytes for micro_batch in self.micro_batches))
        return sum(pools), sum(rests)

    def kept(self) -> np.ndarray:
        """Entries of each row on any tier, over all layers and heads: int [B]."""
        residents = [micro_batch.resident for micro_batch in self.micro_batches]
        return np.concatenate(
            [
                np.asarray(x.sink_counts + x.ring_counts + x.counts * self.layout.block_tokens).sum(axis=(0, 2))
                for x in residents
            ]
        )

    def compile(self) -> None:
        """Compiles the programs of a step, by a rehearsal in which all rows are done.

        Compilation needs memory too, which is given back before the tiers fill up.
        """
        rows = len(self._lengths)
        runs = self._runs(np.zeros(rows, np.int32), np.ones(rows, bool), rehearsal=True)
        jax.block_until_ready(_take_turns(runs))
        self.recorder.forget()
        give_back()

    def fill(self, layers: Iterable[Parts]) -> None:
        """Takes in the parts of all layers, in order."""
        own = self.layout.layers - len(self._model.config.local_layers)
        writer = Writer(self.store, own, self._policy.timeout, self._progress("storing layers", own))
        try:
            for layer, parts in enumerate(layers):
                for micro_batch in self.micro_batches:
                    micro_batch.place(parts, layer)
                if self.recorder.trace is not None:
                    self.recorder.worth.append(np.asarray(parts.worth))
                if layer not in self._model.config.local_layers:
                    writer.put(layer, parts, self.windows[layer])
            writer.finish()
        finally:
            writer.close()
        give_back()

    def step(self, tokens: np.ndarray, done: np.ndarray) -> list[Array]:
        """Runs the newest tokens int32 [B] through the model, but for rows that are ``done`` bool [B].

        Returns:
            The last hidden states [b, M] of each micro-batch.
        """
        if self._since_flush == self._room:
            for micro_batch in self.micro_batches:
                micro_batch.flush(self._workers)
            self._since_flush = 0
        self._since_flush += 1
        self.recorder.steps += 1
        began = time.perf_counter()
        hidden = _take_turns(self._runs(tokens, done))
        self.recorder.add("step", -1, 0, began)
        return hidden

    def follow(self, tokens: np.ndarray, lengths: np.ndarray) -> list[Array]:
        """Reads given tokens, int32 [B, n] of ``lengths`` int [B], one by one.

        Returns:
            Logits float32 [B, V] after each of the n; of a row that has ended, of no meaning.
        """
        logits = []
        for column in range(tokens.shape[1]):
            hidden = self.step(tokens[:, column], column >= lengths)
            logits.append(jnp.concatenate([programs.unembed(self._model, h) for h in hidden]))
        return logits

    def _runs(self, tokens: np.ndarray, done: np.ndarray, rehearsal: bool = False) -> list[Iterator]:
        """A step of each micro-batch, not begun."""
        runs = []
        for micro_batch in self.micro_batches:
            mine = self._rows(micro_batch)
            hidden = programs.embed(self._model, jnp.asarray(tokens[mine, None]))
            alive = jnp.asarray(~done[mine])
            runs.append(micro_batch.run(hidden, alive, self.recorder.steps, self._workers, rehearsal))
        return runs

    def begin(self, logits: Array, sampler: Sampler, key: Array, capacity: int, ends: tuple[int, ...]) -> HostState:
        """The state after the first token, which is chosen from ``logits`` [B, V] of the prompts' last tokens."""
        state = programs.begin(logits, sampler, key, self._lengths, ends)
        first, done = (np.asarray(x) for x in state)
        return HostState(np.broadcast_to(first[:, None], (len(first), capacity)).copy(), 1, done)

    def advance(self, state: HostState, sampler: Sampler, key: Array, until: int, ends: tuple[int, ...]) -> HostState:
        """Goes on until ``until`` tokens are generated, or every row has met an end token."""
        keys = key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(state.done)))
        keys = [keys[self._rows(micro_batch)] for micro_batch in self.micro_batches]
        tell = self._progress("writing tokens", until)
        while state.count < until and not state.done.all():
            hidden = self.step(state.tokens[:, -1], state.done)
            pieces = [
                self._choose(micro_batch, h, sampler, mine, state, ends)
                for micro_batch, h, mine in zip(self.micro_batches, hidden, keys, strict=True)
            ]
            chosen, done = (np.concatenate([np.asarray(x) for x in column]) for column in zip(*pieces))
            tokens = state.tokens.copy()
            tokens[:, state.count :] = chosen[:, None]
            state = HostState(tokens, state.count + 1, done)
            tell(state.count)
        return state

    def _choose(self, micro_batch: MicroBatch, hidden, sampler, keys, state: HostState, ends):
        mine = self._rows(micro_batch)
        inputs = hidden, sampler, keys, micro_batch.resident.next_position
        written, done = jnp.asarray(state.tokens[mine]), jnp.asarray(state.done[mine])
        return programs.next_tokens(self._model, *inputs, written, jnp.int32(state.count), done, ends)

    @staticmethod
    def _rows(micro_batch: MicroBatch) -> slice:
        return slice(micro_batch.row, micro_batch.row + micro_batch.layout.rows)

    def _micro_batch(self, rows: np.ndarray, part: int) -> MicroBatch:
        layout = dataclasses.replace(self.layout, rows=len(rows))
        lengths = self._lengths[rows[0] : rows[-1] + 1]
        return MicroBatch(self._model, self._policy, layout, self.windows, lengths, int(rows[0]), part, self.recorder)

    def _progress(self, what: str, total: int):
        tell = self._policy.progress
        return (lambda done: tell(what, done, total)) if tell else (lambda done: None)


def read_prompts(
    model: Transformer,
    tokens: Array,
    lengths: Array,
    policy: Tiered,
    max_new_tokens: int,
    recorder: Recorder | None = None,
) -> tuple[Array, TieredDecoder]:
    """Reads prompts onto the tiers.

    Args:
        model: The decoder.
        tokens: int32 [B, T], right-padded.
        lengths: int32 [B].
        policy: How the cache is spread.
        max_new_tokens: Most tokens to generate.
        recorder: Told of everything.

    Returns:
        Logits float32 [B, V] of each row's last token, and the decoder, which must be closed.

    Raises:
        ValueError, StoreError: If a tier is too small or fails.
    """
    logits = cache = None
    rows = tokens.shape[1]
    if policy.policy is not None:
        logits, cache = compress(model, tokens, lengths, policy.policy)
        rows = round_up(max(int(jnp.max(cache.counts)), 1), 64)
    decoder = TieredDecoder(model, policy, lengths, rows, max_new_tokens, recorder)
    try:
        decoder.compile()
        if cache is not None:
            decoder.fill(cut_layers(cache, model.config, rows, decoder.layout))
        else:
            layers = PromptLayers(model, tokens, lengths, decoder.layout)
            decoder.fill(layers)
            logits = programs.last_logits(model, layers.hidden, lengths)
    except BaseException:
        decoder.close()
        raise
    return logits, decoder


def _micro_batches(model: Transformer, rows: int) -> int:
    """Two of four rows or more; on a CPU one, where the cores that compute also fetch, and each reads all weights."""
    on_cpu = all(device.platform == "cpu" for device in model.embedding.get_value().devices())
    return 2 if rows >= 4 and not on_cpu else 1


def _take_turns(runs: list) -> list:
    """Lets each run go on to where others can, in turn, until all have ended; their results."""
    results = [None] * len(runs)
    while any(result is None for result in results):
        for i, run in enumerate(runs):
            if results[i] is None:
                results[i] = next(run)
    return results
