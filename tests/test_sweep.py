"""One reading for many policies: the same caches as each policy's own prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvec_jax as kv
from kvec_jax.calibrate.file import Calibration
from tests.prompts import batch, model_of

CALIBRATION = Calibration(
    model="tiny", heads=tuple(tuple(range(8)) for _ in range(4)), layer_weights=(0.4, 0.3, 0.2, 0.1), provenance={}
)
POLICIES = (
    kv.FullCache(),
    kv.SnapKV(0.5),
    kv.KVec(40),
    kv.LaProx(40),
    kv.CompressKV(40, calibration=CALIBRATION),
)


def check_same(model, T, policies, lengths, atol):
    tokens, lengths = batch(lengths, T)
    logits, caches = kv.sweep(model, tokens, lengths, policies, reserve=3)
    assert len(caches) == len(policies)
    for policy, cache in zip(policies, caches):
        own_logits, own = kv.prefill(model, tokens, lengths, policy, reserve=3)
        np.testing.assert_allclose(logits, own_logits, atol=atol, err_msg=policy.name)
        for row in range(len(lengths)):
            kept, expected = cache.kept_positions(row), own.kept_positions(row)
            for layer, layer_expected in zip(kept, expected):
                for head, head_expected in zip(layer, layer_expected):
                    np.testing.assert_array_equal(head, head_expected, err_msg=policy.name)
        assert jax.tree.structure(cache) == jax.tree.structure(own)
        for part, own_part in zip(jax.tree.leaves(cache), jax.tree.leaves(own)):
            np.testing.assert_allclose(part, own_part, atol=atol, err_msg=policy.name)


def test_equals_separate_prefills():
    check_same(model_of()[0], 128, POLICIES, [128, 70, 33], 1e-5)


@pytest.mark.slow
def test_equals_separate_prefills_with_local_layers():
    model = model_of(1, local_layers=(0, 2), sliding_window=24)[0]
    check_same(model, 96, [kv.FullCache(), kv.KVec(40), kv.LaProx(40)], [96, 50], 1e-5)


def test_refused():
    model, (tokens, lengths) = model_of()[0], batch([8], 8)
    with pytest.raises(ValueError, match="policies: expected at least one"):
        kv.sweep(model, tokens, lengths, [])
    with pytest.raises(TypeError, match="policies: expected policies that choose rows"):
        kv.sweep(model, tokens, lengths, [kv.FullCache(), "snapkv"])
    with pytest.raises(ValueError, match="lengths"):
        kv.sweep(model, tokens, jnp.array([9]), [kv.FullCache()])
    with pytest.raises(ValueError, match="reserve"):
        kv.sweep(model, tokens, lengths, [kv.FullCache()], reserve=-1)
