"""Texts beyond the model's context: kept entries at new positions, against an oracle that stores keys unturned."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.models.rope import Rope
from kvec_jax.testing import tiny_language_model
from tests.oracle.compact import read
from tests.oracle.forward import softmax
from tests.prompts import as_lists, model_of

LENGTHS, T, CHUNK, BUDGET = (13, 40, 150), 160, 16, 24
POLICIES = {
    "streaming": kv.StreamingLLM(BUDGET),
    "knorm": kv.KNorm(BUDGET, sinks=2),
    "snapkv": kv.SnapKV(BUDGET, window=8, kernel=1),
}
# No text fits into a context of 48, but a budget of 24 and a chunk of 16 do.
SHORT = dict(max_position_embeddings=48)
MODELS = {
    "llama": SHORT,
    "stretched": SHORT | dict(rope=Rope(kind="llama3", factor=8.0, original_max_position=16)),
    "some layers without": SHORT | dict(no_rope_layers=(1, 3)),
}


def prompt(length):
    """Tokens that are all different: keys of equal tokens have equal norms, but for the rounding of their turns."""
    return np.random.default_rng(length).permutation(np.arange(1, 255))[:length].tolist()


def batch(lengths, T):
    tokens = [prompt(length) + [0] * (T - length) for length in lengths]
    return jnp.array(tokens), jnp.array(lengths)


def choose(name):
    """What a head keeps, by the policies' formulas."""

    def best(keys, queries):
        n, Q = len(keys), queries.shape[1]
        scores, at = np.arange(n).astype(float), np.arange(n)
        if name == "knorm":
            scores = -np.linalg.norm(keys, axis=-1)
        if name == "snapkv":
            logits = queries @ keys.T * keys.shape[1] ** -0.5
            logits = np.where(at <= np.arange(n - Q, n)[:, None], logits, -np.inf)
            scores = softmax(logits)[:, -8:].sum(axis=(0, 1))
        policy = POLICIES[name]
        scores[at < policy.sinks] = 1e30
        scores[n - 1 - at < policy.scorer.window] = 2e30
        return sorted(sorted(range(n), key=lambda i: (-scores[i], i))[:BUDGET])

    return best


def pieces_of(tokens, first):
    return [tokens[:first], *(tokens[at : at + CHUNK] for at in range(first, len(tokens), CHUNK))]


def oracle(model, w, name, tokens):
    first = len(tokens) % CHUNK or CHUNK
    return read(model.config, {"lm_head": w["embedding"]} | w, pieces_of(tokens, first), choose(name))


@pytest.mark.parametrize(
    "name, changes", [*((name, "llama") for name in POLICIES), *(("snapkv", changes) for changes in list(MODELS)[1:])]
)
def test_prompts_beyond_the_context_are_what_the_oracle_reads(name, changes):
    model, w = model_of(**MODELS[changes])
    logits, cache = kv.prefill(model, *batch(LENGTHS, T), POLICIES[name], reserve=4, chunk=CHUNK, rerotate=True)
    more = jnp.array([[7, 8, 9]] * len(LENGTHS))
    later, _ = kv.extend(model, cache, more, all_logits=True)
    for row, length in enumerate(LENGTHS):
        want, kept = oracle(model, w, name, prompt(length))
        assert as_lists(cache.kept_positions(row)) == as_lists(kept)
        np.testing.assert_allclose(logits[row], want[-1], atol=1e-4)
        tokens = pieces_of(prompt(length), length % CHUNK or CHUNK)
        want, _ = read(model.config, {"lm_head": w["embedding"]} | w, [*tokens, [7, 8, 9]], choose(name))
        np.testing.assert_allclose(later[row], want[-3:], atol=1e-4)
    assert cache.next_position.tolist() == list(LENGTHS)
    assert cache.rope_position.tolist() == [min(length, BUDGET) for length in LENGTHS]


@pytest.mark.parametrize("name", ["streaming", "snapkv"])
def test_texts_that_are_written_go_on_beyond_the_context(name):
    model, w = model_of(**SHORT)
    new, lengths = 90, (13, 40)
    settings = dict(chunk=CHUNK, tail=CHUNK, rerotate=True, eos_token_ids=())
    tokens = kv.generate(model, *batch(lengths, 48), POLICIES[name], max_new_tokens=new, **settings)
    for row, length in enumerate(lengths):
        text = [*prompt(length), *tokens[row, :-1].tolist()]
        pieces = pieces_of(text[:length], length % CHUNK or CHUNK)
        pieces += [text[at : at + CHUNK] for at in range(length, len(text), CHUNK)]
        logits, _ = read(model.config, {"lm_head": w["embedding"]} | w, pieces, choose(name))
        best = logits[length - 1 :].max(axis=-1)
        np.testing.assert_allclose(logits[np.arange(length - 1, len(text)), tokens[row]], best, atol=1e-4)


def test_one_reading_is_turned_as_a_chunk_of_all_is():
    model, _ = model_of(rope=Rope(kind="yarn", factor=4.0, attention_factor=1.2))
    arguments, settings = (model, *batch(LENGTHS, T), POLICIES["snapkv"]), dict(reserve=8, rerotate=True)
    _, once = kv.prefill(*arguments, **settings)
    _, chunked = kv.prefill(*arguments, chunk=T, **settings)
    assert once.rope_position.tolist() == chunked.rope_position.tolist()
    new = jnp.array([[7, 8]] * 3)
    np.testing.assert_allclose(kv.extend(model, once, new)[0], kv.extend(model, chunked, new)[0], atol=1e-4)


