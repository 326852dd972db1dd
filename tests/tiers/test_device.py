"""The device's tables and buffers, and the counts of what was fetched."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from kvec_jax.tiers import pipeline, programs
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.simulate import Trace
from kvec_jax.tiers.slots import write_blocks
from kvec_jax.tiers.store import BlockStore
from kvec_jax.tiers.timeline import picture
from kvec_jax.tiers.windows import Profile
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


def test_short_rows_leave_their_slots_alone():
    """Rows without blocks have chosen nothing and hold nothing."""
    _, decoder = run(tiered(), 3, lengths=(3, 200))
    slot_block, block_slot, _ = tables(decoder.micro_batches[0])
    assert (slot_block[:, 0] == block_slot.shape[-1]).all()
    assert (np.asarray(decoder.micro_batches[0].pool)[0] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_buffers_stay_where_they_are(dtype):
    """What steps write to is donated, and written in place."""
    seen = []

    def look(decoder):
        one = decoder.micro_batches[0]
        seen.append((one.pool.unsafe_buffer_pointer(), one.resident.ring.unsafe_buffer_pointer()))

    _, decoder = run(tiered(device_bytes=WINDOW), 4, after_step=look, dtype=dtype)
    assert decoder.recorder.missed > 0
    assert len(set(seen)) == 1


def test_reused_staging_memory_does_not_reach_the_device(monkeypatch):
    """What was handed to the device stays, however late it is looked at."""
    handed = []
    real = programs.write

    def write(pool, blocks, into):
        handed.append((blocks, np.array(blocks, copy=True)))
        return real(pool, blocks, into)

    monkeypatch.setattr(programs, "write", write)
    run(tiered(device_bytes=WINDOW), 6)
    assert len(handed) > 4
    for blocks, then in handed:
        np.testing.assert_array_equal(np.asarray(blocks), then)


def test_attention_to_what_is_there_ends_before_the_fetch_does(monkeypatch):
    """A fetch that waits for the attention of its own layer doesn't wait in vain."""
    recorder, missing = Recorder(events=[]), []
    real = BlockStore.fetch

    def fetch(self, layer, *arguments):
        until = time.monotonic() + 20
        while not any((e.stage, e.step, e.layer) == ("hit", recorder.steps, layer) for e in recorder.events):
            if time.monotonic() > until:
                missing.append(layer)
                break
            time.sleep(0.001)
        return real(self, layer, *arguments)

    monkeypatch.setattr(BlockStore, "fetch", fetch)
    run(tiered(device_bytes=WINDOW, micro_batches=1), 3, recorder=recorder)
    fetches = [e for e in recorder.events if e.stage == "fetch"]
    assert fetches and not missing
    lines = picture(recorder.events, fetches[0].step, range(4)).splitlines()
    assert [line.split()[0] for line in lines] == ["select", "hit", "fetch", "miss", "finish", "0"]


def test_without_overlap_attention_begins_after_the_fetch():
    recorder = Recorder(events=[])
    run(tiered(device_bytes=WINDOW, micro_batches=1, overlap=False), 3, recorder=recorder)
    hits = {(e.step, e.layer): e for e in recorder.events if e.stage == "hit"}
    fetches = [e for e in recorder.events if e.stage == "fetch"]
    assert fetches and all(hits[e.step, e.layer].dispatched >= e.ended for e in fetches)


def test_profile_gives_more_to_those_who_gain(tmp_path):
    recorder = Recorder(trace=[])
    _, decoder = run(tiered(), 8, recorder=recorder)
    trace = Trace.of(recorder, 4)
    path = tmp_path / "profile.json"
    Profile.measure("tiny", trace, decoder.layout.top, "lookahead", dict(steps=8)).save(path)
    policy = tiered(profile=path, device_bytes=2 * WINDOW)
    logits, other = run(policy, 8)
    assert other.windows.sum() <= 2 * 4 * 14 and other.windows.min() >= other.layout.top
    assert trace.misses(other.windows, "lookahead").sum() == other.recorder.missed
    even, _ = run(tiered(device_bytes=policy.device_bytes), 8)
    np.testing.assert_allclose(logits, even, atol=2e-4)
    assert other.recorder.missed <= trace.misses(np.full((4, 2), 14), "lookahead").sum()


def test_few_programs_are_compiled():
    """What depends on the number of missing blocks is compiled for a few sizes, the rest once."""
    by_size = ["attend_fetched", "write"]
    once = "read_layer place_layer select look_up attend_resident attend_held finish_layer end_step".split()
    before = {name: cached(name) for name in by_size + once}
    for lengths in ((200, 77, 3, 150), (190, 60, 9, 120)):
        run(tiered(device_bytes=WINDOW, micro_batches=1, sinks=5), 8, lengths=lengths)  # sizes that no other test has
    assert cached("select") == before["select"] + 1
    assert all(cached(name) <= before[name] + 1 for name in once)
    assert all(cached(name) <= before[name] + 3 for name in by_size)  # 1, 2 and 7 blocks


def cached(name):
    return getattr(programs, name)._cache_size()
