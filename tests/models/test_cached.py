"""Logits and greedy tokens of another implementation, through the cache: prompt at once, then in pieces of any size."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.models.load import load_model
from tests.models.test_goldens import GOLDENS

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]
FIRST = 8  # tokens that are read at once


@functools.cache
def golden(family):
    folder = GOLDENS / family
    return load_model(folder, dtype="float32").model, dict(np.load(folder / "logits.npz"))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family):
    model, want = golden(family)
    ids = jnp.asarray(want["ids"])
    lengths = jnp.full(ids.shape[0], ids.shape[1])
    tokens = kv.generate(model, ids, lengths, kv.FullCache(), max_new_tokens=24, eos_token_ids=())
    np.testing.assert_array_equal(tokens, want["greedy"])


@pytest.mark.parametrize("family, chunk", [*((family, 7) for family in FAMILIES), ("llama", 1), ("gemma3", 64)])
def test_logits_in_chunks(family, chunk):
    model, want = golden(family)
    ids = jnp.asarray(want["ids"])
    B, T = ids.shape
    logits, cache = kv.prefill(
        model, ids[:, :FIRST], jnp.full(B, FIRST), kv.FullCache(), reserve=T - FIRST, all_logits=True
    )
    parts = [logits]
    for start in range(FIRST, T, chunk):
        piece = ids[:, start : start + chunk]
        size = piece.shape[1]
        padded = jnp.pad(piece, [(0, 0), (0, chunk - size)])
        logits, cache = kv.extend(model, cache, padded, jnp.full(B, size), all_logits=True)
        parts.append(logits[:, :size])
    got = jnp.concatenate(parts, axis=1)[:, want["positions"]]
    np.testing.assert_allclose(got, want["logits"], atol=2e-4)
