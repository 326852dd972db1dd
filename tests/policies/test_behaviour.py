"""What must hold for every policy: it keeps what its paper says, for each row of a batch as if that were alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from tests.oracle.forward import forward
from tests.policies.cases import CASES, calibrated
from tests.prompts import as_lists, batch, model_of, prompt, trace_of

T = 300
LENGTHS = (5, 37, 300, 190)

# Variants of what others show already: their whole suite is among the slow tests.
VARIANTS = ("streaming-share", "h2o", "kvec-share", "laprox-score-mean", "laprox-exact", "criticaladakv", "knorm")


def some(names, slow=VARIANTS):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in names])


every_policy = some(CASES)


@functools.cache
def run(name: str, lengths=LENGTHS, seed: int = 0, pad: int = 0):
    """Logits of the last tokens and the cache, with room for three more tokens."""
    model, _ = model_of()
    return kv.prefill(model, *batch(lengths, T, seed, pad), CASES[name].policy, reserve=3)


WITH_ORACLE = [name for name, case in CASES.items() if case.keep]


@some(WITH_ORACLE, slow=())
def test_keeps_what_the_formulas_say(name):
    _, cache = run(name)
    for row, length in enumerate(LENGTHS):
        assert as_lists(cache.kept_positions(row)) == as_lists(CASES[name].keep(trace_of(length)))


@every_policy
def test_the_prompt_itself_is_read_exactly(name):
    logits, _ = run(name)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row], trace_of(length).logits[-1], atol=5e-5)


@every_policy
def test_later_tokens_see_what_was_kept_and_nothing_else(name):
    model, w = model_of()
    _, cache = run(name)
    new = jnp.asarray([[7, 100, 31]] * len(LENGTHS))
    logits, after = kv.extend(model, cache, new, all_logits=True)
    for row, length in enumerate(LENGTHS):
        want = forward(model.config, w, [*prompt(length), 7, 100, 31], cache.kept_positions(row), length).logits
        np.testing.assert_allclose(logits[row], want[-3:], atol=5e-5)
        assert int(after.next_position[row]) == length + 3
        assert as_lists(after.kept_positions(row)) == as_lists(cache.kept_positions(row))


@every_policy
def test_rows_do_not_depend_on_their_neighbours(name):
    logits, cache = run(name)
    others, elsewhere = run(name, lengths=(300, 5, 299, 37), seed=0)
    for row, length in enumerate(LENGTHS):
        if length in (300, 5, 37):
            other = (300, 5, 299, 37).index(length)
            assert as_lists(cache.kept_positions(row)) == as_lists(elsewhere.kept_positions(other))
            np.testing.assert_allclose(logits[row], others[other], atol=1e-5)


@every_policy
def test_padding_may_hold_any_tokens(name):
    logits, cache = run(name)
    others, other = run(name, pad=99)
    np.testing.assert_array_equal(logits, others)
    for row in range(len(LENGTHS)):
        assert as_lists(cache.kept_positions(row)) == as_lists(other.kept_positions(row))


@every_policy
def test_the_window_is_kept_and_the_budget_is_used_to_the_last_place(name):
    case, (_, cache) = CASES[name], run(name)
    tokens = case.policy.budget.tokens
    for row, length in enumerate(LENGTHS):
        budget = min(tokens if isinstance(tokens, int) else max(1, int(tokens * length + 0.5)), length)
        kept = cache.kept_positions(row)
        for layer in kept:
            if case.exact:
                assert sum(map(len, layer)) == len(layer) * budget
            for head in layer:
                assert (np.diff(head) > 0).all() and head.min() >= 0 and head.max() < length
                assert set(range(length - min(case.window, budget), length)) <= set(head.tolist())
        assert sum(len(h) for layer in kept for h in layer) == int(cache.counts[row].sum())
        assert sum(len(h) for layer in kept for h in layer) == cache.counts[row].size * budget


@every_policy
def test_the_memory_of_what_is_gone_is_given_back(name):
    _, cache = run(name)
    _, full = run("full")
    tokens = CASES[name].policy.budget.tokens
    share = min(tokens / T if isinstance(tokens, int) else tokens, 1.0)
    assert cache.pool_nbytes <= 1.01 * share * full.pool_nbytes
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


# One of each way to score, to choose and to store.
@some(
    CASES, slow=[name for name in CASES if name not in ("full", "snapkv", "kvec", "laprox", "criticalkv", "expected")]
)
def test_bfloat16(name):
    model, _ = model_of(dtype=jnp.bfloat16)
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), CASES[name].policy, reserve=3)
    assert cache.keys.dtype == cache.tail_values.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32 and bool(jnp.isfinite(logits).all())
    exact, float32 = run(name)
    assert cache.pool_nbytes * 2 == float32.pool_nbytes
    assert float(jnp.corrcoef(logits.ravel(), exact.ravel())[0, 1]) > 0.99
    np.testing.assert_array_equal(cache.counts.sum((1, 2)), float32.counts.sum((1, 2)))


LOCAL = dict(sliding_window=8, local_layers=(0, 2))
QUICK = ("full", "streaming", "snapkv-layer-share")


@some(WITH_ORACLE, slow=[name for name in WITH_ORACLE if name not in QUICK])
def test_local_layers_keep_their_window_and_cost_the_others_nothing(name):
    """Local layers keep what their window still shows; the policy acts on the global ones as on a model of those."""
    case = calibrated(2) if name == "compresskv" else CASES[name]
    model, _ = model_of(**LOCAL)
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), case.policy)
    for row, length in enumerate(LENGTHS):
        trace = trace_of(length, **LOCAL)
        np.testing.assert_allclose(logits[row], trace.logits[-1], atol=5e-5)
        some = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.name != "logits"}
        compressed = dataclasses.replace(trace, **{n: [x[1], x[3]] for n, x in some.items()})
        window = [list(range(max(length - 8, 0), length))] * 2
        first, second = as_lists(case.keep(compressed))
        assert as_lists(cache.kept_positions(row)) == [window, first, window, second]
