"""Every named method keeps what the slow oracle says, written from the formulas of its paper, for unequal prompts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration
from kvec_jax.prefill import run_prefill
from tests.oracle import budgets, policies, scores
from tests.prompts import as_lists, batch, model_of, trace_of

T = 300
LENGTHS = (300, 190, 37)
HEADS = ((0, 3), (1,), (7, 2, 5, 6), (4,))
CALIBRATION = Calibration(model="tiny", heads=HEADS, layer_weights=(0.1, 0.4, 0.2, 0.3))


def pyramid(budget, window, layers, length):
    """The authors' budgets, made exact: the first layers get what the sum lacks, the last give what is too much."""
    each = budgets.pyramid(budget, window, layers, length)
    missing = budget * layers - sum(each)
    for layer in range(missing) if missing > 0 else range(layers + missing, layers):
        each[layer] += 1 if missing > 0 else -1
    return each


def compresskv(trace):
    if trace.keys[0].shape[1] <= 64:
        return policies.everything(trace)
    return policies.compresskv(trace, budgets.compresskv((0.1, 0.4, 0.2, 0.3), 64), [list(h) for h in HEADS])


def alike(score, window=0):
    """An oracle for a method that keeps each head's best by one score."""
    return lambda trace: policies.per_head(trace, 64, lambda layer: score(trace, layer), window)


def kvec_everywhere(trace):
    """K-VEC's scores with one selection over the whole model, without the parts that depend on what was chosen."""
    if trace.keys[0].shape[1] <= 64:
        return policies.everything(trace)
    prefix = trace.keys[0].shape[1] - 16
    all_scores = []
    for layer in range(len(trace.keys)):
        attention = scores.group_mean(scores.window_attention(trace, layer, 16), scores.heads_of(trace))
        all_scores.append(scores.pool(attention.mean(1)[:, :prefix], 7, "max"))
    return policies.model_scope(np.stack(all_scores), 64, 16, prefix + 16)


CASES = {
    "pyramidkv": (kv.PyramidKV(64), lambda t: policies.pyramidkv(t, 64, rule=pyramid)),
    "adakv": (kv.AdaKV(64), lambda t: policies.adakv(t, 64)),
    "criticalkv": (kv.CriticalKV(64), lambda t: policies.criticalkv(t, 64)),
    "criticaladakv": (kv.CriticalAdaKV(64), lambda t: policies.critical_adakv(t, 64)),
    "cake": (kv.CAKE(64), lambda t: policies.cake(t, 64)),
    "cake-taus": (kv.CAKE(64, tau1=1.6, tau2=0.4), lambda t: policies.cake(t, 64, tau1=1.6, tau2=0.4)),
    "tova": (kv.TOVA(64), lambda t: policies.tova(t, 64)),
    "knorm": (kv.KNorm(64), alike(scores.knorm)),
    "keydiff": (kv.KeyDiff(64), alike(scores.keydiff)),
    "observed": (kv.ObservedAttention(64), alike(scores.observed)),
    "observed-sum": (
        kv.ObservedAttention(64, per_query=False),
        alike(lambda trace, layer: scores.observed(trace, layer, normalize=False)),
    ),
    "kvec": (kv.KVec(64), lambda t: policies.kvec(t, 64)[0]),
    "kvec-other": (
        kv.KVec(48, window=8, extended_window=20, unfocused_heads=1, novelty_weight=3.0, forced_share=0.1, kernel=3),
        lambda t: policies.kvec(t, 48, 8, 20, 1, 3.0, 0.1, 3)[0],
    ),
    "kvec-is-snapkv": (
        kv.KVec(64, window=32, unfocused_heads=0, novelty_weight=0.0, forced_share=0.0),
        lambda t: policies.snapkv(t, 64),
    ),
    "kvec-model": (
        dataclasses.replace(kv.KVec(64, unfocused_heads=0, novelty_weight=0.0, forced_share=0.0), scope="model"),
        kvec_everywhere,
    ),
    "laprox": (kv.LaProx(64), lambda t: policies.laprox(t, 64)),
    "laprox-score-mean": (kv.LaProx(64, reading="score_mean"), lambda t: policies.laprox(t, 64, gqa="score_mean")),
    "laprox-exact": (
        kv.LaProx(64, reading="exact"),
        lambda t: policies.laprox(t, 64, gqa="exact", pool_score=True),
    ),
    "compresskv": (kv.CompressKV(64, calibration=CALIBRATION), compresskv),
}


@pytest.mark.parametrize("name", CASES)
def test_keeps_what_the_formulas_say(name):
    policy, oracle = CASES[name]
    model, _ = model_of()
    _, cache = kv.prefill(model, *batch(LENGTHS, T), policy)
    for row, length in enumerate(LENGTHS):
        assert as_lists(cache.kept_positions(row)) == as_lists(oracle(trace_of(length)))


def test_expected_attention_keeps_what_the_formulas_say():
    model, _ = model_of()
    _, cache = kv.prefill(model, *batch(LENGTHS, T), kv.ExpectedAttention(64))
    for row, length in enumerate(LENGTHS):
        trace = trace_of(length)
        want = alike(lambda trace, layer: scores.expected_attention(trace, layer, model.config))(trace)
        assert as_lists(cache.kept_positions(row)) == as_lists(want)


def test_random_depends_on_seed_layer_head_and_position_alone():
    model, _ = model_of()
    _, cache = kv.prefill(model, *batch(LENGTHS, T), kv.Random(48, seed=3))
    _, alone = kv.prefill(model, *batch(LENGTHS[1:2], 256), kv.Random(48, seed=3))
    _, other = kv.prefill(model, *batch(LENGTHS[1:2], 256), kv.Random(48, seed=4))
    assert as_lists(cache.kept_positions(1)) == as_lists(alone.kept_positions(0))
    assert as_lists(cache.kept_positions(1)) != as_lists(other.kept_positions(0))
    flat = {tuple(head) for layer in as_lists(alone.kept_positions(0)) for head in layer}
    assert len(flat) == 8  # no two heads draw the same


def test_laprox_does_not_see_the_size_of_a_layers_output():
    model, _ = model_of()
    tokens, lengths = batch((200,), 200)
    layers = jnp.ones(4).at[2].set(50.0)[:, None, None]
    for a, b in ((kv.LaProx(48), True), (kv.LaProx(48, normalize=False), False)):
        kept = _kept_with_scaled_output(model, jnp.ones_like(layers), tokens, lengths, a)
        assert (kept == _kept_with_scaled_output(model, layers, tokens, lengths, a)) is b


def _kept_with_scaled_output(model, factors, tokens, lengths, policy):
    """What is kept when only the scorer sees W_O multiplied by ``factors`` [L, 1, 1]."""
    prepared = policy.scorer.prepare(model) * (factors**2)[..., None]
    _, cache = run_prefill(model, prepared, tokens, lengths, policy, 0)
    return as_lists(cache.kept_positions(0))
