"""Generation from a packed cache: the tokens, when it stops, and what the compiled loop holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from tests.compilations import count_compilations
from tests.oracle import policies
from tests.oracle.forward import forward
from tests.prompts import batch, model_of, prompt, trace_of

LENGTHS, T = (5, 37, 60), 64
POLICIES = {
    "full": (kv.FullCache(), policies.everything),
    "streaming": (kv.StreamingLLM(24), lambda t: policies.streaming_llm(t, 24)),
    "snapkv": (kv.SnapKV(24, window=8), lambda t: policies.snapkv(t, 24, 8)),
}
LOCAL = dict(sliding_window=8, local_layers=(0, 2))
NO_END = ()


def check_greedy(tokens, length, keep, **changes):
    """Every token is the most likely one after a pass, without any cache, over the prompt and the tokens before it.

    One pass over all of them gives what repeating it for every token would: no token sees a later one.
    """
    model, w = model_of(**changes)
    kept = keep(trace_of(length, **changes))
    text = [*prompt(length), *tokens.tolist()]
    logits = forward(model.config, w, text, kept, length).logits[length - 1 : -1]
    logits[0] = trace_of(length, **changes).logits[-1]
    best = logits.max(axis=-1)
    np.testing.assert_allclose(logits[np.arange(len(tokens)), tokens], best, atol=1e-4)  # the same, or as good as
    assert (logits.argmax(axis=-1) == np.asarray(tokens)).mean() > 0.98


@functools.cache
def generated(name: str, new: int = 64):
    model, _ = model_of()
    return np.asarray(
        kv.generate(model, *batch(LENGTHS, T), POLICIES[name][0], max_new_tokens=new, eos_token_ids=NO_END)
    )


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_tokens_are_those_of_passes_without_a_cache(name):
    tokens = generated(name)
    assert tokens.shape == (3, 64) and tokens.dtype == np.int32
    for row, length in enumerate(LENGTHS):
        check_greedy(tokens[row], length, POLICIES[name][1])


def test_local_layers_forget_generated_tokens_too():
    model, _ = model_of(**LOCAL)
    policy, keep = kv.FullCache(), policies.everything
    tokens = kv.generate(model, *batch(LENGTHS, T), policy, max_new_tokens=24, eos_token_ids=NO_END)
    for row, length in enumerate(LENGTHS):
        check_greedy(np.asarray(tokens[row]), length, keep, **LOCAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_of_very_unequal_prompts_is_each_of_them_alone(name):
    model, _ = model_of()
    lengths = (5, 37, 512, 1900)
    policy = {"full": kv.FullCache(), "streaming": kv.StreamingLLM(128), "snapkv": kv.SnapKV(128)}[name]
    tokens, sizes = batch(lengths, 1900)
    together = kv.generate(model, tokens, sizes, policy, max_new_tokens=16, eos_token_ids=NO_END)
    _, cache = kv.prefill(model, tokens, sizes, policy)
    for row, length in enumerate(lengths):
        alone = batch((length,), length)
        got = kv.generate(model, *alone, policy, max_new_tokens=16, eos_token_ids=NO_END)
        np.testing.assert_array_equal(got[0], together[row])
        _, one = kv.prefill(model, *alone, policy)
        for mine, theirs in zip(one.kept_positions(0), cache.kept_positions(row)):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs))


def prefilled(reserve: int = 64):
    model, _ = model_of()
    return model, *kv.prefill(model, *batch(LENGTHS, T), POLICIES["snapkv"][0], reserve=reserve)


def test_prefill_and_decode_are_generate_and_the_cache_is_donated():
    model, logits, cache = prefilled()
    tokens, after = kv.decode(model, cache, logits, max_new_tokens=64, eos_token_ids=NO_END)
    np.testing.assert_array_equal(tokens, generated("snapkv"))
    assert after.tail_length.tolist() == [63] * 3
    assert after.next_position.tolist() == [length + 63 for length in LENGTHS]
    assert cache.tail_keys.is_deleted() and cache.keys.is_deleted()


def test_a_text_goes_on_where_it_was_left():
    model, logits, cache = prefilled()
    first, cache = kv.decode(model, cache, logits, max_new_tokens=20, eos_token_ids=NO_END)
    logits, cache = kv.extend(model, cache, first[:, -1:])
    second, _ = kv.decode(model, cache, logits, max_new_tokens=20, eos_token_ids=NO_END)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), generated("snapkv")[:, :40])


def test_it_stops_at_the_very_first_token():
    model, logits, cache = prefilled()
    ends = tuple(generated("snapkv")[:, 0].tolist())
    tokens, after = kv.decode(model, cache, logits, max_new_tokens=64, eos_token_ids=ends)
    np.testing.assert_array_equal(tokens, generated("snapkv")[:, :1].repeat(64, axis=1))
    assert after.tail_length.tolist() == [0, 0, 0]  # no step was taken


def test_a_row_that_has_ended_waits_for_the_others():
    model, logits, cache = prefilled()
    free = generated("snapkv")
    end, never = int(free[1, 5]), min(set(range(256)) - set(np.ravel(free).tolist()))
    tokens, after = kv.decode(model, cache, logits, max_new_tokens=64, eos_token_ids=(end, never))
    for row in range(3):
        met = np.flatnonzero(free[row] == end)
        until = int(met[0]) if len(met) else 63
        np.testing.assert_array_equal(tokens[row, : until + 1], free[row, : until + 1])
        assert (tokens[row, until:] == tokens[row, until]).all()
        assert int(after.tail_length[row]) == until


SAMPLER = kv.Sample(temperature=1.3, top_k=40)


def sampled(tokens, lengths, key):
    model, _ = model_of()
    return np.asarray(
        kv.generate(model, tokens, lengths, POLICIES["snapkv"][0], SAMPLER, key, 16, eos_token_ids=NO_END)
    )


def test_sampling_follows_the_key_and_each_row_its_own():
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, lengths = batch(LENGTHS, T)
    first = sampled(tokens, lengths, keys)
    np.testing.assert_array_equal(first, sampled(tokens, lengths, keys))
    order = np.array([2, 0, 1])
    np.testing.assert_array_equal(first[order], sampled(tokens[order], lengths[order], keys[order]))
    same = sampled(tokens[jnp.array([0, 0, 0])], lengths[jnp.array([0, 0, 0])], jax.random.key(1))
    assert len({tuple(row) for row in same.tolist()}) == 3  # one key for all still gives every row its own


def test_keys_of_both_kinds_draw_the_same():
    tokens, lengths = batch(LENGTHS, T)
    for seeds in (5, np.arange(3)):
        keys = [
            (kind if np.ndim(seeds) == 0 else jax.vmap(kind))(seeds) for kind in (jax.random.key, jax.random.PRNGKey)
        ]
        assert keys[1].dtype == jnp.uint32
        np.testing.assert_array_equal(*(sampled(tokens, lengths, key) for key in keys))


def test_a_repetition_penalty_counts_what_was_written_lately_and_not_the_prompt():
    model, logits, cache = prefilled()
    written = []
    for _ in range(12):
        scores = np.asarray(logits, np.float64)
        for row in range(3):
            seen = list({int(tokens[row]) for tokens in written[-4:]})
            scores[row, seen] = np.where(scores[row, seen] > 0, scores[row, seen] / 1.5, scores[row, seen] * 1.5)
        written.append(scores.argmax(axis=-1))
        logits, cache = kv.extend(model, cache, jnp.asarray(written[-1])[:, None])
    model, logits, cache = prefilled()
    sampler = kv.Greedy(repetition_penalty=1.5, repetition_window=4)
    tokens, _ = kv.decode(model, cache, logits, sampler, max_new_tokens=12, eos_token_ids=NO_END)
    np.testing.assert_array_equal(tokens, np.stack(written, axis=1))
    assert (np.asarray(tokens) != generated("snapkv")[:, :12]).any()


def test_what_varies_between_calls_does_not_compile_again():
    model, _ = model_of()
    policy = POLICIES["snapkv"][0]

    def run(lengths, **settings):
        tokens, lengths = batch(lengths, T, seed=3)
        sampler, key = kv.Sample(**settings), jax.random.key(len(settings))
        kv.generate(model, tokens, lengths, policy, sampler, key, 16, eos_token_ids=NO_END)

    run((5, 6, 7), temperature=0.5)
    with count_compilations() as compiled:
        run((64, 1, 30), temperature=0.9, top_k=3, top_p=0.5)
    assert compiled == []


def test_the_loop_stays_on_the_device():
    model, _ = model_of()
    tokens, lengths = batch(LENGTHS, T)
    run = jax.jit(lambda *args: kv.generate(*args, POLICIES["snapkv"][0], eos_token_ids=NO_END))
    text = run.lower(model, tokens, lengths).as_text()
    assert "while" in text
    assert not any(word in text for word in ("callback", "infeed", "outfeed", "send", "recv"))


CALLS = {
    "no room for tokens": (dict(max_new_tokens=0), "max_new_tokens: expected an integer, 1 or more, got 0"),
    "half a token": (dict(max_new_tokens=2.5), "max_new_tokens: expected an integer, 1 or more, got 2.5"),
    "beyond the context": (dict(max_new_tokens=2048), "60 tokens and 2048 new ones take 2107 positions"),
    "a name for a sampler": (dict(sampler="greedy"), "sampler: expected Greedy"),
    "a class for a sampler": (dict(sampler=kv.Greedy), "sampler: expected Greedy"),
    "sampling without a key": (dict(sampler=kv.Sample()), "key: Sample needs a random key"),
    "a number for a key": (dict(sampler=kv.Sample(), key=0), "key: expected one jax.random.key"),
    "half a key": (dict(sampler=kv.Sample(), key=jnp.zeros(1, jnp.uint32)), "key: expected one jax.random.key"),
    "too few keys": (dict(sampler=kv.Sample(), key=jax.random.split(jax.random.key(0), 2)), "key: expected one"),
    "policy": (dict(policy="snapkv"), "policy: expected a Policy"),
    "one end token": (dict(eos_token_ids=2), "eos_token_ids: expected"),
    "text as end token": (dict(eos_token_ids=("</s>",)), "eos_token_ids: expected"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name):
    changes, message = CALLS[name]
    tokens, lengths = batch(LENGTHS, T)
    call = dict(model=model_of()[0], tokens=tokens, lengths=lengths, policy=kv.FullCache(), max_new_tokens=4) | changes
    with pytest.raises((TypeError, ValueError), match=message):
        kv.generate(**call)


def test_decoding_beyond_the_tail_is_refused():
    model, logits, cache = prefilled()
    with pytest.raises(ValueError, match="room for 64 tokens after the prompt and would need 65"):
        kv.decode(model, cache, logits, max_new_tokens=66)
    kv.decode(model, cache, logits, max_new_tokens=64, eos_token_ids=NO_END)
