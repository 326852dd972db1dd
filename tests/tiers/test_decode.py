"""Steps over tiers attend to what the formulas say, wherever it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.tiers.decoder import read_prompts
from tests.prompts import batch, model_of
from tests.tiers.runs import LENGTHS, NEW, ROOM, T, expected, run, tiered

MODELS = {
    "llama": {},
    "local layers": dict(sliding_window=24, local_layers=(0, 2)),
    "qwen": dict(attention_bias=True, num_attention_heads=4, num_key_value_heads=1),
}
WINDOW = 4 * 2 * 4 * 7 * 1024  # rows, heads, layers, chosen blocks, bytes of a block


def check(logits, steps=4, budget=1.0, rows=range(4), **settings):
    for row in rows:
        np.testing.assert_allclose(logits[row, :steps], expected(row, steps, budget, **settings), atol=2e-4)


def test_whole_budget_is_full_attention():
    logits, _ = run(tiered(budget=1.0), 4)
    check(logits)


@pytest.mark.parametrize("model, budget", [("llama", 32), ("qwen", 0.25)])
def test_each_step_attends_to_the_best_blocks(model, budget):
    changes = MODELS[model]
    logits, _ = run(tiered(budget=budget), 4, changes=changes)
    check(logits, budget=budget, **changes)


SETTINGS = {
    "in order": dict(deterministic=True),
    "fetch first": dict(overlap=False),
    "one micro-batch, as by default": dict(micro_batches=None),
    "three micro-batches": dict(micro_batches=3),
    "least recently used": dict(eviction="lru"),
    "disk, no memory": dict(disk=True, host_bytes=0),
    "memory map": dict(disk=True, host_bytes=1 << 16, backend="mmap"),
    "hints": dict(disk=True, host_bytes=1 << 17, hints=2),
    "small device": dict(device_bytes=WINDOW),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_change_no_result(tmp_path, settings):
    if settings.get("disk"):
        settings = settings | dict(disk=tmp_path)
    logits, decoder = run(tiered(**settings), 4)
    check(logits, budget=0.25)
    assert len(decoder.micro_batches) == (settings.get("micro_batches", 2) or 1)


def test_deterministic_runs_are_equal_to_the_bit(tmp_path):
    """over ram, mmap and direct, windows of 1, 2, 3 and all, both evictions, 1 and 4 threads."""
    disk = dict(disk=tmp_path, host_bytes=1 << 16)
    variants = [
        dict(),
        dict(device_bytes=WINDOW, eviction="lru"),
        dict(device_bytes=2 * WINDOW, **disk, threads=1),
        dict(device_bytes=3 * WINDOW, **disk, eviction="lru", threads=4),
        dict(device_bytes=WINDOW, **disk, backend="mmap", threads=4),
        dict(device_bytes=100 * WINDOW, **disk, backend="mmap", threads=1),
    ]
    (first, _), *others = (run(tiered(deterministic=True, **variant), 6) for variant in variants)
    assert [decoder.recorder.missed > 0 for _, decoder in others] == [True, True, True, True, False]
    for logits, _ in others:
        np.testing.assert_array_equal(logits, first)


def test_prompts_shorter_than_the_budget_choose_everything():
    logits, decoder = run(tiered(budget=512), 4)
    assert decoder.recorder.chosen == 4 * 4 * 2 * sum(max(length - 20, 0) // 8 for length in LENGTHS)
    check(logits)


def test_rows_that_are_done_stand_still():
    logits, decoder = run(tiered(), 4, done=np.array([False, True, False, True]))
    check(logits, budget=0.25, rows=(0, 2))
    positions = [np.asarray(m.resident.next_position) for m in decoder.micro_batches]
    assert np.concatenate(positions).tolist() == [204, 77, 7, 150]


def test_rows_do_not_depend_on_each_other():
    """A row alone, and padded to its own length, is what it is in a batch. The oracle makes the clusters by itself."""
    together, _ = run(tiered(index="clusters"), 4)
    alone, _ = run(tiered(index="clusters"), 4, lengths=LENGTHS[1:2], new=NEW[1:], padded=80)
    np.testing.assert_allclose(alone[0], together[1], atol=1e-4)
    check(together, budget=0.25, clustered=True)
    assert np.abs(together[0] - expected(0, 4, 0.25)).max() > 1e-3


def test_generated_tokens_become_blocks(tmp_path):
    """Beside local layers, which drop what has left their window."""
    changes = MODELS["local layers"]
    policy = tiered(flush=16, disk=tmp_path, host_bytes=1 << 16)
    logits, decoder = run(policy, 40, changes=changes)
    check(logits, 40, 0.25, flush=16, **changes)
    counts = np.concatenate([np.asarray(m.resident.counts)[1] for m in decoder.micro_batches])
    assert counts[:, 0].tolist() == [(length - min(length, 4) + 32 - 16) // 8 for length in LENGTHS]


def test_bfloat16_stays_close():
    logits, decoder = run(tiered(budget=1.0), 3, dtype=jnp.bfloat16)
    assert decoder.micro_batches[0].pool.dtype == jnp.uint16
    for row in range(4):
        np.testing.assert_allclose(logits[row], expected(row, 3, dtype=jnp.bfloat16), atol=0.15)


def test_on_top_of_an_eviction_policy():
    """With the whole budget, what the policy kept is attended to, and nothing else; heads keep different numbers."""
    policy = kv.Policy(scorer=kv.WindowAttention(window=8), budget=0.5, scope="model")
    logits, _ = run(tiered(budget=1.0, policy=policy), 3)
    model, _ = model_of(dtype=jnp.float32)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), policy, reserve=4)
    for step in range(3):
        other, cache = kv.extend(model, cache, jnp.asarray(NEW[:, step : step + 1]))
        np.testing.assert_allclose(logits[:, step], other, atol=2e-4)


SAMPLERS = {"greedy": kv.Greedy(), "sample": kv.Sample(temperature=0.8, repetition_penalty=1.5, repetition_window=3)}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_generates_what_the_full_cache_does(sampler):
    model, _ = model_of(dtype=jnp.float32)
    tokens, lengths = batch(LENGTHS, T)
    key = jax.random.key(3)
    full = kv.generate(model, tokens, lengths, kv.FullCache(), sampler, key, 8, eos_token_ids=(77,))
    logits, decoder = read_prompts(model, tokens, lengths, tiered(budget=1.0), ROOM)
    with decoder:
        state = decoder.begin(logits, sampler, key, 8, (77,))
        state = decoder.advance(state, sampler, key, 8, (77,))
    np.testing.assert_array_equal(state.tokens, full)
