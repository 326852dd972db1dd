"""SeKV on a real model: with everything open it is full attention, and the head that is shipped loads and is used."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.demo import reference_text
from kvec_jax.sekv.losses import divergence
from tests.models.test_real import load
from tests.sekv.open import EVERYTHING, Sized

pytestmark = pytest.mark.slow

T, NEW = 1500, 8


@pytest.fixture(scope="module")
def smol():
    loaded = load("smollm2-135m")
    ids = loaded.tokenizer.encode(reference_text()[: 16 * T])[: T + NEW]
    return loaded.model, jnp.asarray(ids, jnp.int32)[None]


@pytest.fixture(scope="module")
def full(smol):
    """Logits that full attention gives after the prompt and after each of the tokens that follow."""
    return logits_with(*smol, kv.FullCache())[0]


def logits_with(model, ids, policy):
    first, cache = kv.prefill(model, ids[:, :T], [T], policy, reserve=NEW)
    later, cache = kv.extend(model, cache, ids[:, T:], all_logits=True)
    return np.concatenate([first, later[0]]), cache


def test_all_spans_open_at_full_rank_are_full_attention(smol, full):
    policy = Sized(min_span=16, max_span=40, window=60, anchors=45, slots=EVERYTHING)
    got, cache = logits_with(*smol, policy)
    spans = int(jnp.sum(cache.beyond.counts > 0))
    assert spans > 30
    np.testing.assert_array_equal(jnp.sum(cache.beyond.slot_spans >= 0, axis=-1), spans)
    np.testing.assert_allclose(got, full, atol=1e-4)


def test_the_shipped_head_is_used(smol, full):
    model, ids = smol
    policy = kv.SeKV(0.2, head="smollm2-135m")
    got, cache = logits_with(model, ids, policy)
    np.testing.assert_array_equal(cache.beyond.route, policy.head.route[...])
    without, _ = logits_with(model, ids, kv.SeKV(0.2))
    assert np.max(np.abs(got - without)) > 1e-3
    # What is lost is little beside what the tokens themselves change.
    assert divergence(full, got) < 0.5 * divergence(full, np.roll(full, 1, axis=0))
    assert int(cache.beyond.fetched[0]) > 0
