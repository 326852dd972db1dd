"""Caches of fixed size: prompts read in chunks and generations with a limited tail, against a plain simulation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from tests.oracle.forward import forward, softmax
from tests.prompts import as_lists, batch, model_of, prompt

LENGTHS, T, CHUNK = (5, 40, 75), 80, 16
POLICIES = {
    "full": kv.FullCache(),
    "streaming": kv.StreamingLLM(24),
    "knorm": kv.KNorm(24, sinks=2),
    "keydiff": kv.KeyDiff(24),
    "snapkv": kv.SnapKV(24, window=8, kernel=3),
    "tova": kv.TOVA(24),
    "share": kv.StreamingLLM(0.5),
}
NO_END = ()


def looks(trace, layer, n, positions, window, end):
    """Attention of query head n's last ``window`` tokens to the entries at ``positions``, summed over the tokens."""
    G = len(trace.queries[layer]) // len(trace.keys[layer])
    keys, total = trace.keys[layer][n // G][positions], np.zeros(len(positions))
    for at in range(max(end - window, 0), end):
        query = trace.queries[layer][n][at]
        total += softmax(np.where(positions <= at, keys @ query * len(query) ** -0.5, -np.inf))
    return total


def score(name, trace, layer, head, positions, end):
    """Score of each of a head's entries at ``positions``, once ``end`` tokens have come; larger is better."""
    keys, N = trace.keys[layer][head][positions], len(trace.queries[layer])
    G = N // len(trace.keys[layer])
    if name == "knorm":
        return -np.linalg.norm(keys, axis=-1)
    if name == "keydiff":
        directions = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        mean = directions.mean(0)
        return -directions @ mean / np.linalg.norm(mean)
    if name == "tova":  # all heads keep the same
        return sum(looks(trace, layer, n, positions, 1, end) for n in range(N))
    if name == "snapkv":
        total = sum(looks(trace, layer, head * G + g, positions, 8, end) for g in range(G))
        before = np.pad(total[: max(len(total) - 8, 0)], 1)
        total[: len(before) - 2] = [before[i : i + 3].max() for i in range(len(before) - 2)]
        return total
    return positions.astype(float)


def choose(name, trace, layer, candidates, budget, end):
    """What each head of a layer keeps of its candidates."""
    policy = POLICIES[name]
    chosen = []
    for head, positions in enumerate(candidates):
        scores = score(name, trace, layer, head, np.asarray(positions), end)
        at = np.arange(len(positions))
        scores[at < policy.sinks] = 1e30
        scores[len(positions) - 1 - at < policy.scorer.window] = 2e30
        best = sorted(range(len(positions)), key=lambda i: (-scores[i], i))[:budget]
        chosen.append(sorted(positions[i] for i in best))
    return chosen


def simulate(name, tokens, borders, budget):
    """Kept positions ``[layer][head]`` and all logits, if the policy chooses again at each of the ``borders``."""
    model, w = model_of()
    config = model.config
    L, K = config.num_hidden_layers, config.num_key_value_heads
    kept, sees = [[[] for _ in range(K)] for _ in range(L)], {}
    for start, end in zip([0, *borders[:-1]], borders):
        for layer in range(L):
            for head in range(K):
                sees[layer, head, start] = list(kept[layer][head])

        def allow(layer, queries, keys, allowed):
            allowed = allowed.copy()
            for (at, head, first), those in sees.items():
                if at == layer:
                    gone = np.ones(allowed.shape[-1], bool)
                    gone[those], gone[first:] = False, False
                    following = [f for (_, _, f) in sees if f > first]
                    allowed[head, first : min(following, default=None), gone] = False
            return allowed

        trace = forward(config, w, tokens[:end], allow=allow)
        if end != borders[-1] or len(tokens) == end:
            for layer in range(L):
                candidates = [those + list(range(start, end)) for those in kept[layer]]
                kept[layer] = choose(name, trace, layer, candidates, budget, end)
    return kept, trace.logits


def borders_of(length):
    """Where a prompt's chunks end: the first takes what is left over."""
    return [end for end in range(length % CHUNK or CHUNK, length + 1, CHUNK)]


def budget_of(name, length):
    return {"full": length, "share": int(length / 2 + 0.5)}.get(name, 24)


@functools.cache
def chunked(name):
    model, _ = model_of()
    return kv.prefill(model, *batch(LENGTHS, T), POLICIES[name], reserve=4, chunk=CHUNK)


@pytest.mark.parametrize("name", POLICIES)
def test_prompts_in_chunks_are_what_a_simulation_keeps(name):
    logits, cache = chunked(name)
    for row, length in enumerate(LENGTHS):
        kept, want = simulate(name, list(prompt(length)), borders_of(length), budget_of(name, length))
        assert as_lists(cache.kept_positions(row)) == as_lists(kept)
        np.testing.assert_allclose(logits[row], want[-1], atol=1e-4)
    assert cache.next_position.tolist() == list(LENGTHS) and cache.tail_length.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["full", "knorm", "snapkv"])
