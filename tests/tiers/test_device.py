"""The device's tables and buffers, and the counts of what was fetched."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax.tiers import pipeline, programs
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.simulate import Trace
from kvec_jax.tiers.slots import write_blocks
from tests.tiers.runs import run, tiered

WINDOW = 4 * 2 * 4 * 7 * 1024  # rows, heads, layers, chosen blocks, bytes of a block


def tables(micro_batch):
    slots = micro_batch.slots
    return (np.asarray(x) for x in (slots.slot_block, slots.block_slot, slots.sizes))


def check_inverses(decoder):
    for micro_batch in decoder.micro_batches:
        slot_block, block_slot, sizes = tables(micro_batch)
        N, S = block_slot.shape[-1], slot_block.shape[-1]
        for layer, row, head in np.ndindex(slot_block.shape[:3]):
            held, where = slot_block[layer, row, head], block_slot[layer, row, head]
            assert (held[sizes[layer, head] :] == N).all()
            assert {(s, b) for s, b in enumerate(held) if b < N} == {(s, b) for b, s in enumerate(where) if s < S}


@pytest.mark.parametrize("eviction", ["lookahead", "lru"])
def test_tables_are_inverses_after_every_step(eviction):
    run(tiered(device_bytes=WINDOW, eviction=eviction), 6, after_step=check_inverses)


def test_hits_and_misses_are_what_was_chosen():
    """With room for everything no block is fetched twice, and here none at all."""
    recorder = Recorder(trace=[])
    run(tiered(device_bytes=100 * WINDOW), 5, recorder=recorder)
    assert recorder.missed == 0
    assert recorder.chosen == sum((picked < 29).sum() for _, _, picked, _ in recorder.trace)


def test_no_block_is_fetched_twice_where_all_fit(monkeypatch):
    """From an empty device."""
    fetched = []
    monkeypatch.setattr(pipeline.MicroBatch, "place", place_without_blocks)
    real = pipeline.Workers.fetch

    def fetch(self, layer, ids, out, row, part):
        fetched.extend((layer, row + b, k, i) for (b, k, _), i in np.ndenumerate(ids) if i < 29)
        return real(self, layer, ids, out, row, part)

    monkeypatch.setattr(pipeline.Workers, "fetch", fetch)
    _, decoder = run(tiered(device_bytes=100 * WINDOW), 8)
    assert len(fetched) == len(set(fetched)) == decoder.recorder.missed > 0


def place_without_blocks(self, parts, layer):
    parts = parts._replace(worth=-jnp.ones_like(parts.worth))
    self.resident, self.slots, self.pool = programs.place_layer(
        self.resident, self.slots, self.pool, parts, jnp.int32(self.row), jnp.int32(layer), self.layout.rows
    )


@pytest.mark.parametrize("eviction", ["lookahead", "lru"])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_simulator_counts_what_the_run_fetched(factor, eviction):
    recorder = Recorder(trace=[])
    _, decoder = run(tiered(device_bytes=factor * WINDOW, eviction=eviction), 8, recorder=recorder)
    trace = Trace.of(recorder, decoder.layout.layers)
    misses = trace.misses(decoder.windows, eviction)
    assert misses.sum() == recorder.missed
    assert recorder.missed > 0 or factor > 1
    best = trace.misses(decoder.windows, "belady").sum()
    assert best <= misses.sum()


def test_nothing_is_written_for_the_sentinel():
    pool = jnp.arange(2 * 3 * 2 * 1 * 2.0).reshape(2, 3, 2, 1, 2)
    blocks = -jnp.ones((2, 1, 2, 2, 1, 2))
    written = write_blocks(pool, blocks, jnp.array([[[3, 3]], [[1, 3]]]))
    np.testing.assert_array_equal(written[0], pool[0])
    np.testing.assert_array_equal(written[1], pool[1].at[1].set(-1))
