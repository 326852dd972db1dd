"""New tokens on top of a compressed cache: in any portions, for each row its own number."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from tests.oracle.forward import forward
from tests.prompts import as_lists, batch, model_of, prompt

LENGTHS, T = (60, 9), 64
POLICIES = {
    "snapkv": kv.SnapKV(16, window=8),
    "layer": kv.Policy(scorer=kv.WindowAttention(window=8), budget=16, scope="layer"),
}
NEW = np.random.default_rng(9).integers(1, 255, size=(2, 64)).astype(np.int32)


def prefilled(name="snapkv", reserve=64, **changes):
    model, _ = model_of(**changes)
    return model, kv.prefill(model, *batch(LENGTHS, T), POLICIES[name], reserve=reserve)[1]


@functools.cache
def expected(name="snapkv", **changes):
    """Logits of the new tokens by the oracle, from what the cache keeps."""
    model, cache = prefilled(name, **changes)
    _, w = model_of(**changes)
    rows = []
    for row, length in enumerate(LENGTHS):
        text = [*prompt(length), *NEW[row].tolist()]
        rows.append(forward(model.config, w, text, cache.kept_positions(row), length).logits[length:])
    return np.stack(rows)


@pytest.mark.parametrize("name, chunk", [("snapkv", 1), ("snapkv", 7), ("snapkv", 64), ("layer", 7)])
def test_portions_of_any_size(name, chunk):
    model, cache = prefilled(name)
    logits = []
    for start in range(0, 64, chunk):
        part = NEW[:, start : start + chunk]
        real = part.shape[1]
        part = np.pad(part, [(0, 0), (0, chunk - real)], constant_values=250)
        out, cache = kv.extend(model, cache, jnp.asarray(part), jnp.array([real] * 2), all_logits=True)
        logits.append(np.asarray(out)[:, :real])
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected(name), atol=1e-4)
    assert cache.tail_length.tolist() == [64, 64]
    assert cache.next_position.tolist() == [124, 73]


def test_portions_across_the_window_of_local_layers():
    changes = dict(sliding_window=8, local_layers=(0, 2))
    model, cache = prefilled(**changes)
    logits = []
    for start in range(0, 63, 7):
        out, cache = kv.extend(model, cache, jnp.asarray(NEW[:, start : start + 7]), all_logits=True)
        logits.append(np.asarray(out))
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected(**changes)[:, :63], atol=1e-4)


def test_every_row_takes_its_own_number_of_tokens():
    model, start = prefilled()
    cache = start
    for lengths in ((7, 0), (3, 7), (0, 5)):
        part = np.full((2, 7), 250, np.int32)
        for row, length in enumerate(lengths):
            at = int(cache.tail_length[row])
            part[row, :length] = NEW[row, at : at + length]
        logits, cache = kv.extend(model, cache, jnp.asarray(part), jnp.array(lengths))
        for row, length in enumerate(lengths):
            if length:
                at = int(cache.tail_length[row]) - 1
                np.testing.assert_allclose(logits[row], expected()[row, at], atol=1e-4)
    assert cache.tail_length.tolist() == [10, 12]
    assert start.tail_length.tolist() == [0, 0]


def test_the_old_cache_stays_as_it_was():
    model, cache = prefilled()
    tokens = jnp.asarray(NEW[:, :7])
    first, _ = kv.extend(model, cache, tokens)
    other, _ = kv.extend(model, cache, tokens[:, ::-1])
    again, _ = kv.extend(model, cache, tokens)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert as_lists(cache.kept_positions(0))


def test_padding_may_reach_beyond_the_tail():
    model, cache = prefilled(reserve=3)
    part = np.pad(NEW[:, :3], [(0, 0), (0, 4)], constant_values=250)
    logits, after = kv.extend(model, cache, jnp.asarray(part), jnp.array([3, 2]))
    np.testing.assert_allclose(logits[0], expected()[0, 2], atol=1e-4)
    np.testing.assert_allclose(logits[1], expected()[1, 1], atol=1e-4)
    assert after.tail_capacity == 3


def test_no_new_tokens_and_no_tail():
    model, cache = prefilled(reserve=0)
    _, after = kv.extend(model, cache, jnp.zeros((2, 1), jnp.int32), jnp.array([0, 0]))
    assert after.next_position.tolist() == list(LENGTHS)


FAULTS = {
    "no room": (dict(tokens=NEW[:, :5]), "room for 4 tokens after the prompt and would need 5.*reserve"),
    "other batch": (dict(tokens=NEW[:1, :3]), "tokens: expected 2 rows, as the cache has, got 1"),
    "floats": (dict(tokens=NEW[:, :3] * 1.0), r"tokens: expected integers of shape \[B, T\]|tokens: expected integers"),
    "no columns": (dict(tokens=NEW[:, :0]), "tokens: expected at least one"),
    "beyond the vocabulary": (dict(tokens=NEW[:, :3] + 256), "tokens: expected 0 to 255"),
    "too long": (dict(tokens=NEW[:, :3], lengths=[3, 4]), "lengths: expected 0 to 3, got 3 to 4"),
    "negative": (dict(tokens=NEW[:, :3], lengths=[3, -1]), "lengths: expected 0 to 3, got -1 to 3"),
    "other lengths": (dict(tokens=NEW[:, :3], lengths=[3]), "lengths: expected 2 integers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_calls(name):
    call, message = FAULTS[name]
    model, cache = prefilled(reserve=4)
    with pytest.raises((TypeError, ValueError), match=message):
        kv.extend(model, cache, **call)


def test_beyond_the_context():
    model, _ = model_of(max_position_embeddings=64)
    _, cache = kv.prefill(model, *batch(LENGTHS, T), POLICIES["snapkv"], reserve=10)
    with pytest.raises(ValueError, match=r"expected at most 64 positions in all \(the model's context\), got 65"):
        kv.extend(model, cache, jnp.asarray(NEW[:, :5]))