def test_one_chunk_is_the_whole_prompt_at_once(name):
    model, _ = model_of()
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), POLICIES[name], chunk=512)
    want, whole = kv.prefill(model, *batch(LENGTHS, T), POLICIES[name])
    np.testing.assert_allclose(logits, want, atol=1e-4)
    for row in range(3):
        assert as_lists(cache.kept_positions(row)) == as_lists(whole.kept_positions(row))


def test_the_first_layer_of_a_memoryless_scorer_is_that_of_one_reading():
    model, _ = model_of()
    _, whole = kv.prefill(model, *batch(LENGTHS, T), POLICIES["knorm"])
    for row in range(3):
        mine, its = (as_lists(cache.kept_positions(row))[0] for cache in (chunked("knorm")[1], whole))
        assert mine == its


def test_what_was_read_in_chunks_goes_on():
    model, w = model_of()
    logits, _ = kv.extend(model, chunked("snapkv")[1], jnp.array([[7, 8]] * 3), all_logits=True)
    for row, length in enumerate(LENGTHS):
        alone, cache = kv.prefill(model, *batch((length,), T), POLICIES["snapkv"], reserve=4, chunk=CHUNK)
        single, _ = kv.extend(model, cache, jnp.array([[7, 8]]), all_logits=True)
        np.testing.assert_allclose(logits[row], single[0], atol=1e-4)
        np.testing.assert_allclose(chunked("snapkv")[0][row], alone[0], atol=1e-4)


def test_memory_does_not_grow_with_the_prompt():
    def largest(length):
        model, _ = model_of()
        run = jax.jit(functools.partial(kv.prefill, policy=POLICIES["snapkv"], chunk=CHUNK))
        return run.lower(model, *batch((length,), length)).compile().memory_analysis().temp_size_in_bytes

    assert largest(1600) < 1.1 * largest(160)


@pytest.mark.parametrize("name", ["streaming", "knorm", "snapkv"])
def test_a_limited_tail_is_what_a_simulation_keeps(name):
    model, _ = model_of()
    new, tail = 30, 10
    tokens = np.asarray(
        kv.generate(model, *batch(LENGTHS, T), POLICIES[name], max_new_tokens=new, eos_token_ids=NO_END, tail=tail)
    )
    for row, length in enumerate(LENGTHS):
        text = [*prompt(length), *tokens[row, :-1].tolist()]
        borders = [length, *range(length + tail, len(text), tail), len(text)]
        _, logits = simulate(name, text, borders, 24)
        best = logits[length - 1 :].max(axis=-1)
        np.testing.assert_allclose(logits[np.arange(length - 1, len(text)), tokens[row]], best, atol=1e-4)


def test_a_tail_that_is_long_enough_changes_nothing():
    model, _ = model_of()
    arguments = model, *batch(LENGTHS, T), POLICIES["snapkv"]
    limited = kv.generate(*arguments, max_new_tokens=12, eos_token_ids=NO_END, tail=12)
    np.testing.assert_array_equal(limited, kv.generate(*arguments, max_new_tokens=12, eos_token_ids=NO_END))


def test_rows_of_a_batch_choose_again_when_their_own_tail_is_full():
    model, _ = model_of()
    settings = dict(max_new_tokens=30, eos_token_ids=(9,), tail=10)
    together = kv.generate(model, *batch(LENGTHS, T), POLICIES["snapkv"], **settings)
    for row, length in enumerate(LENGTHS):
        alone = kv.generate(model, *batch((length,), T), POLICIES["snapkv"], **settings)
        np.testing.assert_array_equal(together[row], alone[0])


BAD = {
    "no chunk": (dict(chunk=0), "chunk: expected an integer, 1 or more"),
    "chunk below the window": (dict(chunk=4, policy=POLICIES["snapkv"]), "chunk: expected at least 8"),
    "layer scope": (dict(chunk=16, policy=kv.AdaKV(64)), "chunk: only for policies whose heads all keep"),
    "memory": (dict(chunk=16, policy=kv.KVec(24, window=8)), "chunk: kvec can't choose again"),
    "all logits": (dict(chunk=16, all_logits=True), "all_logits: not with chunk"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, message = BAD[name]
    call = dict(policy=POLICIES["knorm"]) | call
    with pytest.raises((ValueError, kv.UnsupportedError), match=message):
        kv.prefill(model_of()[0], *batch(LENGTHS, T), **call)


def test_bad_tails():
    arguments = model_of()[0], *batch(LENGTHS, T)
    for policy, tail, message in [
        (POLICIES["snapkv"], 7, "tail: expected at least 8"),
        (POLICIES["snapkv"], 0, "tail: expected an integer, 1 or more"),
        (POLICIES["share"], 16, "tail: expected a budget in tokens"),
        (kv.LaProx(24, window=8), 16, "tail: laprox"),
    ]:
        with pytest.raises((ValueError, kv.UnsupportedError), match=message):
            kv.generate(*arguments, policy, max_new_tokens=4, tail=tail)
