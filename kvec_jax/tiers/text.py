"""From prompts to text over tiers, and what it cost."""

import dataclasses
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvec_jax.running import Listener, Output, Run, Stats, round_up
from kvec_jax.sampling import Sampler
from kvec_jax.tiers.decoder import TieredDecoder, read_prompts
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.recorder import compiled_seconds
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TieredStats(Stats):
    """What a generation over tiers cost; what follows is of the whole batch.

    ``kept`` are entries on any tier, ``cache_bytes`` a row's share of what is on the device. Seconds leave out what XLA
    took to compile.

    Attributes:
        hit_rate: Share of the blocks that steps attended to which were on the device already.
        tier_bytes: At the end. ``"device"``: blocks on the device; ``"resident"``: everything else there (sinks, recent
            tokens with room for new ones, index, tables); ``"host"``: blocks in host memory; ``"disk"``: whole extents.
        reads: How the disk was read: ``"direct"``, ``"buffered"`` where that was refused, ``"mmap"`` or ``"none"``.
        fetched_bytes_per_step: Of the blocks that went to the device.
        disk_bytes_per_step: Read from disk, whole extents, hints included.
        stage_seconds: Sums over the run: ``"step"``: all of a step but the choice of a token; ``"wait for select"``:
            the host waits to know what is missing; ``"fetch"``: threads fetch; ``"stall"``: the host waits for them.
        stalls: How often a layer had something to fetch.
        failed_hints: Hints that could not be followed; they change no result.
    """

    hit_rate: float
    tier_bytes: dict[str, int]
    reads: str
    fetched_bytes_per_step: float
    disk_bytes_per_step: float
    stage_seconds: dict[str, float]
    stalls: int
    failed_hints: int


def write_text(
    lm,
    policy: Tiered,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    sampler: Sampler,
    key: Array,
    max_new_tokens: int,
    ends: tuple[int, ...],
    listeners: Sequence[Listener],
) -> list[Output]:
    """``LanguageModel.generate`` over tiers, from padded ``tokens`` [B, T] and ``lengths`` [B] on."""
    run, compiled = Run(), compiled_seconds()
    began = time.perf_counter()
    capacity = round_up(max_new_tokens, 64)
    logits, decoder = read_prompts(lm.model, jnp.asarray(tokens), jnp.asarray(lengths), policy, capacity)
    with decoder:
        kept = decoder.kept()
        state = decoder.begin(logits, sampler, key, capacity, ends)
        run.compile_seconds = compiled_seconds() - compiled
        run.prefill_seconds = time.perf_counter() - began - run.compile_seconds
        state = run.decode(
            lambda state, until: decoder.advance(state, sampler, key, int(until), ends),
            state,
            max_new_tokens,
            listeners,
        )
        later = compiled_seconds() - compiled - run.compile_seconds
        run.compile_seconds += later
        run.decode_seconds -= later
        tiers = _tiers(decoder)
        held, moved = tiers["tier_bytes"], decoder.recorder.missed * decoder.store.shape.block_bytes
    config, itemsize = lm.config, lm.model.dtype.itemsize
    costs = [
        dict(
            prompt_tokens=length,
            kept=entries,
            total=length * config.num_hidden_layers * config.num_key_value_heads,
            cache_bytes=(held["device"] + held["resident"]) // len(lengths),
            full_cache_bytes=config.kv_bytes(tokens.shape[1], itemsize),
            host_bytes=held["host"] // len(lengths),
            moved_bytes=moved // len(lengths),
        )
        for length, entries in zip(lengths.tolist(), kept.tolist(), strict=True)
    ]
    outputs = run.outputs(lm.tokenizer, state, ends, costs)
    return [dataclasses.replace(each, stats=TieredStats(**vars(each.stats), **tiers)) for each in outputs]


def _tiers(decoder: TieredDecoder) -> dict:
    """The fields of ``TieredStats`` that ``Stats`` doesn't have."""
    recorder, store = decoder.recorder, decoder.store
    steps = max(recorder.steps, 1)
    pool, rest = decoder.device_bytes
    return dict(
        hit_rate=1 - recorder.missed / recorder.chosen if recorder.chosen else 1.0,
        tier_bytes=dict(device=pool, resident=rest, host=store.memory_bytes(), disk=store.disk_bytes()),
        reads=store.reads,
        fetched_bytes_per_step=recorder.missed * store.shape.block_bytes / steps,
        disk_bytes_per_step=store.counts.disk_bytes_read / steps,
        stage_seconds=dict(recorder.seconds),
        stalls=recorder.fetches,
        failed_hints=store.counts.failed_hints,
    )