def test_where_nothing_is_dropped_nothing_is_turned():
    lm = tiny_language_model(dtype=jnp.bfloat16)
    arguments = lm.model, *batch(LENGTHS, T), kv.FullCache()
    plain, moved = (kv.prefill(*arguments, rerotate=turned, chunk=32)[1] for turned in (False, True))
    np.testing.assert_array_equal(plain.keys.astype(jnp.float32), moved.keys.astype(jnp.float32))
    assert moved.shift.tolist() == [0, 0, 0]


def test_bfloat16_is_turned_in_float32_and_rounded_once():
    lm = tiny_language_model(dtype=jnp.bfloat16)
    arguments = lm.model, *batch(LENGTHS, T), kv.StreamingLLM(BUDGET)
    _, plain = kv.prefill(*arguments)
    _, moved = kv.prefill(*arguments, rerotate=True)
    size = np.linalg.norm(np.asarray(plain.keys, np.float32), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(moved.keys, np.float32), axis=-1), size, rtol=2**-7)


def test_contexts_of_long_documents_are_asked_extended_saved_and_loaded(tmp_path):
    lm = tiny_language_model(max_position_embeddings=192)
    settings = dict(chunk=64, rerotate=True)
    book = lm.compress("It rained on the sea, and nobody came. " * 20, kv.SnapKV(32, window=8), **settings)
    assert book.tokens > 700 and int(book.cache.rope_position[0]) == 32
    questions = ["Who came?", "Where did it rain, and why?"]
    together = lm.ask(book, questions, max_new_tokens=8)
    assert [lm.ask(book, q, max_new_tokens=8).tokens for q in questions] == [output.tokens for output in together]
    later = lm.extend(book, "Then the sun came out.")
    assert int(later.cache.rope_position[0]) == 32 + later.tokens - book.tokens
    later.save(tmp_path / "book.kv")
    again = kv.load_context(tmp_path / "book.kv", lm)
    assert lm.ask(again, questions[0]).tokens == lm.ask(later, questions[0]).tokens
    with pytest.raises(ValueError, match="more than the model's context of 192"):
        lm.ask(book, "Who came?", max_new_tokens=180)


def test_stored_in_fewer_bits_it_answers_about_the_same():
    model, _ = model_of(**SHORT)
    settings = dict(reserve=4, chunk=CHUNK, rerotate=True)
    new = jnp.array([[7, 8]] * 3)
    logits = [
        kv.extend(
            model, kv.prefill(model, *batch(LENGTHS, T), POLICIES["snapkv"], cache_dtype=bits, **settings)[1], new
        )[0]
        for bits in (None, "int8")
    ]
    np.testing.assert_allclose(*logits, atol=0.05)


def test_rows_taken_from_a_cache_keep_their_positions():
    model, _ = model_of(**SHORT)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), POLICIES["snapkv"], reserve=4, chunk=CHUNK, rerotate=True)
    new = jnp.array([[7, 8]] * 3)
    want, _ = kv.extend(model, cache, new)
    got, _ = kv.extend(model, cache.take_rows(jnp.array([2, 0, 1])), new)
    np.testing.assert_allclose(got, want[jnp.array([2, 0, 1])], atol=1e-5)


BAD = {
    "uneven heads": (dict(policy=kv.LaProx(24, window=8)), "rerotate: only for policies whose heads all keep"),
    "layers that differ": (dict(policy=kv.PyramidKV(24, window=8)), "rerotate: only for policies whose heads all keep"),
    "a number": (dict(rerotate=1), "rerotate: expected True or False, got 1"),
    "no chunk": (dict(), "tokens: 160 tokens take 160 positions, more than the model's context of 48; 24 are kept"),
    "a chunk too large": (dict(chunk=32), "tokens: 160 tokens take 56 positions"),
    "not asked for": (dict(chunk=16, rerotate=False), "160 tokens take 160 positions.*chunk and rerotate"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, message = BAD[name]
    call = dict(policy=POLICIES["snapkv"], rerotate=True) | call
    with pytest.raises((TypeError, ValueError, kv.UnsupportedError), match=message):
        kv.prefill(model_of(**SHORT)[0], *batch(LENGTHS, T), **call)


def test_bad_texts():
    lm = tiny_language_model(max_position_embeddings=128)
    long = "It rained on the sea. " * 20
    with pytest.raises(ValueError, match=r"prompt: 440 tokens and 8 new ones take 447 positions.*chunk and rerotate"):
        lm.generate(long, kv.SnapKV(32, window=8), max_new_tokens=8)
    with pytest.raises(ValueError, match=r"take 199 positions, more than the model's context of 128; 32 are kept"):
        lm.generate(long, kv.SnapKV(32, window=8), max_new_tokens=168, chunk=64, rerotate=True)
    with pytest.raises(kv.UnsupportedError, match="rerotate: only for policies"):
        lm.compress(long, dataclasses.replace(kv.SnapKV(32, window=8), scope="layer"), rerotate=True)
